"""A cold start is light: heavy packages are imported when they are first needed."""

import re
import resource
import subprocess
import sys
from pathlib import Path

from whet.errors import MissingExtra

HEAVY = ("torch", "transformers", "peft", "starlette", "uvicorn", "openai", "matplotlib", "numpy")
LOADED = f"import sys; sys.exit(', '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def import_seconds() -> float:
    """Measure by `-X importtime` in a fresh process; its last line is of `whet`."""
    done = run("-X", "importtime", "-c", "import whet")
    micros, name = done.stderr.splitlines()[-1].split("|")[1:]
    assert name.strip() == "whet"
    return int(micros) / 1e6


def test_importing_whet_takes_less_than_300_ms() -> None:
    # The best of five: a busy machine makes any one of them slow.
    assert min(import_seconds() for _ in range(5)) < 0.3


def test_importing_whet_imports_nothing_heavy() -> None:
    assert run("-c", f"import whet; {LOADED}").stderr == ""


def test_every_name_comes_when_it_is_asked_for_and_a_decorated_agent_stays_light() -> None:
    agent = "import whet\n@whet.rollout\ndef solve(task, llm): return 0.0\n"
    assert run("-c", f"{agent}whet.Endpoint, whet.RunConfig, whet.WhetError; {LOADED}").stderr == ""


def test_the_demo_agents_helpers_are_light_too() -> None:
    assert run("-c", f"import whet.demos.problems; {LOADED}").stderr == ""


def test_help_takes_less_than_a_second_and_no_torch() -> None:
    # Of the processor: on a busy machine the clock tells of others.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("-c", "from whet.app.cli.main import main; main(['--help'])")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 1.0
    quiet = "import contextlib, whet.app.cli.main as c\nwith contextlib.suppress(SystemExit):"
    assert run("-c", f"{quiet} c.main(['demo', '--help'])\n{LOADED}").stderr == ""


def test_listing_models_needs_no_torch() -> None:
    done = run("-c", f"import whet.app.cli.main as c; c.main(['models']); {LOADED}")
    assert done.stderr == ""
    assert "smollm2" in done.stdout


def test_a_missing_extra_is_installed_from_the_clone_that_whet_is_installed_from() -> None:
    line = str(MissingExtra.build("it", "local"))
    found = re.search(r"(: in a clone of whet)?: pip install -e '(.+)\[local\]'$", line)
    assert found, line
    assert found[2] == "." if found[1] else (Path(found[2]) / "pyproject.toml").is_file()
