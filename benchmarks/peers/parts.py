"""The parts of a step, measured separately to show the distance to the limit.

As a module (``python -m peers.parts JOB``) it is one rank; all ranks measure at the same time,
so they share the machine as they do in training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peers.contestants import ADAMW, join_group
from peers.model import build_batches, build_model
from peers.settings import Workload

_BF16 = torch.bfloat16
_Maker = Callable[[], Callable[[], object]]


def _seconds(action: Callable[[], object], rounds: int) -> list[float]:
    action()
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def _compute(workload: Workload) -> Callable[[], object]:
    model = build_model(workload).to(_BF16)
    batches = build_batches(workload, dist.get_rank())

    def run() -> None:
        for batch in batches:
            model(batch).backward()
        model.zero_grad(set_to_none=True)

    return run


def _exchange(numel: int) -> Callable[[], object]:
    """Every rank sends its half to its neighbour and receives the other half."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.zeros(numel, dtype=_BF16), torch.zeros(numel, dtype=_BF16)

    def run() -> None:
        requests = [
            dist.isend(outgoing, (rank + 1) % size),
            dist.irecv(incoming, (rank - 1) % size),
        ]
        for request in requests:
            if request is not None:
                request.wait()

    return run


def _collectives(numel: int, size: int) -> dict[str, Callable[[], object]]:
    padded = -(-numel // size) * size
    whole, shard = torch.zeros(padded, dtype=_BF16), torch.zeros(padded // size, dtype=_BF16)
    return {
        "all_reduce, bf16": lambda: dist.all_reduce(whole),
        "reduce_scatter_tensor, bf16": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all_gather_into_tensor, bf16": lambda: dist.all_gather_into_tensor(whole, shard),
    }


def _collective(name: str, numel: int, size: int) -> Callable[[], object]:
    return _collectives(numel, size)[name]


def _adamw(numel: int) -> Callable[[], object]:
    values = torch.nn.Parameter(torch.zeros(numel))
    values.grad = torch.full((numel,), 1e-3)
    return torch.optim.AdamW([values], **ADAMW).step


def _copy(numel: int) -> Callable[[], object]:
    source, target = torch.zeros(numel), torch.ones(numel)
    return lambda: target.copy_(source)


def _makers(workload: Workload, numel: int) -> dict[str, tuple[int, _Maker]]:
    """For each part: the bytes it handles, and the function that prepares it."""
    share = -(-numel // workload.world_size)
    makers: dict[str, tuple[int, _Maker]] = {
        "forward and backward, bf16": (0, lambda: _compute(workload)),
        "exchange of one share, bf16": (2 * share, lambda: _exchange(share)),
        "fused AdamW on all values, fp32": (0, lambda: _adamw(numel)),
        "fused AdamW on one share, fp32": (0, lambda: _adamw(share)),
        "copy of all values, fp32": (4 * numel, lambda: _copy(numel)),
    }
    for name in _collectives(2, workload.world_size):
        makers[name] = (2 * numel, partial(_collective, name, numel, workload.world_size))
    return makers


def measure(workload: Workload) -> dict[str, dict[str, Any]]:
    """Bytes and seconds per round of each part; a part the backend lacks has no seconds."""
    model = build_model(workload)
    numel = sum(parameter.numel() for parameter in model.parameters())
    del model
    results: dict[str, dict[str, Any]] = {}
    for name, (size, make) in _makers(workload, numel).items():
        try:
            seconds = _seconds(make(), workload.steps)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            seconds = []
        results[name] = {"bytes": size, "seconds": seconds}
    return results


def main() -> None:
    job = json.loads(sys.argv[1])
    workload = Workload(**job["workload"])
    join_group(workload)
    path = Path(job["output"]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(measure(workload)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
