"""The equivalence matrix: its factors, the configuration of a cell, and how far a cell may stray.

A factor is one entry of `FACTORS`: its levels by name, each with what it adds to the configuration.
A later factor (residence tier, codec, compiled) is one more entry.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from .cover import Cell
from .models import ROWS, SUBJECTS

UPDATES = 3
MAX_NORM = 0.03  # below every cell's norms: a test says so

NOTHING: dict[str, Any] = {}

# Buckets of a few hundred elements, so that even these models fill several of them; nothing is
# kept longer than its use.
TINY = {
    "reduce_bucket_size": 200,
    "allgather_bucket_size": 200,
    "stage3_prefetch_bucket_size": 200,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
# The same, but one bucket is always on its way ahead of its use, and what is near stays.
AHEAD = {
    **TINY,
    "stage3_prefetch_bucket_size": 1,
    "stage3_max_live_parameters": 400,
    "stage3_max_reuse_distance": 200,
}
WIDE = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "stage": {f"stage{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "precision": {
        "fp32": NOTHING,
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "bf16wide": WIDE,
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    },
    "accumulation": {
        "acc1": {"gradient_accumulation_steps": 1},
        "acc3": {"gradient_accumulation_steps": 3},
    },
    "clipping": {"free": {"gradient_clipping": 0.0}, "clip": {"gradient_clipping": MAX_NORM}},
    # Four ranks are two nodes of two: with a second copy of the weights on each, or with a copy of
    # all model states.
    "world": {
        "w1": NOTHING,
        "w2": NOTHING,
        "w3": NOTHING,
        "w4hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
        "w4mics": {"zero_optimization": {"mics_shard_size": 2}},
    },
    "model": {name: NOTHING for name in SUBJECTS},
    "keys": {
        "tiny": {"zero_optimization": TINY},
        "ahead": {"zero_optimization": AHEAD},
        "large": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        "default": NOTHING,
    },
    # Not Lion: its update is a sign, which any rounding of a small gradient can turn around.
    "optimizer": {"adamw": NOTHING, "sgd": NOTHING, "adagrad": NOTHING, "uncorrected": NOTHING},
    # When the mean is divided, in which form it travels, and when: at every stage the same numbers.
    "wire": {
        "usual": NOTHING,
        "before": {
            "prescale_gradients": True,
            "zero_optimization": {"reduce_scatter": False, "grad_hooks": False},
        },
        "parts": {
            "gradient_predivide_factor": 2.0,
            "zero_optimization": {
                "reduce_scatter": False,
                "overlap_comm": False,
            },
        },
        "rows": {"sparse_gradients": True},
    },
}
LEVELS: dict[str, list[str]] = {factor: list(levels) for factor, levels in FACTORS.items()}
NODES = ["w4hpz", "w4mics"]
# What the pairwise cover is made of: nodes mean something at stage 3 only.
COVERED = {**LEVELS, "world": [level for level in LEVELS["world"] if level not in NODES]}

# Optimizers that look at whole parameters are no levels: a rounding of a small singular value, or
# of a gradient that is almost zero, changes their whole update, so the bounds of the matrix do not
# hold for them. What holds is asked in `test_by_parameter.py`.
BY_PARAMETER: dict[str, tuple[str, dict[str, Any]]] = {
    "lamb": ("Lamb", {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.01}),
    "muon": ("Muon", {"lr": 0.02, "adam_lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}),
    "adafactor": ("Adafactor", {"lr": 0.02, "weight_decay": 0.01}),
}

# Cells outside the pairwise cover that failed once; they run always, with what they showed.
ALWAYS = {
    # A rank waited for a reduction of a bucket that the other, on another branch, had not started.
    "stage3-fp32-acc3-clip-w2-branches-tiny-sgd",
}

# How a model may be compiled: by the engine, or as a whole before the engine sees it.
COMPILATIONS = ("engine.compile", "torch.compile")
# Cells that run once more, compiled. No factor of the matrix: a compilation takes about a second.
COMPILED = (
    "stage0-bf16-acc1-clip-w2-tied-tiny-adamw-usual",
    "stage1-fp32-acc3-clip-w2-frozen-tiny-adamw-usual",
    "stage1-autocast-acc3-free-w2-scalars-large-sgd-usual",
    "stage2-fp32-acc3-free-w2-unused-tiny-sgd-usual",
    "stage3-fp32-acc3-clip-w2-tied_matmul-ahead-adamw-usual",
    "stage3-fp32-acc1-free-w2-frozen-tiny-sgd-usual",
    "stage3-bf16-acc3-clip-w2-unused-default-adamw-usual",
    "stage3-autocast-acc1-clip-w2-branches-ahead-sgd-usual",
    "stage3-fp32-acc1-clip-w2-checkpointed-tiny-sgd-usual",
)


def cells_of_nodes() -> list[Cell]:
    """At stage 3, every model on either kind of node, and all other levels drawn evenly.

    What is gathered once more and early is what nodes are about: buckets are tiny.
    """
    chance = random.Random(0)
    levels = {**LEVELS, "stage": ["stage3"], "world": NODES, "keys": ["tiny", "ahead"]}
    drawn = {
        factor: chance.sample(many * len(LEVELS["model"]), k=len(LEVELS["model"]))
        for factor, many in levels.items()
    }
    return [
        {**{factor: drawn[factor][number] for factor in LEVELS}, "model": model}
        for number, model in enumerate(LEVELS["model"])
    ]


@dataclass(frozen=True)
class Departure:
    """Cells that are run otherwise than the rest, how, and why."""

    applies: Callable[[Cell], bool]
    reason: str
    settings: Mapping[str, Any]


def _is_sixteen_bit(cell: Cell) -> bool:
    return cell["precision"] != "fp32"


def _is_adam(cell: Cell) -> bool:
    return cell["optimizer"] in ("adamw", "uncorrected")


# All special treatments of single cells, with their reasons.
DEPARTURES: dict[str, Departure] = {
    "smooth AdamW in 16 bit": Departure(
        lambda cell: _is_sixteen_bit(cell) and _is_adam(cell),
        "At eps = 1e-8 AdamW's update is nearly the gradient's sign, so a rounding of a gradient "
        "that is almost zero turns a whole step around. With eps above the gradients the update is "
        "a smooth function of them: a rounding error d moves a weight by at most lr * d / eps, "
        "which is the bound that `Outcome.rounding` adds up.",
        {"eps": 0.1},
    ),
    "larger steps in 16 bit": Departure(
        _is_sixteen_bit,
        "The final weight is read in 16 bit, so it is known to u * |w| only; the learning rate is "
        "large enough for the update to stand out from that.",
        {"lr": 0.3},
    ),
    "eps for attention in fp32": Departure(
        lambda cell: (
            cell["precision"] == "fp32" and _is_adam(cell) and SUBJECTS[cell["model"]].has_attention
        ),
        "A key's bias has no influence on softmax, so its gradient is rounding noise around zero; "
        "at eps = 1e-8 the order of summation alone moves AdamW by 7e-4 of the update.",
        {"eps": 1e-4},
    ),
    "edits through GatheredParameters at stage 3": Departure(
        lambda cell: cell["stage"] == "stage3" and cell["model"] == "edited_in_place",
        "Between steps a stage-3 rank does not hold the weight, so there is nothing to edit in "
        "place; the edit goes through GatheredParameters instead.",
        {"gathered": True},
    ),
}


def departing_settings(cell: Cell) -> dict[str, Any]:
    """The changes of the table above to a cell."""
    settings: dict[str, Any] = {}
    for departure in DEPARTURES.values():
        if departure.applies(cell):
            settings.update(departure.settings)
    return settings


def id_of(cell: Cell) -> str:
    """The levels of a cell, which is also the name that pytest shows."""
    return "-".join(cell.values())


def cell_named(name: str) -> Cell:
    """The cell of an id; levels of factors that came after it are their first ones."""
    levels = name.split("-")
    rest = [known[0] for known in list(LEVELS.values())[len(levels) :]]
    return dict(zip(LEVELS, levels + rest, strict=True))


def world_of(cell: Cell) -> int:
    return int(cell["world"][1])


def stage_of(cell: Cell) -> int:
    return int(cell["stage"].removeprefix("stage"))


def accumulation_of(cell: Cell) -> int:
    return int(cell["accumulation"].removeprefix("acc"))


def max_norm_of(cell: Cell) -> float:
    return MAX_NORM if cell["clipping"] == "clip" else 0.0


def compute_dtype_of(cell: Cell) -> torch.dtype:
    if cell["precision"] in ("fp32", "autocast"):
        return torch.float32
    return torch.float16 if cell["precision"] == "fp16" else torch.bfloat16


def autocast_of(cell: Cell) -> AbstractContextManager[Any]:
    """The autocast that the forward runs under."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=cell["precision"] == "autocast")


