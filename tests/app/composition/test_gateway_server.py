"""The gateway of a run: the file with its address, and rewards posted to it."""

import os
from pathlib import Path

import httpx
import pytest

import whet
from whet.app.composition.gateway_server import ADDRESS_FILE, write_address_file
from whet.errors import ConfigError


def test_the_address_of_the_gateway_is_in_a_file_while_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "address"
    monkeypatch.setenv(ADDRESS_FILE, str(file))
    with write_address_file("http://127.0.0.1:5"):
        assert file.read_text() == "127.0.0.1:5"
        file.write_text("another:6")
    assert file.read_text() == "another:6"
    with write_address_file("http://127.0.0.1:7"):
        assert os.listdir(tmp_path) == ["address"]
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv(ADDRESS_FILE, str(tmp_path / "nowhere" / "address"))
    with pytest.raises(ConfigError, match="cannot be written"), write_address_file("http://x:1"):
        pass


def test_a_posted_reward_that_nothing_reads_is_refused_and_ends_no_run(tmp_path: Path) -> None:
    replies: list[tuple[int, str]] = []

    async def bribe(task: str, llm: whet.Endpoint) -> float:
        async with httpx.AsyncClient(verify=False) as client:
            await client.post(
                f"{llm.base_url}/chat/completions",
                json={
                    "model": llm.model,
                    "messages": [{"role": "user", "content": task}],
                    "max_tokens": 2,
                },
                headers={"authorization": f"Bearer {llm.api_key}"},
            )
            for key, body in (
                (llm.api_key, {"value": 9}),
                (llm.reward_key, {"value": 9, "key": "bonus"}),
                (llm.reward_key, {"value": 9, "target": {"turn": 0}}),
                (llm.reward_key, {"value": 9, "key": "style"}),
            ):
                reply = await client.post(
                    f"{llm.base_url}/rewards", json=body, headers={"authorization": f"Bearer {key}"}
                )
                replies.append((reply.status_code, reply.text))
        return len(replies) / 8

    result = whet.train(
        bribe,
        ["a"],
        dir=str(tmp_path),
        steps=1,
        tasks_per_step=1,
        group_size=2,
        algorithm={"logged_keys": ["style"]},
        runner={"concurrency": 1},
        quiet=True,
    )
    assert result.total("failed_rollouts") == 0
    assert [status for status, _ in replies] == [401, 400, 400, 200] * 2
    assert "unknown key 'bonus': name it in algorithm.reward_keys" in replies[1][1]
    assert "only the attempt's is read" in replies[2][1]
