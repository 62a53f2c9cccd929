"""What a cluster can offer: a request that no node can ever satisfy is refused before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from raytrain_platform.errors import InfeasibleRequestError
from raytrain_platform.spec import ReplicaSpec

logger = logging.getLogger(__name__)

# Ray keeps amounts in ten-thousandths; counting in them makes 0.3 hold three times 0.1.
_UNITS_PER_ONE = 10_000
_MEASURED_IN_BYTES = frozenset({"memory", "object_store_memory"})
# Ray's default label for the kind of node; `ray up` and KubeRay set it, `ray start` by hand does not.
_NODE_GROUP_LABEL = "ray.io/node-group"


@dataclass(frozen=True)
class NodeResources:
    """All that one node offers, whether in use or not; or all that a kind of node would offer."""

    name: str
    """Node id, or the name of the kind."""

    resources: Mapping[str, float]
    """Amount of each resource, such as ``{"CPU": 8, "GPU": 1}``."""


def check_feasible(
    resources_per_worker: Mapping[str, float],
    workers_per_replica: int,
    nodes: Sequence[NodeResources],
    autoscaler_types: Sequence[NodeResources] = (),
) -> None:
    """Refuse a request that can never be satisfied, however long the job waits.

    Resources in use by others do not count: they come back. A worker must fit on one node; the workers of a replica
    may be spread over several. A kind of node that an autoscaler can start is taken to be available without limit.

    Args:
        resources_per_worker: What one worker reserves.
        workers_per_replica: Workers that must have their resources at the same time.
        nodes: The nodes there are.
        autoscaler_types: Kinds of node an autoscaler can start.

    Raises:
        InfeasibleRequestError: Names the resource, how much is asked, the largest amount there is, and the cure.
    """
    if not resources_per_worker:
        return
    offers = [*nodes, *autoscaler_types]
    lacking = [name for name, asked in resources_per_worker.items() if _units(asked) > _units(_largest(name, offers))]
    if lacking:
        raise InfeasibleRequestError(_explain_lack(resources_per_worker, lacking, nodes, autoscaler_types))
    if not any(_num_slots(resources_per_worker, offer) for offer in offers):
        raise InfeasibleRequestError(_explain_apart(resources_per_worker, offers))
    if any(_num_slots(resources_per_worker, kind) for kind in autoscaler_types):
        return
    num_slots = sum(_num_slots(resources_per_worker, node) for node in nodes)
    if num_slots < workers_per_replica:
        raise InfeasibleRequestError(
            f"one replica needs {workers_per_replica} workers of {_words(resources_per_worker)} at the same time, but "
            f"the cluster's {_nodes(len(nodes))} together have room for {num_slots}; lower "
            f"replicas.workers_per_replica to {num_slots}, or add nodes and submit again"
        )


def check_cluster(replicas: ReplicaSpec) -> None:
    """Refuse a job whose workers no node of the connected cluster can ever host.

    Ray has no public call that tells which kinds of node its autoscaler can start. Where one is on, a request that
    fits no present node is let through with a warning, and waits.

    Raises:
        InfeasibleRequestError: As ``check_feasible``, when no autoscaler is on.
    """
    try:
        check_feasible(replicas.resources_per_worker, replicas.workers_per_replica, read_nodes())
    except InfeasibleRequestError as error:
        if not is_autoscaling():
            raise
        logger.warning("%s; an autoscaler is on, so the job waits in case it can start such a node", error)


def read_nodes() -> tuple[NodeResources, ...]:
    """Return the nodes alive in the connected cluster."""
    return tuple(NodeResources(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"])


def is_autoscaling() -> bool:
    """Whether an autoscaler may add nodes to the connected cluster.

    It may when a node names the kind it is of, as those do that `ray up` and KubeRay start. A node started with
    the variable RAY_NODE_TYPE_NAME names its kind too.
    """
    return any(node["Alive"] and _NODE_GROUP_LABEL in node.get("Labels", {}) for node in ray.nodes())


def _largest(resource: str, offers: Sequence[NodeResources]) -> float:
    return max((offer.resources.get(resource, 0.0) for offer in offers), default=0.0)


def _num_slots(resources_per_worker: Mapping[str, float], offer: NodeResources) -> int:
    """Workers that fit on one node."""
    return min(
        _units(offer.resources.get(name, 0.0)) // max(_units(asked), 1) for name, asked in resources_per_worker.items()
    )


def _units(amount: float) -> int:
    return round(amount * _UNITS_PER_ONE)


def _explain_lack(
    resources_per_worker: Mapping[str, float],
    lacking: Sequence[str],
    nodes: Sequence[NodeResources],
    autoscaler_types: Sequence[NodeResources],
) -> str:
    offers = [*nodes, *autoscaler_types]
    asked = _words({name: resources_per_worker[name] for name in lacking})
    largest = {name: _largest(name, offers) for name in lacking}
    kinds = f" and the {len(autoscaler_types)} kind(s) an autoscaler can start" if autoscaler_types else ""
    fitting = {name: amount for name, amount in largest.items() if amount > 0}
    lower = f"ask for at most {_words(fitting)}" if fitting else f"leave out {', '.join(lacking)}"
    return (
        f"one worker asks for {asked}, but the largest of the cluster's {_nodes(len(nodes))}{kinds} has "
        f"{_words(largest)}; {lower} in replicas.resources_per_worker, or add a node that has {asked}"
    )


def _explain_apart(resources_per_worker: Mapping[str, float], offers: Sequence[NodeResources]) -> str:
    has = [_words({name: offer.resources.get(name, 0.0) for name in resources_per_worker}) for offer in offers]
    shown = " | ".join(dict.fromkeys(has))
    return (
        f"one worker asks for {_words(resources_per_worker)} on one node; there is enough of each, but on no single "
        f"node (they have {shown}); ask for less in replicas.resources_per_worker, or add a node that has all of it"
    )


def _nodes(num_nodes: int) -> str:
    return f"{num_nodes} node" if num_nodes == 1 else f"{num_nodes} nodes"


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {amount / 2**30:g} GiB" if name in _MEASURED_IN_BYTES else f"{name} {amount:g}"
        for name, amount in resources.items()
    )
