"""Runs the benchmarks: ``python -m benchmarks [NAME]``; each prints a table and writes ``results/NAME.json``."""

from __future__ import annotations

import importlib
import sys

NAMES = ("exact_reduce", "throughput", "join", "start", "recovery")


def main() -> None:
    """Run one benchmark, or all."""
    wanted = sys.argv[1:] or NAMES
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
