"""Modules that store their weight as integers of a few bits, and dequantize it in each forward.

`module.weight` is the dequantized weight, bit for bit as `redundancy_clean` left it; it is no
longer a parameter, and cannot be trained. The module's other parameters stay as they are.

A value of a grid is `(code * stride + first) * scale + zero`, with a scale and a zero for each
group. The arithmetic is that of `quantizers.py`, in the same dtype, so that decoding returns the
quantized weight itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.errors import ModelError
from hadal.plugins.compression.layers import CompressedConv2d, CompressedEmbedding, CompressedLinear
from hadal.plugins.compression.quantizers import scales_of, symmetric_levels

_BYTE = 8


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The codes of one weight: their bits, their values, and their groups."""

    bits: int
    first: int
    """The integer that code 0 represents."""
    stride: int
    """Difference between the integers of two neighbouring codes."""
    groups: int
    """Equal slices of the flat weight, each with its own scale."""
    shape: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Elements of a row; rows are the first dimension."""
        return prod(self.shape[1:])

    def as_tensor(self) -> Tensor:
        """Return the layout as integers, as a state dict holds it: int64, 1-D."""
        return torch.tensor((self.bits, self.first, self.stride, self.groups, *self.shape))

    @staticmethod
    def of(spec: Tensor) -> CodeLayout:
        """Return the layout that `as_tensor` gave."""
        numbers = [int(number) for number in spec.tolist()]
        bits, first, stride, groups, *shape = numbers
        return CodeLayout(bits, first, stride, groups, tuple(shape))


def _widths(bits: int) -> Iterator[int]:
    """Yield powers of two, the largest first, that add up to the bits; the largest is 8."""
    for width in (8, 4, 2, 1):
        while bits >= width:
            yield width
            bits -= width


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes in bytes, row by row.

    Args:
        codes: integers from 0 to `2 ** bits - 1`, (rows, columns).
        bits: 1 to 16. Each row is a whole number of bytes for each power of two in it.

    Returns:
        uint8, (rows, bytes of a row): the lowest bits of all codes first.
    """
    parts, shift = [], 0
    for width in _widths(bits):
        part = (codes >> shift & (1 << width) - 1).to(torch.uint8)
        each = _BYTE // width
        missing = -part.shape[1] % each
        part = torch.nn.functional.pad(part, (0, missing)).view(len(part), -1, each)
        places = torch.arange(0, _BYTE, width, dtype=torch.uint8, device=codes.device)
        parts.append((part << places).sum(2, dtype=torch.uint8))
        shift += width
    return torch.cat(parts, 1)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes of packed rows: uint8 up to 8 bits, else int32; (rows, columns)."""
    if bits == _BYTE:
        return packed
    found: Tensor | None = None
    start = shift = 0
    for width in _widths(bits):
        size = -(-columns * width // _BYTE)
        part = packed[:, start : start + size]
        if width < _BYTE:
            places = torch.arange(0, _BYTE, width, dtype=torch.uint8, device=packed.device)
            part = (part.unsqueeze(2) >> places & (1 << width) - 1).flatten(1)[:, :columns]
        part = part.int() if bits > _BYTE else part
        found = part if found is None else found | part << shift
        start, shift = start + size, shift + width
    assert found is not None
    return found


def decode(packed: Tensor, layout: CodeLayout, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the weight in its shape, and in the dtype of `scale`.

    Args:
        packed: the weight's packed rows.
        layout: their layout.
        scale: (groups,).
        zero: (groups,); None if every group is around zero.
    """
    levels = levels_of(packed, layout, scale.dtype).reshape(layout.groups, -1)
    found = levels.mul_(scale.unsqueeze(1))
    if zero is not None:
        found.add_(zero.unsqueeze(1))
    return found.view(layout.shape)


def levels_of(packed: Tensor, layout: CodeLayout, dtype: torch.dtype) -> Tensor:
    """Return the integers that packed rows represent, in a floating dtype; (rows, columns)."""
    levels = unpack(packed, layout.bits, layout.columns).to(dtype)
    if layout.stride != 1:
        levels.mul_(layout.stride)
    return levels.add_(layout.first) if layout.first else levels


def signed_levels(packed: Tensor, layout: CodeLayout) -> Tensor:
    """Return the integers that packed rows of at most 8 bits represent, as int8; (rows, columns).

    Only for weights around zero: others have integers up to 255.
    """
    codes = unpack(packed, layout.bits, layout.columns).view(torch.int8)
    # Codes from 128 on are negative now; int8 wraps around, so the sums are right.
    return (codes if layout.stride == 1 else codes * layout.stride) + layout.first


