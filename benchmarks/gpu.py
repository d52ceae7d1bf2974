"""One training step of a GPT-2-XL on this machine's GPUs: Hadal, a loop by hand, FSDP2, DeepSpeed.

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
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import traces
from peers.model import Gpt, build_batches
from peers.overlap import Overlap
from peers.report import describe_environment, markdown_table
from peers.settings import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Contestant,
    Workload,
    ds_config,
)
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hadal
from hadal.device import current_device, memory_use, reset_peak_memory, synchronize
from hadal.device.inventory import peak_of_name
from hadal.zero import estimate

_GIB = 2**30
_LOOP, _FSDP2, _DEEPSPEED = "loop", "fsdp2", "deepspeed"
_PROFILED_STEPS = 2
# A batch this small leaves the device idle, so that its steps take the host's time.
_SMALL_TOKENS, _SMALL_STEPS = 128, 10
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
    reserved_gib: float
    overlap: Overlap
    overlap_share: float | None
    idle_share: float
    """The fraction of a step during which no kernel runs."""
    host_s: float
    """Seconds of a step of a tiny batch, which the host's work determines."""
    idle_share_small: float
    update: list[tuple[str, int, float]]
    """Kernels of an update: name, number and seconds, longest first."""
    update_launches: int
    update_s: float

    @property
    def step_s(self) -> float:
        return median(self.steps)


# ---- the contestants -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """Two functions that make one step."""

    compute: Callable[[list[Tensor]], Tensor]
    """Makes all forwards and backwards; returns the mean loss."""
    update: Callable[[], object]

    def step(self, batches: list[Tensor]) -> Tensor:
        loss = self.compute(batches)
        self.update()
        return loss


@dataclass(frozen=True)
class Setting:
    """The same for every contestant."""

    workload: Workload
    recomputes: bool = True
    compiles: bool = False
    is_brief: bool = False


def _model(setting: Setting, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    with device:
        model = Gpt(setting.workload)
    for block in model.blocks if setting.recomputes else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def _engine_trainer(engine: Any) -> Trainer:
    def compute(batches: list[Tensor]) -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for number, batch in enumerate(batches, start=1):
            part = engine(batch)
            engine.backward(part)
            if number < len(batches):
                engine.step()
            loss += part.detach() / len(batches)
        return loss

    return Trainer(compute, engine.step)


def _hadal(stage: int, setting: Setting) -> Trainer:
    model = _model(setting, current_device())
    config = ds_config(setting.workload, Contestant("hadal", stage, "bf16"))
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    if setting.compiles:
        engine.compile()
    return _engine_trainer(engine)


def _deepspeed(setting: Setting) -> Trainer:
    """DeepSpeed with torch's fused Adam, which needs no compiled operator."""
    import deepspeed

    model = _model(setting, current_device())
    config = ds_config(setting.workload, Contestant("deepspeed", _stage_of_peer(setting), "bf16"))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if setting.compiles:
        engine.compile()
    return _engine_trainer(engine)


def _stage_of_peer(setting: Setting) -> int:
    return 3 if setting.workload.world_size > 1 else 0


def _loop(setting: Setting) -> Trainer:
    """bf16 weights, fp32 masters, torch's fused AdamW: a program without a library."""
    workload = setting.workload
    model = _model(setting, current_device())
    masters = [p.detach().float().clone() for p in model.parameters()]
    model.to(torch.bfloat16)
    if setting.compiles:
        model.compile()
    parameters = list(model.parameters())
    trained: nn.Module = model
    unreduced: Callable[[], AbstractContextManager[None]] = nullcontext
    if workload.world_size > 1:
        replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        trained, unreduced = replica, replica.no_sync
    optimizer = torch.optim.AdamW(masters, **_ADAMW)

    def compute(batches: list[Tensor]) -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for number, batch in enumerate(batches, start=1):
            with unreduced() if number < len(batches) else nullcontext():
                part = trained(batch) / len(batches)
                part.backward()
            loss += part.detach()
        return loss

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None  # every parameter is used
                master.grad = parameter.grad.float()
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(parameters, masters)
        trained.zero_grad(set_to_none=True)

    return Trainer(compute, update)


_ADAMW: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "betas": BETAS,
    "eps": EPSILON,
    "weight_decay": WEIGHT_DECAY,
    "fused": True,
}


