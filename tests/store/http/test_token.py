"""The token of a served store: made once, and readable by its owner only."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.store import open_store
from whet.store.http.token import FILE, VARIABLE, find_token, make_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first, again = make_token(tmp_path / "new"), make_token(tmp_path / "new")
    file = tmp_path / "new" / FILE
    assert (first.is_new, again.is_new) == (True, False)
    assert first.value == again.value == find_token(tmp_path / "new") == file.read_text()
    assert len(first.value) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert make_token(tmp_path / "other").value != first.value


def test_a_store_starts_in_a_new_folder_with_a_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "given\n")
    assert make_token(tmp_path / "new").value == find_token(tmp_path / "new") == "given"
    assert list((tmp_path / "new").iterdir()) == []


def test_servers_that_start_at_once_agree_and_nobody_sees_half_a_token(tmp_path: Path) -> None:
    for folder in (tmp_path / str(n) for n in range(20)):
        with ThreadPoolExecutor(8) as threads:
            made = [threads.submit(make_token, folder) for _ in range(8)]
        tokens = [done.result() for done in made]
        assert {token.value for token in tokens} == {find_token(folder)}
        assert sum(token.is_new for token in tokens) == 1
        assert [file.name for file in folder.iterdir()] == [FILE]


def test_a_server_killed_while_it_makes_its_token_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            make_token(tmp_path)
    assert make_token(tmp_path).is_new
    assert find_token(tmp_path)


def test_the_environment_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(tmp_path)
    monkeypatch.setenv(VARIABLE, "given")
    assert make_token(tmp_path) == ("given", False)
    assert find_token(tmp_path) == "given"


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    make_token(tmp_path)
    (tmp_path / FILE).chmod(mode)
    for act in (make_token, find_token):
        with pytest.raises(ConfigError, match="chmod 600"):
            act(tmp_path)


def test_an_empty_token_is_none(tmp_path: Path) -> None:
    (tmp_path / FILE).touch(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        find_token(tmp_path)


def test_a_missing_token_is_an_error_that_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"set {VARIABLE}, or run where '.whet/store.token' is"):
        open_store("http://127.0.0.1:1")


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create the token"):
        make_token(tmp_path / "file" / "below")
