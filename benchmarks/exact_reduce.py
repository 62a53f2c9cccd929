"""The exact reduction against gloo's own all-reduce, in turn, within one run."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Any

import torch

from benchmarks.report import Row, summarize, write
from raytrain_platform.comm.exact import MAX_WORLD_SIZE, ExactReducer, Layout
from raytrain_platform.comm.group import GlooGroup, Rendezvous, RendezvousServer
from raytrain_platform.comm.tree import Tree
from raytrain_platform.elastic.shards import block_of

SIZES_MB = (1, 4, 16, 64)
NUM_ROUNDS, NUM_WARMUP = 25, 5


def main() -> None:
    """Measure 2 and 4 members."""
    rows = [row for size in (2, 4) for row in _measure(size)]
    write("exact_reduce", rows)


def _measure(num_members: int) -> list[Row]:
    server = RendezvousServer("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = [
        context.Process(target=_member, args=(server.rendezvous("bench"), rank, num_members, results))
        for rank in range(num_members)
    ]
    for member in members:
        member.start()
    measured: dict[int, list[tuple[float, float]]] = results.get(timeout=300)
    for member in members:
        member.join()
    rows = []
    for size_mb, times in measured.items():
        ratios = [exact_s / own_s for own_s, exact_s in times]
        own_ms = statistics.median(own_s for own_s, _ in times) * 1000
        metric = f"{num_members} members, {size_mb} MB: exact / gloo's all-reduce ({own_ms:.1f} ms)"
        rows.append(summarize(metric, ratios, goal="<= 1.2"))
    return rows


def _member(rendezvous: Rendezvous, rank: int, size: int, results: Any) -> None:
    torch.set_num_threads(1)
    group = GlooGroup(rendezvous, rank, size, timeout_s=60)
    layout = Layout(Tree(size), tuple(block_of(k, size, size) for k in range(size)))
    reducer = ExactReducer(group, layout)
    measured: dict[int, list[tuple[float, float]]] = {}
    for size_mb in SIZES_MB:
        num_elements = size_mb * 2**18
        values = torch.ones(num_elements + MAX_WORLD_SIZE)
        times = []
        for _ in range(NUM_ROUNDS):
            begin = time.perf_counter()
            group.all_reduce(values[:num_elements]).wait()
            middle = time.perf_counter()
            reducer.start([values], num_elements)
            reducer.finish()
            times.append((middle - begin, time.perf_counter() - middle))
        measured[size_mb] = times[NUM_WARMUP:]
    if rank == 0:
        results.put(measured)
    group.all_reduce(torch.ones(1)).wait()
    group.close()
