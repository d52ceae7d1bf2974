"""Packed models in files: a safetensors file of Hadal's, and the formats of other libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import ModelError, UsageError, expect_one_of, needed
from hadal.plugins.compression.layers import ActivationRule, Compressed, change, compressed_modules
from hadal.plugins.compression.masks import as_matrix, as_weight
from hadal.plugins.compression.packed import (
    CodeLayout,
    Packed,
    levels_of,
    load_state,
    pack,
    packed_modules,
    unpack,
)
from hadal.plugins.compression.shrinking import shapes_of, take_shapes

FILE = "model.safetensors"
_NOTE = "hadal_compression"


def save_packed(model: nn.Module, folder: str | Path) -> Path:
    """Write a model's state dict into a directory, and return the path of the file.

    Tensors that are shared are written once, and 2:4 weights without their zeros. The file's
    metadata records how inputs are quantized. The configuration of a transformers model is written
    next to it.

    Args:
        model: a model, usually after `pack_weights`.
        folder: is created if it does not exist.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, shared = distinct(model.state_dict())
    tensors, halves = without_zeros(model, tensors)
    inputs = {
        name: asdict(module.compression.activation)
        for name, module in compressed_modules(model)
        if module.compression.activation is not None and module.compression.activation_is_on
    }
    told = {"shared": shared, "inputs": inputs, "shapes": shapes_of(model), "halves": halves}
    note = json.dumps({"version": 1, **told})
    path = folder / FILE
    save_file(tensors, path, metadata={"format": "pt", _NOTE: note})
    save_configuration(model, folder)
    return path


def load_packed(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """Load packed weights into a model whose weights are not packed, and return the model.

    Its modules become packed, get the saved sizes, and quantize their inputs as the saved ones did.

    Args:
        model: a model of the same architecture, with the sizes before pruning; changed in place.
        source: the folder that `save_packed` wrote, its file, or a state dict. A state dict
            has no quantized inputs and no new sizes: call `init_compression` before, if
            inputs are quantized.

    Raises:
        UsageError: there is no such file, or `save_packed` did not write it.
        ModelError: a packed weight has no module in the model, or one of another shape.
        RuntimeError: other names or shapes differ, as in `load_state_dict`.
    """
    if isinstance(source, Mapping):
        load_state(model, source)
        return model
    state, note = _read(Path(source))
    take_shapes(model, note.get("shapes", {}))
    for name, settings in note["inputs"].items():
        _quantize_inputs(model, name, ActivationRule(**settings))
    load_state(model, state)
    return model


def _read(path: Path) -> tuple[dict[str, Tensor], Any]:
    from safetensors import safe_open

    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path} does not exist; pass the folder that save_packed wrote to")
    with safe_open(path, framework="pt") as file:
        note = (file.metadata() or {}).get(_NOTE)
        if note is None:
            raise UsageError(
                f"{path} has no {_NOTE} in its metadata; expected a file that save_packed wrote"
            )
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    told = json.loads(note)
    state = with_zeros(state, told.get("halves", {}))
    return {**state, **{name: state[other] for name, other in told["shared"].items()}}, told


def _quantize_inputs(model: nn.Module, name: str, rule: ActivationRule) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ModelError(
            f"{name} quantizes its inputs, but {type(model).__name__} has no module of this name"
        ) from None
    if not isinstance(module, (nn.Linear, nn.Conv2d)):
        raise ModelError(
            f"{name} quantizes its inputs, but the module is {type(module).__name__}; expected"
            " Linear or Conv2d"
        )
    changed: Compressed = change(module)
    changed.quantize_inputs(rule)
    changed.compression.activation_is_on = True


def distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor of a state dict once, and the names that are aliases of others."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if value.numel() and key in owners:
            shared[name] = owners[key]
            continue
        owners[key] = name
        tensors[name] = value.detach().cpu().contiguous()
    return tensors, shared


def save_configuration(model: nn.Module, folder: Path) -> None:
    """Write the configuration of a transformers model next to its weights, if it is one."""
    save = getattr(getattr(model, "config", None), "save_pretrained", None)
    if save is not None:
        save(folder)


# ---- 2:4-sparse weights --------------------------------------------------------------------------

# The format is that of compressed-tensors' `sparse-24-bitmask`.

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
    expect_one_of(LAYOUTS, "layout", layout)
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
    quantization = _needed("torchao.quantization", "torchao")
    core = _needed("torchao.core.config", "torchao")
    safetensors = _needed("torchao.prototype.safetensors.safetensors_support", "torchao")
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


def _needed(module: str, layout: str) -> Any:
    return needed(module, f"the layout {layout}", layout, instead="use the layout hadal")