def scale_of_rows(scale: Tensor, layout: CodeLayout) -> Tensor:
    """Return the scale of each row, (rows,), or the only one, (1,); groups are whole rows."""
    each = layout.shape[0] // layout.groups
    return scale if layout.groups == 1 else scale.repeat_interleave(each)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The values that a quantized weight may have, before and after parts of it are removed."""

    bits: int
    symmetric: bool
    scale: Tensor
    """(groups,), in the dtype that values are computed in."""
    zero: Tensor | None
    shape: tuple[int, ...]
    """Shape of the quantized weight."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Indices that are left in a dimension; a missing dimension has all."""

    def cut(self, dimension: int, kept: Tensor) -> Grid:
        """Return the grid after a selection from the weight's indices."""
        before = self.kept.get(dimension)
        kept = kept if before is None else before.to(kept.device)[kept]
        return replace(self, kept={**self.kept, dimension: kept})

    def groups_left(self) -> Tensor | None:
        """Return the group of each equal slice of the rest; None if slices mix groups."""
        count = self.scale.numel()
        if count == 1 or not self.kept:
            return torch.arange(count)
        numbers = torch.arange(prod(self.shape)) // (prod(self.shape) // count)
        numbers = numbers.view(self.shape)
        for dimension, kept in self.kept.items():
            numbers = numbers.index_select(dimension, kept.cpu())
        for slices in (numbers.shape[0], count):
            if slices and numbers.numel() % slices == 0:
                of_slices = numbers.reshape(slices, -1)
                if bool((of_slices == of_slices[:, :1]).all()):
                    return of_slices[:, 0]
        return None


