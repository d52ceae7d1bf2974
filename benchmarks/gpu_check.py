"""Checks Hadal on the GPU at hand in about ten minutes: whether it is right, fast, and offloads.

Each check runs in processes of its own with a time limit and prints lines
`NAME  value  expected  OK|FAIL`. A line without an expectation is a reading. ``--dry`` runs
everything tiny on CPUs, to try the checks themselves. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT)]

import torch
import torch.distributed as dist
from peers.model import Gpt
from peers.report import describe_environment
from peers.settings import Workload
from torch import Tensor, nn

import hadal
from hadal.device import current_device, memory, streams, synchronize
from hadal.device.peaks import peak_of_name

_STEPS = 6
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "SGD", "Lamb", "Lion", "Muon")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64")
_DTYPES += ("bool", "int16", "complex64")
# 20 to 30 ms of a GPU's time.
_SLEEP_CYCLES = 40_000_000
# GPU memory rates in TB/s, bytes read and written.
_COPY_TB_S = {"H200": 4.0, "H100": 2.8}

Json = Any
Result = dict[str, Any]


@dataclass
class Line:
    """One line of the report; `is_ok` is None for a reading."""

    name: str
    value: str
    expected: str = ""
    is_ok: bool | None = None


@dataclass(frozen=True)
class Check:
    """A function that yields lines, and the seconds that it may take."""

    part: str
    limit_s: float
    act: Callable[[], Iterator[Line]]


CHECKS: dict[str, Check] = {}
CALLS: dict[str, Callable[..., Json]] = {}
"""Functions that run in processes of their own, by name."""


def check(part: str, limit_s: float) -> Callable[[Callable[[], Iterator[Line]]], None]:
    """Add a check to a part: `right`, `fast` or `offload`."""

    def add(act: Callable[[], Iterator[Line]]) -> None:
        CHECKS[act.__name__] = Check(part, limit_s, act)

    return add


def called(function: Callable[..., Json]) -> Callable[..., Json]:
    """Make a function known to `in_processes`."""
    CALLS[function.__name__] = function
    return function


def is_dry() -> bool:
    """Return True if everything runs tiny on CPUs."""
    return os.environ.get("GPU_CHECK_DRY") == "1"


def expect(name: str, value: object, expected: str, is_ok: bool) -> Line:
    """Return a line with a verdict."""
    return Line(name, str(value), expected, is_ok)


# ---- processes -----------------------------------------------------------------------------------


def in_processes(
    function: str, number: int = 1, variables: Mapping[str, str] | None = None, **given: Json
) -> list[Json]:
    """Call a function in `number` processes of one job, all on the first device; return results.

    Raises:
        RuntimeError: a process fails; the message has the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        everywhere = {**os.environ, **address, "WORLD_SIZE": str(number), "LOCAL_RANK": "0"}
        command = [sys.executable, __file__, "--call", function, json.dumps(given), folder]
        with ExitStack() as files:
            started = [
                subprocess.Popen(
                    command,
                    env={**everywhere, "RANK": str(rank), **(variables or {})},
                    stdout=subprocess.DEVNULL,
                    stderr=files.enter_context(Path(folder, f"{rank}.log").open("w")),
                )
                for rank in range(number)
            ]
            for process in started:
                process.wait()
        for rank, process in enumerate(started):
            if process.returncode:
                raise RuntimeError(Path(folder, f"{rank}.log").read_text()[-1500:])
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(number)]


def _free_port() -> int:
    from torch.distributed.elastic.utils.distributed import get_free_port

    return int(get_free_port())


