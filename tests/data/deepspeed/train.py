"""Trains with DeepSpeed: saves after three updates, or goes on from a universal checkpoint.

A rank of it: `train.py FOLDER KIND STAGE DTYPE FIRST LAST [saves]`, with the numbers of the first
update and of the one after the last. `losses.json` gets the mean loss of every update.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def train(
    folder: str, kind: str, stage: int, dtype: str, steps: range, *, saves: bool
) -> list[float]:
    import deepspeed
    import deepspeed.pipe
    import torch
    import toy
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # it refuses before it tries
    # The universal format has one name for each expert, so all of them are then on every rank.
    size = 2 if saves or kind == "pipeline" else 1
    model = toy.model_of(kind, deepspeed.moe.layer.MoE, deepspeed.pipe, size)
    config = toy.config_of(stage, dtype)
    config["gradient_accumulation_steps"] = 1 + (kind == "pipeline")
    config["optimizer"]["params"]["torch_adam"] = True  # its own is compiled first, for minutes
    # This rounds before it adds the bias.
    config["zero_optimization"]["memory_efficient_linear"] = False
    config["checkpoint"] = {"load_universal": not saves}
    groups = [{**group, "name": str(n)} for n, group in enumerate(toy.groups_of(model))]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if not saves:
        load(engine, folder, stage)
    losses = []
    for step in steps:
        if step == toy.TRAINED and saves:
            engine.save_checkpoint(folder)
        losses.append(toy.update(engine, step, torch.distributed.get_world_size()))
    return losses


def load(engine: Any, folder: str, stage: int) -> None:
    inner = engine.optimizer.optimizer
    decays = [group["weight_decay"] for group in inner.param_groups]
    engine.load_checkpoint(folder)
    if stage == 3:  # its load makes one of all groups; docs/from_deepspeed.md
        for group, decay in zip(inner.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for state in inner.state.values():
            state["step"] = state["step"].clone()


if __name__ == "__main__":
    folder, kind, stage, dtype, first, last, *more = sys.argv[1:]
    losses = train(folder, kind, int(stage), dtype, range(int(first), int(last)), saves=bool(more))
    if os.environ["RANK"] == "0":
        Path(folder, "losses.json").write_text(json.dumps(losses))
    import torch

    torch.distributed.barrier()
    os._exit(0)  # threads of its own sometimes abort a plain exit
