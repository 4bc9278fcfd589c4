"""The read-only API of the dashboard, over a run folder with records of every kind."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from pydantic import JsonValue

from support.runs.recorded_run import PAYLOAD, QUESTION, make_folder, record_run, record_step
from support.store.records import MINUTE, call
from whet.app.cli.main import main
from whet.app.dashboard.pages.attempt_page import AttemptPages
from whet.app.dashboard.pages.scores import read_evaluations
from whet.app.dashboard.pages.token_texts import split_text
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.serving import Dashboard
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.gateway.templates.chat_template import ChatTemplate
from whet.models.catalog import TINY
from whet.store.schema import VERSION
from whet.store.sqlite import SQLiteStore
from whet.types import GenerationId, Mode, Origin, Outcome, Rollout

RUN = "/api/runs/mine"

pytestmark = pytest.mark.usefixtures("folder")


def read(client: httpx.Client, path: str, **query: Any) -> Any:
    reply = client.get(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids(client: httpx.Client, **query: Any) -> list[str]:
    page = read(client, f"{RUN}/rollouts", **query)
    return [row["id"] for row in page["rollouts"]]


def test_the_list_of_runs_has_progress_also_without_a_report(
    client: httpx.Client,
) -> None:
    [run] = read(client, "/api/runs")["runs"]
    assert (run["name"], run["kind"], run["steps"]) == ("mine", "train", 2)
    assert run["rewards"] == [0.5, 0.6]


def test_a_run_has_its_config_without_secrets_and_its_counts(
    client: httpx.Client,
) -> None:
    run = read(client, RUN)
    assert run["config"]["group_size"] == 4
    assert run["statuses"]["train"] == {"failed": 2, "queued": 1, "succeeded": 14}
    [resource] = read(client, f"{RUN}/resources")["resources"]
    assert resource["name"] == "prompt"
    shown = read(client, f"{RUN}/resources/prompt")
    assert shown["versions"][0]["value"]["api_key"] == "(hidden)"
    assert "sk-secret" not in json.dumps(shown)


def test_numbers_that_are_not_finite_are_null(client: httpx.Client) -> None:
    steps = read(client, f"{RUN}/steps")
    assert steps["step"] == [1, 2]
    assert steps["metrics"]["logprob_gap"] == [None, None]
    later = read(client, f"{RUN}/steps", after=1)
    assert later["step"] == [2]


def test_rollouts_are_filtered_and_paged_in_the_database(client: httpx.Client) -> None:
    assert len(ids(client)) == 17
    assert ids(client, status="failed") == ["train-000002-003", "train-000000-003"]
    assert ids(client, status="queued") == ["waits"]
    assert len(ids(client, step=1)) == 8
    assert ids(client, group="train-000001", order="oldest", limit=2) == [
        "train-000001-000",
        "train-000001-001",
    ]
    assert ids(client, order="best", limit=1) == ["train-000003-003"]
    assert set(ids(client, max_reward=0)) == {f"train-00000{n}-000" for n in range(4)}
    assert len(ids(client, text="what IS 3*4")) == 17
    assert ids(client, text="nowhere") == []
    assert len(ids(client, forked=True)) == 16
    assert len(ids(client, agent=QUESTION)) == 16


@pytest.mark.parametrize("order", ["newest", "oldest", "best", "worst"])
def test_pages_follow_each_other_without_gaps(client: httpx.Client, order: str) -> None:
    whole = ids(client, order=order, limit=200)
    seen: list[str] = []
    cursor: str | None = None
    while True:
        query = {"after": cursor} if cursor else {}
        page = read(client, f"{RUN}/rollouts", order=order, limit=5, **query)
        seen += [row["id"] for row in page["rollouts"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == whole
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    "query",
    [
        "status=bad",
        "limit=0",
        "limit=9999",
        "step=x",
        "after=zzz",
        "after=1,nan",
        "after=1,e",
        "after=1,--1",
        "min_reward=nan",
        "unknown=1",
        "order=sideways",
    ],
)
def test_an_invalid_parameter_is_a_422_that_names_it(client: httpx.Client, query: str) -> None:
    reply = client.get(f"{RUN}/rollouts?{query}")
    assert reply.status_code == 422
    assert query.split("=")[0] in reply.json()["error"]


def test_what_does_not_exist_is_a_404_in_one_line(client: httpx.Client) -> None:
    for path in ("rollouts/none", "attempts/none", "attempts/none/credit", "resources/none", "no"):
        reply = client.get(f"{RUN}/{path}")
        assert reply.status_code == 404
        assert "\n" not in reply.json()["error"]


def test_an_attempt_has_its_tokens_forks_rewards_and_spans(
    client: httpx.Client,
) -> None:
    rollout = read(client, f"{RUN}/rollouts/train-000000-001")
    assert rollout["rollout"]["step"] == 1
    [attempt] = rollout["attempts"]
    found = read(client, f"{RUN}/attempts/{attempt['id']}")
    first, second, third = found["calls"]
    assert first["generations"][0]["texts"] == ["Use", " the", " calculator"]
    assert first["generations"][0]["logprobs"] == [-0.05, -2.0, None]
    assert first["generations"][0]["versions"] == [[0, 2], [1, 1]]
    assert second["parent"] == f"{first['id']}.0"
    assert third["fork"] == "edited_history"
    assert "summarized" in third["cause"]
    assert [reward["key"] for reward in found["rewards"]] == [QUESTION, "tool"]
    [span] = found["spans"]
    assert (span["start"], span["end"]) == (0.0, 5.0)


def test_credit_has_advantages_and_says_what_was_trained(client: httpx.Client) -> None:
    attempt = "train-000001-003.1"
    credit = read(client, f"{RUN}/attempts/{attempt}/credit")
    assert credit["reason"] is None
    assert all(value > 0 for value in credit["advantages"].values())
    assert credit["trained"] == sorted(credit["advantages"])
    assert len(credit["rows"]) == 2
    waiting = client.get(f"{RUN}/attempts/waits.1/credit")
    assert waiting.status_code == 404


def test_credit_has_the_log_ratios_that_the_trainer_left_in_the_folder(
    folder: RunFolder, client: httpx.Client
) -> None:
    path = f"{RUN}/attempts/train-000001-003.1/credit"
    assert read(client, path)["log_ratios"] == {}
    mine, other = GenerationId("train-000001-003.1-1.0"), GenerationId("train-000000-001.1-1.0")
    found = {mine: [0.0123, -0.5, float("nan")], other: [1.0]}
    folder.save_log_ratios(0, found)
    assert read(client, path)["log_ratios"] == {mine: [0.012, -0.5, None]}


def test_failures_are_grouped_by_reason(client: httpx.Client) -> None:
    queue = read(client, f"{RUN}/queue")
    [failure] = queue["failures"]
    assert (failure["kind"], failure["count"]) == ("agent", 2)
    assert failure["last"] == "train-000002-003"
    assert queue["workers"][0]["name"] == QUESTION


def test_groups_have_the_spread_of_their_rewards(client: httpx.Client) -> None:
    groups = read(client, f"{RUN}/groups", step=1)["groups"]
    assert [group["group"] for group in groups] == ["train-000001", "train-000000"]
    assert groups[0]["mean"] == 0.75
    assert groups[1]["failed"] == 1


def test_reward_health_has_components_and_findings(client: httpx.Client) -> None:
    health = read(client, f"{RUN}/rewards")
    assert health["rollouts"] == 14
    assert {component["key"] for component in health["components"]} == {QUESTION, "tool"}
    assert sum(health["histogram"]["counts"]) == 14
    assert health["judge"]["disagreement"] == [0.3, 0.3]
    assert any("judge disagree (0.30)" in finding for finding in health["findings"])


def test_the_doctor_counts_what_can_be_trained_and_reads_the_template(
    client: httpx.Client,
) -> None:
    doctor = read(client, f"{RUN}/doctor")
    assert doctor["is_all"]
    assert (doctor["counts"]["rollouts"], doctor["counts"]["rows"]) == (14, 28)
    assert doctor["counts"]["forks"] == {"edited_history": 14}
    assert doctor["counts"]["unproven"] == 0
    assert "end of turn" in doctor["template"]


def test_one_task_is_followed_over_steps(client: httpx.Client) -> None:
    assert ids(client, task="train-000000-001") == ["train-000000-001"]
    assert client.get(f"{RUN}/rollouts?task=none").status_code == 404


def test_a_change_is_announced_and_a_closing_server_ends_the_stream(fresh: RunFolder) -> None:
    async def go_on() -> None:
        async with SQLiteStore(fresh.store) as store:
            assert await store.claim("w", lease_s=600, wait_s=0) is not None
            await record_step(store, 2, QUESTION)

    dashboard = Dashboard(FolderCatalog(fresh.path.parent.parent))
    code = dashboard.create_link().split("code=")[1]
    with httpx.Client(base_url=dashboard.url, timeout=60) as client:
        client.post("/api/session", json={"code": code})
        with client.stream("GET", f"{RUN}/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines)[6:])["step"] == 1
            anyio.run(go_on)
            seen = next(each for line in lines if (each := json.loads(line[6:]))["step"] == 2)
            assert seen["rollouts"]["running"] == 1
            dashboard.close()
            assert list(lines) == []


def test_the_html_file_has_the_run_inside_and_no_way_out_of_its_data(
    tmp_path: Path,
) -> None:
    other = make_folder(tmp_path, "hostile", PAYLOAD)
    anyio.run(lambda: record_run(other, steps=1, text=PAYLOAD))
    file = tmp_path / "run.html"
    command = ["view", str(other.path), "--html", str(file)]
    assert main(command) == 0
    page = file.read_text()
    data = page.split('id="data">')[1].split("</script>")[0]
    records = json.loads(data)
    assert records["/api/runs/hostile/rollouts"]["rollouts"][0]["task"] == PAYLOAD
    assert "<img" not in data
    assert "http://" not in page.split("</style>")[0]
    assert "default-src 'none'" in page


def test_the_terminal_shows_the_same_numbers(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(folder.path), "--tui"]) == 0
    shown = capsys.readouterr().out
    assert "2 steps" in shown
    assert "failed 2" in shown
    assert main(["view", str(folder.path), "--json"]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert frame["steps"]["metrics"]["reward"] == [0.5, 0.6]


def test_rollouts_are_listed_in_the_terminal_as_on_the_page(
    folder: RunFolder,
    client: httpx.Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = str(folder.path)
    assert main(["rollouts", run, "--failed"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    [number] = [n for n, line in enumerate(lines) if "train-000002-003" in line]
    assert "failed" in lines[number]  # one line each, also in 80 columns
    assert lines[number + 1].startswith("  agent: ")
    assert "tokens seconds" in " ".join(shown.split())
    assert "these are" not in shown
    assert main(["rollouts", run, "--limit=1"]) == 0
    assert "these are 1: a higher --limit lists more" in capsys.readouterr().out
    for columns, has_tasks in (("60", False), ("160", True)):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["rollouts", run]) == 0
        assert capsys.readouterr().out.splitlines()[0].rstrip().endswith("task") is has_tasks
    assert "train-000000-000" not in shown
    assert "judge" not in shown
    assert main(["rollouts", run, "--failed", "--json"]) == 0
    page = read(client, f"{RUN}/rollouts", status="failed")
    assert json.loads(capsys.readouterr().out) == page["rollouts"]
    assert main(["rollouts", run, "--text", "nowhere"]) == 0
    assert "no such rollouts" in capsys.readouterr().out
    for bad in (["--status", "odd"], ["--limit", "0"], ["--task", "none"]):
        assert main(["rollouts", run, *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for unknown, found in (
        (["--step", "9"], "invalid --step 9: the run has steps 1 to 2"),
        (["--policy", "solvr"], "invalid --policy 'solvr': the run has one policy"),
    ):
        assert main(["rollouts", run, *unknown]) == 2
        assert found in capsys.readouterr().err


def test_a_rollout_is_shown_by_its_name_alone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(folder.path.parent.parent)
    assert main(["show", "train-000000-003", "--dir", directory, "--json"]) == 0
    [attempt] = json.loads(capsys.readouterr().out)["attempts"]
    assert (attempt["rollout"], attempt["failure"]["kind"]) == ("train-000000-003", "agent")
    for bad in (["show", "nothing"], ["show", "train-000000-003", "--failed"]):
        assert main([*bad, "--dir", directory]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_does_not_exist_is_one_line_and_exit_code_2(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", "nothing", "--dir", str(folder.path), "--json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_store_of_another_version_is_one_line_and_exit_code_2(
    fresh: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = make_it_another_version(fresh)
    run = str(fresh.path)
    for look in ("show", "rollouts", "view --json", "view --html=page.html"):
        assert main([*look.split(), run]) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1


def test_the_dashboard_lists_a_run_of_another_version_and_shows_why_it_cannot_be_read(
    fresh: RunFolder,
) -> None:
    expected = make_it_another_version(fresh)
    dashboard = Dashboard(FolderCatalog(fresh.path.parent.parent))
    with httpx.Client(base_url=dashboard.url, timeout=60) as client:
        code = dashboard.create_link().split("code=")[1]
        assert client.post("/api/session", json={"code": code}).status_code == 200
        assert [run["name"] for run in read(client, "/api/runs")["runs"]] == ["mine"]
        reply = client.get(RUN)
    dashboard.close()
    assert (reply.status_code, expected in reply.json()["error"]) == (503, True)


def make_it_another_version(folder: RunFolder) -> str:
    """Change the version of a run's store; returns the error that follows."""
    with closing(sqlite3.connect(folder.store)) as db:
        db.execute(f"PRAGMA user_version = {VERSION - 1}")
    return f"has schema version {VERSION - 1}, expected {VERSION}: open it with the version"


