"""Assignment of ranks to bundles of a placement group: neighbours share a node."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.trainers import local_ranks, rank_order


def test_bundles_that_ray_mixed_up_are_sorted_by_node() -> None:
    nodes = ["b", "a", "b", "a"]
    order = rank_order(nodes)
    assert order == [0, 2, 1, 3]
    assert local_ranks([nodes[bundle] for bundle in order]) == [0, 1, 0, 1]


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_every_bundle_is_taken_once_and_nodes_are_not_left_and_entered_again(nodes: list[str]) -> None:
    order = rank_order(nodes)
    assert sorted(order) == list(range(len(nodes)))
    walked = [nodes[bundle] for bundle in order]
    changes = [two for one, two in itertools.pairwise(walked) if one != two]
    assert len(changes) == len(set(walked)) - bool(walked)
    local = local_ranks(walked)
    assert sorted(zip(walked, local, strict=True)) == sorted({*zip(walked, local, strict=True)})
