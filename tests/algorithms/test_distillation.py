"""A token's advantage is the teacher's log-probability less the sampler's."""

from collections.abc import Sequence

import pytest

from support.store.trajectories import Conversation, generation
from whet.algorithms.distillation import Distillation
from whet.config import AlgorithmConfig
from whet.errors import ConfigError
from whet.protocols import Scorer
from whet.training.rows import build_rows
from whet.types import Sampling

pytestmark = pytest.mark.anyio

CONFIG = AlgorithmConfig(name="distillation", teacher="x")


class Ruler(Scorer):
    """Thinks of a token as minus its place in the sequence."""

    def __init__(self) -> None:
        self.scored: list[tuple[int, ...]] = []

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        self.scored += map(tuple, sequences)
        return [tuple(-float(place) for place in range(1, len(s))) for s in sequences]


async def test_the_advantage_of_a_token_is_the_difference_of_its_log_probabilities() -> None:
    talk = Conversation()
    [first] = talk.call([7, 8], generation([1, 2], [-0.5, -0.25]))
    [second] = talk.call([9], generation([3], [-1.0]), parent=first)
    teacher = Ruler()
    [credit] = await Distillation(CONFIG, teacher).credit([[talk.ended(0.0)]], [])
    assert teacher.scored == [(7, 8, 1, 2, 9, 3)], "a conversation is scored once"
    # The tokens stand at 2, 3 and 5.
    assert credit.advantages == {first: (-2 + 0.5, -3 + 0.25), second: (-5 + 1.0,)}
    [row] = build_rows([credit]).rows
    assert [segment.advantages for segment in row.segments] == [(-1.5, -2.75), (-4.0,)]


async def test_the_same_model_as_teacher_teaches_nothing() -> None:
    talk = Conversation()
    talk.call([7, 8], generation([1, 2], [-2.0, -3.0]))
    [credit] = await Distillation(CONFIG, Ruler()).credit([[talk.ended(1.0)], []], [])
    assert list(credit.advantages.values()) == [(0.0, 0.0)]


async def test_samples_of_a_shaped_distribution_are_refused_by_name() -> None:
    talk = Conversation("odd")
    talk.call([7], generation([1], sampling=Sampling(temperature=0.7)))
    with pytest.raises(ConfigError, match=r"rollout 'odd' was sampled with temperature 0\.7"):
        await Distillation(CONFIG, Ruler()).credit([[talk.ended(1.0)]], [])
