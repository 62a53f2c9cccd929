"""Where the tests of checkpoints save, and what."""

from __future__ import annotations

from dataclasses import dataclass

import fsspec
import torch

from raytrain_platform.checkpoint.snapshot import Snapshot, digest, flatten
from tests.contracts.failing_storage import failing


@dataclass(frozen=True)
class Place:
    """One folder of one kind of storage, also reached through a file system that can be made to fail."""

    url: str
    failing_url: str
    stride_bytes: int
    """How finely files are cut where a test goes through all of their bytes; every byte where that is quick."""

    @property
    def files(self):
        return fsspec.core.url_to_fs(self.url)[0]

    def path(self, step, name):
        return f"{fsspec.core.url_to_fs(self.url)[1]}/step-{step:08d}/{name}"

    def names(self, step):
        return {path.rsplit("/", 1)[-1] for path in self.files.find(self.path(step, ""))}

    def rewrite(self, step, name, change):
        path = self.path(step, name)
        self.files.pipe_file(path, bytes(change(bytearray(self.files.cat_file(path)))))

    def empty(self):
        if self.files.exists(self.url):
            self.files.rm(self.url, recursive=True)


def snapshot(step, fill=None):
    weights = torch.full((3,), float(step if fill is None else fill))
    return Snapshot(
        step, *flatten({"weights": weights, "tied": weights, "bias": torch.tensor(0.5), "lr": float("inf")})
    )


def same(left, right):
    return (left.step, left.meta, digest(left.tensors)) == (right.step, right.meta, digest(right.tensors))


def count_operations(action, piece_bytes=16):
    with failing(None, piece_bytes=piece_bytes) as script:
        action()
    return script.num_done
