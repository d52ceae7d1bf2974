"""Values sent in another dtype, or in their own.

Tests: tests/comm/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec, whole_words


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """Rounding to a dtype. The values' own dtype loses nothing: the plain codec."""

    dtype: torch.dtype

    def wire_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values become."""
        return whole_words(numel * self.dtype.itemsize)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write `values` into `out`; values beyond the dtype's range become infinite."""
        used = values.numel() * self.dtype.itemsize
        out[:used].view(self.dtype).copy_(values)
        out[used:].zero_()

    def decoded(self, wire: Tensor, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values of a wire."""
        yield 0, wire[: numel * self.dtype.itemsize].view(self.dtype)
