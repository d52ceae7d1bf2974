"""DeepSpeed's compiled Adam for CPUs, by itself: ``python -m peers.cpu_adam ELEMENTS THREADS``.

Makes an update for each line that it reads, and prints its seconds: from a bf16 gradient to bf16
weights, like the others.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from peers.settings import LEARNING_RATE, WEIGHT_DECAY


def main() -> None:
    numel, threads = map(int, sys.argv[1:])
    # Libraries print to stdout; only the seconds go to the parent.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    master = nn.Parameter(torch.randn(numel))
    weights = master.detach().to(torch.bfloat16)
    gradient = torch.randn(numel).mul_(1e-3).to(torch.bfloat16)
    # It requires gradients of the masters' dtype; other dtypes give NaN.
    master.grad = torch.zeros_like(master)
    optimizer = DeepSpeedCPUAdam([master], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in sys.stdin:
        began = time.perf_counter()
        master.grad.copy_(gradient)
        optimizer.step()
        weights.copy_(master.detach())
        print(time.perf_counter() - began, file=answers)


if __name__ == "__main__":
    main()
