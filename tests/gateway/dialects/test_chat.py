"""Chat Completions on the wire."""

import pytest

from support.gateway.scripted_gateway import (
    ARGUMENTS,
    CALLING,
    CHAT_TOOL,
    TWO_CALLS,
    Gateway,
    Json,
    NewGateway,
)
from whet.types import Fork, Mode, Omission

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HI: Json = {"role": "user", "content": "hi"}


def ask(*messages: Json, **more: object) -> Json:
    return {"model": "policy", "messages": [*messages] or [HI], **more}


async def test_a_reply_has_text_usage_and_an_id_of_its_call(gateway: Gateway) -> None:
    reply = await gateway.post(PATH, ask())
    [call] = await gateway.calls()
    [choice] = reply["choices"]
    assert reply["id"] == f"chatcmpl-{call.id}"
    assert choice["message"]["content"] == "hello there"
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == call.prompt_length
    assert reply["usage"]["completion_tokens"] == len(call.generations[0].tokens)


async def test_a_stream_reads_like_the_whole_reply(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}")
    whole = await gateway.post(PATH, ask(tools=[CHAT_TOOL]))
    events = await gateway.events(PATH, ask(tools=[CHAT_TOOL]))
    deltas = [event["choices"][0]["delta"] for event in events]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    [call] = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call["function"]["arguments"] == ARGUMENTS
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_has_usage_only_on_request(gateway: Gateway) -> None:
    plain = await gateway.events(PATH, ask())
    with_usage = await gateway.events(PATH, ask(stream_options={"include_usage": True}))
    assert not any(event.get("usage") for event in plain)
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] > 0


async def test_token_ids_come_as_vllm_gives_them(gateway: Gateway) -> None:
    whole = await gateway.post(PATH, ask(return_token_ids=True))
    events = await gateway.events(PATH, ask(return_token_ids=True))
    first, second = await gateway.calls()
    assert whole["prompt_token_ids"] == list(first.prompt_suffix)
    assert whole["choices"][0]["token_ids"] == list(first.generations[0].tokens)
    assert events[0]["prompt_token_ids"] == list(second.prompt_suffix)
    streamed = [id for e in events for c in e["choices"] for id in c.get("token_ids", [])]
    assert streamed == list(second.generations[0].tokens)
    assert "prompt_token_ids" not in await gateway.post(PATH, ask())


async def test_logprobs_are_those_of_the_sampled_tokens(gateway: Gateway) -> None:
    reply = await gateway.post(PATH, ask(logprobs=True, top_logprobs=2))
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-0.5] * len(entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    [call] = await gateway.calls()
    assert [gateway.text([id]) for id in call.generations[0].tokens] == [
        entry["token"] for entry in entries
    ]


async def test_several_choices_are_several_generations_of_one_call(gateway: Gateway) -> None:
    reply = await gateway.post(PATH, ask(n=3))
    events = await gateway.events(PATH, ask(n=2))
    first, second = await gateway.calls()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(first.generations) == 3
    assert len(second.generations) == 2
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}


@pytest.mark.parametrize(
    "echo",
    [
        {"content": None},
        {"content": ""},
        {},
        {"content": [], "name": "Assistant", "refusal": None, "parsed": None},
        {"content": "[blank text]"},
    ],
)
@pytest.mark.parametrize(
    "arguments", [ARGUMENTS, '{"expression":"2 + 3"}', '{ "expression" : "2 \\u002b 3" }']
)
async def test_an_echoed_turn_continues_from_its_sampled_tokens(
    new_gateway: NewGateway, echo: Json, arguments: str
) -> None:
    gateway = await new_gateway(CALLING, "it is 5")
    first = await gateway.post(PATH, ask(HI, tools=[CHAT_TOOL]))
    [made] = first["choices"][0]["message"]["tool_calls"]
    function = made["function"] | {"arguments": arguments, "parsed_arguments": {}}
    turn = {"role": "assistant", "tool_calls": [made | {"index": 0, "function": function}]} | echo
    result = {"role": "tool", "tool_call_id": made["id"], "content": "5"}
    await gateway.post(PATH, ask(HI, turn, result, tools=[CHAT_TOOL]))
    one, two = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert two.origin.fork is None
    whole = [*one.prompt_suffix, *one.generations[0].tokens, *two.prompt_suffix]
    assert gateway.engine.prompts[1] == whole


