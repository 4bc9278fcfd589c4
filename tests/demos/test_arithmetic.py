"""The arithmetic problems of the demo: answers, wordings, splits and rewards."""

import ast
import json
import math
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.demos.arithmetic import CALCULATOR, SYSTEM, calculate, problems, solve
from whet.demos.problems import EXAMPLE, PATTERNS, Draw, ProblemSplit, draw, use_tool
from whet.types import Endpoint

# --------------------------------------------------------------------------- problems


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def possible_answers(kind: str, operands: list[int]) -> set[int]:
    """Computed without the calculator."""
    match kind:
        case "add":
            return {sum(operands)}
        case "subtract":
            return {max(operands) - min(operands)}
        case "multiply":
            return {math.prod(operands)}
        case _:
            orders = list(permutations(operands))
            return {
                value for a, b, c in orders for value in (a + b - c, a * b + c, a * b - c)
            }  # fmt: skip


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right_and_not_negative(split: ProblemSplit) -> None:
    for task in problems(split, 400, 0):
        assert task["answer"] in possible_answers(task["kind"], numbers(task["question"]))
        assert task["answer"] >= 0


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.expression)
def test_every_wording_asks_for_its_own_expression(pattern: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        drawn = draw(pattern, "train", rng)
        assert sorted(numbers(drawn.question)) == sorted(drawn.numbers.values())
        assert "{" not in drawn.question


def keys(tasks: list[dict[str, Any]]) -> set[tuple[str, tuple[int, ...]]]:
    return {(task["kind"], tuple(sorted(numbers(task["question"])))) for task in tasks}


def test_train_and_test_share_no_numbers_of_a_kind_and_repeat_none() -> None:
    train, test = problems("train", 4000, 1), problems("test", 2000, 2)
    assert len(keys(train)) == 4000
    assert len(keys(test)) == 2000
    assert not keys(train) & keys(test)


def test_a_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert problems("train", 20, 3) == problems("train", 20, 3)
    assert problems("train", 20, 3) != problems("train", 20, 4)


def test_every_kind_is_asked_equally_often() -> None:
    kinds = [task["kind"] for task in problems("test", 40, 0)]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("add", "subtract", "multiply", "two_step"), 10
    )


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than the different test problems"):
        problems("test", 50_000, 0)


def test_the_example_is_right_and_of_the_train_split() -> None:
    (task,) = problems("test", 1, 0, examples=True)
    assert task["examples"] == EXAMPLE
    a, b = numbers(EXAMPLE[0]["content"])
    assert Draw(PATTERNS[0], {"a": a, "b": b}, "").split == "train"
    arguments = EXAMPLE[1]["tool_calls"][0]["function"]["arguments"]
    assert use_tool("calculator", arguments) == EXAMPLE[2]["content"] == str(a + b)


# --------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", "42"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*-4", "-20"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7//2", "3"),
        ("7%4", "3"),
        ("1.5*3", "4.5"),
        ("1/3", "0.3333333333"),
        ("+5", "5"),
        ("-0.0", "0"),
    ],
)
def test_arithmetic_is_evaluated(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "2**9", "1+", "()", "...", "(1,2)", "1 2", "007", "1<2", "x", "1e9", "9" * 99,
        "9" * 201, "1/0", "1%0", "1//0.0", "(" * 99 + "1", "-" * 200, "__import__('os')", "1\n+1",
        "\0", "\u0661+\u0661", "999999999*999999999", "9" * 198 + ".0",
    ],
)  # fmt: skip
def test_bad_input_comes_back_as_an_error_text(expression: str) -> None:
    assert calculate(expression).startswith("error: ")


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=220) | st.text(max_size=220))
def test_no_input_raises(expression: str) -> None:
    value = calculate(expression)
    assert value.startswith("error: ") or math.isfinite(float(value))


@given(st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda p: f"({''.join(p)})"),
    max_leaves=6,
))  # fmt: skip
def test_integer_arithmetic_is_python_s(expression: str) -> None:
    value = eval(compile(ast.parse(expression, mode="eval"), "", "eval"))
    assert calculate(expression) == str(value) or abs(value) > 10**12


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "2*3"}', "6"),
        ("calculator", '{"expression": 7}', "7"),
        ("calc", '{"expression": "2*3"}', "error: unknown tool"),
        ("calculator", '{"expression": "2*3"', "error: expected an expression"),
        ("calculator", '{"expr": "2*3"}', "error: expected an expression"),
        ("calculator", '"2*3"', "error: expected an expression"),
        ("calculator", "null", "error: expected an expression"),
    ],
)
def test_a_tool_call_as_a_model_wrote_it_gives_a_text(
    name: str, arguments: str, result: str
) -> None:
    assert use_tool(name, arguments) == result


# --------------------------------------------------------------------------- agent


class Model:
    """An OpenAI endpoint that replies from a script and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def reply(self, request: dict[str, Any], key: str | None) -> dict[str, Any]:
        self.requests.append(request)
        self.keys.append(key)
        message = {"role": "assistant", "content": None, **self.script[len(self.requests) - 1]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
        }  # fmt: skip


@pytest.fixture
def model() -> Iterator[tuple[Model, Endpoint]]:
    model = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps(model.reply(request, self.headers["authorization"])).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield model, Endpoint(base_url=url, api_key="key", model="tiny")
        server.shutdown()
        thread.join()


def calls(arguments: str, name: str = "calculator") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


TASK = {"question": "What is 12 plus 32?", "answer": 44, "kind": "add"}


def test_the_agent_uses_the_calculator_and_is_rewarded(model: tuple[Model, Endpoint]) -> None:
    fake, llm = model
    fake.script = [calls('{"expression": "12+32"}'), {"content": "The answer is 44."}]
    assert anyio.run(solve, TASK, llm) == 1.0
    first, second = fake.requests
    assert first["model"] == "tiny"
    assert first["tools"] == [CALCULATOR]
    assert first["messages"] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TASK["question"]},
    ]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["tool_calls"] == fake.script[0]["tool_calls"]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "44"}
    assert fake.keys == ["Bearer key", "Bearer key"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("44", 1.0),
        ("12 + 32 = 44.", 1.0),
        ("It is 44.0", 1.0),
        ("44 or 45", 0.0),
        ("-44", 0.0),
        ("many", 0.0),
        (None, 0.0),
    ],
)
def test_the_last_number_is_the_answer(
    model: tuple[Model, Endpoint], text: str | None, reward: float
) -> None:
    fake, llm = model
    fake.script = [{"content": text}]
    assert anyio.run(solve, TASK, llm) == reward


def test_a_bad_call_is_answered_with_its_error_and_turns_are_bounded(
    model: tuple[Model, Endpoint],
) -> None:
    fake, llm = model
    fake.script = [calls("{", "calculator"), calls("{}", "search"), calls('{"expression": "1"}')]
    assert anyio.run(solve, TASK, llm) == 0.0
    results = [m["content"] for m in fake.requests[-1]["messages"] if m["role"] == "tool"]
    assert results == ["error: expected an expression", "error: unknown tool"]
    assert len(fake.requests) == 3


def test_examples_come_before_the_question(model: tuple[Model, Endpoint]) -> None:
    fake, llm = model
    fake.script = [{"content": "1,234"}]
    task = {**TASK, "answer": 1234, "examples": EXAMPLE}
    assert anyio.run(solve, task, llm) == 1.0
    assert [m["role"] for m in fake.requests[0]["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip


def test_importing_whet_does_not_import_openai() -> None:
    code = "import sys, whet, whet.demos.problems; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