def run_script(
    *words: str, limit_s: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the repository; return its outputs."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


# ---- a small model, trained in many ways ---------------------------------------------------------


def _shape() -> Workload:
    if is_dry():
        return Workload(2, 32, 2, 64, 16, micro_batch=2, accumulation=2)
    return Workload(4, 512, 8, 1024, 256, micro_batch=4, accumulation=2)


def _batches(ranks: int, rank: int, steps: int) -> Iterator[Tensor]:
    """Return a rank's micro-batches."""
    shape, generator = _shape(), torch.Generator().manual_seed(1)
    size = (shape.micro_batch, shape.sequence + 1)
    for number in range(steps * shape.accumulation * ranks):
        batch = torch.randint(shape.vocabulary, size, generator=generator)
        if number % ranks == rank:
            yield batch.to(current_device())


def _config(stage: int, precision: str = "fp32", **more: Json) -> Result:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    made: Result = {
        "train_micro_batch_size_per_gpu": _shape().micro_batch,
        "gradient_accumulation_steps": _shape().accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": _ADAM},
        "zero_optimization": zero,
        **more,
    }
    if precision != "fp32":
        made[precision] = {"enabled": True}
    return made


def _engine(config: Json) -> Any:
    torch.manual_seed(0)
    model = Gpt(_shape())
    return hadal.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _start(ranks: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if is_dry() or ranks == 1:
        hadal.init_distributed()
        return
    import staged

    staged.register("cuda")
    hadal.init_distributed("cpu:gloo,cuda:staged")


def _step(engine: Any, batches: Iterator[Tensor]) -> Tensor:
    losses = []
    for _ in range(_shape().accumulation):
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@called
def train(runs: list[Result], ranks: int = 1, delayed: bool = False) -> list[Result]:
    """Train the small model several times; return the mean losses over ranks, one a step.

    A run that fails has its error instead. `delayed`: copies of side streams are slow.
    """
    _start(ranks)
    if delayed:
        _delay_side_streams(ranks)
    found = []
    for run in runs:
        try:
            found.append({"losses": _losses(ranks, **run), "error": ""})
        except Exception as error:
            found.append({"losses": [], "error": f"{type(error).__name__}: {error}"[:300]})
        finally:
            if not is_dry():
                torch.cuda.set_sync_debug_mode("default")
    return found


def _losses(
    ranks: int,
    config: Result,
    steps: int = _STEPS,
    deterministic: bool = True,
    forbids_waits_after: int | None = None,
    save: str = "",
    load: str = "",
) -> list[float]:
    torch.use_deterministic_algorithms(deterministic)
    engine = _engine(config)
    if load:
        engine.load_checkpoint(load)
    batches = _batches(ranks, dist.get_rank(), steps)
    for _ in range(engine.global_steps * _shape().accumulation):
        next(batches)
    losses = []
    for step in range(engine.global_steps, steps):
        if step == forbids_waits_after and not is_dry():
            torch.cuda.set_sync_debug_mode("error")
        losses.append(_step(engine, batches))
        if save and step == steps // 2 - 1:
            engine.save_checkpoint(save)
    if not is_dry():
        torch.cuda.set_sync_debug_mode("default")
    total = torch.stack(losses).double().cpu() / ranks
    dist.all_reduce(total)
    engine.destroy()
    found: list[float] = total.tolist()
    return found


def _delay_side_streams(ranks: int) -> None:
    """Let the GPU sleep before every copy of a side stream, and of `staged`."""
    if is_dry():
        return
    sleep = partial(torch.cuda._sleep, _SLEEP_CYCLES)
    plain = streams.SideStream.copy

    def copy(self: streams.SideStream, out: Tensor, values: Tensor) -> None:
        with self.current():
            sleep()
        plain(self, out, values)

    streams.SideStream.copy = copy  # type: ignore[method-assign]
    if ranks > 1:
        import staged

        staged.delay(sleep)


@called
def train_by_hand() -> list[Result]:
    """The same in a loop with torch's fused AdamW, in fp32 and bf16."""
    _start(1)
    torch.use_deterministic_algorithms(True)
    return [{"losses": _by_hand(precision), "error": ""} for precision in ("fp32", "bf16")]


def _by_hand(precision: str, steps: int = _STEPS) -> list[float]:
    torch.manual_seed(0)
    model = Gpt(_shape()).to(current_device())
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    if precision == "bf16":
        model.bfloat16()
    parameters = list(model.parameters())
    betas = tuple(_ADAM["betas"])  # type: ignore[arg-type]
    keys: Any = {**_ADAM, "betas": betas}
    optimizer = torch.optim.AdamW(masters, **keys, fused=True)
    batches, losses = _batches(1, 0, steps), []
    for _ in range(steps):
        parts = []
        for _ in range(_shape().accumulation):
            loss = model(next(batches))
            (loss / _shape().accumulation).backward()
            parts.append(loss.detach())
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.to(master.dtype)
            optimizer.step()
            torch._foreach_copy_(parameters, masters)
        model.zero_grad(set_to_none=True)
        losses.append(torch.stack(parts).mean())
    found: list[float] = torch.stack(losses).double().tolist()
    return found


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True))


