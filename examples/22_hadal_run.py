"""The variables that `hadal run` sets for each rank, and its reports of output and failures.

    hadal run --num_accelerators 2 examples/22_hadal_run.py --steps 30

The same line with `--hostfile hosts` starts it on all hosts of that file, and with `--dry-run` it
shows the processes without starting them. Try `--fail 1`: rank 1 raises an error, and the report
shows its traceback first, and the other rank's exit below it.
"""

import argparse
import os

import torch
from torch import nn

import hadal

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """Learn a sum; each rank prints its variables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fail", type=int, help="the rank that fails")
    args = parser.parse_args()

    hadal.init_distributed()
    rank, threads = int(os.environ["RANK"]), torch.get_num_threads()
    print(f"number {os.environ['LOCAL_RANK']} of this host, {threads} threads", flush=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, *_ = hadal.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for step in range(args.steps):
        if step == 5 and rank == args.fail:
            raise ValueError(f"a sample of rank {rank} cannot be read")
        x = torch.randn(16, 2, device=engine.device)
        loss = nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
    print(f"loss {loss.item():.2f} after {engine.global_steps} updates")


if __name__ == "__main__":
    main()
