"""Packed models in the formats of other libraries."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import UsageError
from hadal.plugins.compression.files import FILE, distinct, save_configuration, save_packed
from hadal.plugins.compression.packed import Packed, packed_modules
from hadal.plugins.compression.packing import levels_of

LAYOUTS = ("hadal", "compressed-tensors", "torchao")
_BUFFERS = ("codes", "scale", "zero", "spec")


@torch.no_grad()
def export_packed(model: nn.Module, folder: str | Path, layout: str = "hadal") -> list[str]:
    """Write a packed model into a folder; return the modules whose weights were written unpacked.

    `load_packed` reads the layout `hadal`, which holds everything. `from_pretrained` of
    transformers reads `compressed-tensors` if that package is installed: symmetric weights of
    linear layers as 4-bit or 8-bit integers with a scale per row or slice of a row, the values
    unchanged. `torchao` is the same for torchao, with one byte per element. Weights that these two
    cannot express are written unpacked, and inputs are not quantized.

    Args:
        model: a model after `pack_weights`; for layouts but `hadal` one of transformers.
        folder: is created if it does not exist.
        layout: one of `LAYOUTS`.

    Raises:
        UsageError: the layout is unknown, its package is not installed, the model is not one of
            transformers, no weight is packed, or only `hadal` can store the shapes of the model.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if not any(packed_modules(model)):
        raise UsageError(
            f"{type(model).__name__} has no packed weights; call redundancy_clean and pack_weights"
            " before"
        )
    if layout == "hadal":
        save_packed(model, folder)
        return []
    if layout == "torchao":
        return _torchao(model, Path(folder))
    return _compressed_tensors(model, Path(folder))


def _compressed_tensors(model: nn.Module, folder: Path) -> list[str]:
    package = _needed("compressed_tensors.compressors", "compressed-tensors")
    state, packed, left = _parts(model, "compressed-tensors")
    groups: dict[tuple[int, int | None], list[str]] = {}
    for name, (module, slice_size) in packed.items():
        bits = 4 if module.layout.bits <= 4 else 8
        whole_rows = slice_size == module.layout.columns
        groups.setdefault((bits, None if whole_rows else slice_size), []).append(name)
        state |= _integers(name, module, bits, package)
    _write(model, folder, distinct(state)[0], {}, _description(groups))
    return left


def _torchao(model: nn.Module, folder: Path) -> list[str]:
    quantization: Any = _needed("torchao.quantization", "torchao")
    core: Any = _needed("torchao.core.config", "torchao")
    safetensors: Any = _needed("torchao.prototype.safetensors.safetensors_support", "torchao")
    state, packed, left = _parts(model, "torchao")
    tensors, _ = distinct(state)
    for name, (module, slice_size) in packed.items():
        levels, scale = _levels_and_scale(module)
        tensors[f"{name}.weight"] = quantization.IntxUnpackedToInt8Tensor(
            qdata=levels,
            scale=scale,
            zero_point=torch.zeros_like(scale, dtype=torch.int8),
            target_dtype=torch.int8,
            block_size=[1, slice_size],
            dtype=scale.dtype,
            activation_quantization=None,
        )
    flat, notes = safetensors.flatten_tensor_state_dict(tensors)
    kind = core.config_to_dict(quantization.IntxWeightOnlyConfig())
    description = {"quant_method": "torchao", "quant_type": {"default": kind}}
    _write(model, folder, flat, notes, description)
    return left


def _parts(
    model: nn.Module, layout: str
) -> tuple[dict[str, Tensor], dict[str, tuple[Packed, int]], list[str]]:
    """Return unpacked tensors, packed modules with their slice size, and other names."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise UsageError(
            f"{layout} needs a model of transformers, whose config.json defines how to load it;"
            f" {type(model).__name__} has none: use the layout hadal"
        )
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"the configuration of {type(model).__name__} already has a quantization_config, with"
            f" the shapes that pruning left, and {layout} would replace it: use the layout hadal"
        )
    state = dict(model.state_dict())
    packed: dict[str, tuple[Packed, int]] = {}
    left = []
    for name, module in packed_modules(model):
        for part in _BUFFERS:
            state.pop(f"{name}.weight_{part}", None)
        slice_size = _slice_size(module)
        if slice_size is None:
            state[f"{name}.weight"] = module.weight
            left.append(name)
        else:
            packed[name] = module, slice_size
    return state, packed, left


def _write(
    model: nn.Module,
    folder: Path,
    tensors: dict[str, Tensor],
    notes: dict[str, str],
    description: dict[str, Any],
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt", **notes})
    save_configuration(model, folder)
    path = folder / "config.json"
    told = json.loads(path.read_text("utf-8"))
    told["quantization_config"] = description
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", "utf-8")


def _slice_size(module: Packed) -> int | None:
    """Return how many elements of a row share a scale; None if the layout cannot express it."""
    layout = module.layout
    rows, groups = layout.shape[0], layout.groups
    fits = isinstance(module, nn.Linear) and module.weight_zero is None and layout.bits <= 8
    if not fits or (rows % groups and groups % rows):
        return None
    return layout.columns // max(1, groups // rows)


def _integers(name: str, module: Packed, bits: int, package: ModuleType) -> dict[str, Tensor]:
    levels, scale = _levels_and_scale(module)
    found = {f"{name}.weight_scale": scale}
    if bits == 8:
        return {**found, f"{name}.weight": levels}
    return {
        **found,
        f"{name}.weight_packed": package.pack_to_int32(levels, bits),
        f"{name}.weight_shape": torch.tensor(module.layout.shape),
    }


def _levels_and_scale(module: Packed) -> tuple[Tensor, Tensor]:
    """Return a weight's integers (int8), and a scale for each slice of its rows."""
    layout = module.layout
    levels = levels_of(module.weight_codes, layout, torch.float32).to(torch.int8)
    rows = layout.shape[0]
    scale = module.weight_scale.repeat_interleave(max(1, rows // layout.groups)).view(rows, -1)
    return levels, scale


def _description(groups: dict[tuple[int, int | None], list[str]]) -> dict[str, Any]:
    formats = {8: "int-quantized", 4: "pack-quantized"}
    found = {}
    for index, ((bits, size), names) in enumerate(groups.items()):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if size is None else "group",
            "group_size": size,
        }
        found[f"group_{index}"] = {
            "targets": names,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": formats[bits],
        }
    used = {formats[bits] for bits, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": used.pop() if len(used) == 1 else "mixed-precision",
        "ignore": [],
        "config_groups": found,
    }


def _needed(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the layout {package} needs the package {package}, which cannot be imported"
            f" ({error}); pip install {package}, or use the layout hadal"
        ) from error
