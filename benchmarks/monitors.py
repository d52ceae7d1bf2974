"""The cost of monitors, report and profiler in a training step of 91 M parameters.

    torchrun --nproc-per-node 2 benchmarks/monitors.py

Engines of one model take their steps in turns, so that other work on the machine slows all equally.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from peers.model import build_batches, build_model
from peers.settings import Workload

import hadal


def _config(folder: str, name: str, profile_step: int) -> dict[str, Any]:
    """A configuration: with nothing, with monitors and the report, or with the profiler."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
    }
    place = {"enabled": True, "output_path": folder, "job_name": name}
    if name == "monitors and report":
        config |= {"csv_monitor": place, "tensorboard": place}
        config["jsonl_monitor"] = {**place, "report": True}
    if name == "profiler":
        file = os.path.join(folder, "profile.txt")
        profiler = {"enabled": True, "profile_step": profile_step, "output_file": file}
        config["flops_profiler"] = profiler
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(layers=options.layers, width=options.width)
    (batch,) = build_batches(workload, dist.get_rank())
    names = ("nothing", "monitors and report", "profiler")
    middle = options.steps // 2
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared)
        (folder,) = shared
        engines = {}
        for name in names:
            config = _config(folder, name, middle)
            engines[name] = hadal.initialize(model=build_model(workload), config=config)[0]
        for number in range(options.steps + 2):
            for name in names if number % 2 == 0 else reversed(names):
                dist.barrier()
                began = time.perf_counter()
                engines[name].backward(engines[name](batch))
                engines[name].step()
                times[name].append(time.perf_counter() - began)
        for engine in engines.values():
            engine.destroy()
    if dist.get_rank() == 0:
        usual = median(times["nothing"][2:])
        ratios = [a / b for a, b in zip(times[names[1]], times[names[0]], strict=True)][2:]
        print(f"a step with nothing: {1e3 * usual:.1f} ms")
        print(
            f"with monitors and report: {median(ratios):.4f} of it (median of {len(ratios)} pairs)"
        )
        slowest = sorted(times["profiler"][2:], reverse=True)[:2]
        shown = " and ".join(f"{each / usual:.2f}" for each in slowest)
        print(f"the two steps that are profiled: {shown} of it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
