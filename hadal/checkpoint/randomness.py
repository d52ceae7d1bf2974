"""The program's random generators: Python's, numpy's, torch's and the accelerator's."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from hadal.device import current_device, random_state, set_random_state


def states() -> dict[str, Any]:
    """Return the state of each generator as numbers, tuples, arrays and tensors."""
    device = current_device()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "accelerator": random_state(device),
    }


def check(saved: dict[str, Any]) -> None:
    """Raise if `restore` would raise, and change nothing.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: a state does not belong to its generator.
    """
    random.Random().setstate(saved["python"])
    np.random.RandomState().set_state(saved["numpy"])
    torch.Generator().set_state(saved["torch"])
    present, state = random_state(current_device()), saved["accelerator"]
    if present is None or state is None:
        return
    if state.shape != present.shape or state.dtype != present.dtype:
        raise ValueError("the saved generator state belongs to another kind of accelerator")


def restore(saved: dict[str, Any], copy: int = 0) -> None:
    """Restore the state of every generator; the accelerator's only if both sides have one.

    Ranks that the saved job did not have start as copies of a saved rank. Copy 0 continues that
    rank's numbers; any other copy draws different ones, seeded with the checksum of torch's saved
    state and the copy's number.
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
