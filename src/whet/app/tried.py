"""An attempt that was tried, read back for people."""

from dataclasses import dataclass

from pydantic import JsonValue

from whet.app.joined import Joint, join
from whet.types import AttemptRecord, Call, Reward, Rollout, Span


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt with all that was recorded of it."""

    rollout: Rollout
    record: AttemptRecord
    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    rewards: tuple[Reward, ...]
    """Those of an attempt that succeeded."""

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return (self.record.ended or self.record.started) - self.record.started

    @property
    def prompt_tokens(self) -> int:
        """What its calls were given, all together."""
        return sum(call.prompt_length for call in self.calls)

    @property
    def sampled_tokens(self) -> int:
        """What its calls sampled, all together."""
        return sum(len(g.tokens) for call in self.calls for g in call.generations)

    @property
    def joints(self) -> dict[str, Joint]:
        """The calls that its spans are about, by span id."""
        return join(self.spans, self.calls)

    def as_json(self) -> dict[str, object]:
        """All of it but the token ids, which the store has."""
        failure, joints = self.record.failure, self.joints
        return {
            "attempt": self.record.id,
            "task": self.rollout.task,
            "seconds": round(self.seconds, 3),
            "reward": self.record.reward,
            "failure": failure.model_dump(mode="json") if failure else None,
            "prompt_tokens": self.prompt_tokens,
            "sampled_tokens": self.sampled_tokens,
            "calls": [_call(call) for call in self.calls],
            "rewards": [reward.model_dump(mode="json") for reward in self.rewards],
            "spans": [
                span.model_dump(mode="json") | _about(joints.get(span.span_id))
                for span in self.spans
            ],
        }


def _about(joint: Joint | None) -> dict[str, str | None]:
    return {"call": joint and joint.call, "call_by": joint and joint.by}


def _call(call: Call) -> dict[str, JsonValue]:
    return {
        "id": call.id,
        "parent": call.parent,
        "dialect": call.origin.dialect,
        "model": call.origin.model,
        "agent": call.origin.agent,
        "tools": list(call.origin.tools),
        "fork": call.origin.fork.value if call.origin.fork else None,
        "prompt_tokens": call.prompt_length,
        "new_prompt_tokens": len(call.context),
        "messages": [dict(message) for message in call.messages],
        "answers": [
            {
                "message": dict(generation.message),
                "sampled_tokens": len(generation.tokens),
                "stop": generation.stop,
            }
            for generation in call.generations
        ],
    }
