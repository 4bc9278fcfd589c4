from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.jsonlines import JsonLines


def test_what_is_appended_is_read_back_by_whoever_opens_it_next(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "below" / "x.jsonl")
    lines.append({"a": 1}, {"b": "ü"})
    lines.append({"c": None})
    assert list(JsonLines(lines.path).read()) == [{"a": 1}, {"b": "ü"}, {"c": None}]


@pytest.mark.parametrize("torn", [b'{"c": ', b'{"c": 3}'])
def test_a_line_without_its_end_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n{"b": 2}\n' + torn)
    lines = JsonLines(file)
    lines.append({"d": 4})
    assert list(lines.read()) == [{"a": 1}, {"b": 2}, {"d": 4}]


def test_two_that_append_do_not_write_into_each_others_lines(tmp_path: Path) -> None:
    one, two = JsonLines(tmp_path / "x"), JsonLines(tmp_path / "x")
    for number in range(20):
        one.append({"one": number})
        two.append({"two": number})
    assert len(list(one.read())) == 40


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n[1]\n")
    with pytest.raises(ConfigError, match="line 2 is no JSON object"):
        list(JsonLines(tmp_path / "x").read())


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        JsonLines(tmp_path / "file" / "x")
