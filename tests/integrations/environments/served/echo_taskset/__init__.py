"""A taskset of verifiers with its data in the file."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false
import verifiers.v1 as vf


class LetterTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        text = trace.last_reply or ""
        return sum(c.isalpha() for c in text) / max(len(text), 1)


class LetterTaskset(vf.Taskset[LetterTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield LetterTask(vf.TaskData(idx=n, prompt=f"Say {n}."))


__all__ = ["LetterTaskset"]
