"""Rows packed into trees of shared prefixes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.models.tiny_llama import row_of
from whet.trainers.packing import PrefixTree, pack
from whet.types import Row

rows_that_share = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=8).map(
        lambda tokens: row_of(tokens[:1], tokens[1:], [-1.0] * (len(tokens) - 1), 1.0)
    ),
    min_size=1,
    max_size=12,
)


def ancestors(tree: PrefixTree, node: int) -> list[int]:
    return [key for key in range(node + 1) if node < tree.end[key]]


def packed(rows: list[Row], most: int) -> list[PrefixTree]:
    return list(pack(rows, most))


@given(rows_that_share, st.integers(1, 40))
@settings(deadline=None)
def test_every_row_is_found_once_and_sees_exactly_itself(rows: list[Row], most: int) -> None:
    trees = packed(rows, most)
    found = [row for tree in trees for row, _ in tree.rows]
    assert sorted(row.tokens for row in found) == sorted(row.tokens for row in rows)
    for tree in trees:
        for row, nodes in tree.rows:
            assert tuple(tree.tokens[node] for node in nodes) == row.tokens
            assert [tree.depth[node] for node in nodes] == list(range(len(nodes)))
            for depth, node in enumerate(nodes):
                assert ancestors(tree, node) == nodes[: depth + 1].tolist()


@given(rows_that_share)
@settings(deadline=None)
def test_a_shared_prefix_stands_once(rows: list[Row]) -> None:
    [tree] = packed(rows, 1000)
    prefixes = {row.tokens[:n] for row in rows for n in range(1, len(row.tokens) + 1)}
    assert tree.size == len(tree.tokens) == len(prefixes)


@given(rows_that_share, st.integers(1, 40))
@settings(deadline=None)
def test_a_tree_is_larger_than_allowed_only_for_one_row(rows: list[Row], most: int) -> None:
    for tree in packed(rows, most):
        assert tree.size <= most or len({row.tokens for row, _ in tree.rows}) == 1


def test_unrelated_rows_share_a_tree_only_while_it_is_small() -> None:
    strangers = [row_of([index] * 200, [1], [-1.0], 1.0) for index in range(2, 6)]
    assert [len(tree.rows) for tree in packed(strangers, 5000)] == [2, 2]
    family = [row_of([2] * 200, [index], [-1.0], 1.0) for index in range(3, 90)]
    assert [len(tree.rows) for tree in packed(family, 5000)] == [87]


def test_no_rows_are_no_trees() -> None:
    assert packed([], 100) == []