@pytest.mark.parametrize("content", [None, "[blank text]"])
async def test_a_dropped_text_beside_a_call_is_noted_and_its_tokens_stand(
    new_gateway: NewGateway, content: str | None
) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}", "it is 5")
    first = await gateway.post(PATH, ask(HI, tools=[CHAT_TOOL]))
    turn = first["choices"][0]["message"] | {"content": content}
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "5"}
    await gateway.post(PATH, ask(HI, turn, result, tools=[CHAT_TOOL]))
    one, two = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert two.origin.lossy


async def test_an_edited_history_forks_with_its_cause(gateway: Gateway) -> None:
    await gateway.post(PATH, ask(HI))
    edited: Json = {"role": "assistant", "content": "something else"}
    await gateway.post(PATH, ask(HI, edited, HI))
    one, two = await gateway.calls()
    assert one.origin.fork is None
    assert two.parent is None
    assert two.origin.fork is Fork.EDITED_HISTORY


async def test_no_tools_at_all_is_an_empty_list_of_tools(gateway: Gateway) -> None:
    await gateway.post(PATH, ask(HI, tools=[]))
    await gateway.post(PATH, ask(HI))
    one, two = await gateway.calls()
    assert one.root == two.root


async def test_strict_is_not_shown_to_the_model_and_constrains_nothing(gateway: Gateway) -> None:
    strict = {"type": "function", "function": CHAT_TOOL["function"] | {"strict": True}}
    await gateway.post(PATH, ask(HI, tools=[strict]))
    await gateway.post(PATH, ask(HI, tools=[CHAT_TOOL]))
    one, two = await gateway.calls()
    assert one.prompt_suffix == two.prompt_suffix
    assert "strict" not in gateway.text(one.prompt_suffix)
    assert one.generations[0].sampling.grammar is None
    assert one.origin.tools == ("calculator",)


async def test_without_parallel_calls_the_first_one_is_shown(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(TWO_CALLS)
    both = await gateway.post(PATH, ask(tools=[CHAT_TOOL]))
    one = await gateway.post(PATH, ask(tools=[CHAT_TOOL], parallel_tool_calls=False))
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    first, second = await gateway.calls()
    assert first.generations[0].tokens == second.generations[0].tokens
    assert (first.origin.omitted, second.origin.omitted) == ((), (Omission.HIDDEN_CALL,))


async def test_reasoning_may_come_back_under_either_name(gateway: Gateway) -> None:
    for name in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "so", name: "thought"}
        await gateway.post(PATH, ask(HI, turn, HI))
    for call in await gateway.calls():
        assert call.messages[1]["reasoning"] == "thought"


