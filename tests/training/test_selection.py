"""Selection of the calls that are trained."""

from pydantic import JsonValue

from support.store.trajectories import Conversation, generation
from whet.config import SelectionConfig
from whet.training.selection import explain_exclusions, select
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Credit,
    Generation,
    GenerationId,
    Origin,
    Rollout,
    Sampling,
    Trajectory,
)

GENERATION = Generation(
    tokens=(1,), logprobs=(0.0,), versions=(0,), stop="stop", sampling=Sampling(), message={}
)


def call(name: str, origin: Origin, parent: str | None = None, system: str = "") -> Call:
    messages: list[dict[str, JsonValue]] = [{"role": "system", "content": system}] if system else []
    return Call(
        id=CallId(name),
        attempt=AttemptId("a.1"),
        parent=GenerationId(parent) if parent else None,
        root="r",
        messages=(*messages, {"role": "user", "content": "hi"}),
        prompt_suffix=(1,),
        prompt_length=1,
        prompt_digest="",
        generations=(GENERATION,),
        created=0.0,
        origin=origin,
    )


CALLS = (
    call("main", Origin(agent="solver", model="policy", tools=("calc",)), system="Solve it."),
    call("next", Origin(agent="solver", model="policy", tools=("calc",)), parent="main.0"),
    call("title", Origin(agent="titler", model="small"), system="Write a title."),
)


def kept(config: SelectionConfig) -> set[str]:
    attempt = Attempt(id=AttemptId("a.1"), rollout=Rollout(id="a", task=1, group="g"), number=1)
    trajectory = Trajectory(attempt=attempt, calls=CALLS, rewards=(), reward=1.0)
    credit = Credit(trajectory, {c.generation_id(0): 1.0 for c in CALLS})
    return set(select([credit], config)[0].advantages)


def test_an_empty_selection_trains_everything() -> None:
    assert kept(SelectionConfig()) == {"main.0", "next.0", "title.0"}


def test_calls_are_chosen_by_agent_model_system_prompt_and_tools() -> None:
    ours = {"main.0", "next.0"}
    assert kept(SelectionConfig(agents=("solver",))) == ours
    assert kept(SelectionConfig(models=("policy",))) == ours
    assert kept(SelectionConfig(system_contains="Solve")) == ours
    assert kept(SelectionConfig(tools=("calc",))) == ours


def test_generations_that_are_left_out_have_a_reason() -> None:
    reasons = explain_exclusions(CALLS, SelectionConfig(agents=("solver",)))
    assert reasons == {"title.0": "agent 'titler' is not among selection.agents"}


def test_without_a_selection_the_credits_are_returned_unchanged() -> None:
    attempt = Attempt(id=AttemptId("a.1"), rollout=Rollout(id="a", task={}, group="g"), number=1)
    trajectory = Trajectory(attempt=attempt, calls=CALLS, rewards=(), reward=1.0)
    credit = Credit.even(trajectory, 1.0)
    [same] = select([credit], SelectionConfig())
    assert same is credit


def test_answers_that_the_agent_threw_away_are_left_out_on_request() -> None:
    attempt = Conversation()
    used, other = attempt.call([1, 2], generation([3]), generation([4]))
    [again] = attempt.call([1, 2], generation([5]))  # the same prompt, sampled anew
    [last, choice] = attempt.call([6], generation([7]), generation([8]), parent=used)
    [aside] = attempt.call([9], generation([3]))
    credit = Credit.even(attempt.ended(1.0), 1.0)
    assert select([credit], SelectionConfig()) == [credit]
    [left] = select([credit], SelectionConfig(discarded=False))
    assert set(left.advantages) == {used, last, choice, aside}
    reasons = explain_exclusions(attempt.calls, SelectionConfig(discarded=False))
    assert set(reasons) == {other, again}
