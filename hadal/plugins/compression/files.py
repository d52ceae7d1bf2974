"""Save a model with packed weights in a directory with a safetensors file, and load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hadal.errors import ModelError, UsageError
from hadal.plugins.compression.halves import with_zeros, without_zeros
from hadal.plugins.compression.layers import Compressed, RunningRange, change, compressed_modules
from hadal.plugins.compression.packed import load_state
from hadal.plugins.compression.rules import ActivationRule
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
    changed.compression.activation = rule
    changed.compression.activation_is_on = True
    if rule.static and changed.activation_quantizer is None:
        mode = "symmetric" if rule.symmetric else "asymmetric"
        changed.activation_quantizer = RunningRange(quant_mode=mode).train(module.training)


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
