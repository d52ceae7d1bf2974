"""One training step of a GPT-2-XL on this machine's GPUs: Hadal, a hand-written loop and FSDP2.

Steps per second, the fraction of the GPU's peak that the model's own operations reach (MFU), peak
memory and Hadal's estimate of it, and the overlap of communication with computation.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.model import Gpt, build_batches
from peers.overlap import Overlap, read_trace
from peers.report import describe_environment, markdown_table
from peers.settings import BETAS, CLIP, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Workload
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hadal
from hadal.device import current_device, memory_use, reset_peak_memory, synchronize
from hadal.device.peaks import peak_of_name
from hadal.zero import estimate

_GIB = 2**30
_LOOP, _FSDP2 = "loop", "fsdp2"
_PROFILED_STEPS = 2
_POLL_S = 0.05
_MODEL = {"layers": 48, "width": 1600, "heads": 25, "vocabulary": 50304, "sequence": 1024}


@dataclass(frozen=True)
class Finding:
    """The figures of one contestant; memory and times are those of rank 0."""

    name: str
    parameters: int
    init_s: float
    steps: list[float]
    losses: list[float]
    held_gib: float
    peak_gib: float
    estimate_gib: float
    overlap: Overlap
    overlap_share: float | None

    @property
    def step_s(self) -> float:
        return median(self.steps)


# ---- the contestants: each returns a function that makes one step and returns its loss ---------

Step = Callable[[], Tensor]


def _model(workload: Workload, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    with device:
        model = Gpt(workload)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def _hadal_step(stage: int, workload: Workload, batches: list[Tensor]) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPSILON,
                "weight_decay": WEIGHT_DECAY,
            },
        },
    }
    engine, _, _, _ = hadal.initialize(model=_model(workload, current_device()), config=config)

    def step() -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for batch in batches:
            part = engine(batch)
            engine.backward(part)
            engine.step()
            loss += part.detach() / len(batches)
        return loss

    return step


def _loop_step(workload: Workload, batches: list[Tensor]) -> Step:
    """bf16 weights, fp32 masters, torch's fused AdamW: a program without a library."""
    model = _model(workload, current_device())
    masters = [p.detach().float().clone() for p in model.parameters()]
    model.to(torch.bfloat16)
    parameters = list(model.parameters())
    trained: nn.Module = model
    unreduced: Callable[[], AbstractContextManager[None]] = nullcontext
    if workload.world_size > 1:
        replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        trained, unreduced = replica, replica.no_sync
    optimizer = torch.optim.AdamW(
        masters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step() -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for number, batch in enumerate(batches, start=1):
            with unreduced() if number < len(batches) else nullcontext():
                part = trained(batch) / len(batches)
                part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None  # every parameter is used
                master.grad = parameter.grad.float()
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(parameters, masters)
        trained.zero_grad(set_to_none=True)
        return loss

    return step


def _fsdp2_step(workload: Workload, batches: list[Tensor]) -> Step:
    """torch's fully_shard, block by block: fp32 weights cast to bf16 for the gathers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model(workload, current_device())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    sharded: Any = fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step() -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for number, batch in enumerate(batches, start=1):
            sharded.set_requires_gradient_sync(number == len(batches))
            part = model(batch) / len(batches)
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---- one contestant on one rank ----------------------------------------------------------------


def measure(name: str, workload: Workload) -> Finding:
    """Train with one contestant on this rank; all ranks call it."""
    hadal.init_distributed()
    device = current_device()
    stage = {_LOOP: 0, _FSDP2: 3}.get(name)
    starts = {_LOOP: _loop_step, _FSDP2: _fsdp2_step}
    start = starts.get(name) or partial(_hadal_step, int(name))
    batches = [batch.to(device) for batch in build_batches(workload, int(os.environ["RANK"]))]
    begun = time.perf_counter()
    step = start(workload, batches)
    synchronize(device)
    init_s = time.perf_counter() - begun
    reset_peak_memory(device)
    losses = [step() for _ in range(workload.warmup)]
    times = []
    for _ in range(workload.steps):
        synchronize(device)
        begun = time.perf_counter()
        losses.append(step())
        synchronize(device)
        times.append(time.perf_counter() - begun)
    held, _, peak = _memory(device)
    overlap = _profiled(step, device)
    with torch.device("meta"):
        counted = estimate.counted(Gpt(workload))
    stage = int(name) if stage is None else stage
    states = estimate.device_nbytes(stage, counted, estimate.JobSize(workload.world_size))
    return Finding(
        {_LOOP: "by hand", _FSDP2: _FSDP2}.get(name, f"hadal, stage {stage}"),
        counted.numel,
        init_s,
        times,
        [float(loss) for loss in losses],
        held / _GIB,
        peak / _GIB,
        states / _GIB,
        overlap,
        overlap.share,
    )


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes held now, on the host, and at most; on a CPU all are the host's."""
    use = memory_use(device)
    return (use.host, use.host, use.host) if device.type == "cpu" else (use[1], use[0], use[2])


def _profiled(step: Step, device: torch.device) -> Overlap:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    elif device.type == "xpu":
        activities.append(ProfilerActivity.XPU)
    with profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return read_trace(trace)


def model_flops(workload: Workload) -> int:
    """Operations of the model itself in one rank's step, without recomputation.

    Attention is counted in full, as is usual, though a causal kernel leaves out half of it.
    """
    with torch.device("meta"):
        model = Gpt(workload)
        batch = torch.zeros(workload.micro_batch, workload.sequence + 1, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(batch).backward()
    return int(counter.get_total_flops()) * workload.accumulation


# ---- all contestants, and the report -------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: to try it out, tiny")
    add("--processes", type=int, help="ranks; by default one for each GPU")
    add("--stages", help="ZeRO stages, as 0,3; by default 0 alone, 0,1,2,3 on several ranks")
    for name, value in _MODEL.items():
        add(f"--{name}", type=int, default=value)
    add("--micro-batch", type=int, default=8, help="sequences of a rank in one micro-step")
    add("--accumulation", type=int, default=1, help="micro-steps per step")
    add("--steps", type=int, default=10, help="measured steps")
    add("--warmup", type=int, default=3, help="unmeasured steps")
    add("--timeout", type=float, default=900.0, help="seconds one contestant may take")
    add("--peak-tflops", type=float, help="16-bit operations per second of the device, in 10^12")
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--output", type=Path, metavar="FILE", help="draw a bar chart (PNG)")
    add("--worker", help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _workload(options: argparse.Namespace, processes: int) -> Workload:
    model = {name: getattr(options, name) for name in _MODEL}
    run = {name: getattr(options, name) for name in ("accumulation", "steps", "warmup")}
    return Workload(**model, **run, micro_batch=options.micro_batch, world_size=processes)


def _run(name: str, workload: Workload, options: argparse.Namespace) -> Finding | str:
    """The figures of one contestant in its own processes, or the reason for their absence."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += ["--worker", name, "--result", str(result)]
        size = str(workload.world_size)
        variables = {"OMP_NUM_THREADS": "1", **os.environ}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        variables |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        if options.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("w") as written:
            ranks = [
                subprocess.Popen(
                    command,
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=written,
                    stderr=written,
                )
                for rank in range(workload.world_size)
            ]
            fault = _fault_of(ranks, options.timeout)
        if fault or not result.exists():
            return f"{fault}\n{log.read_text()[-2000:]}"
        told = json.loads(result.read_text())
    return Finding(**{**told, "overlap": Overlap(**told["overlap"])})


def _fault_of(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait for all ranks; stop all of them if one fails or the time is over."""
    deadline, fault = time.monotonic() + timeout, ""
    while not fault and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            fault = "a rank failed"
        elif time.monotonic() > deadline:
            fault = f"no result within {timeout:g} s"
        time.sleep(_POLL_S)
    for rank in ranks:
        rank.kill()
        rank.wait()
    return fault or ("a rank failed" if any(rank.returncode for rank in ranks) else "")


def _peak(options: argparse.Namespace) -> tuple[str, float | None]:
    """The device's name, and its 16-bit operations per second, if known."""
    if options.device == "cpu":
        return "cpu", options.peak_tflops and options.peak_tflops * 1e12
    device = current_device()
    name = str(torch.get_device_module(device).get_device_name(device))
    return name, options.peak_tflops * 1e12 if options.peak_tflops else peak_of_name(name)[0]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(finding: Finding, workload: Workload, flops: int, peak: float | None) -> list[str]:
    achieved = flops / finding.step_s
    tokens = workload.micro_batch * workload.accumulation * workload.sequence
    return [
        finding.name,
        f"{1 / finding.step_s:.3f}",
        f"{tokens / finding.step_s:.0f}",
        f"{achieved / 1e12:.2f}",
        _number(achieved / peak if peak else None, ".3f"),
        f"{finding.held_gib:.2f}",
        f"{finding.estimate_gib:.2f}",
        f"{finding.peak_gib:.2f}",
        _number(finding.overlap_share, ".2f"),
        f"{finding.init_s:.2f}",
        f"{finding.losses[-1]:.3f}",
    ]


_HEADER = ["contestant", "steps/s", "tokens/s, a rank", "TFLOP/s", "MFU", "held GiB"]
_HEADER += ["estimate GiB", "peak GiB", "overlap", "init s", "loss"]


def _draw(findings: Sequence[Finding], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[Finding], float]]] = [
        ("steps per second", lambda finding: 1 / finding.step_s),
        ("peak memory, GiB (line: states by the estimate)", lambda finding: finding.peak_gib),
    ]
    size = (12, 1.8 + 0.4 * len(findings))
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=size, constrained_layout=True)
    colours = ["tab:blue" if f.name.startswith("hadal") else "tab:gray" for f in findings]
    for axis, (name, value) in zip(axes, panels, strict=True):
        values = [value(finding) for finding in findings]
        bars = axis.barh([finding.name for finding in findings], values, color=colours)
        axis.bar_label(bars, fmt="{:,.2f}", padding=2)
        axis.set_title(name)
        axis.margins(x=0.15)
    for place, finding in enumerate(findings):
        axes[1].plot([finding.estimate_gib] * 2, [place - 0.4, place + 0.4], color="tab:red")
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _work(options: argparse.Namespace) -> int:
    workload = _workload(options, int(os.environ["WORLD_SIZE"]))
    finding = measure(options.worker, workload)
    if os.environ["RANK"] == "0":
        options.result.write_text(json.dumps(asdict(finding)))
    torch.distributed.destroy_process_group()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every contestant; return 1 if one has no figures."""
    options = _parse(arguments)
    if options.worker:
        return _work(options)
    if options.device == "gpu" and not torch.accelerator.is_available():
        print("There is no GPU here, so there is nothing to measure; --device cpu tries it out.")
        return 0
    processes = options.processes or max(1, torch.accelerator.device_count())
    workload = _workload(options, processes)
    stages = options.stages or ("0,1,2,3" if processes > 1 else "0")
    device, peak = _peak(options)
    flops = model_flops(workload)
    findings, failures = [], {}
    for name in [_LOOP, _FSDP2, *stages.split(",")]:
        found = _run(name, workload, options)
        if isinstance(found, str):
            failures[name] = found
            print(f"{name}: {found}", flush=True)
        else:
            findings.append(found)
    title = f"{processes} x {device}, {flops / 1e12:.3g} TFLOP in a step of a rank"
    print(title)
    print(markdown_table(_HEADER, [_row(f, workload, flops, peak) for f in findings]))
    if options.json:
        document: dict[str, Any] = {
            "environment": {**describe_environment(), "device": device},
            "workload": asdict(workload),
            "flops": flops,
            "peak_flops": peak,
            "contestants": [
                {**asdict(f), "step_s": f.step_s, "mfu": flops / f.step_s / peak if peak else None}
                for f in findings
            ],
            "failures": failures,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.output and findings:
        _draw(findings, title, options.output)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