def test_every_token_has_its_text_and_a_character_of_several_tokens_one() -> None:
    pieces = {n: bytes([b]) for n, b in enumerate("aé日".encode())}

    def decode(ids: Any) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    assert split_text(range(6), decode) == ["a", "", "é", "", "", "日"]
    assert "".join(split_text(range(5), decode)) == "aé\ufffd"


async def evaluate_once(folder: RunFolder, run: str, when: str) -> None:
    async with SQLiteStore(folder.store, run=run) as store:
        await store.enqueue(
            [Rollout(id=f"{when}-greedy-00000", group=when, task="a task", mode=Mode.VAL)]
        )
        attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
        assert attempt is not None
        await store.finish(attempt.id, Outcome(reward=1.0))


@pytest.mark.parametrize(
    ("kind", "sides", "page"),
    [
        ("train", {"before": "default", "after": "default"}, "{}-greedy-00000"),
        ("eval", {"tiny": "tiny", "mine": "mine"}, None),
    ],
)
def test_the_rollouts_of_an_evaluation_are_named_where_they_have_a_page(
    kind: str, sides: dict[str, str], page: str | None, tmp_path: Path
) -> None:
    folder = RunFolder.create(resolve({"dir": str(tmp_path), "name": "mine"}), kind)
    for side, run in sides.items():
        anyio.run(evaluate_once, folder, run, side if kind == "train" else "eval")

    async def read_sides() -> Any:
        catalog = FolderCatalog(tmp_path)
        try:
            return await read_evaluations(await catalog.open("mine"))
        finally:
            await catalog.close()

    [task] = anyio.run(read_sides)["tasks"]
    for side in sides:
        [shown] = task["sides"][side]["greedy"]
        assert shown["rollout"] == (page and page.format(side))


@pytest.mark.anyio
async def test_the_tokens_of_each_policy_are_read_by_its_own_tokenizer(
    tmp_path: Path, model: Path
) -> None:
    policies: dict[str, JsonValue] = {"a": {}, "b": {"model": str(model)}}
    values: dict[str, JsonValue] = {"dir": str(tmp_path), "name": "two", "policies": policies}
    folder = RunFolder.create(resolve(values), "train")
    async with SQLiteStore(folder.store) as store:
        await store.enqueue([Rollout(id="r", group="g", task="a task")])
        attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
        assert attempt is not None
        for policy in policies:
            made = call(attempt.id, policy, tokens=(270, 280))
            await store.append(made.model_copy(update={"origin": Origin(policy=policy)}))
        catalog = FolderCatalog(tmp_path)
        shown: Any = await AttemptPages().read_attempt(await catalog.open("two"), attempt.id)
        await catalog.close()
    found = [each["generations"][0]["texts"] for each in shown["calls"]]
    templates = [ChatTemplate(TINY), ChatTemplate(model)]
    assert found == [[t.decode_all([270]), t.decode_all([280])] for t in templates]
    assert found[0] != found[1]
