"""Trajectories as a gateway would record them."""

from collections.abc import Sequence

from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    GenerationId,
    Rollout,
    Sampling,
    Trajectory,
    digest_tokens,
)


def generation(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    sampling: Sampling | None = None,
) -> Generation:
    return Generation(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs or [-0.5] * len(tokens)),
        versions=(version,) * len(tokens),
        stop="stop",
        sampling=sampling or Sampling(),
        message={"role": "assistant"},
    )


class Conversation:
    """Calls of one attempt, each with the digest of the prompt that was really served."""

    def __init__(self, rollout: str = "r", group: str = "g") -> None:
        self.attempt = Attempt(
            id=AttemptId(f"{rollout}.1"), rollout=Rollout(id=rollout, task=0, group=group), number=1
        )
        self.calls: list[Call] = []
        self.prompts: dict[GenerationId, tuple[int, ...]] = {}
        """What was served before each generation was sampled."""
        self._whole: dict[GenerationId, tuple[int, ...]] = {}

    def call(
        self, context: Sequence[int], *generations: Generation, parent: GenerationId | None = None
    ) -> list[GenerationId]:
        prompt = (self._whole[parent] if parent else ()) + tuple(context)
        call = Call(
            id=CallId(f"{self.attempt.id}.c{len(self.calls)}"),
            attempt=self.attempt.id,
            parent=parent,
            root="root",
            messages=(),
            prompt_suffix=tuple(context),
            prompt_length=len(prompt),
            prompt_digest=digest_tokens(prompt).hexdigest(),
            generations=generations,
            created=0.0,
        )
        self.calls.append(call)
        ids = [call.generation_id(index) for index in range(len(generations))]
        for id_, one in zip(ids, generations, strict=True):
            self.prompts[id_] = prompt
            self._whole[id_] = prompt + one.tokens
        return ids

    def ended(self, reward: float) -> Trajectory:
        return Trajectory(attempt=self.attempt, calls=tuple(self.calls), rewards=(), reward=reward)


def single(rollout: str, prompt: Sequence[int], tokens: Sequence[int], reward: float) -> Trajectory:
    """An attempt of one call with one answer."""
    conversation = Conversation(rollout)
    conversation.call(prompt, generation(tokens))
    return conversation.ended(reward)
