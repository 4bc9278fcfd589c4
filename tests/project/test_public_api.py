"""The public API. docs/reference/python-api.md has its signatures, and a test compares them."""

import pickle
from pathlib import Path

import pytest

import whet
from whet import errors


def test_at_most_39_names_are_exported_and_each_can_be_completed() -> None:
    assert len(whet.__all__) <= 39
    assert set(whet.__all__) <= set(dir(whet))


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        whet.missing  # noqa: B018 - the attribute access is the test


def test_the_package_is_typed_for_its_users() -> None:
    assert (Path(whet.__file__).parent / "py.typed").exists()


def test_every_error_survives_pickling() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    ours = [kind for kind in kinds if issubclass(kind, errors.WhetError)]
    assert len(ours) > 10
    for kind in ours:
        copy = pickle.loads(pickle.dumps(kind("why")))
        assert type(copy) is kind
        assert str(copy) == "why"
