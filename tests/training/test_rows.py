"""Rows: exactly what was sampled and served, with weights that sum to one."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.store.trajectories import Conversation, generation, single
from whet.config import LossConfig
from whet.training.rows import build_rows, normalize
from whet.types import Credit, GenerationId, Sampling, Trajectory

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@dataclass
class Forest:
    """An attempt with what a test knows about it."""

    conversation: Conversation
    credit: Credit

    @property
    def trajectory(self) -> Trajectory:
        return self.credit.trajectory


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Calls that begin or continue conversations, some several times, some with n > 1."""
    conversation = Conversation(draw(st.sampled_from("abc")))
    ids: list[GenerationId] = []
    for _ in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([None, *ids]))
        answers = [generation(draw(tokens)) for _ in range(draw(st.integers(0, 3)))]
        context = draw(tokens if parent is None else st.lists(st.integers(0, 5), max_size=4))
        ids += conversation.call(context, *answers, parent=parent)
    credited = draw(st.sets(st.sampled_from(ids))) if ids else set[GenerationId]()
    advantages = {id_: float(index + 1) for index, id_ in enumerate(sorted(credited))}
    return Forest(conversation, Credit(conversation.ended(1.0), advantages))


@given(forests())
def test_what_has_credit_is_trained_once_after_exactly_what_was_served(forest: Forest) -> None:
    built = build_rows([forest.credit])
    segments = [(row, segment) for row in built.rows for segment in row.segments]
    assert built.unproven == ()
    assert Counter(segment.generation for _, segment in segments) == Counter(
        list(forest.credit.advantages)
    )
    sampled = {
        call.generation_id(index): one
        for call in forest.conversation.calls
        for index, one in enumerate(call.generations)
    }
    for row, segment in segments:
        one = sampled[segment.generation]
        assert row.tokens[: segment.start] == forest.conversation.prompts[segment.generation]
        assert row.tokens[segment.start : segment.end] == one.tokens
        assert segment.logprobs == one.logprobs
        assert set(segment.advantages) == {forest.credit.advantages[segment.generation]}
    for row in built.rows:
        ends = [0, *(segment.end for segment in row.segments)]
        assert all(a <= segment.start for a, segment in zip(ends, row.segments, strict=False))
        assert len(row.tokens) == ends[-1], "tokens after the last trained one are of no use"


@given(forests(), st.data())
def test_a_changed_context_unproves_exactly_what_was_sampled_after_it(
    forest: Forest, data: st.DataObject
) -> None:
    calls = list(forest.trajectory.calls)
    changeable = [index for index, call in enumerate(calls) if call.prompt_suffix]
    changed = data.draw(st.sampled_from(changeable))
    context = list(calls[changed].prompt_suffix)
    place = data.draw(st.integers(0, len(context) - 1))
    context[place] += 1
    calls[changed] = calls[changed].model_copy(update={"prompt_suffix": tuple(context)})
    affected: set[GenerationId | None] = set()
    for call in calls:
        if call.id == calls[changed].id or call.parent in affected:
            affected |= {call.generation_id(index) for index in range(len(call.generations))}
    trajectory = forest.trajectory.model_copy(update={"calls": tuple(calls)})
    built = build_rows([Credit(trajectory, forest.credit.advantages)])
    credited = set(forest.credit.advantages)
    assert sorted(built.unproven) == sorted(credited & affected)
    trained = [segment.generation for row in built.rows for segment in row.segments]
    assert sorted(trained) == sorted(credited - affected)


@given(st.lists(forests(), min_size=1, max_size=4), st.sampled_from(["token", "rollout"]))
@settings(max_examples=60)
def test_weights_sum_to_one(forests: list[Forest], how: str) -> None:
    loss = LossConfig.model_validate({"normalize": how})
    rows = normalize(build_rows([forest.credit for forest in forests]).rows, loss, rollouts=1)
    total = sum(segment.weight * len(segment.logprobs) for row in rows for segment in row.segments)
    assert total == pytest.approx(1.0 if rows else 0.0)
    by_rollout = defaultdict[str, float](float)
    for row in rows:
        by_rollout[row.rollout] += sum(
            segment.weight * len(segment.logprobs) for segment in row.segments
        )
    if how == "rollout":
        assert all(w == pytest.approx(1 / len(by_rollout)) for w in by_rollout.values())
    else:
        assert len({segment.weight for row in rows for segment in row.segments}) <= 1


