"""The cost of offloading on one GPU, and the largest GPT that trains on it, in under 10 minutes.

First the bits: host and disk must agree exactly, the device within rounding. Then one model that
fits on the device, with its optimizer on the device, on the host, on both, and with its weights on
the host. Then the largest model that trains with the optimizer on the host, and with ``--disk`` one
on a disk. Each runs in its own process; a model that does not fit is printed and the next smaller
one is tried.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import traces
from peers.model import Gpt
from peers.report import describe_environment, markdown_table
from peers.settings import Workload
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hadal
from hadal import utils
from hadal.device import current_device, memory_use, reset_peak_memory, synchronize, total_memory
from hadal.device.memory import free_host_nbytes, page_locked

_GIB = 2**30
GOAL = 0.4
# Layers, width and heads of models, by billions of parameters (GPT-3's, and sizes between).
LADDER = {
    40.0: (64, 7168, 56),
    30.0: (48, 7168, 56),
    20.0: (44, 6144, 48),
    13.0: (40, 5120, 40),
    11.0: (54, 4096, 32),
    9.0: (44, 4096, 32),
    6.7: (32, 4096, 32),
    2.7: (32, 2560, 32),
    1.3: (24, 2048, 16),
}
_VOCABULARY = 50304
# Host bytes of a parameter with an offloaded optimizer: master, moments, gradient.
_HOST_NBYTES = 4 + 8 + 2
_HOST_SHARE = 0.85
_DEVICE_SHARE = 0.6
_DISK_NBYTES = 2 * (4 + 8)


@dataclass(frozen=True)
class Case:
    """One run: the model, the tiers of its states, and its batch."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    accumulation: int
    steps: int
    recomputed: float
    """The fraction of blocks that are recomputed in backward."""
    optimizer: str = "none"
    weights: str = "none"
    ratio: float = 1.0
    nvme_path: str = ""

    @property
    def tokens(self) -> int:
        return self.sequence * self.micro_batch * self.accumulation

    @property
    def numel(self) -> int:
        return self.layers * 12 * self.width**2 + (self.vocabulary + self.sequence) * self.width

    @property
    def flops(self) -> float:
        """Operations of the model in a step, without recomputation, with attention in full."""
        attention = 12 * self.layers * self.width * self.sequence
        return self.tokens * (6 * self.numel + attention)


def _config(case: Case, stage: int = 3) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if case.optimizer != "none":
        zero["offload_optimizer"] = {"device": case.optimizer, "nvme_path": case.nvme_path}
        if case.ratio < 1:
            zero["offload_optimizer"]["ratio"] = case.ratio
    if case.weights != "none":
        zero["offload_param"] = {"device": case.weights, "nvme_path": case.nvme_path}
    return {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }


