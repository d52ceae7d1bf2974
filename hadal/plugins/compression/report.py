"""Report of a model's compression: techniques, bits, sparsity and bytes of each module."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hadal.plugins.compression.layers import Compressed, compressible, mask_name, score_name
from hadal.plugins.compression.packed import Packed, grid_left
from hadal.plugins.compression.pruning import BLOCK_SCORES
from hadal.plugins.compression.shrinking import pruned_by
from hadal.units import shown_nbytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_BEFORE = "_hadal_nbytes_before"


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module of a report."""

    name: str
    techniques: tuple[str, ...]
    """Sections of `compression_training` that act on it, and `packed`."""
    bits: int | None
    """Bits of the weight now; None if it is not quantized, or not yet."""
    input_bits: int | None
    """Bits of the input now."""
    sparsity: float | None
    """Fraction of zeros in the weight that forwards use; None if it is sharded over ranks."""
    nbytes_before: int
    """Bytes of its weight and bias before anything was removed or packed."""
    nbytes_after: int
    """The same, now."""


@dataclass(frozen=True, slots=True)
class CompressionReport:
    """All modules with a weight that techniques know, and the bytes of the whole model."""

    rows: tuple[ModuleRow, ...]
    nbytes_before: int
    nbytes_after: int

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        """Return a table of the compressed modules, with the whole model in the last line."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, show_footer=True)
        made.add_column("module", footer="whole model", overflow="fold")
        made.add_column("techniques", overflow="fold")
        for name in ("bits", "inputs", "zeros"):
            made.add_column(name, justify="right", no_wrap=True)
        before, after = shown_nbytes(self.nbytes_before), shown_nbytes(self.nbytes_after)
        made.add_column("before", footer=before, justify="right", no_wrap=True)
        made.add_column("after", footer=after, justify="right", no_wrap=True)
        for row in self.rows:
            made.add_row(
                row.name,
                ", ".join(row.techniques),
                _shown(row.bits),
                _shown(row.input_bits),
                "" if row.sparsity is None else f"{100 * row.sparsity:.1f} %",
                shown_nbytes(row.nbytes_before),
                shown_nbytes(row.nbytes_after),
            )
        return made

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def compression_report(model: nn.Module) -> CompressionReport:
    """Return a report of a model's compression so far; printing it shows a table.

    Modules without a technique and without a change of size are left out.

    Args:
        model: a model or its engine, before or after `redundancy_clean` and `pack_weights`.
    """
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    before: Mapping[str, int] = getattr(inner, _BEFORE, {})
    rows = []
    for name, module in inner.named_modules():
        if compressible(module):
            row = _row(name, module, before.get(name))
            if row.techniques or row.nbytes_before != row.nbytes_after:
                rows.append(row)
    after = _nbytes_of_model(inner)
    return CompressionReport(tuple(rows), before.get("", after), after)


def note_sizes(model: nn.Module) -> None:
    """Record a model's sizes before anything is removed, unless they are recorded already."""
    if not hasattr(model, _BEFORE):
        sizes = {name: _nbytes(part) for name, part in model.named_modules() if compressible(part)}
        setattr(model, _BEFORE, {"": _nbytes_of_model(model), **sizes})


def _row(name: str, module: nn.Module, before: int | None) -> ModuleRow:
    techniques, bits, input_bits = [], None, None
    grid = grid_left(module)
    if grid is not None:
        techniques, bits = ["weight_quantization"], grid.bits
    if isinstance(module, Packed):
        techniques, bits = ["weight_quantization", "packed"], module.layout.bits
    if isinstance(module, Compressed):
        state = module.compression
        if state.weight is not None:
            techniques.append("weight_quantization")
            bits = None if state.bits is None else state.bits.bits
        if state.activation is not None:
            techniques.append("activation_quantization")
            input_bits = state.activation.bits if state.activation_is_on else None
        techniques += [rule.technique for rule in state.prunings]
    techniques += pruned_by(module)
    after = _nbytes(module)
    sparsity = _sparsity(module)
    return ModuleRow(name, tuple(techniques), bits, input_bits, sparsity, before or after, after)


@torch.no_grad()
def _sparsity(module: nn.Module) -> float | None:
    if not isinstance(module, Packed):
        held = module.weight
        assert isinstance(held, Tensor)
        if held.untyped_storage().nbytes() < held.numel() * held.element_size():
            return None  # stage 3 has it in shards
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, Compressed) and not _draws(module):
        weight = module.effective_weight()
    return 1.0 - int(weight.count_nonzero()) / max(weight.numel(), 1)


def _draws(module: Compressed) -> bool:
    """Return whether an effective weight draws random numbers, which are reserved for training."""
    rule = module.compression.weight
    return rule is not None and rule.stochastic


def _nbytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in _kept(module))


def _nbytes_of_model(model: nn.Module) -> int:
    # Tensors that modules share count once; stage 3 has no state dict, only sizes.
    own = dict.fromkeys(value for module in model.modules() for value in _kept(module))
    return sum(value.numel() * value.element_size() for value in own)


def _kept(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's own tensors, without what `redundancy_clean` removes."""
    temporary = _temporary(module) if isinstance(module, Compressed) else ()
    for values in (module._parameters, module._buffers):
        for name, value in values.items():
            if value is not None and name not in temporary:
                yield value


def _temporary(module: Compressed) -> set[str]:
    techniques = [rule.technique for rule in module.compression.prunings]
    return {BLOCK_SCORES} | {make(t) for t in techniques for make in (mask_name, score_name)}


def _shown(bits: int | None) -> str:
    return "" if bits is None else str(bits)
