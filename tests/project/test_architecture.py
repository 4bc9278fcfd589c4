"""The shape of the code as tables: what may import what, how long things get, what is never used.

A limit with waivers is not a limit: there are none here.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "whet"
FILES = sorted(SRC.rglob("*.py"))

SHARED = {"types", "errors", "config", "protocols"}
PUBLIC = {"types", ""}
"""What a user's own agent may import; "" is `import whet`."""

PARTS = {"runners", "gateway", "store", "algorithms", "trainers", "engines"}

MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "config": {"errors"},
    "protocols": {"types", "config"},
    "io": SHARED,
    "models": SHARED | {"io"},
    "training": SHARED | {"io"},
    "algorithms": SHARED | {"training"},
    "runners": SHARED | {"io"},
    "gateway": SHARED | {"io"},
    "store": SHARED | {"io"},
    "trainers": SHARED | {"io", "models"},
    "engines": SHARED | {"io", "models"},
    "demos": PUBLIC,
    "app": SHARED | PARTS | {"io", "models", "training", "demos", ""},
    # The names of Agent Lightning over ours: nothing of ours imports it.
    "agl": SHARED | {"io", "runners", "store", ""},
    # The package itself imports its names on first use; `python -m whet` starts the command.
    "": {"app"},
}
"""Parts never import each other; they meet in app. `models` is what the local engine and the
local trainer share: one copy of the weights."""

FENCES: dict[str, set[str]] = {
    "torch": {"trainers", "engines", "models"},
    "transformers": {"models", "engines"},
    "peft": {"models"},
    "safetensors": {"models", "trainers"},
    "numpy": {"engines", "models", "trainers", "app"},
    "tokenizers": {"gateway", "models"},
    "jinja2": {"gateway"},
    "gguf": {"models"},
    "huggingface_hub": {"models"},
    "llguidance": {"engines"},
    "starlette": {"gateway", "store", "io", "app", "agl"},
    "uvicorn": {"io"},
    "openai": {"demos"},
    "httpx": set(),  # `io.http_client` is the one HTTP client
    "aiohttp": {"io", "engines"},
    "tinker": {"app", "models"},
    "google": {"app"},
    "zstandard": {"app"},
    "pyrage": {"app"},
    "tensorboard": {"training"},
    "wandb": {"training"},
    "mlflow": {"training"},
    "opentelemetry": {"runners"},
    "agents": {"runners"},
    "rich": {"app"},
    "matplotlib": {"app"},
    "argparse": {"app", "agl"},
    "sqlite3": {"store", "agl"},
    "psycopg": {"store"},
    "ray": {"runners", "trainers"},
    "verl": {"trainers"},
    "hydra": {"trainers"},
    "omegaconf": {"trainers"},
    "tensordict": {"trainers"},
    "transfer_queue": {"trainers"},
    "prometheus_client": {"store"},
}
"""Where a library may be imported at all."""

BANNED = {"unittest", "pickle", "marshal", "shelve", "requests"}
BANNED_CALLS = {"eval", "exec", "print", "breakpoint", "__import__"}
MAX_FILE, MAX_FUNCTION, MAX_ENTRIES = 500, 60, 16
SMALL_FOLDERS = ("src/whet", "tests", "bench", "scripts", "docs/guides")
"""Folders that, like all below them, have at most `MAX_ENTRIES`."""
OF_NO_PART = {"contracts", "integrations", "project", "support"}
"""Folders of the tests that mirror no folder of the sources."""


class Import(NamedTuple):
    """A module that a file imports, and whether that happens when the file is imported."""

    module: str
    eager: bool


def part_of(path: Path) -> str:
    first = path.relative_to(SRC).parts[0].removesuffix(".py")
    return "" if first in ("__init__", "__main__") else first


def part_of_module(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> list[Import]:
    return list(_imports(parse(path).body, eager=True))


def _imports(body: list[ast.stmt], *, eager: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, eager)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield Import(whole if is_module(whole) else node.module, eager)
        else:
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            below = [child for child in ast.walk(node) if isinstance(child, ast.stmt)][1:]
            direct = [child for child in below if isinstance(child, (ast.Import, ast.ImportFrom))]
            yield from _imports([*direct], eager=eager and not later and not typing)


@cache
def is_module(name: str) -> bool:
    path = SRC.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def ours(path: Path) -> set[str]:
    modules = {i.module for i in imports(path) if i.eager or path != SRC / "__init__.py"}
    return {part_of_module(m) for m in modules if m == "whet" or m.startswith("whet.")}


def roots(path: Path) -> set[str]:
    return {i.module.split(".")[0] for i in imports(path)}


def named(path: Path) -> str:
    return str(path.relative_to(SRC))


def test_every_part_has_a_row_in_the_table() -> None:
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)


