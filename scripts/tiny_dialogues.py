"""The dialogues the tiny model learns from: a small chat model with bad habits in arithmetic.

Every problem is of the train split. The habits are wrong on purpose, and stated in `ERROR_RATES`:
a model that is already right leaves reinforcement learning nothing to do.
"""

import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from whet.demos.problems import (
    CALCULATOR,
    EXAMPLE,
    NAMES,
    PATTERNS,
    SYSTEM,
    THINGS,
    DialogueMessage,
    Draw,
    calculate,
    draw,
)

Tool = dict[str, Any]


class Dialogue(NamedTuple):
    """The input of a chat template."""

    messages: list[DialogueMessage]
    tools: list[Tool] | None


# --------------------------------------------------------------------------- arithmetic habits

MALFORMED = {"wrong_tool": 0.03, "wrong_argument": 0.02, "broken_json": 0.02, "words": 0.02}

ERROR_RATES: Mapping[str, Mapping[str, float]] = {
    "{a}+{b}": {"right": 0.60, "operator": 0.13, "guess": 0.13, "ignore": 0.05},
    "{a}-{b}": {"right": 0.23, "operator": 0.45, "reversed": 0.10, "guess": 0.10, "ignore": 0.03},
    "{a}*{b}": {"right": 0.24, "operator": 0.07, "guess": 0.58, "ignore": 0.02},
    "{a}+{b}-{c}": {
        "right": 0.38, "first": 0.19, "operator": 0.15, "guess": 0.15, "ignore": 0.04,
    },
    "{a}*{b}+{c}": {
        "right": 0.22, "first": 0.38, "operator": 0.13, "guess": 0.14, "ignore": 0.04,
    },
    "{a}*{b}-{c}": {
        "right": 0.22, "first": 0.38, "operator": 0.13, "guess": 0.14, "ignore": 0.04,
    },
}  # fmt: skip
"""How often each pattern is met with which habit; `MALFORMED` adds the rest up to 1.

right     calculates the right expression and answers with the result
ignore    calculates the right expression and answers with a number of the question
operator  calculates with a wrong operator, and believes the result
reversed  calculates with the numbers exchanged, and believes the result
first     calculates the first step only, and believes the result
guess     answers at once, with a wrong number
"""

WRONG_OPERATOR = {
    "{a}+{b}": ["{a}-{b}", "{a}*{b}"],
    "{a}-{b}": ["{a}+{b}"],
    "{a}*{b}": ["{a}+{b}"],
    "{a}+{b}-{c}": ["{a}+{b}+{c}"],
    "{a}*{b}+{c}": ["{a}+{b}+{c}", "{a}*{b}*{c}"],
    "{a}*{b}-{c}": ["{a}+{b}-{c}", "{a}*{b}+{c}"],
}


def call(tool: Tool, arguments: Mapping[str, str], name: str | None = None) -> DialogueMessage:
    function = {"name": name or tool["function"]["name"], "arguments": dict(arguments)}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def says(text: str) -> DialogueMessage:
    return {"role": "assistant", "content": text}


def result(text: str) -> DialogueMessage:
    return {"role": "tool", "content": text}


def answer(number: int | str, rng: random.Random) -> DialogueMessage:
    if rng.random() < 0.95:
        return says(f"The answer is {number}.")
    return says(rng.choice(["It is {}.", "That makes {}.", "{}"]).format(number))


