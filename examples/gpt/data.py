"""Text that is on every machine: the source files of Python's standard library."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """The bytes of the training and the validation half, which share no file."""

    train: Tensor
    validation: Tensor

    def unigram_entropy(self) -> float:
        """Return nats per validation byte of the best model without context."""
        counts = np.bincount(self.validation.numpy(), minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def read_standard_library() -> Text:
    """Read the `*.py` files at the top of the standard library; a tenth of them is validation.

    Only a file's name decides its half, so it is the same on every rank and in every run.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    halves: dict[bool, list[bytes]] = {False: [], True: []}
    for file in files:
        halves[zlib.crc32(file.name.encode()) % 10 == 0].append(file.read_bytes())
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(halves[kept])), dtype=torch.uint8)
        for kept in (False, True)
    )
    return Text(train, validation)


def batch(text: Tensor, count: int, context: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` windows at positions chosen by `seed`: the bytes, and the next bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (count, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
