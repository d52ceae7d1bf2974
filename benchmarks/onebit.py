"""The benefit of optimizers that send signs: bytes and time of an update, against plain Adam.

A GPT-like stack of linear layers is trained on CPU ranks at stage 0 in bf16, by each optimizer in
turn, in its last phase: after the variance is frozen. Bytes are those that a rank sends to other
ranks in an update, counted at the calls: the same on every machine. Time is the median of an update
on the slower rank; `--slow MB` delays sends to that many megabytes per second, as on a network of
that speed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import hadal
from hadal.comm.local import pairs

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 1},
    "ZeroOneAdam, every 8th": {
        "var_freeze_step": 2,
        "local_step_scaler": 1,
        "local_step_clipper": 8,
    },
}
_WARM_UP = 10


class _Wire:
    """Counts the bytes that this rank sends, and waits as long as a slow network would take."""

    def __init__(self, slow: float) -> None:
        self.nbytes = 0
        self._slow = slow
        self._start = pairs._start

    def start(self, sends: bool, tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        """Replaces `pairs._start`."""
        if sends:
            self.nbytes += tensor.nbytes
            if self._slow:
                time.sleep(tensor.nbytes / (self._slow * 1e6))
        return self._start(sends, tensor, *args, **keywords)


def _engine(options: argparse.Namespace, name: str) -> Any:
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(options.layers)]
    params = {"lr": 1e-5, "eps": 1e-4, **_OPTIMIZERS[name]}
    engine, _, _, _ = hadal.initialize(
        model=nn.Sequential(*layers),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": name.split(",")[0], "params": params},
            "zero_optimization": {"stage": 0},
        },
    )
    return engine


def _measure(options: argparse.Namespace, name: str) -> tuple[float, float]:
    """Bytes and seconds of an update."""
    engine, wire = _engine(options, name), _Wire(options.slow)
    x = torch.randn(4, options.width, dtype=torch.bfloat16)
    seconds, nbytes = [], []
    with patch.object(pairs, "_start", wire.start):
        for step in range(_WARM_UP + options.steps):
            dist.barrier()
            began, before = time.monotonic(), wire.nbytes
            engine.backward(engine(x).float().square().mean())
            engine.step()
            if step >= _WARM_UP:
                seconds.append(time.monotonic() - began)
                nbytes.append(wire.nbytes - before)
    slowest = torch.tensor(statistics.mean(seconds) if "," in name else statistics.median(seconds))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    engine.destroy()
    return statistics.mean(nbytes), float(slowest)


def _run(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first: tuple[float, float] | None = None
    for name in _OPTIMIZERS:
        found = _measure(options, name)
        first = first or found
        if rank == 0:
            print(
                f"{name:24} {found[0] / 1e6:10.3f} MB  1/{first[0] / found[0]:<6.1f}"
                f" {found[1] * 1e3:10.1f} ms  {found[1] / first[1]:.2f}"
            )
    dist.destroy_process_group()


def main() -> None:
    """Measure every optimizer on fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="measured updates of each optimizer")
    parser.add_argument("--slow", type=float, default=0.0, metavar="MB", help="megabytes a second")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numel = options.layers * options.width * (options.width + 1)
    print(f"{numel / 1e6:.1f} M parameters in bf16, {options.ranks} ranks: sent by one per update")
    processes.spawn(_run, (options, port), options.ranks)


if __name__ == "__main__":
    main()
