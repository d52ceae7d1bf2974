"""Write the checkpoints beside this file: what older versions of the library saved.

    PYTHONPATH=OLD OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tests/data/checkpoints/make.py NAME

`OLD` is a checkout of an older version: 306f727 was the first to write format 4, 0652087 format 5,
780e98a format 6, 6db1025 format 7, and f29c7cc format 8. With the checkpoint goes what that
version itself reports of it: weights, masters, moments, counters, and the random numbers and
batches that come next. A checkpoint that is here is never written anew: a test shows that today's
library loads it.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hadal

HERE = Path(__file__).parent
UPDATES = 3
CLIENT = {"epoch": 2, "best": float("inf"), "names": ("a", None), "ema": torch.arange(5.0)}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}},
}


def model_of() -> nn.Module:
    """A model whose weights and biases fill several buckets, with a buffer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 4))


def engine_of() -> tuple[Any, Any]:
    """The engine whose state was saved, as it starts, and its loader."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(40, 6), torch.randn(40, 4))
    engine, _, loader, _ = hadal.initialize(model=model_of(), config=CONFIG, training_data=data)
    return engine, loader


def train(engine: Any, batches: Any, updates: int) -> list[Tensor]:
    """So many updates of two micro-steps; their losses."""
    losses = []
    for _ in range(2 * updates):
        inputs, targets = next(batches)
        loss = (engine(inputs.bfloat16()).float() - targets).square().mean()
        losses.append(loss.detach())
        engine.backward(loss)
        engine.step()
    return losses


def values_of(engine: Any) -> dict[str, Tensor]:
    """Weights, buffers, masters and moments; on every rank."""
    from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"module.{name}": value.clone() for name, value in engine.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        found[f"master.{name}"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key}.{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def facts_of(engine: Any, batches: Any) -> dict[str, Any]:
    """Counters and what comes next on this rank: random numbers and a batch."""
    return {
        "counters": [engine.global_steps, engine.micro_steps, engine.global_samples],
        "lr": engine.get_lr(),
        "random": torch.rand(2).tolist(),
        "batch": next(batches)[0].tolist(),
    }


def main() -> None:
    """Train, save, and write down what this version says of it."""
    engine, loader = engine_of()
    batches = iter(loader)
    train(engine, batches, UPDATES)
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    home = Path(folder[0])
    engine.save_checkpoint(home, client_state=CLIENT)
    values, rank = values_of(engine), torch.distributed.get_rank()
    (home / f"facts_{rank}.json").write_text(json.dumps(facts_of(engine, batches)))
    contiguous = {name: value.contiguous() for name, value in values.items()}
    save_file(contiguous, home / f"expected_{rank}")
    torch.distributed.barrier()
    if rank == 0:
        with tarfile.open(HERE / f"{sys.argv[1]}.tar.xz", "x:xz") as archive:
            for path in sorted(home.rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    archive.add(path, path.relative_to(home))


if __name__ == "__main__":
    main()
