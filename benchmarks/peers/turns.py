"""Steps with and without offload in turns, in one process: ``python -m peers.turns JOB``, a rank.

Two engines run on the same machine at the same time, so other work affects both equally.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from peers.contestants import Trainer, import_starter, join_group
from peers.model import build_batches, build_model
from peers.settings import Contestant, Workload

_WAYS = ("without", "with")


def _measure(
    trainers: dict[str, Trainer], workload: Workload, turns: int
) -> dict[str, dict[str, list[float]]]:
    """Wall and processor seconds of each step; every other turn runs in reverse."""
    batches = build_batches(workload, dist.get_rank())
    found: dict[str, dict[str, list[float]]] = {
        way: {"clock": [], "processor": []} for way in _WAYS
    }
    for turn in range(workload.warmup + turns):
        for way in _WAYS[:: -1 if turn % 2 else 1]:
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            trainers[way].step(batches)
            found[way]["processor"].append(time.process_time() - processor)
            found[way]["clock"].append(time.perf_counter() - clock)
    return {
        way: {kind: seconds[workload.warmup :] for kind, seconds in kinds.items()}
        for way, kinds in found.items()
    }


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    workload = Workload(**job["workload"])
    start = import_starter("hadal")
    join_group(workload)
    trainers = {
        way: start(build_model(workload), Contestant(**job[way]), workload) for way in _WAYS
    }
    result = _measure(trainers, workload, job["turns"])
    path = Path(job["output"]) / f"rank{os.environ['RANK']}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").replace(path)
    for trainer in trainers.values():
        trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
