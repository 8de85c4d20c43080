"""Trees of sequences: every sequence is the nodes of its path, and each shared prefix is stored once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.tree import LEAST, Ids, SharedPrefixes, Tree


@st.composite
def sequences(draw: st.DrawFn) -> list[Ids]:
    """Draw sequences with some common prefixes: with parts of one text, and of each other."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    text = rng.integers(0, 3, 80).astype(np.int32)
    found: list[Ids] = []
    for _ in range(draw(st.integers(1, 9))):
        start = found[rng.integers(len(found))] if found and rng.random() < 0.5 else text
        head = start[: rng.integers(0, len(start) + 1)]
        found.append(np.concatenate([head, rng.integers(0, 3, rng.integers(not len(head), 40))]).astype(np.int32))
    return found


def grown(found: list[Ids], prefixes: SharedPrefixes | None = None) -> Tree:
    return Tree.of([len(ids) for ids in found], prefixes or SharedPrefixes.of(found))


@given(sequences())
def test_a_path_spells_its_sequence(found: list[Ids]) -> None:
    tree = grown(found)
    for ids, path in zip(found, tree.paths, strict=True):
        nodes = [tree.nodes[number] for number in path]
        spelt = np.concatenate([found[node.of][node.start : node.end] for node in nodes])
        np.testing.assert_array_equal(spelt, ids)
        assert [node.parents for node in nodes] == [path[:i] for i in range(len(path))]


@given(sequences())
def test_descendants_follow_their_node_without_a_gap(found: list[Ids]) -> None:
    nodes = grown(found).nodes
    for number, node in enumerate(nodes):
        below = [other for other, candidate in enumerate(nodes) if number in candidate.parents]
        assert below == list(range(number + 1, node.last + 1))
        assert len(node) > 0


@given(sequences())
def test_what_two_branches_still_have_in_common_is_short(found: list[Ids]) -> None:
    nodes = grown(found).nodes
    for a, one in enumerate(nodes):
        for two in nodes[a + 1 :]:
            if one.parents == two.parents:
                x, y = (found[n.of][n.start : n.end] for n in (one, two))
                n = min(len(x), len(y))
                assert n < LEAST or not np.array_equal(x[:LEAST], y[:LEAST])


@given(sequences())
def test_nothing_is_shared_where_nothing_may_be(found: list[Ids]) -> None:
    tree = grown(found, SharedPrefixes.none(len(found)))
    assert tree.paths == tuple((i,) for i in range(len(found)))
    assert tree.tokens == sum(map(len, found))


def test_a_group_and_a_split_trajectory() -> None:
    prompt, turn = np.arange(40, dtype=np.int32), np.arange(100, 130, dtype=np.int32)
    one, two, three = (np.full(n, n, np.int32) for n in (5, 6, 7))
    found = [np.concatenate(parts) for parts in ((prompt, one), (prompt, turn, two), (prompt, turn, three))]
    tree = grown(found)
    assert [(len(node), len(node.parents)) for node in tree.nodes] == [(40, 0), (5, 1), (30, 1), (6, 2), (7, 2)]
    assert tree.paths == ((0, 1), (0, 2, 3), (0, 2, 4))
    assert tree.tokens == 40 + 5 + 30 + 6 + 7


def test_a_sequence_that_is_the_beginning_of_another_ends_inside_it() -> None:
    long = np.arange(50, dtype=np.int32)
    tree = grown([long, long[:30], long])
    assert tree.paths == ((0, 1), (0,), (0, 1))
    assert tree.tokens == 50


def test_as_deep_as_a_trajectory_has_turns() -> None:
    whole = np.arange(2000 * LEAST, dtype=np.int32)
    sequences = [whole[: LEAST * turns] for turns in range(1, 2001)]
    tree = Tree.of([len(ids) for ids in sequences], SharedPrefixes.of(sequences))
    assert (tree.tokens, len(tree.paths[-1])) == (len(whole), 2000)
    assert {node.last for node in tree.nodes} == {1999}
