"""`hadal compress`: quantized weights of a trained model in fewer bytes."""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hadal.cli.parser import add_actions, add_command, add_flag, integer
from hadal.cli.terminal import CommandError, show, table
from hadal.errors import few, needed
from hadal.units import shown_nbytes, shown_numel

_LAYOUTS = ("hadal", "compressed-tensors", "torchao")
_ROUNDS = 10


def add_to(group: Any) -> None:
    """Add the subcommand and its own."""
    own = add_actions(
        group,
        "compress",
        help="Write a trained model with quantized weights in fewer bytes",
        description="Write a trained model with quantized weights in fewer bytes.",
        examples=("hadal compress export exported small --config ds_config.json",),
    )
    exporting = add_command(
        own,
        "export",
        help="Quantize the weights of a model of transformers, and write them as integers",
        description="Quantize the weights of a model of transformers by compression_training, or to"
        " a number of bits, and write them as integers; then compare size, latency and accuracy"
        " with the original model.",
        examples=(
            "hadal compress export exported small --config ds_config.json --eval checks:accuracy",
            "hadal compress export exported small --bits 8 --layout compressed-tensors",
        ),
    )
    add_flag(exporting, "model MODEL", "Folder that from_pretrained of transformers reads", Path)
    add_flag(exporting, "out OUT", "The directory to write to", Path)
    how = exporting.add_mutually_exclusive_group(required=True)
    add_flag(
        how,
        "--config FILE",
        "The ds_config.json of the training, whose weight_quantization is applied",
        Path,
    )
    add_flag(
        how,
        "--bits N",
        "Quantize all linear layers, convolutions and embeddings of torch to N bits, one"
        " scale per weight",
        integer(ge=1, le=8),
    )
    add_flag(
        exporting,
        "--layout",
        "Format of the files: for hadal.compression.load_packed, or for from_pretrained of"
        " transformers with compressed-tensors or torchao",
        default="hadal",
        choices=_LAYOUTS,
    )
    add_flag(
        exporting,
        "--eval MODULE:FUNCTION",
        "A function that takes the model and returns its accuracy",
    )
    exporting.set_defaults(run=run_export)


def run_export(parsed: argparse.Namespace) -> int:
    """Write the model, and compare it with the one before."""
    from hadal.plugins.compression import init_compression, pack_weights, redundancy_clean
    from hadal.plugins.compression.export import export_packed

    if parsed.out.resolve() == parsed.model.resolve():
        raise CommandError(f"{parsed.out} holds the model itself; pass another directory for OUT")
    evaluate = None if parsed.eval is None else _function(parsed.eval)
    model = _model(parsed.model)
    before = copy.deepcopy(model)
    wishes = _weights_only(parsed.config) if parsed.bits is None else _all_linear(parsed.bits)
    redundancy_clean(init_compression(model, wishes), wishes)
    left = pack_weights(model)
    left += export_packed(model, parsed.out, parsed.layout)
    rows = table("", "before", "after", right=("before", "after"))
    for name, values in _measured(before, model, evaluate).items():
        rows.add_row(name, *values)
    show(f"wrote {parsed.out}")
    if left:
        show(f"not packed: {few(left)}")
    for line in _not_quantized(model):
        show(line)
    show(rows)
    return 0


def _model(folder: Path) -> Any:
    transformers = needed(
        "transformers",
        "hadal compress",
        instead="call hadal.compression.pack_weights and save_packed in a program of your own",
    )
    from hadal.plugins.compression import register_with_transformers

    register_with_transformers()
    if not (folder / "config.json").is_file():
        raise CommandError(
            f"{folder} has no config.json; pass a folder that save_pretrained wrote, or that"
            " hadal checkpoint export wrote for a model of transformers"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise CommandError(
            f"{folder}/config.json names the architectures {names}; expected a class of"
            " transformers"
        )
    return kind.from_pretrained(folder).eval()


def _weights_only(path: Path) -> dict[str, Any]:
    """Return the weight quantization of a configuration."""
    from hadal.plugins.compression.compress import section_of

    section = section_of(path)
    if not section.weight_quantization.is_on:
        raise CommandError(
            f"{path}: compression_training.weight_quantization is not on; switch it on, or pass"
            " --bits"
        )
    shown = section.weight_quantization.model_dump(mode="json", exclude_unset=True)
    return {"compression_training": {"weight_quantization": shown}}


def _all_linear(bits: int) -> dict[str, Any]:
    shared = {"enabled": True, "quantize_weight_in_forward": True}
    group = {"params": {"start_bits": bits, "target_bits": bits}, "modules": ["*"]}
    section = {"shared_parameters": shared, "different_groups": {"all": group}}
    return {"compression_training": {"weight_quantization": section}}


def _not_quantized(model: Any) -> Iterator[str]:
    """Yield a line for each class of modules whose weights were not quantized, with the reason."""
    from hadal.plugins.compression.layers import compressible, why_not
    from hadal.plugins.compression.packed import Packed

    found: dict[tuple[str, str], list[int]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, Packed) or weight is None or weight.dim() < 2:
            continue
        reason = why_not(module) or "no group of the configuration names them"
        if not compressible(module):
            reason = "only torch's Linear, Conv2d and Embedding can be"
        found.setdefault((type(module).__name__, reason), []).append(weight.numel())
    for (name, reason), sizes in found.items():
        elements = f"{shown_numel(sum(sizes))} elements"
        yield f"not quantized: {len(sizes)} {name} ({elements}): {reason}"


def _function(name: str) -> Callable[[Any], float]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Callable[[Any], float] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"--eval {name}: {error}; expected MODULE:FUNCTION") from error
    return found


def _measured(
    before: Any, after: Any, evaluate: Callable[[Any], float] | None
) -> dict[str, tuple[str, str]]:
    from hadal.plugins.compression import compression_report

    sizes = [compression_report(each).nbytes_after for each in (before, after)]
    rows = {"size": tuple(shown_nbytes(size) for size in sizes)}
    times = _latencies(before, after)
    rows["forward on this machine"] = tuple(f"{1000 * each:.1f} ms" for each in times)
    if evaluate is not None:
        rows["accuracy"] = tuple(f"{evaluate(each):.4g}" for each in (before, after))
    return {name: (values[0], values[1]) for name, values in rows.items()}


def _latencies(*models: Any) -> list[float]:
    """Return the shortest forward of each, measured in alternating order."""
    import torch

    best = [float("inf")] * len(models)
    inputs = models[0].dummy_inputs
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for index, model in enumerate(models):
                begin = time.perf_counter()
                model(**inputs)
                best[index] = min(best[index], time.perf_counter() - begin)
    return best