def test_a_module_imports_only_what_its_part_may() -> None:
    allowed = {path: {part_of(path), *MAY_IMPORT[part_of(path)]} for path in FILES}
    assert {named(path): extra for path in FILES if (extra := ours(path) - allowed[path])} == {}


def test_nobody_imports_app_but_the_lazy_names_of_the_package() -> None:
    of_app = {
        named(path): {i.eager for i in imports(path) if i.module.startswith("whet.app")}
        for path in FILES
        if part_of(path) != "app" and path != SRC / "__main__.py"
    }
    assert {name: eager for name, eager in of_app.items() if eager} == {"__init__.py": {False}}


def test_a_heavy_library_stays_behind_its_fence() -> None:
    found = {path: roots(path) & set(FENCES) for path in FILES}
    outside = {
        named(path): {root for root in fenced if part_of(path) not in FENCES[root]}
        for path, fenced in found.items()
    }
    assert {name: fenced for name, fenced in outside.items() if fenced} == {}


def test_verl_is_imported_in_its_own_folder_alone() -> None:
    libraries = {"verl", "transfer_queue", "tensordict", "omegaconf", "hydra"}
    users = {path.parent for path in FILES if roots(path) & libraries}
    assert users == {SRC / "trainers" / "verl"}


def test_modules_do_not_import_each_other_in_circles() -> None:
    def module(path: Path) -> str:
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    graph = {module(path): {i.module for i in imports(path) if i.eager} for path in FILES}
    # Importing `whet.x` runs `whet/__init__.py` first, which is why that one is light.
    known = set(graph) - {"whet"}
    edges = {name: found & known for name, found in graph.items()}
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_a_file_fits_in_500_lines() -> None:
    lengths = {named(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE} == {}


def test_a_folder_has_at_most_16_entries() -> None:
    for top in SMALL_FOLDERS:
        for folder in [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
            names = sorted(entry.name for entry in folder.iterdir())
            entries = [name for name in names if not name.startswith(("__", "py.typed"))]
            assert len(entries) <= MAX_ENTRIES, f"{folder.relative_to(ROOT)}: {entries}"


def test_the_folders_of_the_tests_are_those_of_the_sources() -> None:
    tests = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    mirrors = {folder for folder in tests if not OF_NO_PART & {*folder.parts[:1]}}
    assert {str(folder) for folder in mirrors if not (SRC / folder).is_dir()} == set()


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{named(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    ]
    assert long == []


def test_every_module_and_class_says_what_it_is() -> None:
    silent = [
        f"{named(path)}:{getattr(node, 'name', '')}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Module, ast.ClassDef))
        and not getattr(node, "name", "").startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_nothing_banned_is_used() -> None:
    calls = [
        f"{named(path)}:{node.lineno}: {node.func.id}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in BANNED_CALLS
    ]
    assert calls == []
    assert {named(path): found for path in FILES if (found := roots(path) & BANNED)} == {}


def test_a_loop_is_woken_from_other_threads_in_one_way() -> None:
    users = [named(path) for path in FILES if "call_soon_threadsafe" in path.read_text()]
    assert users == ["io/threads.py"]


def test_the_url_of_an_attempt_is_written_in_one_file() -> None:
    users = [named(path) for path in FILES if "/attempt/{" in path.read_text()]
    assert users == ["io/attempt_url.py"]


def test_the_checks_see_what_they_should(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(
        "import whet.store.sqlite\n"
        "from whet.gateway import auth\n"
        "if TYPE_CHECKING:\n    from whet.app.train import train\n"
        "def late():\n    import torch\n"
    )
    assert imports(file) == [
        Import("whet.store.sqlite", eager=True),
        Import("whet.gateway.auth", eager=True),
        Import("whet.app.train", eager=False),
        Import("torch", eager=False),
    ]
