"""One rank of one contestant: ``python -m peers.worker JOB``, with the job as JSON.

Writes its measurements as JSON to the job's ``output`` folder.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from peers.contestants import Starter, Trainer, import_starter, join_group
from peers.model import build_batches, build_model
from peers.settings import Contestant, Workload

_MIB = 1 << 20
_Measured = tuple[Trainer, dict[str, Any]]


def _resident() -> float:
    """Resident memory of this process now, in MiB; 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    return int(statm.read_text().split()[1]) * resource.getpagesize() / _MIB


def _peak() -> float:
    """The peak resident memory of this process, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB


def _train(trainer: Trainer, workload: Workload, batches: list[Tensor]) -> dict[str, Any]:
    """Train for the workload's steps; return seconds after the warm-up, and all losses."""
    seconds, losses = [], []
    for _ in range(workload.warmup + workload.steps):
        dist.barrier()
        began = time.perf_counter()
        losses.append(trainer.step(batches))
        seconds.append(time.perf_counter() - began)
    return {"steps": seconds[workload.warmup :], "losses": losses}


def _measure(start: Starter, contestant: Contestant, workload: Workload) -> _Measured:
    model = build_model(workload)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batches = build_batches(workload, dist.get_rank())
    before = _resident()
    dist.barrier()
    began = time.perf_counter()
    trainer = start(model, contestant, workload)
    dist.barrier()
    init_s, after = time.perf_counter() - began, _resident()
    result = _train(trainer, workload, batches)
    result |= {
        "init_s": init_s,
        "rss_before": before,
        "rss_init": after,
        "peak": _peak(),
        "parameters": parameters,
    }
    return trainer, result


def _write(job: dict[str, Any], result: dict[str, Any]) -> None:
    path = Path(job["output"]) / f"rank{os.environ['RANK']}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").replace(path)


def main() -> None:
    job = json.loads(sys.argv[1])
    workload, contestant = Workload(**job["workload"]), Contestant(**job["contestant"])
    try:
        start = import_starter(contestant.library)
    except ImportError as error:
        _write(job, {"unavailable": str(error)})
        return
    join_group(workload)
    trainer, result = _measure(start, contestant, workload)
    _write(job, result)
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