def _engine(case: Case, stage: int = 3) -> Any:
    shape = ("layers", "width", "heads", "vocabulary", "sequence")
    workload = Workload(**{name: getattr(case, name) for name in shape})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # like a 16-bit checkpoint
    with current_device():
        model = Gpt(workload)
    torch.set_default_dtype(torch.float32)
    for block in model.blocks[: round(case.recomputed * case.layers)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return hadal.initialize(model=model, config=_config(case, stage))[0]


def _batches(case: Case) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        shape = (case.micro_batch, case.sequence + 1)
        yield torch.randint(case.vocabulary, shape, generator=generator).to(current_device())


# ---- one run, in its own process
# ------------------------------------------------------------------


def measured(case: Case) -> dict[str, Any]:
    """Train a few steps; seconds of each step, and of its update."""
    hadal.init_distributed()
    device = current_device()
    begun = time.perf_counter()
    engine, batches = _engine(case), _batches(case)
    synchronize(device)
    found: dict[str, Any] = {"init_s": time.perf_counter() - begun, "steps": [], "updates": []}
    found["parameters"] = sum(p.numel() for p in engine.module.parameters())
    found["flops"] = case.flops
    reset_peak_memory(device)
    for number in range(1 + case.steps):  # the first one learns and allocates
        synchronize(device)
        begun = time.perf_counter()
        for micro_step in range(case.accumulation):
            loss = engine(next(batches))
            engine.backward(loss)
            if micro_step == case.accumulation - 1:
                synchronize(device)
                before = time.perf_counter()
            engine.step()
        synchronize(device)
        done = time.perf_counter()
        if number:
            found["steps"].append(done - begun)
            found["updates"].append(done - before)
        print(f"step {number}: {done - begun:.2f} s, loss {float(loss):.3f}", flush=True)
    use = memory_use(device)
    found |= {"loss": float(loss), "host_gib": use.host / _GIB, "peak_gib": use.device_peak / _GIB}
    found["traced"] = _traced(engine, batches, case)
    engine.destroy()
    return found


def _traced(engine: Any, batches: Iterator[Tensor], case: Case) -> dict[str, Any]:
    """The copies of a step's last micro-step and of its update, and what runs beside them."""

    def compute() -> None:
        engine.backward(engine(next(batches)))

    for _ in range(case.accumulation - 1):
        compute()
        engine.step()
    computing, updating = traces.traced(compute), traces.traced(engine.step, with_host=True)
    kernels = traces.kernels(computing)
    leaving, coming = traces.copies(computing, "DtoH"), traces.copies(computing, "HtoD")
    new_weights = traces.copies(updating, "HtoD")
    on_host = [event for event in updating if event.name.startswith("aten::_fused_adam")]
    digests = [event for event in kernels if "sum_functor<long" in event.name]
    return {
        "gradients_leaving_bytes_s": _rate_of(leaving),
        "gradients_leaving_hidden": traces.share_under(leaving, kernels),
        "weights_coming_bytes_s": _rate_of(coming),
        "weights_coming_bytes": sum(event.nbytes for event in coming),
        "new_weights_bytes_s": _rate_of(new_weights),
        "new_weights_hidden": traces.share_under(new_weights, on_host),
        "digests_share": traces.seconds(digests) / max(traces.seconds(kernels), 1e-12),
        "gradients_leaving_bytes": sum(event.nbytes for event in leaving),
        "new_weights_bytes": sum(event.nbytes for event in new_weights),
    }


def _rate_of(copies: Sequence[traces.Event]) -> float:
    return sum(event.nbytes for event in copies) / max(traces.seconds(copies), 1e-12)


def compared(case: Case) -> dict[str, Any]:
    """Train a tiny model in every tier; compare masters and moments."""
    hadal.init_distributed()
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        ways = {"device": ("none", "none", 1.0), "host": ("cpu", "none", 1.0)}
        ways |= {"disk": ("nvme", "none", 1.0)}
        if stage == 3:
            ways |= {"half": ("cpu", "none", 0.5), "host, weights too": ("cpu", "cpu", 1.0)}
            ways |= {"disk, weights too": ("nvme", "nvme", 1.0)}
        states = {}
        for name, (optimizer, weights, ratio) in ways.items():
            chosen = replace(case, optimizer=optimizer, weights=weights, ratio=ratio)
            states[name] = _trained(chosen, stage)
        pairs = [("host", "disk")]
        pairs += [("host, weights too", "disk, weights too")] if stage == 3 else []
        for one, other in pairs:
            alike = all(map(torch.equal, states[one][-1], states[other][-1]))
            found[f"stage {stage}: {one} and {other} alike"] = alike
        for name in [name for name in states if name != "device"]:
            apart = [
                float((a - b).norm() / b.norm().clamp(min=1e-30))
                for a, b in zip(states[name][0], states["device"][0], strict=True)
            ]
            found[f"stage {stage}: {name} and device, one update, relative distance"] = max(apart)
    return found


def _trained(case: Case, stage: int) -> list[list[Tensor]]:
    """The masters and moments after each update."""
    engine, batches, states = _engine(case, stage), _batches(case), []
    for _ in range(case.steps):
        for _ in range(case.accumulation):
            engine.backward(engine(next(batches)))
            engine.step()
        state: list[Tensor] = []
        for parameter in engine.module.parameters():
            state.append(utils.safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                state.append(utils.safe_get_full_optimizer_state(parameter, key))
        states.append([one.double().cpu() for one in state])
    engine.destroy()
    return states


def rates(case: Case, seconds: float = 1.0) -> dict[str, float]:
    """Measure the limits of a step: bf16 matrix products, copies of pinned memory, and the disk."""
    device = current_device()
    width = 8192 if device.type != "cpu" else 256
    one, other = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in "ab")
    found = {"matrix_flops": 2 * width**3 * _per_second(lambda: one @ other, seconds)}
    if device.type != "cpu":
        host = page_locked(1 << 28)
        there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        for name, (out, values) in {"leaving": (host, there), "coming": (there, host)}.items():
            act = partial(out.copy_, values, non_blocking=True)
            found[f"{name}_bytes"] = out.numel() * _per_second(act, seconds)
    if case.nvme_path:
        size = 1 << (32 if device.type != "cpu" else 24)
        found |= _disk_rates(Path(case.nvme_path, "rates"), size)
    return found


def _disk_rates(
    path: Path, nbytes: int, block: int = 1 << 23, threads: int = 8
) -> dict[str, float]:
    """Write and read a file past the system's cache, several blocks at a time."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        file = os.open(path, flags | os.O_DIRECT)
    except OSError:  # a file system without it
        file = os.open(path, flags)
    buffers = [mmap.mmap(-1, block) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(os.urandom(block))
    found = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, move in {"disk_write_bytes": os.pwritev, "disk_read_bytes": os.preadv}.items():

            def several(first: int, move: Any = move) -> None:
                for place in range(first * block, nbytes, threads * block):
                    move(file, [buffers[first]], place)

            begun = time.perf_counter()
            list(pool.map(several, range(threads)))
            found[name] = nbytes / (time.perf_counter() - begun)
    os.close(file)
    path.unlink()
    return found


def _per_second(act: Any, seconds: float) -> float:
    device, count = current_device(), 0
    for _ in range(3):
        act()
    synchronize(device)
    begun = time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        for _ in range(10):
            act()
        count += 10
        synchronize(device)
    return count / passed


# ---- the runs and the report
# ----------------------------------------------------------------------


def _run(kind: str, case: Case, options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """The figures of one process; without figures, its last output under "fault"."""
    if options.device == "cpu" and kind != "rates":  # to try it out
        _take_place()
        return _ACTS[kind](case)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, f"--device={options.device}", f"--worker={kind}"]
        command += [f"--case={json.dumps(asdict(case))}", f"--result={result}"]
        variables = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **os.environ}
        if options.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as late:
            return {
                "fault": f"no result within {timeout:.0f} s; last output: {str(late.stdout)[-300:]}"
            }
        if result.exists():
            return dict(json.loads(result.read_text()))
        return {"fault": f"exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}


_ACTS = {"rates": rates, "bits": compared, "train": measured}


def _work(options: argparse.Namespace) -> int:
    _take_place()
    case = Case(**json.loads(options.case))
    options.result.write_text(json.dumps(_ACTS[options.worker](case)))
    return 0


def _take_place() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)


_HEADER = ["run", "10^9 parameters", "tokens/s", "of the matrix rate", "step s", "update s"]
_HEADER += ["device peak GiB", "host GiB", "init s"]


def _row(case: Case, found: dict[str, Any], rate: float) -> list[str]:
    step = median(found["steps"])
    return [
        case.name,
        f"{found['parameters'] / 1e9:.2f}",
        f"{case.tokens / step:.0f}",
        f"{case.flops / step / rate:.3f}",
        f"{step:.2f}",
        f"{median(found['updates']):.2f}",
        f"{found['peak_gib']:.1f}",
        f"{found['host_gib']:.1f}",
        f"{found['init_s']:.1f}",
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: to try it out, tiny")
    add("--seconds", type=float, default=570.0, help="time limit of the whole run")
    add("--small", type=float, default=1.3, help="10^9 parameters of the compared model")
    add(
        "--largest",
        type=float,
        help="10^9 parameters to start with; by default the largest that may fit",
    )
    add("--micro-batch", type=int, default=8, help="sequences of 1024 tokens in a micro-step")
    add("--accumulation", type=int, default=8, help="micro-steps of a step")
    add("--recomputed", type=float, default=1.0, help="fraction of recomputed blocks")
    add("--steps", type=int, default=2, help="measured steps")
    add("--disk", type=Path, metavar="PATH", help="also with the optimizer on a disk")
    add("--skip-bits", action="store_true", help="leave out the comparison of bits")
    add("--only", choices=("largest", "small", "disk"), help="which of the models to train")
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--strict", action="store_true", help="exit with 1 if bits differ or the goal is missed")
    for name in ("--worker", "--case"):
        add(name, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _case(name: str, size: float, options: argparse.Namespace, **more: Any) -> Case:
    layers, width, heads = LADDER[min(LADDER, key=lambda known: abs(known - size))]
    shape = {"layers": layers, "width": width, "heads": heads}
    shape |= {"vocabulary": _VOCABULARY, "sequence": 1024}
    if options.device == "cpu":
        shape = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 128, "sequence": 32}
    run = {name: getattr(options, name) for name in ("micro_batch", "accumulation", "steps")}
    return Case(name, **shape, **run, recomputed=options.recomputed, **more)


def _share_of_host(size: float) -> float:
    """The fraction of the optimizer of a model (10^9 parameters) that fits on the host."""
    free = free_host_nbytes() or total_memory(torch.device("cpu")).total
    return min(1.0, int(100 * _HOST_SHARE * free / (size * 1e9 * _HOST_NBYTES)) / 100)


def _sizes(options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Sizes that may fit, largest first, each with the host's fraction of its optimizer."""
    device = total_memory(current_device()).total if options.device == "gpu" else 0
    for size in LADDER:
        share = _share_of_host(size)
        # Weights, and the gradients and optimizer of the part that the device updates itself.
        there = size * 1e9 * (2 + (1 - share) * _HOST_NBYTES)
        if size <= (options.largest or size) and (not device or there < _DEVICE_SHARE * device):
            yield size, share


class _Report:
    """Runs cases while there is time, and prints the figures of each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + options.seconds
        self.rate = 0.0
        self.kept: list[dict[str, Any]] = []

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def run(self, kind: str, case: Case) -> dict[str, Any]:
        found = {"fault": "no time is left"}
        if self.left_s > 5:
            found = _run(kind, case, self._options, self.left_s)
        self.kept.append({"kind": kind, "case": asdict(case), "found": found})
        if "fault" in found:
            print(f"{case.name}: {found['fault']}\n", flush=True)
        return found

    def train(self, case: Case) -> float | None:
        """The fraction of the matrix rate; None if it did not train."""
        found = self.run("train", case)
        if "fault" in found:
            return None
        print(markdown_table(_HEADER, [_row(case, found, self.rate)]), "\n", flush=True)
        return case.flops / median(found["steps"]) / self.rate


def _compare_bits(report: _Report, options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        # Narrow, so that it is over soon; a part of the last block of each bucket is odd.
        tiny = Case("bits", 2, 96, 2, 500, 64, 2, 2, 3, 0.0, nvme_path=folder)
        found = report.run("bits", tiny)
    for what, value in found.items():
        print(f"{what}: {value}", flush=True)
    print(flush=True)
    apart = [value for what, value in found.items() if what.endswith("distance")]
    alike = [value for what, value in found.items() if what.endswith("alike")]
    return bool(alike) and all(alike) and max(apart) <= 1e-6


def _measure(report: _Report, options: argparse.Namespace) -> bool:
    """Print all tables; whether the largest model reaches the goal."""
    small = partial(_case, size=options.small, options=options)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("all on the device", {}),
        ("optimizer on the host", {"optimizer": "cpu"}),
        ("half of the optimizer", {"optimizer": "cpu", "ratio": 0.5}),
        ("optimizer and weights on the host", {"optimizer": "cpu", "weights": "cpu"}),
    ]
    if options.only == "disk":
        ways.clear()
    if options.disk:
        free = os.statvfs(options.disk)
        ways.append(("optimizer on the disk", {"optimizer": "nvme"}))
        if free.f_bavail * free.f_frsize < options.small * 1e9 * _DISK_NBYTES * 1.05:
            print("the disk has too little room for it", flush=True)
            ways.pop()
    share = None
    for size, ratio in _sizes(options) if options.only in (None, "largest") else ():
        case = _case("the largest", size, options, optimizer="cpu", ratio=ratio)
        print(f"{size:g} 10^9 parameters, {ratio:.0%} of the optimizer on the host", flush=True)
        share = report.train(case)
        if share is not None:
            break
    for name, more in ways if options.only != "largest" else ():
        path = str(options.disk) if more.get("optimizer") == "nvme" else ""
        report.train(small(name, nvme_path=path, **more))
    if options.only in ("small", "disk"):
        return True
    verdict = share is not None and share >= GOAL
    told = "none" if share is None else f"{share:.3f}"
    print(f"of the matrix rate: {told}, goal {GOAL}: {'met' if verdict else 'MISSED'}", flush=True)
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 with `--strict` if bits differ or the goal is missed."""
    options = _parse(arguments)
    if options.worker:
        return _work(options)
    if options.device == "gpu" and not torch.accelerator.is_available():
        print("There is no GPU here, so there is nothing to measure; --device cpu tries it out.")
        return 0
    report = _Report(options)
    disk = str(options.disk or "")
    found = report.run("rates", _case("rates", options.small, options, nvme_path=disk))
    if "fault" in found:
        return 1
    report.rate = found["matrix_flops"]
    print({name: f"{value:.4g}" for name, value in found.items()}, flush=True)
    bits = options.skip_bits or _compare_bits(report, options)
    goal = _measure(report, options)
    if options.json:
        document = {"environment": describe_environment(), "runs": report.kept}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.strict and not (bits and goal) else 0


if __name__ == "__main__":
    sys.exit(main())
