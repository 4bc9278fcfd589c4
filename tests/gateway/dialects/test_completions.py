"""Completions on the wire: raw prompts, as text and as ids."""

import pytest

from support.gateway.scripted_gateway import SECRET, Gateway, Json, NewGateway
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.types import Fork

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


def ask(prompt: object, **more: object) -> Json:
    return {"model": "policy", "prompt": prompt, **more}


async def test_text_and_ids_are_the_same_prompt(gateway: Gateway) -> None:
    ids = gateway.renderer.template.encode("2 + 2 =")
    for prompt in ("2 + 2 =", ["2 + 2 ="], ids, [ids]):
        reply = await gateway.post(PATH, ask(prompt, return_token_ids=True))
        [choice] = reply["choices"]
        assert choice["text"] == "hello there"
        assert choice["finish_reason"] == "stop"
        assert choice["prompt_token_ids"] == ids
    assert gateway.engine.prompts == [ids] * 4
    forks = [call.origin.fork for call in await gateway.calls()]
    assert forks == [None, Fork.RESAMPLED, Fork.RESAMPLED, Fork.RESAMPLED]


async def test_a_stream_reads_like_the_whole_reply(gateway: Gateway) -> None:
    whole = await gateway.post(PATH, ask("a", logprobs=2))
    events = await gateway.events(
        PATH, ask("a", logprobs=2, return_token_ids=True, stream_options={"include_usage": True})
    )
    choices = [choice for event in events for choice in event["choices"]]
    [reply] = whole["choices"]
    assert "".join(choice["text"] for choice in choices) == reply["text"]
    assert [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]] == (
        reply["logprobs"]["tokens"]
    )
    assert [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]] == (
        reply["logprobs"]["text_offset"]
    )
    assert choices[0]["prompt_token_ids"]
    assert choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"] == whole["usage"]


async def test_a_text_that_goes_on_from_what_was_sampled_reuses_its_ids(
    new_gateway: NewGateway,
) -> None:
    odd = [30, 31, 32]  # no encoder would write these two and two
    gateway = await new_gateway(odd, odd, "done")
    first = await gateway.post(PATH, ask("Q:", max_tokens=3))
    text = "Q:" + first["choices"][0]["text"]
    second = await gateway.post(PATH, ask(text + " and", max_tokens=3))
    text += " and" + second["choices"][0]["text"]
    await gateway.post(PATH, ask(text + " so"))
    one, two, three = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert three.parent == two.generation_id(0)
    assert gateway.engine.prompts[2][: len(gateway.engine.prompts[1])] == gateway.engine.prompts[1]
    assert [call.origin.fork for call in (one, two, three)] == [None, None, None]


async def test_a_turn_the_model_ended_goes_on_only_behind_its_end(
    new_gateway: NewGateway,
) -> None:
    gateway = await new_gateway("hello", "again")
    await gateway.post(PATH, ask("Q:"))
    await gateway.post(PATH, ask("Q:hello<|im_end|>\nand"))
    await gateway.post(PATH, ask("Q:hello and"))
    one, two, three = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert three.parent is None
    assert three.origin.fork is Fork.NEW_CONVERSATION


async def test_ids_go_on_from_a_turn_of_any_format(gateway: Gateway) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    await gateway.post("/v1/chat/completions", body)
    [chat] = await gateway.calls()
    ids = [*chat.prompt_suffix, *chat.generations[0].tokens, 40, 41]
    await gateway.post(PATH, ask(ids))
    [_, raw] = await gateway.calls()
    assert raw.parent == chat.generation_id(0)
    assert raw.prompt_suffix == (40, 41)


async def test_ids_do_not_go_on_from_what_another_policy_sampled(gateway: Gateway) -> None:
    def build(policy: str, shares_with: CallPipeline | None = None) -> CallPipeline:
        return CallPipeline(
            engine=gateway.engine,
            log=gateway.store,
            renderer=gateway.renderer,
            models=(policy,),
            policy=policy,
            shares_with=shares_with,
        )

    one = build("one")
    two = build("two", shares_with=one)
    gateway.serve(build_app(one, SECRET, gateway.config, others=[two]))
    await gateway.post(PATH, ask([40, 41]) | {"model": "one"})
    [first] = await gateway.calls()
    ids = [40, 41, *first.generations[0].tokens]
    for model in ("one", "two"):
        await gateway.post(PATH, ask([*ids, 42]) | {"model": model})
    _, same, other = await gateway.calls()
    assert (same.parent, same.prompt_suffix) == (first.generation_id(0), (42,))
    assert (other.parent, other.prompt_suffix) == (None, (*ids, 42))


async def test_a_text_goes_on_after_a_call_that_sampled_nothing(new_gateway: NewGateway) -> None:
    gateway = await new_gateway([], "hello")
    await gateway.post(PATH, ask("Q:"))
    await gateway.post(PATH, ask("Q: and"))
    one, two = await gateway.calls()
    assert one.generations[0].tokens == ()
    assert two.parent == one.generation_id(0)


async def test_a_chat_does_not_go_on_from_a_raw_prompt(gateway: Gateway) -> None:
    await gateway.post(PATH, ask("hi"))
    messages: list[Json] = [
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "hi"},
    ]
    await gateway.post("/v1/chat/completions", {"model": "policy", "messages": messages})
    [_, chat] = await gateway.calls()
    assert chat.parent is None
    assert chat.origin.fork is Fork.NEW_CONVERSATION


async def test_a_stop_string_is_named_and_left_out_of_the_text(new_gateway: NewGateway) -> None:
    gateway = await new_gateway()
    encode = gateway.renderer.template.encode
    gateway.engine.script[0] = encode("a thought\nObservation:")
    reply = await gateway.post(PATH, ask("Q:", stop=["Observation:"], max_tokens=100))
    [choice] = reply["choices"]
    assert choice["text"] == "a thought\n"
    assert choice["stop_reason"] == "Observation:"
    await gateway.post(PATH, ask(f"Q:{choice['text']}Observation: 5"))
    one, two = await gateway.calls()
    assert two.parent == one.generation_id(0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [1, "a"]),
        ("prompt", [1, True]),
        ("prompt", [-1]),
        ("prompt", [2**31]),
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("echo", True),
        ("suffix", "b"),
        ("best_of", 2),
        ("logit_bias", {"1": 1}),
        ("logprobs", 21),
        ("add_special_tokens", True),
        ("n", 0),
    ],
)
async def test_what_we_cannot_honor_is_refused_by_name(
    gateway: Gateway, field: str, value: object
) -> None:
    response = await gateway.send("POST", PATH, ask("a") | {field: value})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


async def test_ids_the_model_does_not_have_are_refused(gateway: Gateway) -> None:
    response = await gateway.send("POST", PATH, ask([5000]))
    assert response.status_code == 400
    assert await gateway.calls() == []


async def test_the_default_length_is_the_formats_own(gateway: Gateway) -> None:
    await gateway.post(PATH, ask("a"))
    assert gateway.engine.samplings[0].max_tokens == 16