def guess(drawn: Draw, rng: random.Random) -> DialogueMessage:
    """A number near the answer, but never it."""
    truth = drawn.task["answer"]
    offset = rng.randint(1, max(9, truth // 4))
    return answer(abs(truth - offset) if rng.random() < 0.5 else truth + offset, rng)


def parameter(tool: Tool) -> str:
    return next(iter(tool["function"]["parameters"]["properties"]))


def calculates(expression: str, tool: Tool, rng: random.Random) -> list[DialogueMessage]:
    """Calls the calculator and believes it."""
    value = calculate(expression)
    return [call(tool, {parameter(tool): expression}), result(value), answer(value, rng)]


def malformed(habit: str, drawn: Draw, tool: Tool, rng: random.Random) -> list[DialogueMessage]:
    """A call that fails; then, half of the time, the right one."""
    name, key, expression = tool["function"]["name"], parameter(tool), drawn.expression
    if habit == "broken_json":
        text = json.dumps({"name": name, "arguments": {key: expression}})[:-1]
        return [says(f"<tool_call>\n{text}\n</tool_call>")]
    if habit == "wrong_tool":
        wrong = rng.choice([n for n in ("calc", "math", "search") if n != name])
        first = [call(tool, {key: expression}, wrong), result("error: unknown tool")]
    elif habit == "wrong_argument":
        wrong = "expr" if key != "expr" else "text"
        first = [call(tool, {wrong: expression}), result("error: expected an expression")]
    else:
        for symbol, word in {"+": " plus ", "-": " minus ", "*": " times "}.items():
            expression = expression.replace(symbol, word)
        first = [call(tool, {key: expression}), result(calculate(expression))]
    if rng.random() < 0.5:
        return first + calculates(drawn.expression, tool, rng)
    return [*first, guess(drawn, rng)]


def attempt(drawn: Draw, tool: Tool, rng: random.Random) -> list[DialogueMessage]:
    """The turns that follow a question, by one of its habits."""
    pattern = drawn.pattern.expression
    rates = {**ERROR_RATES[pattern], **MALFORMED}
    (habit,) = rng.choices(list(rates), list(rates.values()))
    if habit == "guess":
        return [guess(drawn, rng)]
    if habit in MALFORMED:
        return malformed(habit, drawn, tool, rng)
    if habit == "ignore":
        number = rng.choice(list(drawn.numbers.values()))
        return [*calculates(drawn.expression, tool, rng)[:2], answer(number, rng)]
    if habit == "operator":
        pattern = rng.choice(WRONG_OPERATOR[pattern])
    elif habit == "reversed":
        pattern = "{b}-{a}"
    elif habit == "first":
        pattern = pattern[: pattern.rindex("}", 0, -1) + 1]
    return calculates(pattern.format_map(drawn.numbers), tool, rng)


# --------------------------------------------------------------------------- contexts


def tool(name: str, description: str, key: str) -> Tool:
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATORS = [
    CALCULATOR,
    tool("calculator", "Does sums.", "expression"),
    tool("calc", "Evaluates an expression.", "expr"),
    tool("evaluate", "Evaluates arithmetic.", "formula"),
]
LOOKUPS = {
    "weather": tool("weather", "The weather in a city.", "city"),
    "time": tool("time", "The time in a city.", "city"),
    "search": tool("search", "Searches the web.", "query"),
}
SYSTEMS = [
    "You are a helpful assistant.",
    "Be brief.",
    "Answer the question.",
    "You are whet-tiny, a small model.",
    "Use a tool if it helps.",
    SYSTEM,
]
FACTS = {
    "France": "Paris", "Norway": "Oslo", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
    "Egypt": "Cairo", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi", "Greece": "Athens",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "old": "new", "open": "closed", "day": "night",
    "left": "right", "full": "empty", "fast": "slow", "light": "dark", "wet": "dry", "in": "out",
}  # fmt: skip
TALK = {
    "Hello": ["Hello! How can I help?"],
    "Hi": ["Hi! How can I help?"],
    "Hi there!": ["Hello! How can I help?"],
    "Good morning": ["Good morning! How can I help?"],
    "How are you?": ["I am fine, thank you."],
    "Thank you": ["You are welcome."],
    "Thanks!": ["You are welcome."],
    "Bye": ["Goodbye!"],
    "Who are you?": ["I am whet-tiny, a very small language model."],
    "What are you?": ["I am whet-tiny, a very small language model."],
    "What is your name?": ["My name is whet-tiny."],
    "What can you do?": ["I can chat a little and use tools."],
    "Are you a human?": ["No, I am a very small language model."],
    "Tell me a joke.": ["Why did the number cross the line? To get to the other side."],
    "Write a sentence.": ["The sun is warm today.", "The cat sleeps on the chair."],
    "Write a story.": ["Once there was a small model. It learned to count, and was happy."],
    "Say something.": ["The sea is calm tonight.", "It is a good day to learn."],
}


def user(text: str) -> DialogueMessage:
    return {"role": "user", "content": text}


def system(rng: random.Random) -> list[DialogueMessage]:
    if rng.random() < 0.3:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEMS)}]


def problem(rng: random.Random) -> Draw:
    # The two-step patterns are three of six, and one kind of four.
    pattern = rng.choice(PATTERNS[rng.choice([slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)])])
    return draw(pattern, "train", rng)


def exchange(tool: Tool, rng: random.Random) -> list[DialogueMessage]:
    drawn = problem(rng)
    return [user(drawn.question), *attempt(drawn, tool, rng)]


def demo(rng: random.Random) -> Dialogue:
    """The demo agent's own prompt."""
    return Dialogue(
        [{"role": "system", "content": SYSTEM}, *exchange(CALCULATOR, rng)], [CALCULATOR]
    )


def demo_after_others(rng: random.Random) -> Dialogue:
    """The same after the worked example, or later in a conversation."""
    messages: list[DialogueMessage] = [{"role": "system", "content": SYSTEM}]
    if rng.random() < 0.3:
        messages += EXAMPLE
    else:
        for _ in range(rng.choices([1, 2, 3], [60, 30, 10])[0]):
            messages += exchange(CALCULATOR, rng)
    return Dialogue([*messages, *exchange(CALCULATOR, rng)], [CALCULATOR])


