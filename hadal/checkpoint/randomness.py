"""The program's own random generators: Python's, numpy's, torch's and that of the accelerator."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from hadal.device import current_device, random_state, set_random_state


def states() -> dict[str, Any]:
    """Where each generator stands, as numbers, tuples, arrays and tensors."""
    device = current_device()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "accelerator": random_state(device),
    }


def check(saved: dict[str, Any]) -> None:
    """Raise where `restore` would, and change nothing.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: a state is not one of its generator's.
    """
    random.Random().setstate(saved["python"])
    np.random.RandomState().set_state(saved["numpy"])
    torch.Generator().set_state(saved["torch"])
    present, told = random_state(current_device()), saved["accelerator"]
    if present is None or told is None:
        return
    if told.shape != present.shape or told.dtype != present.dtype:
        raise ValueError("the state of the accelerator's generator is that of another kind")


def restore(saved: dict[str, Any], copy: int = 0) -> None:
    """Let every generator go on where it stood; the accelerator's, if both sides have one.

    Ranks that were not there begin as copies of one that was. Each copy but the first (0) draws
    other numbers: its generators are seeded with the checksum of torch's saved state and its
    number.
    """
    if copy:
        seed = zlib.crc32(saved["torch"].numpy().tobytes() + copy.to_bytes(4, "little"))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["accelerator"] is not None:
        set_random_state(saved["accelerator"], current_device())
