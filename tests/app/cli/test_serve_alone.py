"""A model served by itself: `whet serve --model`, and `whet chat`."""

import io
import json
from pathlib import Path

import httpx
import pytest

import whet
from support.runs.processes import start
from whet.app.cli.main import main
from whet.app.composition.standalone import serve_alone
from whet.app.evaluation.model_sources import read_models
from whet.config import RunConfig
from whet.errors import ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DIALOGUES = [{"prompt": f"Say {word}.", "completion": "Never!"} for word in ("a", "b", "c", "d")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = whet.sft(
        DIALOGUES,
        quiet=True,
        dir=str(tmp_path_factory.mktemp("served")),
        name="stubborn",
        trainer={"lora_rank": 8},
        adam={"lr": 5e-3},
        supervised={"epochs": 20, "held_out": 0},
    )
    return result.run


async def test_a_run_is_served_to_any_client_under_its_own_key(run: Path) -> None:
    keys: list[str] = []
    for source in (str(run), "stubborn"):  # by folder, and by name
        config = RunConfig(dir=run.parent.parent)
        async with (
            serve_alone(source, config, print) as gateway,
            httpx.AsyncClient(timeout=60, verify=False) as client,
        ):
            url, key = gateway.own_endpoint.base_url, gateway.own_endpoint.api_key
            assert gateway.own_endpoint.model == "stubborn"
            keys.append(key)
            body = {
                "model": "stubborn",
                "messages": [{"role": "user", "content": "Say a."}],
                "temperature": 0,
                "max_tokens": 8,
            }
            refused = await client.post(f"{url}/chat/completions", json=body)
            assert refused.status_code == 401
            headers = {"Authorization": f"Bearer {key}"}
            reply = await client.post(f"{url}/chat/completions", json=body, headers=headers)
            assert reply.json()["choices"][0]["message"]["content"] == "Never!"
    assert keys[0] == keys[1]


def test_the_command_serves_a_run_until_it_is_stopped(run: Path) -> None:
    with start(run.parent.parent, "serve", "--model", str(run)) as serving:
        line = serving.hears("export OPENAI_BASE_URL=")
        assert f"{run} listens at " in serving.output
        assert serving.output.splitlines()[-2].endswith(", model 'stubborn'")
        url, key = (word.partition("=")[2] for word in line.split()[1:])
        body = {"messages": [{"role": "user", "content": "Say a."}], "temperature": 0}
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.post(
            f"{url}/chat/completions",
            json=body | {"model": "stubborn", "max_tokens": 8},
            headers=headers,
            timeout=60,
        )
        assert reply.json()["choices"][0]["message"]["content"] == "Never!"
        listed = httpx.get(f"{url}/models", headers=headers).json()["data"]
        assert [each["id"] for each in listed] == ["stubborn", "policy"]
        assert serving.stop() == 0
        assert serving.lines[-1] == "gateway stopped"


async def test_an_unknown_model_is_one_error() -> None:
    with pytest.raises(ConfigError, match="there is no model 'nowhere'"):
        async with serve_alone("nowhere", RunConfig(), print):
            pass


def test_chat_answers_the_lines_of_stdin(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Say a.\nSay b.\n"))
    by_name = ("stubborn", f"--dir={run.parent.parent}")
    assert main(["chat", *by_name, "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Never!"


def test_every_command_that_takes_a_model_finds_a_run_by_its_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--dir={run.parent.parent}"
    assert main(["models", "merge", "stubborn", str(tmp_path / "merged"), where]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()
    [found] = read_models(["stubborn"], None, print, directory=run.parent.parent)
    assert (found.name, found.source) == ("stubborn", str(run))
    assert main(["models", "merge", "nobody", str(tmp_path / "other"), where]) == 2
    assert "there is no model 'nobody'" in capsys.readouterr().err


def test_the_model_folder_has_a_card_and_readable_files(run: Path) -> None:
    card = (run / "model" / "README.md").read_text()
    assert "imitation of dialogues" in card
    modes = {file.stat().st_mode & 0o777 for file in (run / "model").iterdir()}
    assert modes == {(run / "config.json").stat().st_mode & 0o777}
    assert json.loads((run / "report.json").read_text())["steps"] == 20