def _same_bits(name: str, one: Result, other: Result) -> Line:
    return _close(name, one, other, 0.0)


def _close(name: str, one: Result, other: Result, limit: float) -> Line:
    expected = f"<= {limit:.0e} relative" if limit else "equal losses, to the bit"
    error = one["error"] or other["error"]
    if error:
        return expect(name, error, expected, False)
    far = _distance(one["losses"], other["losses"])
    return expect(name, f"{far:.1e}", expected, far <= limit)


def _trainings(
    *runs: Result, ranks: int = 1, delayed: bool = False, **variables: str
) -> list[Result]:
    """Train in one job; return the results of its rank 0."""
    found: list[Result] = in_processes(
        "train", ranks, variables, runs=runs, ranks=ranks, delayed=delayed
    )[0]
    return found


# ---- right ---------------------------------------------------------------------------------------


@check("right", 60)
def environment() -> Iterator[Line]:
    """The device and its rates, which other figures are compared with."""
    device = current_device()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name()
    yield Line("device", f"{name}, torch {torch.__version__}, hadal {hadal.__version__}")
    side, numel = (128, 1 << 16) if is_dry() else (8192, 1 << 30)
    dtype = torch.float32 if is_dry() else torch.bfloat16
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    flops = 2 * side**3 / _seconds(lambda: matrix @ matrix)
    peak = None if is_dry() else peak_of_name(name)[0]
    yield _rate("matrix products", flops / 1e12, "TFLOP/s", peak and 0.7 * peak / 1e12)
    values = torch.zeros(numel, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    copied = 2 * numel / _seconds(lambda: other.copy_(values)) / 1e12
    wanted = next((rate for part, rate in _COPY_TB_S.items() if part in name), None)
    yield _rate("copies on the device", copied, "TB/s", wanted)
    host = memory.host_empty(numel, torch.uint8, pinned=True)
    for what, source, target in (("to", host, values), ("from", values, host)):
        act = partial(target.copy_, source, non_blocking=True)
        rate = numel / _seconds(act) / 1e9
        yield _rate(f"copies {what} the device", rate, "GB/s", None if is_dry() else 40.0)


def _rate(name: str, value: float, unit: str, least: float | None) -> Line:
    if least is None:
        return Line(name, f"{value:.3g} {unit}")
    return expect(name, f"{value:.3g} {unit}", f">= {least:.3g}", value >= least)


def _seconds(act: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        act()
    synchronize(current_device())
    begun = time.perf_counter()
    for _ in range(times):
        act()
    synchronize(current_device())
    return (time.perf_counter() - begun) / times


@check("right", 120)
def quickstart() -> Iterator[Line]:
    """README's program ends well, and writes nothing to standard error."""
    text = (ROOT / "README.md").read_text()
    program = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "initialize" in b)
    keys = next(b for b in re.findall(r"```json\n(.*?)```", text, re.S) if "zero" in b)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(f"import os\nos.chdir({folder!r})\n{program}")
        Path(folder, "ds_config.json").write_text(keys)
        done = run_script(f"{folder}/train.py")
    yield expect("exit code", done.returncode, "0", done.returncode == 0)
    last = done.stderr.strip().splitlines()[-1:]
    yield expect("standard error", last or "empty", "empty", not last)


@check("right", 60)
def backend() -> Iterator[Line]:
    """Every dtype that a model may hold passes through the collectives of one bound rank."""
    (found,) = in_processes("collectives")
    for name, failed in found.items():
        yield expect(name, ", ".join(failed) or "all dtypes", "all dtypes", not failed)


@called
def collectives() -> dict[str, list[str]]:
    """The dtypes that fail, by operation."""
    from hadal import comm
    from hadal.comm.collectives import broadcast_

    url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hadal.init_distributed(init_method=url, rank=0, world_size=1)
    ranks, device = comm.Ranks.world(), current_device()
    reduced = [name for name in _DTYPES if name not in ("int16", "bool", "complex64")]
    operations: dict[str, tuple[Sequence[str], Callable[[Tensor], object]]] = {
        "all_gather": (_DTYPES, lambda t: comm.all_gather_into_tensor(t.clone(), t)),
        "reduce_scatter": (reduced, lambda t: comm.reduce_scatter_tensor(t.clone(), t)),
        "all_reduce": (reduced, lambda t: comm.all_reduce(t, dist.ReduceOp.MAX)),
        "broadcast of buffers": (_DTYPES, lambda t: broadcast_(t, 0, ranks, "a broadcast")),
    }
    failed: dict[str, list[str]] = {name: [] for name in operations}
    for name, (dtypes, act) in operations.items():
        for dtype in dtypes:
            if name == "all_gather" and dtype == "int16":
                continue  # NCCL has no 16-bit integers; Hadal gathers weights only
            try:
                act(torch.ones(64, device=device).to(getattr(torch, dtype)))
                synchronize(device)
            except RuntimeError as error:
                failed[name].append(f"{dtype} ({error})"[:120])
    return failed


@check("right", 60)
def loop() -> Iterator[Line]:
    """One rank has the bits of a loop by hand."""
    kinds = ("fp32", "bf16")
    ours = _trainings(*({"config": _config(0, kind)} for kind in kinds))
    (by_hand,) = in_processes("train_by_hand")
    for kind, one, other in zip(kinds, ours, by_hand, strict=True):
        yield _same_bits(f"{kind} against a loop", one, other)


@check("right", 120)
def stages() -> Iterator[Line]:
    """Two and three processes on one device have the same losses at every stage."""
    # With accumulation, stages 2 and 3 add over ranks before they add over micro-steps.
    for ranks, accumulation, limit in ((2, 1, 0.0), (2, 2, 1e-6), (3, 1, 1e-6)):
        keys = {"gradient_accumulation_steps": accumulation}
        runs = [{"config": _config(stage, **keys)} for stage in range(4)]
        found = _trainings(*runs, ranks=ranks)
        for stage in (1, 2, 3):
            name = f"stage {stage} against 0, {ranks} ranks, accumulation {accumulation}"
            yield _close(name, found[stage], found[0], limit)
    whole, cut = _trainings(*({"config": _config(stage, "bf16")} for stage in (0, 3)), ranks=2)
    yield _close("bf16, stage 3 against 0, 2 ranks", cut, whole, 1e-2)


@check("right", 60)
def waits() -> Iterator[Line]:
    """A step never waits for the device."""
    for ranks, numbers in ((1, (0,)), (2, (1, 2, 3))):
        configs = [_config(stage, "bf16", gradient_clipping=1.0) for stage in numbers]
        keys = {"deterministic": False, "forbids_waits_after": 3}
        found = _trainings(*({"config": one, **keys} for one in configs), ranks=ranks)
        for stage, one in zip(numbers, found, strict=True):
            name = f"stage {stage}, {ranks} ranks"
            yield expect(name, one["error"] or "no wait", "no wait", not one["error"])


_ON_HOST: Result = {"offload_optimizer": {"device": "cpu"}}
_ALL_ON_HOST: Result = {**_ON_HOST, "offload_param": {"device": "cpu"}}


@check("right", 150)
def races() -> Iterator[Line]:
    """Slow copies and collectives, and launches one by one, change no bit."""
    recomputes = {"modules": "units", "cpu_checkpointing": True}
    alone = {
        "optimizer on the host": _config(1, "bf16", zero=_ON_HOST),
        "all on the host": _config(3, "bf16", zero=_ALL_ON_HOST),
        "inputs on the host": _config(0, "bf16", activation_checkpointing=recomputes),
    }
    shared = {f"stage {stage}": _config(stage, "bf16") for stage in (1, 2, 3)}
    for ranks, configs in ((1, alone), (2, shared)):
        runs = [{"config": config, "steps": 4} for config in configs.values()]
        plain = _trainings(*runs, ranks=ranks)
        slow = _trainings(*runs, ranks=ranks, delayed=True)
        blocking = _trainings(*runs, ranks=ranks, CUDA_LAUNCH_BLOCKING="1")
        for name, *found in zip(configs, plain, slow, blocking, strict=True):
            yield _same_bits(f"{name}, slow copies", found[1], found[0])
            yield _same_bits(f"{name}, blocking launches", found[2], found[0])


@check("right", 60)
def sanitizer() -> Iterator[Line]:
    """torch's sanitizer of streams finds no race."""
    if is_dry():
        yield Line("sanitizer", "not on CPUs")
        return
    kinds = {
        "stage 0": _config(0, "bf16"),
        "optimizer on the host": _config(1, "bf16", zero=_ON_HOST),
        "all on the host": _config(3, "bf16", zero=_ALL_ON_HOST),
    }
    runs = [{"config": config, "steps": 3} for config in kinds.values()]
    for name, found in zip(kinds, _trainings(*runs, TORCH_CUDA_SANITIZER="1"), strict=True):
        yield expect(name, found["error"] or "no race", "no race", not found["error"])


@check("right", 90)
def pinned() -> Iterator[Line]:
    """Pinned memory that is freed during a copy is not reused too early; its rate of making."""
    (found,) = in_processes("pin_and_free")
    yield expect("wrong copies", found["wrong"], "0", found["wrong"] == 0)
    yield _rate("locking", found["gb_s"], "GB/s", None if is_dry() else 4.0)


@called
def pin_and_free() -> Result:
    """Copy from pinned memory that dies at once, again and again."""
    device, numel = current_device(), 1 << (16 if is_dry() else 26)
    wrong = 0
    for number in range(20 if is_dry() else 100):
        host = memory.host_empty(numel, torch.uint8, pinned=True).fill_(number)
        there = host.to(device, non_blocking=True)
        del host
        noise = torch.full((numel,), 255, dtype=torch.uint8)
        wrong += int((there != number).any())
        del noise
    nbytes = 1 << (20 if is_dry() else 33)
    begun = time.perf_counter()
    memory.host_empty(nbytes, torch.uint8, pinned=True)
    return {"wrong": wrong, "gb_s": nbytes / (time.perf_counter() - begun) / 1e9}


@check("right", 200)
def marked() -> Iterator[Line]:
    """The tests that are marked `gpu` pass."""
    if is_dry():
        yield Line("tests", "none on CPUs")
        return
    words = ["-m", "pytest", "-W", "default", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = run_script(*words, limit_s=190)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    yield expect("tests", lines[-1] if lines else "nothing", "all pass", done.returncode == 0)


@check("right", 60)
def optimizers() -> Iterator[Line]:
    """Every optimizer has the losses of a CPU, to rounding."""
    keys = [{"type": kind, "params": {"lr": 1e-3}} for kind in _OPTIMIZERS]
    runs = [{"config": _config(0, optimizer=each), "steps": 3} for each in keys]
    for kind, *found in zip(
        _OPTIMIZERS, _trainings(*runs), _trainings(*runs, DS_ACCELERATOR="cpu"), strict=True
    ):
        yield _close(kind, *found, 1e-5)


@check("right", 60)
def checkpoint() -> Iterator[Line]:
    """A run that is saved and loaded goes on with the same bits, also while it is saved."""
    with tempfile.TemporaryDirectory() as folder:
        for name, section in (("saved", {}), ("saved meanwhile", {"async_save": True})):
            config, place = _config(1, "bf16", checkpoint=section), f"{folder}/{name}"
            runs = [{"config": config, "save": place}, {"config": config, "load": place}]
            whole, again = _trainings(*runs)
            whole["losses"] = whole["losses"][_STEPS // 2 :]
            yield _same_bits(name, again, whole)


@check("right", 60)
def misuse() -> Iterator[Line]:
    """A batch that runs out of memory in backward can be left out."""
    (found,) = in_processes("run_out_of_memory")
    yield _same_bits("losses after it", found["after"], found["without"])


@called
def run_out_of_memory() -> Result:
    """Losses with and without a batch whose backward fails."""
    torch.use_deterministic_algorithms(True)
    hadal.init_distributed()
    results = {}
    for name in ("without", "after"):
        engine = _engine(_config(0, "bf16"))
        batches, losses = _batches(1, 0, _STEPS), []
        for step in range(_STEPS):
            if name == "after" and step == 2:
                with suppress(RuntimeError):
                    loss = engine(next(_batches(1, 0, 1)))
                    loss.register_hook(lambda _: torch.empty(1 << 50, device=current_device()))
                    engine.backward(loss)
                engine.zero_grad()
            losses.append(float(_step(engine, batches)))
        results[name] = {"losses": losses, "error": ""}
        engine.destroy()
    return results


# ---- fast ----------------------------------------------------------------------------------------

_TINY = ["--layers=2", "--width=64", "--heads=2", "--vocabulary=128", "--sequence=32"]
_TINY += ["--micro-batch=2"]
_MODELS = {  # shapes by what they show, and the least share of the peak
    "GPT-2 XL, recomputed": ([], 0.25),
    "2.6 B, recomputed": (["--layers=32", "--width=2560", "--heads=32"], 0.33),
}


@check("fast", 270)
def step() -> Iterator[Line]:
    """A step beside a loop by hand and FSDP2, its memory, and its share of the device's peak."""
    for name, (shape, least) in list(_MODELS.items())[: 1 if is_dry() else None]:
        with tempfile.TemporaryDirectory() as folder:
            words = ["--json", f"{folder}/found.json", "--steps", "2" if is_dry() else "10"]
            words += ["--device=cpu", "--processes=1", *_TINY] if is_dry() else shape
            done = run_script(f"{ROOT}/benchmarks/gpu.py", *words, limit_s=260)
            if not Path(folder, "found.json").exists():
                yield expect(name, (done.stdout + done.stderr)[-400:], "figures", False)
                continue
            told = json.loads(Path(folder, "found.json").read_text())
        yield from _of_step(name, told, least)


def _of_step(name: str, told: Json, least: float) -> Iterator[Line]:
    by_name = {one["name"]: one for one in told["contestants"]}
    for failed, why in told["failures"].items():
        yield Line(f"{name}: {failed}", str(why).strip().splitlines()[-1][:200])
    ours = next((one for key, one in by_name.items() if key.startswith("hadal")), None)
    if ours is None:
        yield expect(name, "no figures", "figures of Hadal", False)
        return
    for peer, most in (("by hand", 1.03), ("fsdp2", 1.0)):
        if peer in by_name:
            ratio = ours["step_s"] / by_name[peer]["step_s"]
            verdict = f"{ratio:.3f} ({ours['step_s'] * 1e3:.1f} ms)"
            is_ok = None if is_dry() else ratio <= most
            yield Line(f"{name}: step / {peer}", verdict, f"<= {most:g}", is_ok)
    if is_dry():
        return
    yield expect(f"{name}: MFU", f"{ours['mfu']:.3f}", f">= {least}", ours["mfu"] >= least)
    share = ours["held_gib"] / ours["estimate_gib"] - 1
    held = f"{ours['held_gib']:.2f} GiB, estimate {ours['estimate_gib']:.2f}"
    yield expect(f"{name}: held memory", held, "within 2 %", abs(share) <= 0.02)
    ordered = sorted(ours["steps"])
    spread = ordered[int(0.9 * (len(ordered) - 1))] / ours["step_s"]
    yield Line(f"{name}: p90 / median", f"{spread:.3f}")


@check("fast", 150)
def sparse() -> Iterator[Line]:
    """Block-sparse attention beside causal flash attention."""
    (found,) = in_processes("sparse_attention")
    for one in found:
        name = f"{one['mode']}, density {one['density']:.3f}"
        yield expect(name, f"{one['error']:.1e}", "<= 1e-2 of dense", one["error"] <= 1e-2)
        ratio = one["dense_s"] / one["sparse_s"]
        is_ok = None if is_dry() or one["density"] > 0.2 else ratio >= 2
        yield Line(f"{name}, speed-up", f"{ratio:.2f}", ">= 2 below a density of 0.2", is_ok)


@called
def sparse_attention() -> list[Result]:
    """Times and errors of forward and backward, for two patterns."""
    from hadal.plugins.sparse_attention import SparseSelfAttention, from_config

    hadal.init_distributed()
    length, heads, depth = (128, 2, 16) if is_dry() else (8192, 16, 64)
    device, dtype = current_device(), torch.float32 if is_dry() else torch.bfloat16
    found = []
    for mode in ("fixed", "bigbird"):
        section = {"mode": mode, "block": 16 if is_dry() else 64, "attention": "unidirectional"}
        pattern = from_config({"train_batch_size": 1, "sparse_attention": section}, num_heads=heads)
        layer = SparseSelfAttention(pattern, max_seq_length=length).to(device)
        made = [torch.randn(1, heads, length, depth, device=device, dtype=dtype) for _ in range(3)]
        values = [value.requires_grad_() for value in made]
        layout = pattern.make_layout(length).bool()
        size = length // layout.shape[-1]
        mask = layout.to(device).repeat_interleave(size, -2).repeat_interleave(size, -1)
        mask &= torch.ones(length, length, dtype=torch.bool, device=device).tril()
        attend = nn.functional.scaled_dot_product_attention
        ours = layer(*values)
        dense = attend(*values, attn_mask=mask)
        error = float((ours - dense).abs().max() / dense.abs().max())
        causal = partial(attend, is_causal=True)
        passes = {"sparse_s": layer, "dense_s": causal}
        density = float(mask.float().mean() * 2)
        times = {
            name: _seconds(partial(_forward_backward, act, values), 5)
            for name, act in passes.items()
        }
        found.append({"mode": mode, "density": density, "error": error, **times})
    return found


def _forward_backward(attend: Callable[..., Tensor], values: Sequence[Tensor]) -> None:
    attend(*values).sum().backward()


@check("fast", 120)
def compiled() -> Iterator[Line]:
    """A compiled engine trains to the same losses."""
    if is_dry():
        yield Line("compiled", "not on CPUs")
        return
    keys = ({}, {"compile": {"enabled": True}})
    runs = [{"config": _config(0, "bf16", **one), "deterministic": False} for one in keys]
    plain, found = _trainings(*runs)
    yield _close("losses", found, plain, 1e-2)


# ---- offload -------------------------------------------------------------------------------------


@check("offload", 170)
def tiers() -> Iterator[Line]:
    """The time of an update on the host, the rates of copies, and the bits of every tier."""
    yield from _offloading(["--only=small", "--seconds=150"])


@check("offload", 230)
def largest() -> Iterator[Line]:
    """The largest GPT that trains with its optimizer on the host."""
    yield from _offloading(["--only=largest", "--largest=9", "--skip-bits", "--seconds=200"])


def _offloading(words: list[str]) -> Iterator[Line]:
    if is_dry():
        words = ["--device=cpu", "--skip-bits", "--only=largest", "--largest=1.3", "--steps=1"]
        words += ["--micro-batch=2", "--accumulation=2"]
    with tempfile.TemporaryDirectory() as folder:
        script = f"{ROOT}/benchmarks/offload_gpu.py"
        done = run_script(script, *words, "--json", f"{folder}/found.json", limit_s=220)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
    for line in lines:
        yield Line("", line)
    yield expect("exit code", done.returncode, "0", done.returncode == 0)


# ---- all checks ----------------------------------------------------------------------------------


def _results_of(name: str, limit_s: float) -> tuple[list[Line], float]:
    """Run one check in its own process; a fault or a time-out is a line that fails."""
    begun, found = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "lines.json")
        command = [sys.executable, __file__, "--check", name, str(result)]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, wrote = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            wrote = f"it took more than {limit_s:g} s"
        if result.exists():
            found = [Line(**one) for one in json.loads(result.read_text())]
    if process.returncode:
        tail = " ".join(wrote.strip().splitlines()[-3:])[-400:]
        found.append(expect("the check", tail, "runs to its end", False))
    return found, time.perf_counter() - begun


def _run_check(name: str, result: str) -> None:
    lines: list[Line] = []
    for line in CHECKS[name].act():
        lines.append(line)
        Path(result).write_text(json.dumps([asdict(one) for one in lines]))


def _run_call(function: str, given: str, folder: str) -> None:
    rank = os.environ["RANK"]
    found = CALLS[function](**json.loads(given))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _draw(rows: Sequence[tuple[str, Line]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {True: "tab:green", False: "tab:red", None: "tab:gray"}
    figure = pyplot.figure(figsize=(12, 0.6 + 0.22 * len(rows)))
    for place, (name, line) in enumerate(rows):
        height = 1 - (place + 1.5) / (len(rows) + 2)
        texts = (f"{name}: {line.name}", line.value[:60], line.expected[:40])
        for left, text in zip((0.04, 0.42, 0.78), texts, strict=True):
            figure.text(left, height, text, fontsize=8, family="monospace")
        figure.text(0.015, height, "\N{BLACK CIRCLE}", color=colours[line.is_ok], fontsize=9)
    figure.suptitle(title, y=1 - 0.3 / (len(rows) + 2))
    figure.savefig(path, dpi=120)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--part", choices=("right", "fast", "offload"), help="one part; by default all")
    add("--only", help="names of checks, as loop,stages")
    add("--dry", action="store_true", help="tiny, on CPUs, to try the checks themselves")
    add("--json", type=Path, metavar="FILE", help="write all lines as JSON")
    add("--output", type=Path, metavar="FILE", help="draw all lines (PNG)")
    add("--check", nargs=2, help=argparse.SUPPRESS)
    add("--call", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen checks; return 1 if a line fails."""
    options = _parse(arguments)
    if options.check:
        _run_check(*options.check)
        return 0
    if options.call:
        _run_call(*options.call)
        return 0
    if options.dry:
        os.environ |= {"GPU_CHECK_DRY": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    elif not torch.cuda.is_available():
        print("There is no CUDA device here; --dry tries the checks on CPUs.")
        return 0
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    names = options.only.split(",") if options.only else list(CHECKS)
    rows: list[tuple[str, Line]] = []
    for name in names:
        one = CHECKS[name]
        if options.part in (None, one.part):
            lines, spent = _results_of(name, 600.0 if options.dry else one.limit_s)
            for line in lines:
                verdict = {True: "OK", False: "FAIL", None: "-"}[line.is_ok]
                shown = f"{name} {line.name}".strip()
                print(f"{shown:48} {line.value:32} {line.expected:28} {verdict}", flush=True)
            print(f"{name}: {spent:.1f} s", flush=True)
            rows += [(name, line) for line in lines]
    failed = sum(line.is_ok is False for _, line in rows)
    print(f"{failed} of {len(rows)} lines fail")
    if options.json:
        lines_of = [{"check": name, **asdict(line)} for name, line in rows]
        document = {"environment": describe_environment(), "lines": lines_of}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.output:
        _draw(rows, f"{failed} of {len(rows)} lines fail", options.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