def grid_of(weight: Tensor, bits: int, groups: int, *, symmetric: bool) -> Grid:
    """Return the values that `quantize` gives a weight, whatever its rounding."""
    scale, zero = scales_of(weight.detach(), bits, groups, symmetric=symmetric)
    flat = None if zero is None else zero.flatten()
    return Grid(bits, symmetric or bits <= 2, scale.flatten(), flat, tuple(weight.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight as codes."""

    packed: Tensor
    layout: CodeLayout
    scale: Tensor
    zero: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        parts = (self.packed, self.scale, self.zero)
        return sum(part.nbytes for part in parts if part is not None)

    def decoded(self) -> Tensor:
        """Return the weight."""
        return decode(self.packed, self.layout, self.scale, self.zero)


def encode(values: Tensor, grid: Grid) -> Codes | None:
    """Return a quantized weight as codes; None if they do not decode to exactly its values.

    Zeros that pruning left are values too. A one-bit weight has no zero, so it becomes a two-bit
    one.
    """
    owners = grid.groups_left()
    if owners is None or grid.scale.dtype != values.dtype or not values.numel():
        return None
    owners = owners.to(grid.scale.device)
    scale = grid.scale[owners]
    zero = None if grid.zero is None else grid.zero[owners]
    for bits, first, stride in _numberings(grid):
        layout = CodeLayout(bits, first, stride, len(owners), tuple(values.shape))
        found = Codes(_codes(values, layout, scale, zero), layout, scale, zero)
        if torch.equal(found.decoded(), values):
            return found
    return None


def _numberings(grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Yield bits, first integer and stride to try."""
    if not grid.symmetric:
        yield grid.bits, 0, 1
    elif grid.bits > 2:
        yield grid.bits, -(2 ** (grid.bits - 1)), 1
    else:
        if grid.bits == 1:
            yield 1, -1, 2
        yield 2, -1, 1


def _codes(values: Tensor, layout: CodeLayout, scale: Tensor, zero: Tensor | None) -> Tensor:
    # In float64 a division recovers the integer, however the value was rounded.
    flat = values.detach().double().reshape(layout.groups, -1)
    if zero is not None:
        flat = flat - zero.double().unsqueeze(1)
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).double().unsqueeze(1)
    levels = (flat / divisor - layout.first) / layout.stride
    codes = levels.round().clamp(0, 2**layout.bits - 1).int()
    return pack(codes.view(layout.shape[0], -1), layout.bits)


_GRID = "weight_grid"
_CODES, _SCALE, _ZERO, _SPEC = "weight_codes", "weight_scale", "weight_zero", "weight_spec"


class Packed(nn.Module):
    """The base of the classes below.

    Buffers: `weight_codes` (uint8, rows x bytes), `weight_scale` and `weight_zero` (one number per
    group; without zeros None), `weight_spec` (bits, first integer, stride, groups and shape).
    """

    layout: CodeLayout
    weight_codes: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_spec: Tensor

    weight: Any = property(lambda self: self.codes.decoded(), doc="The weight, dequantized.")

    @property
    def codes(self) -> Codes:
        """The weight in stored form."""
        return Codes(self.weight_codes, self.layout, self.weight_scale, self.weight_zero)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        spec = state_dict.get(prefix + _SPEC)
        if spec is not None and CodeLayout.of(spec) != self.layout:
            raise ModelError(
                f"{prefix}weight is packed as {CodeLayout.of(spec)}, but this model's as"
                f" {self.layout}; load packed weights with hadal.compression.load_packed into an"
                " unpacked model"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class PackedLinear(Packed, nn.Linear):
    """`nn.Linear` with a packed weight."""


class PackedConv2d(Packed, nn.Conv2d):
    """`nn.Conv2d` with a packed weight."""


class PackedEmbedding(Packed, nn.Embedding):
    """`nn.Embedding` with a packed weight, of which a forward dequantizes the rows it returns."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows."""
        layout, scale, zero = self.layout, self.weight_scale, self.weight_zero
        if layout.groups not in (1, self.num_embeddings):
            return F.embedding(input, self.weight)
        rows = input.flatten()
        found = levels_of(self.weight_codes[rows], layout, scale.dtype)
        groups = rows if layout.groups > 1 else torch.zeros_like(rows)
        found = found * scale[groups].unsqueeze(1)
        if zero is not None:
            found = found + zero[groups].unsqueeze(1)
        return found.view(*input.shape, -1)


class PackedQuantizedLinear(Packed, CompressedLinear):
    """`CompressedLinear`, whose input is quantized, with a packed weight."""

    in_integers = False
    """True if forwards without gradients multiply integers (`compute_in_integers`)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product."""
        is_ready = self.in_integers and self.compression.activation_is_on
        has_gradients = self.training or torch.is_grad_enabled()
        if not (is_ready and not has_gradients and input.is_cpu and input.numel() > 0):
            return super().forward(input)
        bits, high = self.input_range(input)
        levels, step = symmetric_levels(input, bits, high)
        rows = levels.to(torch.int8).reshape(-1, self.in_features)
        sums = torch._int_mm(rows, signed_levels(self.weight_codes, self.layout).t())
        # Sums have up to 24 bits and more, so that fp16 overflows before they are scaled.
        found = sums.to(torch.promote_types(input.dtype, torch.float32))
        found = found.view(*input.shape[:-1], -1).mul_(step)
        found = found.mul_(scale_of_rows(self.weight_scale, self.layout))
        return (found if self.bias is None else found.add_(self.bias)).to(input.dtype)


class PackedQuantizedConv2d(Packed, CompressedConv2d):
    """`CompressedConv2d`, whose input is quantized, with a packed weight."""


_KINDS: dict[type[nn.Module], type[Packed]] = {
    nn.Linear: PackedLinear,
    nn.Conv2d: PackedConv2d,
    nn.Embedding: PackedEmbedding,
    CompressedEmbedding: PackedEmbedding,
    CompressedLinear: PackedQuantizedLinear,
    CompressedConv2d: PackedQuantizedConv2d,
}


def remember(module: nn.Module, grid: Grid) -> None:
    """Record the grid of a module's weight after it was permanently quantized."""
    setattr(module, _GRID, grid)


def grid_left(module: nn.Module) -> Grid | None:
    """Return the grid of a module's weight; None if it was not permanently quantized."""
    found: Grid | None = getattr(module, _GRID, None)
    return found


def cut_grid(module: nn.Module, dimension: int, kept: Tensor) -> None:
    """Update a module's grid when only some indices of its weight's dimension are left."""
    grid = grid_left(module)
    if grid is not None:
        remember(module, grid.cut(dimension, kept))


@torch.no_grad()
def pack_weights(model: nn.Module) -> list[str]:
    """Store the quantized weights of a cleaned model as integers; return those that stay unpacked.

    Modules keep their place, hooks and names; weights that are tied share their codes. A weight
    stays unpacked if integers would not reproduce its values exactly: if it was changed after
    `redundancy_clean`, or if pruning has broken up its groups.

    Args:
        model: a model after `redundancy_clean`, changed in place.

    Returns:
        The full names of modules that were quantized and stay unpacked.
    """
    done: dict[tuple[int, int, int], Codes | None] = {}
    left = []
    for name, module in list(model.named_modules()):
        grid = grid_left(module)
        if grid is None:
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        key = id(weight), grid.bits, grid.scale.numel()
        if key not in done:
            done[key] = encode(weight, grid)
        codes = done[key]
        if codes is None:
            left.append(name)
        else:
            _hold(module, codes)
    return left


@torch.no_grad()
def unpack_weights(model: nn.Module) -> None:
    """Turn packed weights back into ordinary parameters with the same values."""
    made: dict[int, nn.Parameter] = {}
    for _, module in list(packed_modules(model)):
        key = module.weight_codes.data_ptr()
        if key not in made:
            made[key] = nn.Parameter(module.weight)
        for name in (_CODES, _SCALE, _ZERO, _SPEC):
            del module._buffers[name]
        module.__class__ = _plain(module)  # type: ignore[assignment]
        module.register_parameter("weight", made[key])


def compute_in_integers(model: nn.Module) -> list[str]:
    """Let packed linear layers multiply integers; return the layers that still use floating point.

    A linear layer can do so if its weight and input are symmetric and have at most 8 bits, with a
    scale for the whole weight or for equal numbers of rows. It does so on CPUs, in evaluation with
    gradients off. The sums are exact, so outputs differ by the rounding of floating-point sums.

    Args:
        model: a model after `pack_weights` or `load_packed`, changed in place.

    Returns:
        The full names of the other packed linear layers and convolutions.
    """
    left = []
    for name, module in packed_modules(model):
        if isinstance(module, PackedQuantizedLinear) and _has_integers(module):
            module.in_integers = True
        elif not isinstance(module, PackedEmbedding):
            left.append(name)
    return left


def _has_integers(module: PackedQuantizedLinear) -> bool:
    layout, rule = module.layout, module.compression.activation
    if rule is None or not rule.symmetric or module.weight_zero is not None:
        return False
    # Sums of more products might not fit 32 bits.
    fits = layout.bits <= 8 and layout.columns < 2**17
    return fits and layout.shape[0] % layout.groups == 0


def packed_modules(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Yield the full names of a model's packed modules, and the modules."""
    for name, module in model.named_modules():
        if isinstance(module, Packed):
            yield name, module


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict with packed weights into a model whose weights are not packed yet.

    Raises:
        ModelError: a packed weight has no module in the model, or one of another shape.
        RuntimeError: other names or shapes differ, as `load_state_dict` says.
    """
    layouts = {
        key.removesuffix(f".{_SPEC}"): CodeLayout.of(value)
        for key, value in state.items()
        if key.endswith(f".{_SPEC}")
    }
    for name, layout in layouts.items():
        _expect_fit(model, name, layout)
    shared: dict[int, Codes] = {}
    for name, layout in layouts.items():
        codes = state[f"{name}.{_CODES}"]
        if codes.data_ptr() not in shared:
            shared[codes.data_ptr()] = _like(state, name, layout)
        module = model.get_submodule(name)
        if not isinstance(module, Packed):
            _hold(module, shared[codes.data_ptr()])
    model.load_state_dict(state)


def _like(state: Mapping[str, Tensor], name: str, layout: CodeLayout) -> Codes:
    packed, scale, zero = (state.get(f"{name}.{part}") for part in (_CODES, _SCALE, _ZERO))
    assert packed is not None
    assert scale is not None
    empty = None if zero is None else torch.empty_like(zero)
    return Codes(torch.empty_like(packed), layout, torch.empty_like(scale), empty)


def _expect_fit(model: nn.Module, name: str, layout: CodeLayout) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ModelError(
            f"{name}.weight is packed, but {type(model).__name__} has no module of this name"
        ) from None
    if not isinstance(module, Packed) and type(module) not in _KINDS:
        raise ModelError(
            f"{name}.weight is packed, but the module is {type(module).__name__}; expected Linear,"
            " Conv2d or Embedding"
        )
    weight = module.weight
    assert isinstance(weight, Tensor)
    if tuple(weight.shape) != layout.shape:
        raise ModelError(
            f"{name}.weight has the shape {layout.shape} in the packed file, and"
            f" {tuple(weight.shape)} in this model; build the model with the saved sizes"
        )


def _hold(module: nn.Module, codes: Codes) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    device = weight.device
    del module._parameters["weight"]
    if hasattr(module, _GRID):
        delattr(module, _GRID)
    module.__class__ = _KINDS[type(module)]
    assert isinstance(module, Packed)
    module.layout = codes.layout
    zero = None if codes.zero is None else codes.zero.to(device)
    module.register_buffer(_CODES, codes.packed.to(device))
    module.register_buffer(_SCALE, codes.scale.to(device))
    module.register_buffer(_ZERO, zero)
    module.register_buffer(_SPEC, codes.layout.as_tensor())


def _plain(module: Packed) -> type[nn.Module]:
    found = next(plain for plain, kind in _KINDS.items() if kind is type(module))
    del module.layout
    module.__dict__.pop("in_integers", None)
    return found
