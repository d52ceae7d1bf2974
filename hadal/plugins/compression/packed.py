"""Modules that store their weight as integers of a few bits, and dequantize it in each forward.

`module.weight` is the dequantized weight, bit for bit as `redundancy_clean` left it; it is no
longer a parameter, and cannot be trained. The module's other parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.errors import ModelError
from hadal.plugins.compression.layers import CompressedConv2d, CompressedEmbedding, CompressedLinear
from hadal.plugins.compression.packing import (
    CodeLayout,
    Codes,
    Grid,
    encode,
    levels_of,
    scale_of_rows,
    signed_levels,
)
from hadal.plugins.compression.quantizers import symmetric_levels

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
