"""`whet.serve`: a model served to clients of this machine while a block of Python runs."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from anyio.from_thread import start_blocking_portal
from pydantic import JsonValue

from whet.app.cli.display import open_console
from whet.app.composition.run import serve_alone
from whet.config import resolve
from whet.errors import ConfigError
from whet.io.threads import unwrap_group
from whet.types import Endpoint

SECTIONS = ("dir", "engine", "gateway")
"""Keys of the config that serving reads."""


@contextmanager
def serve(
    model: str | Path, *, quiet: bool = False, **settings: JsonValue
) -> Generator[Endpoint, None, None]:
    """Serve a run, an adapter, a checkpoint or any other model as `whet serve --model` does.

    Yields the endpoint that an OpenAI client, or an agent as `llm`, needs; the server runs in a
    thread until the block ends. `settings` are `dir`, and keys of the sections `engine` and
    `gateway`.

    Raises:
        ConfigError: the model or a setting is unknown, or the model cannot be loaded.
    """
    if others := sorted(set(settings) - set(SECTIONS)):
        raise ConfigError(f"serving does not read {others[0]!r}: expected {', '.join(SECTIONS)}")
    note = partial(open_console(quiet=quiet).print, highlight=False)
    serving = serve_alone(str(model), resolve(settings), note)
    try:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving) as open:
            yield open.own_endpoint
    except ExceptionGroup as group:
        raise unwrap_group(group) from group
