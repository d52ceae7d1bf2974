"""2:4-sparse weights, stored as the two nonzero values of every 4 inputs and their positions.

The format is that of compressed-tensors' `sparse-24-bitmask`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hadal.plugins.compression.masks import as_matrix, as_weight
from hadal.plugins.compression.packed import Packed
from hadal.plugins.compression.packing import CodeLayout, pack, unpack

_GROUP, _KEPT, _BYTE = 4, 2, 8


def is_half_zero(matrix: Tensor) -> bool:
    """Return whether a matrix has at most 2 nonzero numbers in every 4 of a row."""
    if matrix.dim() != 2 or not matrix.numel() or matrix.shape[1] % _GROUP:
        return False
    return bool(((matrix != 0).view(-1, _GROUP).sum(1) <= _KEPT).all())


def halve(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept numbers of a matrix for which `is_half_zero` is true, and their positions.

    Args:
        matrix: (rows, columns), any dtype.

    Returns:
        The numbers, (rows, columns / 2), and uint8 bits of a row, the lowest first: (rows, columns
        / 8, rounded up).
    """
    groups = (matrix != 0).view(-1, _GROUP)
    # If fewer than 2 numbers are nonzero, the first zeros are kept too.
    order = groups.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    is_kept = torch.zeros_like(groups).scatter_(1, order[:, :_KEPT], True).view(matrix.shape)
    values = matrix[is_kept].view(matrix.shape[0], -1)
    missing = -matrix.shape[1] % _BYTE
    bits = torch.nn.functional.pad(is_kept.to(torch.uint8), (0, missing))
    powers = 2 ** torch.arange(_BYTE, dtype=torch.uint8, device=matrix.device)
    packed = (bits.view(len(bits), -1, _BYTE) * powers).sum(2, dtype=torch.uint8)
    return values, packed


def whole(values: Tensor, places: Tensor) -> Tensor:
    """Return the matrix from which `halve` made these."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    shifts = torch.arange(_BYTE, dtype=torch.uint8, device=places.device)
    is_kept = (places.unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, :columns]
    found = values.new_zeros(rows, columns)
    found[is_kept] = values.flatten()
    return found


def without_zeros(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return a state dict in which 2:4 weights are halved, and their shapes by name.

    `NAME` becomes `NAME.values` and `NAME.places`, for a weight or its codes.

    Args:
        model: its linear layers and convolutions are examined.
        tensors: its state dict, or a part of it.
    """
    found, shapes = dict(tensors), {}
    for name, value in tensors.items():
        place, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "weight_codes"):
            continue
        module = model.get_submodule(place)
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        layout: CodeLayout | None = None
        weight: Tensor | None = value
        if isinstance(module, Packed):
            layout = module.layout
            weight = _levels(value, layout, module)
        if weight is None or not is_half_zero(as_matrix(weight)):
            continue
        values, places = halve(as_matrix(weight))
        if layout is not None:
            values = pack(values - layout.first, layout.bits)
        del found[name]
        found |= {f"{name}.values": values, f"{name}.places": places}
        shapes[name] = list(weight.shape)
    return found, shapes


def with_zeros(state: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Return the state dict from which `without_zeros` made these."""
    found = dict(state)
    for name, shape in shapes.items():
        values, places = found.pop(f"{name}.values"), found.pop(f"{name}.places")
        spec = state.get(name.removesuffix("codes") + "spec")
        if spec is None:
            found[name] = as_weight(whole(values, places), torch.Size(shape)).contiguous()
            continue
        layout = CodeLayout.of(spec)
        levels = unpack(values, layout.bits, layout.columns // 2).int() + layout.first
        weight = as_weight(whole(levels, places), torch.Size(shape))
        found[name] = pack(weight.reshape(shape[0], -1) - layout.first, layout.bits)
    return found


def _levels(codes: Tensor, layout: CodeLayout, module: Packed) -> Tensor | None:
    """Return the integers of a packed weight, in its shape; None if no integer represents zero."""
    if module.weight_zero is not None or layout.stride != 1:
        return None
    return (unpack(codes, layout.bits, layout.columns).int() + layout.first).view(layout.shape)
