"""The same random numbers wherever a shard is computed."""

from __future__ import annotations

import enum
import random

import numpy as np
import torch

from raytrain_platform.data.sampler import derive_seed

__all__ = ["Purpose", "derive_seed", "seed_everything"]


class Purpose(enum.IntEnum):
    """What random numbers are drawn for; each purpose has its own."""

    MODEL = 0
    """Initial weights."""

    DATA = 1
    """Reading the samples of a shard: augmentation."""

    COMPUTE = 2
    """The loss of a shard: dropout."""


def seed_everything(purpose: Purpose, seed: int, *, step: int = 0, shard: int = 0) -> None:
    """Seed the global generators of ``random``, ``numpy.random`` and ``torch``, in some 20 microseconds.

    Args:
        purpose: What the numbers are for.
        seed: The job's seed.
        step: Step they are drawn in.
        shard: Shard they are drawn for.
    """
    base = derive_seed(seed, purpose, step, shard)
    # A seed for each: numpy and torch run the same Mersenne twister, and would draw the same bits from the same seed.
    random.seed(derive_seed(base, 0))
    np.random.seed([derive_seed(base, 1) >> 32, derive_seed(base, 1) & 0xFFFF_FFFF])
    # torch.manual_seed takes half a millisecond where a device is not in use: it keeps the stack, to seed it later.
    torch.default_generator.manual_seed(derive_seed(base, 2))
    if torch.accelerator.is_available():
        device = torch.get_device_module()
        getattr(device, "manual_seed_all", device.manual_seed)(derive_seed(base, 2))
