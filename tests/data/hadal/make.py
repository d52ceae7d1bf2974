"""Write the checkpoints beside this file: what older versions of the library saved.

    cd tests && OMP_NUM_THREADS=1 python -m data.hadal.make NAME

`NAME` says which version runs. A checkpoint that is here is never written anew: tests show that
today's library reads it.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from engine.toys import batch_of, config_of, loss_of, model_of
from torch.utils.data import TensorDataset

import hadal

HERE = Path(__file__).parent
UPDATES = 3


def old_engine() -> tuple[Any, Any]:
    """The engine whose state was saved, as it starts, and its loader."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}
    config = config_of(1, gradient_accumulation_steps=2, bf16={"enabled": True}, scheduler=schedule)
    batches = [batch_of(step, 0) for step in range(2 * UPDATES + 4)]
    data = TensorDataset(*(torch.cat(one) for one in zip(*batches, strict=True)))
    engine, _, loader, _ = hadal.initialize(model=model_of(), config=config, training_data=data)
    return engine, loader


def train(engine: Any, batches: Any, updates: int) -> None:
    """So many updates of two micro-steps."""
    for _ in range(2 * updates):
        inputs, targets = next(batches)
        engine.backward(loss_of(engine(inputs.bfloat16()), targets))
        engine.step()


def main() -> None:
    """Train and save."""
    engine, loader = old_engine()
    train(engine, iter(loader), UPDATES)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, client_state={"updates": UPDATES})
        with tarfile.open(HERE / f"{sys.argv[1]}.tar.xz", "x:xz") as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    archive.add(path, path.relative_to(folder))


if __name__ == "__main__":
    main()
