"""The memory and time of a loss over a large vocabulary, computed in four ways.

    python benchmarks/tiles.py              # 131,072 words, length 8,192, hidden size 256
    python benchmarks/tiles.py --hidden 4096 --device cuda --dtype bf16

Each way runs forward and backward in its own process, because peak memory belongs to a process. On
a CPU it is the growth of the process's peak; on an accelerator its allocator's figure. Inputs,
weight and their gradients, which every way needs, are counted and printed as the floor.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.plugins.sequence import TiledFusedLogitsLoss, linear_cross_entropy

WAYS = ("whole", "tiles", "linear", "torch")


def _whole(self: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x).flatten(0, 1).float(), y.flatten())


def _loss(way: str, head: nn.Linear, x: Tensor, y: Tensor, tiles: int) -> Tensor:
    if way == "whole":
        return _whole(head, x, y)
    if way == "tiles":
        return TiledFusedLogitsLoss.apply(_whole, head, x, y, None, tiles)
    if way == "linear":
        return linear_cross_entropy(x, head.weight, y)
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13's own

    flat, targets = x.flatten(0, 1), y.flatten()
    return F.linear_cross_entropy(flat, head.weight, targets, options=LinearCrossEntropyOptions())


def _peak(device: torch.device) -> float:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.accelerator.max_memory_allocated(device) / 2**30


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(0)
    head = nn.Linear(args.hidden, args.words, bias=False, device=device, dtype=dtype)
    x = torch.randn(1, args.length, args.hidden, device=device, dtype=dtype, requires_grad=True)
    y = torch.randint(args.words, (1, args.length), device=device)
    small = torch.randn(8, 8, device=device, requires_grad=True)
    (small @ small).sum().backward()
    floor = sum(one.nbytes for one in (x, head.weight)) / 2**30  # their gradients
    before = _peak(device)
    start = time.perf_counter()
    loss = _loss(args.way, head, x, y, args.tiles)
    loss.backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - start
    assert x.grad is not None and head.weight.grad is not None
    return {
        "way": args.way,
        "GiB": round(_peak(device) - before, 2),
        "floor_GiB": round(floor, 2),
        "seconds": round(seconds, 2),
        "loss": loss.item(),
        "norms": [x.grad.float().norm().item(), head.weight.grad.float().norm().item()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--words", type=int, default=131072)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tiles", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ways", default="whole,tiles,linear")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(_measure(args)))
        return
    found = []
    for way in args.ways.split(","):
        words = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{way}: failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1])
    for one in found[1:]:
        assert abs(one["loss"] - found[0]["loss"]) < 1e-2, "the ways disagree"


if __name__ == "__main__":
    main()
