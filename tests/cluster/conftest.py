from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from raytrain_platform.cluster.local import LocalCluster


@pytest.fixture(scope="module")
def start_cluster() -> Iterator[Callable[..., LocalCluster]]:
    """Start clusters, with the arguments of ``LocalCluster``; they end with the module, whatever its tests do."""
    with contextlib.ExitStack() as clusters:
        yield lambda *args, **options: clusters.enter_context(LocalCluster(*args, **options))
