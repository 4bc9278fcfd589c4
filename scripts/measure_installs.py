"""Print a row of the quickstart's table of extras for each: packages, MB and seconds.

`python scripts/measure_installs.py none runner local` measures these, without names all. Needs
uv; options after `--` go to `uv pip install`, such as `--find-links` or `--torch-backend cpu`.
"""

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(arguments: list[str]) -> None:
    """Install each extra into an environment of its own, with an empty cache."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:at], arguments[at + 1 :]
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for name in table["optional-dependencies"] if name != "dev"]
    for name in names or ["none", *extras]:
        with tempfile.TemporaryDirectory() as folder:
            packages, megabytes, seconds = install(name, Path(folder), options)
            sys.stdout.write(f"| `{name}` | {packages} | {megabytes:,.0f} | {seconds:.0f} |\n")


def install(extra: str, folder: Path, options: list[str]) -> tuple[int, float, float]:
    """Return packages, megabytes without bytecode, and seconds of one installation."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", str(folder / "env")], check=True)
    what = str(ROOT) if extra == "none" else f"{ROOT}[{extra}]"
    command = [*uv, "pip", "install", "--quiet", "--cache-dir", str(folder / "cache")]
    command += ["--python", str(folder / "env"), "-c", str(ROOT / "constraints.txt")]
    began = time.monotonic()
    subprocess.run([*command, *options, what], check=True)
    seconds = time.monotonic() - began
    return *measure(folder / "env"), seconds


def measure(environment: Path) -> tuple[int, float]:
    """Return packages, and megabytes without bytecode."""
    [packages] = environment.glob("lib/*/site-packages")
    files = [file for file in packages.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    return len(list(packages.glob("*.dist-info"))), megabytes


if __name__ == "__main__":
    main(sys.argv[1:])
