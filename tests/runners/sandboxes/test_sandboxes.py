"""Sandboxes: commands that write outside, fork, fill the disk or call others, one by one."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Generator
from itertools import pairwise, product
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import whet
from whet.errors import AgentFailed, ConfigError
from whet.io.server import AppServer
from whet.runners.executors.command import CommandAgent
from whet.runners.executors.external_agents import build_environment
from whet.runners.sandboxes import choose_sandbox
from whet.runners.sandboxes.containers import ContainerSandbox
from whet.runners.sandboxes.control_groups import ControlGroups
from whet.runners.sandboxes.local import build_limits
from whet.runners.sandboxes.sandbox import SandboxLimits
from whet.types import Endpoint

BAD = Path(__file__).parents[2] / "support" / "agents" / "bad_commands.py"


def works(name: str) -> bool:
    try:
        choose_sandbox(name)
    except ConfigError:
        return False
    return True


LOCAL = [name for name in ("subprocess", "bubblewrap") if works(name)]
needs_bubblewrap = pytest.mark.skipif("bubblewrap" not in LOCAL, reason="needs bubblewrap")
each_local = pytest.mark.parametrize("sandbox", LOCAL)


@pytest.fixture(scope="module")
def gateway() -> Generator[str]:
    app = Starlette(
        routes=[Route("/rollouts/r/attempts/a/v1/models", lambda request: PlainTextResponse("ok"))]
    )
    server = AppServer(app, name="gateway")
    yield server.url
    server.close()


def make(sandbox: str, *arguments: str) -> CommandAgent:
    return whet.command([sys.executable, str(BAD), *arguments], sandbox=sandbox)


def run(agent: CommandAgent, gateway: str) -> float:
    llm = Endpoint(base_url=f"{gateway}/rollouts/r/attempts/a/v1", api_key="k", model="m")
    return anyio.run(agent, "t", llm)


@each_local
def test_a_command_has_a_folder_of_its_own_and_its_gateway(sandbox: str, gateway: str) -> None:
    assert run(make(sandbox, "show_home"), gateway) == 1
    assert run(make(sandbox, "show_home"), gateway) == 1  # another folder: `mine` is not there
    assert run(make(sandbox, "call_gateway"), gateway) == 1


@needs_bubblewrap
def test_a_command_cannot_write_outside(tmp_path: Path, gateway: str) -> None:
    for target in (tmp_path / "file", Path.cwd() / "written-by-a-test", Path("/etc/written")):
        run(make("bubblewrap", "write_outside", str(target)), gateway)
        assert not target.exists()


@each_local
def test_a_command_that_forks_without_end_is_bounded(sandbox: str, gateway: str) -> None:
    found = run(make(f"{sandbox},processes=20", "fork_without_end", "20"), gateway)
    assert 10 <= found <= 30
    assert run(make(sandbox, "show_home"), gateway) == 1


@pytest.mark.slow
@each_local
def test_a_command_that_fills_the_disk_is_stopped(sandbox: str, gateway: str) -> None:
    agent = make(f"{sandbox},disk_mb=8", "fill_disk", "400")
    if sandbox == "bubblewrap":
        assert 4 <= run(agent, gateway) <= 8
    else:
        with pytest.raises(AgentFailed, match="wrote more than 8 MB"):
            run(agent, gateway)


@needs_bubblewrap
def test_a_command_reaches_its_gateway_and_no_other_address(gateway: str) -> None:
    other = AppServer(Starlette(), name="other")
    try:
        assert run(make("bubblewrap", "call_address", other.url), gateway) == 0
        port = other.url.rpartition(":")[2]
        assert run(make("bubblewrap", "look_around", port), gateway) == 0
    finally:
        other.close()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))


@needs_bubblewrap
def test_a_command_reaches_a_gateway_beyond_its_network() -> None:
    app = Starlette(
        routes=[Route("/rollouts/r/attempts/a/v1/models", lambda request: PlainTextResponse("ok"))]
    )
    server = AppServer(app, name="gateway", host="127.0.0.2")
    try:
        assert run(make("bubblewrap", "call_gateway"), server.url) == 1
    finally:
        server.close()


@each_local
def test_a_process_that_leaves_its_session_is_killed_as_well(
    sandbox: str, tmp_path: Path, gateway: str
) -> None:
    target = tmp_path / "late"
    run(make(sandbox, "escape_session", str(target)), gateway)
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(target) not in found.stdout


@each_local
def test_a_command_that_takes_too_much_memory_fails_alone(sandbox: str, gateway: str) -> None:
    with pytest.raises(AgentFailed):
        run(make(f"{sandbox},memory_mb=100", "use_memory", "400"), gateway)
    assert run(make(f"{sandbox},memory_mb=100", "use_memory", "5"), gateway) == 5


def test_what_no_control_group_bounds_is_bounded_for_each_process() -> None:
    limits, group = SandboxLimits(memory_mb=1, processes=7), Path("group")
    for processes, memory in product((None, group), repeat=2):
        found = build_limits(limits, ControlGroups(processes, memory))
        assert ("RLIMIT_NPROC" in found) == (processes is None)
        assert found.get("RLIMIT_AS", 2**20) == 2**20
        assert ("RLIMIT_AS" in found) == (memory is None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jail", "unknown sandbox 'jail'"),
        ("docker", "unknown sandbox 'docker'"),
        ("subprocess,disk_mb=x", "invalid limit 'disk_mb=x'"),
        ("subprocess,speed=1", "invalid limit 'speed=1'"),
        ("subprocess,processes=0", "at least 1"),
    ],
)
def test_a_sandbox_checks_its_name(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_sandbox(name)


@pytest.mark.anyio
async def test_a_container_gets_the_variables_of_its_model_and_no_others(tmp_path: Path) -> None:
    sandbox = ContainerSandbox("true", "python:3", SandboxLimits())
    root = "http://10.0.0.5:8000"
    llm = Endpoint(base_url=f"{root}/rollouts/r/attempts/r.1/v1", api_key="k", model="m")
    mine = build_environment(llm, posts_rewards=False)
    environment = {**mine, "WHET_CLAUDE_KEY": "x", "OPENAI_ADMIN_KEY": "x", "OTHER": f"{root}1/"}
    async with sandbox.open(["agent"], tmp_path, environment, llm) as command:
        forwarded = [
            name
            for flag, name in pairwise(command.arguments)
            if flag == "--env" and "=" not in name
        ]
        assert set(forwarded) == mine.keys()
        inside = command.environment
    assert inside["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/rollouts/r/attempts/r.1/v1"
    assert inside["OTHER"] == f"{root}1/", "another address"


@pytest.mark.anyio
async def test_a_gateway_over_tls_fails_the_attempt_with_the_reason(tmp_path: Path) -> None:
    sandbox = ContainerSandbox("true", "python:3", SandboxLimits())
    llm = Endpoint(base_url="https://host/rollouts/r/attempts/r.1/v1", api_key="k", model="m")
    with pytest.raises(AgentFailed, match="passes on plain HTTP"):
        async with sandbox.open(["agent"], tmp_path, {}, llm):
            pass


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs docker's client")
def test_the_client_of_docker_takes_our_command_line(tmp_path: Path) -> None:
    sandbox = ContainerSandbox("docker", "python:3", SandboxLimits())
    llm = Endpoint(base_url="http://127.0.0.1:5/v1", api_key="k", model="m")
    environment = {"OPENAI_API_KEY": "secret", "PATH": "/bin"}
    command = sandbox.build_command("whet-x", ["true"], tmp_path, environment, llm)
    assert "secret" not in " ".join(command)
    # A flag that it does not know is refused before the daemon is asked.
    ended = subprocess.run(
        [*command[:1], "--host", "unix:///nowhere", *command[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unknown flag" not in ended.stderr
    assert "annot connect" in ended.stderr or "failed to connect" in ended.stderr
