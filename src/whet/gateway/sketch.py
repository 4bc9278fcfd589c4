"""Text with slots in it: what a chat template writes, whatever stands in the slots.

A template is rendered with sketches in place of texts. A sketch is no `str`, so that whatever is
not answered here fails instead of going on with a wrong answer. What a template may ask without
harm (does it start so? is it empty?) is answered for the texts at hand and noted: what was written
holds for every text of which the same is true.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import NamedTuple, NoReturn, cast

from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.nativetypes import NativeCodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Slot(NamedTuple):
    """A place where the text of some number stands."""

    number: int
    changes: tuple[Callable[[str], str], ...] = ()
    """What is done to the text before it is written."""

    def text(self, texts: Sequence[str]) -> str:
        """What stands here, of these texts."""
        text = texts[self.number]
        for change in self.changes:
            text = change(text)
        return text


Part = str | Slot


class Question(NamedTuple):
    """What a template asked about the text in a slot."""

    slot: Slot
    ask: Callable[[str, str], bool]
    about: Part
    answer: bool

    def answered_by(self, texts: Sequence[str]) -> bool:
        """Whether these texts give the same answer."""
        about = self.about if isinstance(self.about, str) else self.about.text(texts)
        return self.ask(self.slot.text(texts), about) is self.answer


class OpaqueError(BaseException):
    """A template wants to know more of a text than a sketch tells; no `Exception`, which Jinja's
    own filters and tests pass over."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise OpaqueError


class Sketch:
    """Text with slots. Its names begin with an underscore, which templates cannot reach."""

    __slots__ = ("_asked", "_parts", "_texts")

    def __init__(
        self, parts: tuple[Part, ...], texts: Sequence[str], asked: list[Question]
    ) -> None:
        """Answers are true of `texts`, and noted in `asked`."""
        self._parts = parts
        self._texts = texts
        self._asked = asked

    def _slot(self) -> Slot:
        if len(self._parts) != 1:
            raise OpaqueError
        return cast(Slot, self._parts[0])

    def _question(self, ask: Callable[[str, str], bool], about: Part) -> bool:
        slot = self._slot()
        text = about if isinstance(about, str) else about.text(self._texts)
        answer = ask(slot.text(self._texts), text)
        self._asked.append(Question(slot, ask, about, answer))
        return answer

    def _changed(self, change: Callable[[str], str]) -> "Sketch":
        slot = self._slot()
        changed = Slot(slot.number, (*slot.changes, change))
        return Sketch((changed,), self._texts, self._asked)

    def __add__(self, other: object) -> "Sketch":
        # Not a subclass of str: markup would escape the text.
        if type(other) is not str and not isinstance(other, Sketch):
            return NotImplemented
        return cast(Sketch, concat([self, other]))

    def __radd__(self, other: object) -> "Sketch":
        return cast(Sketch, concat([other, self])) if type(other) is str else NotImplemented

    def __bool__(self) -> bool:
        if any(isinstance(part, str) for part in self._parts):
            return True
        slot = self._slot()
        # Texts that are empty are not of a kind with others, so this needs no note.
        return self._question(str.__ne__, "") if slot.changes else bool(self._texts[slot.number])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sketch):
            return self._question(str.__eq__, other._slot())
        return isinstance(other, str) and self._question(str.__eq__, _plain(other))

    def __contains__(self, other: object) -> bool:
        return self._question(str.__contains__, _plain(other))

    def startswith(self, prefix: object) -> bool:
        """Asked, and noted."""
        return self._question(str.startswith, _plain(prefix))

    def endswith(self, suffix: object) -> bool:
        """Asked, and noted."""
        return self._question(str.endswith, _plain(suffix))

    def strip(self) -> "Sketch":
        """The same slot, without white space at its ends."""
        return self._changed(str.strip)

    __hash__ = __str__ = __repr__ = __format__ = __index__ = _refuse  # pyright: ignore[reportAssignmentType]
    __len__ = __iter__ = __getitem__ = __getattr__ = _refuse


def _plain(value: object) -> str:
    if type(value) is not str:
        raise OpaqueError
    return value


def sketches(texts: Sequence[str]) -> tuple[list[Sketch], list[Question]]:
    """A sketch for each text, and where questions about them will be noted."""
    asked: list[Question] = []
    return [Sketch((Slot(number),), texts, asked) for number in range(len(texts))], asked


def parts_of(written: object) -> tuple[Part, ...]:
    """The text between slots, and the slots; no two texts stand side by side."""
    return written._parts if isinstance(written, Sketch) else (str(written),)  # pyright: ignore[reportPrivateUsage]


def concat(values: Iterable[object]) -> object:
    """What a template wrote piece by piece: text, or a sketch if there is one in it."""
    parts: list[Part] = []
    first: Sketch | None = None
    for value in values:
        if isinstance(value, Sketch) and first is None:
            first = value
        for part in parts_of(value):
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            elif part != "":
                parts.append(part)
    if first is None:
        return "".join(cast(list[str], parts))
    return Sketch(tuple(parts), first._texts, first._asked)  # pyright: ignore[reportPrivateUsage]


class _Generator(NativeCodeGenerator):
    """Compiles templates so that what they write is not made text before `concat` sees it."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def visit_ScopedEvalContextModifier(
        self, node: nodes.ScopedEvalContextModifier, frame: Frame
    ) -> NoReturn:
        raise OpaqueError  # what is written would be escaped


BY_TYPE = frozenset(
    {"string", "mapping", "iterable", "sequence", "number", "integer", "float", "boolean"}
    | {"true", "false", "none", "defined", "undefined", "callable"}
)
"""Tests that are the same for every text."""
BY_EQUALITY = frozenset({"eq", "==", "equalto", "ne", "!=", "in"})
CHANGES = frozenset({"trim", "tojson"})
"""Filters that make a text of a text alone."""
PASSED = frozenset({"default", "d"})
"""Filters that look no further than at whether there is something."""


def let_sketch(environment: ImmutableSandboxedEnvironment) -> None:
    """Make an environment take sketches for text; all else it renders as before."""
    environment.code_generator_class = _Generator
    environment.concat = concat  # pyright: ignore[reportAttributeAccessIssue]
    filters = cast(dict[str, Callable[..., str]], environment.filters)
    filters.update({name: _guarded_filter(name, filter) for name, filter in filters.items()})
    tests = cast(dict[str, Callable[..., bool]], environment.tests)
    tests.update({name: _guarded_test(name, test) for name, test in tests.items()})


def _guarded_filter(name: str, filter: Callable[..., str]) -> Callable[..., str]:
    @wraps(filter)
    def guarded(*values: object, **named: object) -> str:
        if name in PASSED or not any(isinstance(v, Sketch) for v in (*values, *named.values())):
            return filter(*values, **named)
        sketch = next(iter(values)) if len(values) == 1 and not named else None
        if not isinstance(sketch, Sketch):
            raise OpaqueError
        if name in CHANGES:
            sketch = sketch._changed(filter)  # pyright: ignore[reportPrivateUsage]
        elif name != "string":
            raise OpaqueError
        return cast(str, sketch)

    return guarded


def _guarded_test(name: str, test: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(test)
    def guarded(*values: object) -> bool:
        if name in BY_EQUALITY or not any(isinstance(value, Sketch) for value in values):
            return test(*values)
        if name not in BY_TYPE:
            raise OpaqueError
        return test(*("text" if isinstance(value, Sketch) else value for value in values))

    return guarded
