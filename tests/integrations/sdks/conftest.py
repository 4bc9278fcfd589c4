"""The matrix, printed after the suite that found it."""

import pytest

from integrations.sdks.matrix import Cells, as_text

FOUND = pytest.StashKey[dict[str, Cells]]()


@pytest.fixture
def found(pytestconfig: pytest.Config) -> dict[str, Cells]:
    """The cells of the matrix, by the name of the SDK."""
    return pytestconfig.stash.setdefault(FOUND, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if rows := config.stash.get(FOUND, {}):
        terminalreporter.section("SDKs")
        terminalreporter.write_line(as_text(rows))