def loss_scale_of(cell: Cell) -> float:
    return 256.0 if cell["precision"] == "fp16" else 1.0


def optimizer_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    """The optimizer's type and parameters, as the configuration and torch both spell them."""
    changed = departing_settings(cell)
    if cell["optimizer"] in BY_PARAMETER:
        return BY_PARAMETER[cell["optimizer"]]
    if cell["optimizer"] == "sgd":
        return "SGD", {"lr": changed.get("lr", 0.1), "momentum": 0.9, "weight_decay": 0.01}
    if cell["optimizer"] == "adagrad":
        # Sums of squares that start above the gradients' make the update a smooth function of them.
        return "Adagrad", {
            "lr": changed.get("lr", 0.1),
            "initial_accumulator_value": 0.01,
            "weight_decay": 0.01,
        }
    adam = {
        "lr": changed.get("lr", 0.01),
        "betas": (0.9, 0.99),
        "eps": changed.get("eps", 1e-8),
        "weight_decay": 0.01,
    }
    if cell["optimizer"] == "uncorrected":
        # Moments that are not corrected make small updates; larger steps stand out all the same.
        return "AdamW", {**adam, "lr": 3 * adam["lr"], "bias_correction": False}
    return "AdamW", adam


def steepness_of(cell: Cell, update: int) -> float:
    """The change of a weight in an update (numbered from 0) per unit of error in a gradient."""
    kind, settings = optimizer_of(cell)
    if kind == "SGD":
        return float(settings["lr"])
    if kind == "Adagrad":
        return float(settings["lr"]) / math.sqrt(settings["initial_accumulator_value"])
    young = 1 - settings["betas"][0] ** (update + 1)
    part = 1.0 if settings.get("bias_correction", True) else young
    return float(settings["lr"] * part / settings["eps"])


def config_of(cell: Cell) -> dict[str, Any]:
    """The `ds_config` of a cell."""
    kind, params = optimizer_of(cell)
    base = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": kind, "params": {**params, **_json_betas(params)}},
    }
    overlays = [FACTORS[factor].get(level, NOTHING) for factor, level in cell.items()]
    return reduce(_merged, overlays, base)


def _json_betas(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"betas": list(params["betas"])} if "betas" in params else {}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