def _fsdp2(setting: Setting) -> Trainer:
    """torch's fully_shard, block by block: fp32 weights cast to bf16 for the gathers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model(setting, current_device())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    sharded: Any = fully_shard(model, mp_policy=policy)
    if setting.compiles:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)

    def compute(batches: list[Tensor]) -> Tensor:
        loss = batches[0].new_zeros((), dtype=torch.float32)
        for number, batch in enumerate(batches, start=1):
            sharded.set_requires_gradient_sync(number == len(batches))
            part = model(batch) / len(batches)
            part.backward()
            loss += part.detach()
        return loss

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(compute, update)


# ---- one contestant on one rank ----------------------------------------------------------------


_STARTS: dict[str, Callable[[Setting], Trainer]] = {
    _LOOP: _loop,
    _FSDP2: _fsdp2,
    _DEEPSPEED: _deepspeed,
}


def measure(name: str, setting: Setting) -> Finding:
    """Train with one contestant on this rank; all ranks call it."""
    hadal.init_distributed()
    device, workload = current_device(), setting.workload
    start = _STARTS.get(name) or partial(_hadal, int(name))
    batches = [batch.to(device) for batch in build_batches(workload, int(os.environ["RANK"]))]
    begun = time.perf_counter()
    trainer = start(setting)
    synchronize(device)
    init_s = time.perf_counter() - begun
    reset_peak_memory(device)
    losses = [trainer.step(batches) for _ in range(workload.warmup)]
    times = []
    for _ in range(workload.steps):
        synchronize(device)
        begun = time.perf_counter()
        losses.append(trainer.step(batches))
        synchronize(device)
        times.append(time.perf_counter() - begun)
    held, _, peak, reserved = _memory(device)
    steps, update, small, host_s = _traced(trainer, batches) if not setting.is_brief else _NOTHING
    overlap = traces.overlap_of(steps)
    with torch.device("meta"):
        counted = estimate.counted(Gpt(workload))
    stage = int(name) if name.isdigit() else _stage_of_peer(setting) * (name != _LOOP)
    states = estimate.states_of(stage, counted, estimate.JobSize(workload.world_size)).total.device
    return Finding(
        {_LOOP: "by hand"}.get(name, f"hadal, stage {stage}" if name.isdigit() else name),
        counted.numel,
        init_s,
        times,
        [float(loss) for loss in losses],
        held / _GIB,
        peak / _GIB,
        states / _GIB,
        reserved / _GIB,
        overlap,
        overlap.share,
        traces.idle_share(steps),
        host_s,
        traces.idle_share(small),
        traces.by_name(traces.kernels(update) or update),
        traces.launches(update),
        traces.seconds(traces.kernels(update)),
    )


_Traces = tuple[list[traces.Event], list[traces.Event], list[traces.Event], float]
_NOTHING: _Traces = ([], [], [], 0.0)


def _traced(trainer: Trainer, batches: list[Tensor]) -> _Traces:
    """The events of steps, of an update and of a tiny step, and the latter's seconds."""
    steps = traces.traced(lambda: [trainer.step(batches) for _ in range(_PROFILED_STEPS)])
    trainer.compute(batches)
    update = traces.traced(trainer.update)
    host_s, small = _of_small_batches(trainer, batches)
    return steps, update, small, host_s


def _of_small_batches(trainer: Trainer, batches: list[Tensor]) -> tuple[float, list[traces.Event]]:
    """Return the seconds of a step whose batches are tiny, and the events of one such step."""
    small = [batch[:1, : _SMALL_TOKENS + 1].contiguous() for batch in batches]
    device = current_device()
    for _ in range(2):
        trainer.step(small)
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(_SMALL_STEPS):
        trainer.step(small)
    synchronize(device)
    spent = (time.perf_counter() - begun) / _SMALL_STEPS
    return spent, traces.traced(partial(trainer.step, small))


def _memory(device: torch.device) -> tuple[int, int, int, int]:
    """Bytes held now, on the host, at most, and reserved; on a CPU all are the host's."""
    use = memory_use(device)
    if device.type == "cpu":
        return use.host, use.host, use.host, use.host
    return use[1], use[0], use[2], int(torch.accelerator.max_memory_reserved(device))


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
    add("--peers", default="loop,fsdp2,deepspeed", help="what Hadal is compared with, or nothing")
    add("--keep-activations", action="store_true", help="recompute no block in backward")
    add("--brief", action="store_true", help="times and memory alone, without traces")
    add("--compile", action="store_true", help="compile every contestant's model")
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
    run: dict[str, Any] = {
        name: getattr(options, name) for name in ("accumulation", "steps", "warmup")
    }
    run |= {"micro_batch": options.micro_batch, "deepspeed_adam": "torch"}
    return Workload(**model, **run, world_size=processes)


def _setting(workload: Workload, options: argparse.Namespace) -> Setting:
    return Setting(workload, not options.keep_activations, options.compile, options.brief)


def _run_here(name: str, setting: Setting) -> Finding | str:
    """The figures of one contestant in this process: to try it out."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    try:
        return measure(name, setting)
    except Exception:
        return traceback.format_exc()


def _run(name: str, workload: Workload, options: argparse.Namespace) -> Finding | str:
    """The figures of one contestant in its own processes, or the reason for their absence."""
    if options.device == "cpu" and workload.world_size == 1:
        return _run_here(name, _setting(workload, options))
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
        f"{finding.idle_share:.3f}",
        f"{finding.host_s * 1e3:.1f}",
        f"{finding.init_s:.2f}",
        f"{finding.losses[-1]:.3f}",
    ]


_HEADER = ["contestant", "steps/s", "tokens/s, a rank", "TFLOP/s", "MFU", "held GiB"]
_HEADER += ["estimate GiB", "peak GiB", "overlap", "idle", "host ms", "init s", "loss"]


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
    finding = measure(options.worker, _setting(workload, options))
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
    for name in [*filter(None, options.peers.split(",")), *stages.split(",")]:
        if name == _DEEPSPEED and find_spec(_DEEPSPEED) is None:
            print(f"{name}: not installed", flush=True)
            continue
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