@given(st.lists(forests(), min_size=1, max_size=4))
@settings(max_examples=30)
def test_a_constant_weighs_every_token_alike_however_long_its_rollout(
    forests: list[Forest],
) -> None:
    loss = LossConfig(normalize="constant", tokens_per_rollout=50)
    built = build_rows([forest.credit for forest in forests])
    # However many of the step's rollouts are trained: the weight is the same in every step.
    rows = normalize(built.rows, loss, rollouts=64)
    assert all(s.weight == pytest.approx(1 / (64 * 50)) for row in rows for s in row.segments)


def credit_all(trajectory: Trajectory, advantage: float = 1.0) -> Credit:
    ids = [c.generation_id(i) for c in trajectory.calls for i in range(len(c.generations))]
    return Credit(trajectory, dict.fromkeys(ids, advantage))


def test_a_conversation_is_one_row_and_a_branch_is_another() -> None:
    talk = Conversation()
    [first] = talk.call([1, 2], generation([3]))
    [second] = talk.call([4], generation([5, 6]), parent=first)
    [other] = talk.call([7], generation([8]), parent=first)
    rows = build_rows([credit_all(talk.ended(1.0))]).rows
    assert [row.tokens for row in rows] == [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8)]
    assert [[(s.generation, s.start) for s in row.segments] for row in rows] == [
        [(first, 2), (second, 4)],
        [(other, 4)],
    ]


def test_two_equal_samples_of_one_prompt_are_two_rows() -> None:
    talk = Conversation()
    talk.call([1], generation([2]), generation([2]))
    rows = build_rows([credit_all(talk.ended(1.0))]).rows
    assert [row.tokens for row in rows] == [(1, 2), (1, 2)]


def test_sampling_settings_travel_with_the_segment() -> None:
    talk = Conversation()
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5)
    talk.call([1], generation([2, 3], [-0.1, -0.2], version=4, sampling=sampling))
    [row] = build_rows([credit_all(talk.ended(1.0), 0.5)]).rows
    [segment] = row.segments
    assert (segment.temperature, segment.top_p, segment.top_k) == (0.7, 0.9, 5)
    assert (segment.logprobs, segment.versions, segment.advantages) == (
        (-0.1, -0.2),
        (4, 4),
        (0.5, 0.5),
    )


def test_what_was_held_to_a_grammar_is_context() -> None:
    talk = Conversation()
    [held] = talk.call([1], generation([2], sampling=Sampling(grammar="start: /x/")))
    [free] = talk.call([3], generation([4]), parent=held)
    built = build_rows([credit_all(talk.ended(1.0))])
    assert [[s.generation for s in row.segments] for row in built.rows] == [[free]]
    assert built.rows[0].tokens == (1, 2, 3, 4)
    assert built.constrained == (held,)
    assert built.unproven == ()


def test_a_call_whose_parent_is_gone_is_unproven() -> None:
    talk = Conversation()
    [first] = talk.call([1, 2], generation([3]))
    [second] = talk.call([4], generation([5]), parent=first)
    trajectory = talk.ended(1.0).model_copy(update={"calls": (talk.calls[1],)})
    built = build_rows([Credit(trajectory, {second: 1.0})])
    assert built.rows == ()
    assert built.unproven == (second,)


def test_an_empty_generation_trains_nothing() -> None:
    built = build_rows([credit_all(single("r", [1, 2], [], 1.0))])
    assert built.rows == ()
    assert normalize(built.rows, LossConfig(), rollouts=1) == []
