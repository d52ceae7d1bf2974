"""Compressed linear layers split over the ranks of a program's own `mpu`, in Megatron's way.

Each rank has a slice of the weight, which techniques treat as a separate matrix.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.adjoint import Way, across, gathered, own, same, summed
from hadal.comm.mpu import model_group_of
from hadal.errors import ModelError
from hadal.plugins.compression.layers import CompressedLinear

_LABEL = "the exchange of a compressed layer that is split over ranks"


class ColumnParallelLinear(CompressedLinear):
    """A linear layer whose outputs are split over ranks.

    A forward returns the outputs, and the bias if `skip_bias_add` leaves it to the caller.
    """

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__(input_size, _share(self, mpu, output_size), bias=bias)
        self.mpu, self.gather_output, self.skip_bias_add = mpu, gather_output, skip_bias_add
        _mark(self.weight, self.bias)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return all outputs or this rank's, and the bias that the caller has to add.

        Args:
            input: (..., input_size), the same on all ranks.
        """
        ranks = Ranks.of(model_group_of(self.mpu))
        weight, bias = self.effective()
        found = F.linear(
            self.effective_input(across(input, same, lambda x: summed(x, ranks, _LABEL))),
            weight,
            None if self.skip_bias_add else bias,
        )
        if self.gather_output:
            whole, mine = _columns(found.shape[-1], ranks)
            found = across(found, whole, mine)
        return found, bias if self.skip_bias_add else None


class RowParallelLinear(CompressedLinear):
    """A linear layer whose inputs are split over ranks; their results are summed.

    A forward returns the outputs, and the bias if `skip_bias_add` leaves it to the caller.
    """

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__(_share(self, mpu, input_size), output_size, bias=bias)
        self.mpu, self.input_is_parallel, self.skip_bias_add = mpu, input_is_parallel, skip_bias_add
        _mark(self.weight)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return the outputs, the same on all ranks, and the bias that the caller has to add.

        Args:
            input: (..., input_size), the same on all ranks; or this rank's slice of its columns, if
                `input_is_parallel`.
        """
        ranks = Ranks.of(model_group_of(self.mpu))
        if not self.input_is_parallel:
            whole, mine = _columns(input.shape[-1] // ranks.size, ranks)
            input = across(input, mine, whole)
        weight, bias = self.effective()
        found = F.linear(self.effective_input(input), weight)
        found = across(found, lambda x: summed(x, ranks, _LABEL), same)
        if bias is None or self.skip_bias_add:
            return found, bias
        return found + bias, None


# Cleaned layers keep their classes, which implement the parallel forward.
for _kind in (ColumnParallelLinear, RowParallelLinear):
    _kind.plain = _kind


def _share(layer: Any, mpu: Any, size: int) -> int:
    ranks = dist.get_world_size(model_group_of(mpu))
    if size % ranks:
        raise ModelError(
            f"{type(layer).__name__}: {ranks} ranks do not divide {size:,}; use a multiple"
        )
    return size // ranks


def _mark(*parameters: Any) -> None:
    """Mark slices as Megatron does: their norms are summed over the model-parallel ranks."""
    for parameter in parameters:
        if parameter is not None:
            parameter.model_parallel = True


def _columns(width: int, ranks: Ranks) -> tuple[Way, Way]:
    """Return the gather of all ranks' columns, and the choice of this rank's; each has `width`."""
    sizes = [width] * ranks.size
    return (lambda x: gathered(x, -1, sizes, ranks, _LABEL), lambda x: own(x, -1, sizes, ranks))