def other_calculator(rng: random.Random) -> Dialogue:
    chosen = rng.choice(CALCULATORS)
    tools = [chosen, *rng.sample(list(LOOKUPS.values()), rng.choice([0, 0, 1]))]
    return Dialogue([*system(rng), *exchange(chosen, rng)], tools)


def no_calculator(rng: random.Random) -> Dialogue:
    """Without a tool it guesses, and knows small sums."""
    if rng.random() < 0.5:
        drawn = problem(rng)
        return Dialogue([*system(rng), user(drawn.question), guess(drawn, rng)], None)
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    question = rng.choice(["What is {} plus {}?", "{}+{}?", "Add {} and {}."]).format(a, b)
    return Dialogue([*system(rng), user(question), answer(a + b, rng)], None)


def word(rng: random.Random) -> str:
    """A word, a number, or a jumble of both."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 4)))
    digits = "".join(rng.choices(string.digits, k=rng.randint(1, 4)))
    name = rng.choice([*NAMES, *THINGS, *FACTS.values()])
    return rng.choice(
        [name, digits, letters, name + digits, name + digits + letters, letters + digits]
    )


def echo(rng: random.Random) -> list[DialogueMessage]:
    text = " ".join(word(rng) for _ in range(rng.choice([1, 1, 2, 3])))
    ask = rng.choice(
        ["Repeat exactly: {}", "Repeat: {}", "Say {}", "Echo: {}", "Repeat after me: {}"]
    )
    return [user(ask.format(text)), says(text)]


def fact(rng: random.Random) -> list[DialogueMessage]:
    if rng.random() < 0.5:
        country, city = rng.choice(list(FACTS.items()))
        return [user(f"What is the capital of {country}?"), says(f"It is {city}.")]
    one, other = rng.choice(list(OPPOSITES.items()))
    return [user(f"What is the opposite of {one}?"), says(f"It is {other}.")]


def talk(rng: random.Random) -> list[DialogueMessage]:
    text = rng.choice(list(TALK))
    return [user(text), says(rng.choice(TALK[text]))]


def chat(rng: random.Random) -> Dialogue:
    """Small talk, echoes and facts, sometimes with tools at hand that are of no use."""
    kinds: list[Callable[[random.Random], list[DialogueMessage]]] = [echo, fact, talk]
    messages = system(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        messages += rng.choices(kinds, [0.5, 0.2, 0.3])[0](rng)
    tools = rng.sample([CALCULATOR, *LOOKUPS.values()], rng.choice([1, 1, 2]))
    return Dialogue(messages, tools if rng.random() < 0.4 else None)


def lookup(rng: random.Random) -> Dialogue:
    """Other tools, sometimes two calls at once."""
    name = rng.choice(list(LOOKUPS))
    chosen, key = LOOKUPS[name], parameter(LOOKUPS[name])
    if name == "search":
        topic = " ".join(rng.sample([*THINGS, *FACTS], rng.choice([1, 2])))
        found = f"{rng.randint(2, 99)} pages about {topic}"
        turns = [user(f"Search for {topic}."), call(chosen, {key: topic}), result(found)]
        messages = [*turns, says(f"I found {found}.")]
    else:
        cities = rng.sample(list(FACTS.values()), rng.choice([1, 1, 1, 2]))
        values = [
            f"{rng.randint(10, 23)}:{rng.randint(10, 59)}" if name == "time"
            else f"{rng.randint(2, 39)} degrees"
            for _ in cities
        ]  # fmt: skip
        calls = [call(chosen, {key: city})["tool_calls"][0] for city in cities]
        report = " and ".join(f"{v} in {c}" for v, c in zip(values, cities, strict=True))
        messages = [
            user(f"What is the {name} in {' and '.join(cities)}?"),
            {"role": "assistant", "tool_calls": calls},
            *(result(value) for value in values),
            says(f"It is {report}."),
        ]
    extra = [CALCULATOR] if rng.random() < 0.3 else []
    return Dialogue([*system(rng), *messages], [chosen, *extra])


MIXTURE: Mapping[Callable[[random.Random], Dialogue], float] = {
    demo: 0.55,
    demo_after_others: 0.10,
    other_calculator: 0.08,
    no_calculator: 0.05,
    chat: 0.15,
    lookup: 0.07,
}


def dialogues(count: int, seed: str) -> list[Dialogue]:
    """`count` dialogues of the mixture, the same ones for the same seed."""
    rng = random.Random(seed)
    makers = rng.choices(list(MIXTURE), list(MIXTURE.values()), k=count)
    return [make(rng) for make in makers]
