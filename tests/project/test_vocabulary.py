"""The words of the code: the field's own terms, one meaning each.

A private word costs every reader a lookup. Identifiers made of the words below, and names that
stand for two things, are found here.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import codespell_lib

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "whet"
FILES = sorted(SRC.rglob("*.py"))
OTHERS = sorted(
    path
    for folder in ("tests", "bench", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
BRITISH = Path(codespell_lib.__file__).parent / "data" / "dictionary_en-GB_to_en-US.txt"
OURS = [path for path in FILES if path.relative_to(SRC).parts[0] != "agl"]
"""All but the package whose names are Agent Lightning's."""

BANNED = {
    *(
        "told",
        "said",
        "asked",
        "whoever",
        "whose",
        "nobody",
        "somebody",
        "anew",
        "here",
        "elsewhere",
    ),
    *("spoken", "speech", "speaker", "telling", "taking", "tried", "joined", "given", "untold"),
    *("habits", "tails", "lanes", "bell", "tickets", "keeper", "workshop", "promises", "spoilers"),
    "earnings",
}
"""Words that no identifier contains, as a whole word between underscores."""

BANNED_STARTS = ("What ", "Whoever ", "Who ", "Whose ", "How ", "Why ", "Where ", "Those ", "That ")
"""Openings of a docstring that do not say what the thing is."""

SHARED_FILE_NAMES = {
    "__init__.py",
    "engine.py",  # the local and the remote engine
    "fake.py",  # the fake engine and the fake trainer
    "tinker.py",  # the engine, the model and the trainer at a Tinker service
    "local.py",  # the sandbox and the trainer of this machine
    "resources.py",  # the type and its queries
    "calls.py",  # the type and its queries
    "spans.py",  # the type and its queries
    "errors.py",  # of the package, and as HTTP responses
    "server.py",  # of any ASGI application, and the store's
    "codec.py",  # of the store's records, and of Tinker's requests
    "app.py",  # the ASGI applications
    "training.py",  # the types, and the training runs of the Tinker server
    "train.py",  # the function, its command, and the entry point of verl
    "telemetry.py",  # spans that the gateway and the store receive
    "auth.py",  # of the gateway and of the Tinker server
    "runner.py",  # the runner and its command
    "run.py",  # the config, the composition and the tracker of a run
}
"""File names that deliberately stand in several folders."""


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that the file itself defines: classes, functions, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words(name: str) -> set[str]:
    """The words of an identifier: `take_up`, `TakeUp` and `TAKE_UP` have `take` and `up`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in parts}


def named(path: Path) -> str:
    return str(path.relative_to(SRC if path.is_relative_to(SRC) else ROOT))


def test_identifiers_use_the_fields_own_words() -> None:
    found = {
        f"{named(path)}:{line}": name
        for path in [*FILES, *OTHERS]
        for line, name in [*identifiers(parse(path)), (0, named(path.with_suffix("")))]
        if words(name) & BANNED and not name.startswith("test_")  # those are sentences
    }
    assert found == {}


def test_identifiers_have_american_spelling() -> None:
    # codespell, which checks the texts, takes a name with underscores for one word.
    british = {line.partition("->")[0].lower() for line in BRITISH.read_text().splitlines()}
    found = {
        f"{named(path)}:{line}": name
        for path in [*FILES, *OTHERS]
        for line, name in identifiers(parse(path))
        if words(name) & (british - {"dialogue", "dialogues"})
    }
    assert found == {}


def test_docstrings_say_what_the_thing_is_or_does() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        f"{named(path)}:{text.splitlines()[0]}"
        for path in [*FILES, *OTHERS]
        for node in ast.walk(parse(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.startswith(BANNED_STARTS)
    }
    assert found == set()


def aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module-level names of types with their values: `Ids = NDArray[np.int64]`, no `TypeVar`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                yield name, ast.unparse(node.value)


def test_a_class_name_means_one_thing() -> None:
    """Classes and aliases of types; an alias may stand in several modules with one value."""
    places: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for path in OURS:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name][f"{named(path)}:{node.lineno}"] = named(path)
        for name, value in aliases(parse(path)):
            places[name][value] = named(path)
    repeated = {name: [*found.values()] for name, found in places.items() if len(found) > 1}
    assert repeated == {}


def test_a_file_name_means_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in OURS:
        places[path.name].append(named(path))
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    assert {n: f for n, f in repeated.items() if n not in SHARED_FILE_NAMES} == {}
    assert SHARED_FILE_NAMES - repeated.keys() == set(), "exceptions that are not needed"
