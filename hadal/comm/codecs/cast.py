"""Values that travel in another dtype, or in their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec, whole_words


@dataclass(frozen=True, slots=True)
class Cast(Codec):
    """Rounded to a dtype. In the values' own one nothing is lost: the plain codec."""

    dtype: torch.dtype

    def wire_bytes(self, numel: int) -> int:
        """How many bytes `numel` values become."""
        return whole_words(numel * self.dtype.itemsize)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write `values` into `out`; what the dtype cannot hold becomes infinite."""
        used = values.numel() * self.dtype.itemsize
        out[:used].view(self.dtype).copy_(values)
        out[used:].zero_()

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fill `out` with the values of a wire."""
        out.copy_(self._values(wire, out.numel()))

    def decode_add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Add the values of a wire, times `factor`, to `out`."""
        out.add_(self._values(wire, out.numel()), alpha=factor)

    def _values(self, wire: Tensor, numel: int) -> Tensor:
        return wire[: numel * self.dtype.itemsize].view(self.dtype)