async def test_parts_are_joined_and_other_kinds_refused_by_name(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await gateway.post(PATH, ask({"role": "user", "content": parts}))
    [call] = await gateway.calls()
    assert call.messages[0]["content"] == "a\nb"
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    response = await gateway.send("POST", PATH, ask({"role": "user", "content": image}))
    assert response.status_code == 400
    assert "messages.0.content.0" in response.json()["error"]["message"]
    assert "image_url" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", []),
        ("function_call", "auto"),
        ("audio", {}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("logit_bias", {"1": 3}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("modalities", ["audio"]),
        ("kv_transfer_params", {}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("min_p", 0.1),
        ("ignore_eos", True),
        ("guided_json", {}),
        ("continue_final_message", True),
    ],
)
async def test_what_we_cannot_honor_is_refused_by_name(
    gateway: Gateway, field: str, value: object
) -> None:
    response = await gateway.send("POST", PATH, ask(**{field: value}))
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
    assert await gateway.calls() == []


async def test_bookkeeping_and_nulls_are_taken(gateway: Gateway) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "reasoning_effort": "low",
        "verbosity": "low",
        "audio": None,
        "functions": None,
        "stop": None,
        "tools": None,
    }
    await gateway.post(PATH, ask(**fields))


async def test_limits_and_stops_reach_the_engine(gateway: Gateway) -> None:
    await gateway.post(
        PATH, ask(max_completion_tokens=2, max_tokens=9, stop=["x", ""], temperature=0)
    )
    [sampling] = gateway.engine.samplings
    assert sampling.max_tokens == 2
    assert sampling.stop == ("x",)
    assert sampling.seed is None
    assert sampling.temperature == 0
    [call] = await gateway.calls()
    assert call.generations[0].stop == "length"


@pytest.mark.parametrize("mode", [Mode.VAL, Mode.TEST])
async def test_an_evaluation_samples_with_the_seed_of_the_agent(
    new_gateway: NewGateway, mode: Mode
) -> None:
    gateway = await new_gateway(mode=mode)
    await gateway.post(PATH, ask(seed=7))
    [sampling] = gateway.engine.samplings
    assert sampling.seed == 7


async def test_each_choice_has_a_seed_of_its_own(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(mode=Mode.VAL)
    await gateway.post(PATH, ask(seed=7, n=3))
    assert sorted(sampling.seed or 0 for sampling in gateway.engine.samplings) == [7, 8, 9]
    [call] = await gateway.calls()
    assert [generation.sampling.seed for generation in call.generations] == [7, 8, 9]


async def test_rollouts_of_a_group_differ_though_their_agents_send_one_seed(
    new_gateway: NewGateway,
) -> None:
    first, second = await new_gateway(), await new_gateway()
    for gateway, seed in ((first, 7), (first, 7), (second, 7), (first, 8)):
        await gateway.post(PATH, ask(seed=seed))
    one, again, after = [sampling.seed for sampling in first.engine.samplings]
    [other] = [sampling.seed for sampling in second.engine.samplings]
    assert one == again
    assert len({one, other, after}) == 3
    await first.post(PATH, ask(seed=-(2**63)))
    assert 0 <= (first.engine.samplings[-1].seed or -1) < 2**63


async def test_an_unknown_model_is_not_found_and_the_known_are_listed(gateway: Gateway) -> None:
    response = await gateway.send("POST", PATH, ask(model="gpt-4o") | {"model": "gpt-4o"})
    assert response.status_code == 404
    assert "'policy'" in response.json()["error"]["message"]
    listed = (await gateway.send("GET", "/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["policy", "claude-stub"]
    assert (await gateway.send("GET", "/v1/models/policy")).json()["id"] == "policy"
    assert (await gateway.send("GET", "/v1/models/other")).status_code == 404


async def test_a_prompt_that_is_too_long_has_the_error_code_agents_look_for(
    gateway: Gateway,
) -> None:
    response = await gateway.send("POST", PATH, ask({"role": "user", "content": "many " * 9000}))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_tokenize_and_detokenize_are_each_others_reverse(gateway: Gateway) -> None:
    reply = await gateway.post("/tokenize", {"model": "policy", "messages": [HI]})
    await gateway.post(PATH, ask(HI))
    [call] = await gateway.calls()
    assert reply["tokens"] == list(call.prompt_suffix)
    assert reply["count"] == len(call.prompt_suffix)
    assert reply["max_model_len"] == 4096
    text = (await gateway.post("/detokenize", {"tokens": reply["tokens"]}))["prompt"]
    assert text.startswith("<|im_start|>")
    again = await gateway.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert again["tokens"] == reply["tokens"]
    assert "".join(again["token_strs"]) == text
    both = await gateway.send("POST", "/tokenize", {"prompt": "a", "messages": [HI]})
    assert both.status_code == 400
