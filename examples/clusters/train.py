r"""A program that can be stopped at any time and restarted on another number of ranks.

    hadal run --num_accelerators 2 examples/clusters/train.py \
        --deepspeed_config examples/clusters/ds_config.json --folder /tmp/clusters

`elasticity` in ds_config.json contains no batch size: Hadal chooses one that many numbers of ranks
can train. The same program runs under Slurm (`slurm.sh`), Kubernetes (`pytorchjob.yaml`), and with
`hadal run --hostfile hosts --elastic_training`, which continues without lost hosts.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hadal


def main() -> None:
    """Train from the last checkpoint, if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="for all hosts")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two updates")
    args = hadal.add_config_arguments(parser).parse_args()

    hadal.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(480, 8)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    engine, _, loader, _ = hadal.initialize(args=args, model=model, training_data=data)
    batches = hadal.RepeatingLoader(loader)
    engine.load_checkpoint(args.folder)  # nothing, the first time
    micro, times = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    if hadal.comm.get_rank() == 0:
        ranks = hadal.comm.get_world_size()
        print(f"update {engine.global_steps}: {ranks} ranks, {times} micro-batches of {micro}")

    while engine.global_steps < args.steps:
        for _ in range(times):
            x, y = (part.to(engine.device) for part in next(batches))
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        if engine.global_steps % 5 == 0:
            engine.save_checkpoint(args.folder)
        time.sleep(args.pause)
    if hadal.comm.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {engine.global_steps} updates")


if __name__ == "__main__":
    main()
