from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_platform.cluster.capacity import NodeResources, check_feasible
from raytrain_platform.errors import InfeasibleRequestError

AMOUNTS = st.integers(0, 80).map(lambda tenths: tenths / 10)
OFFERS = st.lists(st.fixed_dictionaries({"CPU": AMOUNTS}, optional={"GPU": AMOUNTS}), max_size=5).map(
    lambda amounts: [NodeResources(f"n{number}", resources) for number, resources in enumerate(amounts)]
)
REQUESTS = st.dictionaries(st.sampled_from(["CPU", "GPU"]), AMOUNTS.filter(bool), min_size=1)


def node(**resources: float) -> NodeResources:
    return NodeResources("n", resources)


def refusal(
    request: Mapping[str, float],
    workers: int,
    nodes: Sequence[NodeResources],
    types: Sequence[NodeResources] = (),
) -> str | None:
    try:
        check_feasible(request, workers, nodes, types)
    except InfeasibleRequestError as error:
        return str(error)
    return None


def place(request: Mapping[str, float], nodes: Sequence[NodeResources]) -> int:
    """Workers that can be placed one by one, counted in whole tenths."""
    free = [{name: round(amount * 10) for name, amount in n.resources.items()} for n in nodes]
    asked = {name: round(amount * 10) for name, amount in request.items()}
    placed = 0
    while True:
        host = next((f for f in free if all(f.get(name, 0) >= need for name, need in asked.items())), None)
        if host is None:
            return placed
        for name, need in asked.items():
            host[name] -= need
        placed += 1


@given(REQUESTS, st.integers(1, 12), OFFERS)
def test_a_fixed_cluster_is_feasible_exactly_when_the_workers_of_a_replica_can_be_placed(
    request: dict[str, float], workers: int, nodes: list[NodeResources]
) -> None:
    assert (refusal(request, workers, nodes) is None) == (place(request, nodes) >= workers)


@given(REQUESTS, st.integers(1, 12), OFFERS, OFFERS)
def test_a_request_that_fits_a_kind_an_autoscaler_can_start_is_never_refused(
    request: dict[str, float], workers: int, nodes: list[NodeResources], types: list[NodeResources]
) -> None:
    if place(request, types) >= 1:
        assert refusal(request, workers, nodes, types) is None


@given(REQUESTS, st.integers(1, 12), OFFERS, OFFERS, OFFERS)
def test_more_nodes_and_more_kinds_never_make_a_request_infeasible(
    request: dict[str, float],
    workers: int,
    nodes: list[NodeResources],
    types: list[NodeResources],
    more: list[NodeResources],
) -> None:
    if refusal(request, workers, nodes, types) is None:
        assert refusal(request, workers, [*nodes, *more], types) is None
        assert refusal(request, workers, nodes, [*types, *more]) is None


def test_the_reason_names_the_resource_the_amount_the_largest_and_the_cure() -> None:
    said = refusal({"CPU": 1, "GPU": 4}, 1, [node(CPU=8, GPU=1), node(CPU=64, GPU=2), node(CPU=64)])
    assert said == (
        "one worker asks for GPU 4, but the largest of the cluster's 3 nodes has GPU 2; ask for at most GPU 2 in "
        "replicas.resources_per_worker, or add a node that has GPU 4"
    )


def test_every_lacking_resource_is_named_at_once_and_one_nobody_has_is_to_be_left_out() -> None:
    said = refusal({"NPU": 1, "TPU": 2}, 1, [node(CPU=8)]) or ""
    assert "asks for NPU 1, TPU 2" in said
    assert "1 node has NPU 0, TPU 0; leave out NPU, TPU" in said


def test_memory_is_told_in_gib() -> None:
    said = refusal({"memory": 64 * 2**30}, 1, [node(CPU=8, memory=2**34)]) or ""
    assert "asks for memory 64 GiB" in said
    assert "has memory 16 GiB" in said


def test_resources_that_no_single_node_has_together_are_refused_with_what_each_has() -> None:
    said = refusal({"CPU": 8, "GPU": 1}, 1, [node(CPU=16), node(CPU=2, GPU=1), node(CPU=2, GPU=1)]) or ""
    assert "CPU 8, GPU 1 on one node" in said
    assert "(they have CPU 16, GPU 0 | CPU 2, GPU 1)" in said


def test_a_replica_too_large_for_a_fixed_cluster_is_told_how_many_workers_fit() -> None:
    said = refusal({"CPU": 4}, 4, [node(CPU=8), node(CPU=7)]) or ""
    assert "needs 4 workers of CPU 4" in said
    assert "2 nodes together have room for 3" in said
    assert "replicas.workers_per_replica to 3" in said


def test_a_bigger_kind_of_node_is_waited_for_and_a_too_small_one_is_named() -> None:
    assert refusal({"GPU": 8}, 2, [node(CPU=2)], [node(CPU=96, GPU=8)]) is None
    assert "and the 1 kind(s) an autoscaler can start has GPU 4" in (
        refusal({"GPU": 8}, 2, [node(CPU=2)], [node(CPU=96, GPU=4)]) or ""
    )


def test_a_kind_too_small_for_one_worker_does_not_count_as_room_for_a_replica() -> None:
    assert "have room for 1" in (refusal({"CPU": 4}, 2, [node(CPU=4)], [node(CPU=2)]) or "")


def test_fractions_are_counted_as_ray_counts_them() -> None:
    assert refusal({"CPU": 0.1}, 3, [node(CPU=0.3)]) is None
    assert refusal({"CPU": 0.1 + 0.2}, 1, [node(CPU=0.3)]) is None
    assert refusal({"CPU": 0.19}, 3, [node(CPU=0.57)]) is None
    with pytest.raises(InfeasibleRequestError):
        check_feasible({"CPU": 0.1}, 4, [node(CPU=0.3)])


def test_a_worker_that_reserves_nothing_fits_anywhere() -> None:
    assert refusal({}, 8, []) is None
