"""Whether results are right, and whether anything waits, leaks or races."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import traces
from peers.model import Gpt
from peers.settings import Workload
from torch import Tensor, nn

import hadal
from gpu_checks import training
from gpu_checks.jobs import run_script
from gpu_checks.table import (
    ROOT,
    Line,
    Lines,
    check,
    close,
    distance,
    expect,
    is_dry,
    keep,
    kept,
    measured,
)
from gpu_checks.training import ALL_ON_HOST, INPUTS_ON_HOST, ON_HOST, config, train
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import current_device, memory, synchronize
from hadal.device.inventory import peak_of_name
from hadal.plugins.activation_checkpointing import Recomputation

# GPU memory rates in TB/s, bytes read and written.
_COPY_TB_S = {"H200": 4.3, "H100": 3.0}
_MATRIX_TFLOPS = {"H200": 750.0, "H100": 750.0}
_PINNED_GB_S = 48.0
_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@check("right", 30)
def environment() -> Lines:
    """The device, the disk and their rates, which other figures are compared with."""
    training.start()
    device = current_device()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name()
    yield Line("device", f"{name}, torch {torch.__version__}, hadal {hadal.__version__}")
    rate = matrix_flops() / 1e12
    keep("matrix", rate)
    yield measured("matrix products", rate, least_matrix_tflops(), unit="TFLOP/s")
    numel = 1 << (16 if is_dry() else 30)
    values = torch.zeros(numel, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    copied = 2 * numel / seconds(lambda: other.copy_(values)) / 1e12
    least = next((rate for part, rate in _COPY_TB_S.items() if part in name), None)
    yield measured("copies on the device", copied, least, unit="TB/s")
    host = memory.host_empty(numel, torch.uint8, pinned=True)
    for what, source, target in (("to", host, values), ("from", values, host)):
        act = partial(target.copy_, source, non_blocking=True)
        rate = numel / seconds(act) / 1e9
        keep(f"copies {what} the device", rate)
        yield measured(f"copies {what} the device", rate, _PINNED_GB_S, unit="GB/s")


def least_matrix_tflops() -> float | None:
    """Return what this device should reach; None if it is unknown."""
    if current_device().type == "cpu":
        return None
    name = torch.cuda.get_device_name()
    peak = peak_of_name(name)[0]
    known = next((rate for part, rate in _MATRIX_TFLOPS.items() if part in name), None)
    return known or (0.75 * peak / 1e12 if peak else None)


def matrix_flops() -> float:
    """Return the operations per second of bf16 matrix products."""
    side, dtype = (128, torch.float32) if is_dry() else (8192, torch.bfloat16)
    matrix = torch.randn(side, side, device=current_device(), dtype=dtype)
    return 2 * side**3 / seconds(lambda: matrix @ matrix)


def seconds(act: Callable[[], object], times: int = 10) -> float:
    """Return the mean time of a call on the device."""
    for _ in range(3):
        act()
    synchronize(current_device())
    begun = time.perf_counter()
    for _ in range(times):
        act()
    synchronize(current_device())
    return (time.perf_counter() - begun) / times


# ---- numbers -------------------------------------------------------------------------------------


@check("right", 30)
def loop() -> Lines:
    """One rank has the bits of a loop by hand."""
    training.start()
    for kind in ("fp32", "bf16"):
        ours, other = train(config(0, kind), 10), training.train_by_hand(kind, 10)
        if kind == "fp32":
            keep("plain", ours.losses[: training.STEPS])
        yield close(f"{kind}: losses against a loop", distance(ours.losses, other.losses), 0)
        is_same = all(map(torch.equal, ours.weights, other.weights))
        yield expect(f"{kind}: weights against a loop", is_same, "equal to the bit", is_same)
    ours, other = (
        train(config(0, gradient_clipping=0.5), 10),
        training.train_by_hand("fp32", 10, 0.5),
    )
    yield close("clipped: losses against a loop", distance(ours.losses, other.losses), 2e-7)


@check("right", 20)
def whole() -> Lines:
    """One rank trains with the batches of several; its losses are kept for the next checks."""
    training.start()
    for count in (2, 3, 4):
        keys = {"gradient_accumulation_steps": count}
        keep(f"{count} micro-steps", train(config(0, **keys)).losses)
    yield Line("losses", "kept")


@check("right", 40, ranks=2)
def stages() -> Lines:
    """Two processes on the device have the same losses at every stage."""
    yield from _stages(accumulation=1, limit=0)
    # With accumulation, stages 2 and 3 add over ranks before they add over micro-steps.
    yield from _stages(accumulation=2, limit=1e-6)
    clipped = [train(config(stage, gradient_clipping=0.5)) for stage in range(4)]
    for stage in (1, 2, 3):
        far = distance(clipped[stage].losses, clipped[0].losses)
        yield close(f"clipped, stage {stage} against 0", far, 1e-6)
    parts = [train(config(stage, "bf16")) for stage in range(4)]
    for stage in (1, 2, 3):
        far = distance(parts[stage].losses, parts[0].losses)
        yield close(f"bf16, stage {stage} against 0", far, 0 if stage == 1 else 1e-3)


@check("right", 30, ranks=3)
def stages_of_three() -> Lines:
    """Three processes on the device have the same losses at every stage."""
    yield from _stages(accumulation=1, limit=1e-6)


def _stages(accumulation: int, limit: float) -> Lines:
    training.start()
    ranks = dist.get_world_size()
    found = [train(config(s, gradient_accumulation_steps=accumulation)) for s in range(4)]
    for stage in (1, 2, 3):
        far = distance(found[stage].losses, found[0].losses)
        yield close(f"stage {stage} against 0, {accumulation} micro-steps", far, limit)
    alone = kept(f"{ranks * accumulation} micro-steps")
    name = f"stage 0 against one rank, {accumulation} micro-steps"
    if alone is None:
        yield Line(name, "needs the check `whole`")
    else:
        yield close(name, distance(found[0].losses, alone), 1e-6)


@check("right", 40, ranks=2)
def fsdp2() -> Lines:
    """Stage 3 on two processes has FSDP2's losses; times are those of copies through the host."""
    training.start()
    given = training.batches(training.STEPS)
    engine = training.engine_of(config(3))
    ours = [float(training.make_step(engine, one)) for one in given]
    mine = seconds(lambda: training.make_step(engine, given[0]), 3)
    engine.destroy()
    step = _sharded_step()
    other = [float(step(one[0])) for one in given]
    yield close("losses of stage 3", distance(ours, other), 1e-5)
    peer = seconds(lambda: step(given[0][0]), 3)
    yield Line("step / fsdp2, through the host", f"{mine / peer:.3f}")


def _sharded_step() -> Callable[[Tensor], Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Gpt(training.shape()).to(current_device())
    mesh = dist.init_device_mesh(current_device().type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    keys: Any = training.ADAM
    optimizer = torch.optim.AdamW(model.parameters(), **keys, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Linear(nn.Module):
    """Weights whose gradients are the inputs, on every device to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 48) / 8) for _ in range(3))
        self.slopes = [torch.randn(64, 48) for _ in self.weights]

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self.slopes, strict=True)
        return torch.stack([(w * slope.to(w.device)).sum() for w, slope in pairs]).sum()


# Relative distance of weights after one step; Muon's products are in bf16.
_OPTIMIZERS = {"Adam": 1e-6, "AdamW": 1e-6, "Adagrad": 1e-6, "SGD": 1e-6, "Lamb": 1e-6}
_OPTIMIZERS |= {"Lion": 1e-6, "Muon": 1e-3}


def _after_one_step() -> dict[str, list[float]]:
    found = {}
    for kind in _OPTIMIZERS:
        chosen = {"type": kind, "params": {"lr": 1e-3}}
        engine = training.engine_of(config(0, optimizer=chosen), _Linear)
        engine.backward(engine())
        engine.step()
        found[kind] = torch.cat([w.detach().flatten() for w in engine.module.weights]).tolist()
        engine.destroy()
    return found


@check("right", 20)
def optimizers() -> Lines:
    """One step of every optimizer; the next check compares it with a CPU's."""
    training.start()
    keep("optimizers", _after_one_step())
    yield Line("weights", "kept")


@check("right", 30, **_CPU)
def optimizers_of_a_cpu() -> Lines:
    """Every optimizer steps as on a CPU, to rounding."""
    training.start()
    there, here = kept("optimizers"), _after_one_step()
    for kind, limit in _OPTIMIZERS.items() if there else ():
        one, other = torch.tensor(there[kind]).double(), torch.tensor(here[kind]).double()
        yield close(kind, float((one - other).norm() / other.norm()), limit)
    if not there:
        yield Line("weights", "needs the check `optimizers`")


# ---- waits ---------------------------------------------------------------------------------------

_ADAPTS: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
}


@check("right", 30)
def waits() -> Lines:
    """A step waits for nothing and allocates nothing; fp16 waits once, to read its overflow."""
    yield from _quiet("stage 0, bf16", config(0, "bf16", **_ADAPTS))
    yield from _quiet("stage 0, fp16", config(0, "fp16", **_ADAPTS), waits=1)
    offloaded = config(1, "bf16", zero=ON_HOST, **_ADAPTS)
    yield from _quiet("optimizer on the host", offloaded, waits=None)


@check("right", 40, ranks=2)
def waits_of_stages() -> Lines:
    """The same of stages 1 to 3, beside the waits of `staged` itself."""
    for stage in (1, 2, 3):
        yield from _quiet(f"stage {stage}, bf16", config(stage, "bf16", **_ADAPTS))


def _quiet(name: str, config: dict[str, Any], waits: int | None = 0) -> Lines:
    """Train with waits forbidden, and count them in a trace of two steps; None: a reading."""
    training.start()
    engine = training.engine_of(config)
    given = training.batches(10)
    for number in range(5):
        training.make_step(engine, given[number])
    if waits == 0:
        fault = _with_waits_forbidden(lambda: [training.make_step(engine, b) for b in given[5:8]])
        yield expect(f"{name}: waits", fault or "none", "none", not fault)
    counts = traces.host_calls(
        traces.traced(lambda: [training.make_step(engine, batch) for batch in given[8:]])
    )
    engine.destroy()
    if dist.get_world_size() > 1:  # those of `staged`
        counts -= {key: counts[key] for key in ("cudaEventSynchronize", "cudaHostAlloc")}
    told = ", ".join(f"{count} {call}" for call, count in sorted(counts.items())) or "none"
    if waits is None:
        yield Line(f"{name}: calls in 2 steps", told)
        return
    allowed = {call: 2 * waits for call in traces.WAITS}
    is_ok = all(count <= allowed.get(call, 0) for call, count in counts.items())
    expected = f"at most {2 * waits} waits" if waits else "none"
    yield expect(f"{name}: calls in 2 steps", told, expected, is_ok)


def _with_waits_forbidden(act: Callable[[], object]) -> str:
    if current_device().type != "cuda":
        act()
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
    except RuntimeError as error:
        return str(error)[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


# ---- races ---------------------------------------------------------------------------------------

_ALONE = {
    "optimizer on the host": config(1, "bf16", zero=ON_HOST),
    "all on the host": config(3, "bf16", zero=ALL_ON_HOST),
    "inputs on the host": config(0, "bf16", activation_checkpointing=INPUTS_ON_HOST),
}
_SHARED = {f"stage {stage}": config(stage, "bf16") for stage in (1, 2, 3)}
_RACE_STEPS = 4


@check("right", 40)
def races() -> Lines:
    """Slow copies change no bit."""
    yield from _races(_ALONE)


@check("right", 40, ranks=2)
def races_of_stages() -> Lines:
    """Slow copies and collectives change no bit."""
    yield from _races(_SHARED)


def _races(configs: dict[str, dict[str, Any]]) -> Lines:
    training.start()
    for name, one in configs.items():
        plain = train(one, _RACE_STEPS).losses
        if dist.get_rank() == 0:
            keep(f"plain, {name}", plain)
        with training.slow_copies():
            slow = train(one, _RACE_STEPS).losses
        yield close(f"{name}: slow copies", distance(slow, plain), 0)


@check("right", 40, skips_dry=True, TORCH_CUDA_SANITIZER="1")
def sanitizer() -> Lines:
    """torch's sanitizer of streams finds no race."""
    yield from _sanitized({"stage 0": config(0, "bf16"), **_ALONE})


@check("right", 40, ranks=2, skips_dry=True, TORCH_CUDA_SANITIZER="1")
def sanitizer_of_stages() -> Lines:
    """torch's sanitizer of streams finds no race at stages 1 to 3."""
    yield from _sanitized(_SHARED)


def _sanitized(configs: dict[str, dict[str, Any]]) -> Lines:
    training.start()
    for name, one in configs.items():
        fault = ""
        try:
            train(one, 3)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        yield expect(name, fault or "no race", "no race", not fault)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("this backward fails")


@check("right", 20)
def abandoned() -> Lines:
    """Inputs that are copied back for a backward that never comes overwrite nothing."""
    training.start()
    call = Recomputation(ActivationCheckpointing(cpu_checkpointing=True), None).call
    device, numel = current_device(), 1 << (12 if is_dry() else 26)
    for name, fails in (("backward raises", True), ("backward ends early", False)):
        first = torch.randn(numel, requires_grad=True, device=device) * 1
        with training.slow_copies():
            middle = call(lambda x: x.sin().cos(), first)
            middle = _Failing.apply(middle) if fails else middle
            loss = call(lambda x: x.sin().cos(), middle).sum()
            with suppress(RuntimeError):
                torch.autograd.grad(loss, first if fails else middle)
            del loss, middle, first
        later = [torch.full((numel,), 7.0, device=device) for _ in range(4)]
        synchronize(device)
        wrong = sum(int((one != 7.0).sum()) for one in later)
        yield expect(f"{name}: values overwritten", wrong, "0", wrong == 0)


@check("right", 60)
def pinned() -> Lines:
    """Pinned memory that is freed during a copy is not reused too early; its rate of making."""
    training.start()
    device, numel = current_device(), 1 << (16 if is_dry() else 24)
    wrong = 0
    for number in range(20 if is_dry() else 200):
        host = memory.host_empty(numel, torch.uint8, pinned=True).fill_(number)
        there = host.to(device, non_blocking=True)
        del host
        noise = torch.full((numel,), 255, dtype=torch.uint8)
        wrong += int((there != number).any())
        del noise
    yield expect("wrong copies", wrong, "0", wrong == 0)
    nbytes = 1 << (20 if is_dry() else 33)
    begun = time.perf_counter()
    memory.host_empty(nbytes, torch.uint8, pinned=True)
    yield measured("locking", nbytes / (time.perf_counter() - begun) / 1e9, 4.0, unit="GB/s")


# ---- whole programs ------------------------------------------------------------------------------


@check("right", 60)
def checkpoint() -> Lines:
    """A run that is saved and loaded goes on with the same bits, also while it is saved."""
    training.start()
    with tempfile.TemporaryDirectory() as folder:
        for name, section in (("saved", {}), ("saved meanwhile", {"async_save": True})):
            one, place = config(1, "bf16", checkpoint=section), f"{folder}/{name}"
            unbroken, again = train(one, save=place), train(one, load=place)
            half = unbroken.losses[training.STEPS // 2 :]
            yield close(name, distance(again.losses, half), 0)
        yield _peak_of_saving(folder)


def _peak_of_saving(folder: str) -> Line:
    """Return the host memory of a save in the background, relative to the state's bytes."""
    large = Workload(2, 64, 2, 128, 32) if is_dry() else Workload(8, 1024, 16, 8192, 128)
    one = config(1, "bf16", checkpoint={"async_save": True})
    engine = training.engine_of(one, partial(Gpt, large))
    numel = sum(parameter.numel() for parameter in engine.module.parameters())
    engine.backward(engine(torch.zeros(1, 33, dtype=torch.long, device=current_device())))
    engine.step()
    with suppress(OSError):  # a system without it
        Path("/proc/self/clear_refs").write_text("5")
    before = memory.memory_use(torch.device("cpu")).host
    engine.save_checkpoint(f"{folder}/large")
    engine.wait_for_checkpoint()
    more = memory.peak_memory(torch.device("cpu")) - before
    engine.destroy()
    return measured("host memory of a save / state", more / (14 * numel), most=1.1)


@check("right", 30)
def misuse() -> Lines:
    """A batch that runs out of memory in backward can be left out."""
    training.start()
    with training.deterministic():
        found = [_losses_with_fault_at(step) for step in (None, 2)]
    yield close("losses after it", distance(*found), 0)


def _losses_with_fault_at(step: int | None) -> list[float]:
    engine, losses = training.engine_of(config(0, "bf16")), []
    for number, given in enumerate(training.batches(training.STEPS)):
        if number == step:
            with suppress(RuntimeError):
                loss = engine(given[0])
                loss.register_hook(lambda _: torch.empty(1 << 50, device=current_device()))
                engine.backward(loss)
            engine.zero_grad()
        losses.append(float(training.make_step(engine, given)))
    engine.destroy()
    return losses


# ---- programs that start the process group themselves --------------------------------------------

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_WHOLE = ("int8", "uint8", "int32", "int64")
_OTHERS = ("bool", "complex64")


@check("right", 40, OWN_GROUP="1")
def own_group() -> Lines:
    """A program that starts the process group itself computes on its device, with the same bits."""
    device = None if is_dry() else torch.device("cuda", 0)
    backend = "gloo" if is_dry() else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, device_id=device)
    training.start()
    hadal.init_distributed()
    found = train(config(0))
    wanted = "cpu" if is_dry() else "cuda:0"
    yield expect("device", current_device(), wanted, str(current_device()) == wanted)
    plain = kept("plain")
    yield (
        close("losses", distance(found.losses, plain), 0)
        if plain
        else Line("losses", "needs the check `loop`")
    )


@check("right", 40, OWN_GROUP="1")
def backend() -> Lines:
    """Every dtype that a model may hold passes through the collectives of one bound rank."""
    for name, (dtypes, act) in _operations().items():
        failed = []
        for dtype in dtypes:
            try:
                act(torch.ones(64, device=current_device()).to(getattr(torch, dtype)))
                synchronize(current_device())
            except (RuntimeError, TypeError, ValueError) as error:
                failed.append(f"{dtype} ({error})"[:120])
        yield expect(name, ", ".join(failed) or "all dtypes", "all dtypes", not failed)


def _operations() -> dict[str, tuple[Sequence[str], Callable[[Tensor], object]]]:
    from hadal import comm
    from hadal.comm.collectives import broadcast_

    if not dist.is_initialized():
        dist.init_process_group("gloo" if is_dry() else "cpu:gloo,cuda:nccl")
    ranks, some = comm.Ranks.world(), comm.Ranks.world().some([0])
    numbers, everything = _FLOATS + _WHOLE, _FLOATS + _WHOLE + _OTHERS
    means = () if is_dry() else _FLOATS  # gloo has no means
    reduce, mean = comm.reduce_scatter_tensor, dist.ReduceOp.AVG
    return {
        "all_gather": (everything, lambda t: comm.all_gather_into_tensor(t, t)),
        "reduce_scatter": (numbers, lambda t: reduce(t.clone(), t)),
        "reduce_scatter, mean": (means, lambda t: reduce(t.clone(), t, mean)),
        "all_reduce, mean": (means, lambda t: comm.all_reduce(t, mean)),
        "all_reduce, maximum": (numbers, lambda t: comm.all_reduce(t, dist.ReduceOp.MAX)),
        "all_to_all": (numbers, lambda t: comm.all_to_all_single(t.clone(), t)),
        "another group": (numbers, lambda t: comm.all_reduce(t, group=some.group)),
        "broadcast of buffers": (
            (*everything, "int16"),
            lambda t: broadcast_(t, 0, ranks, "a broadcast"),
        ),
    }


# ---- other programs ------------------------------------------------------------------------------


@check("right", 60, ranks=0)
def quickstart() -> Lines:
    """README's program ends well, and writes nothing to standard error."""
    text = (ROOT / "README.md").read_text()
    program = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "initialize" in b)
    keys = next(b for b in re.findall(r"```json\n(.*?)```", text, re.S) if "zero" in b)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(f"import os\nos.chdir({folder!r})\n{program}")
        Path(folder, "ds_config.json").write_text(keys)
        words = ["-m", "torch.distributed.run", "--nproc_per_node=1", f"{folder}/train.py"]
        done = run_script(*words, limit_s=55, OMP_NUM_THREADS="1")
    yield expect("exit code", done.returncode, "0", done.returncode == 0)
    last = done.stderr.strip().splitlines()[-1:]
    yield expect("standard error", last or "empty", "empty", not last)


@check("right", 130, ranks=0, skips_dry=True)
def marked() -> Lines:
    """The tests that are marked `gpu` pass."""
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        yield Line("tests", "pytest and hypothesis are not installed")
        return
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    words = ["-m", "pytest", "-W", "default", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]
    done = run_script(*words, limit_s=125, PYTHONWARNINGS="default")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield expect("", line[:200], "passes", False)
    yield expect("tests", lines[-1] if lines else "nothing", "all pass", done.returncode == 0)


# ---- last: compared with the races ---------------------------------------------------------------


@check("right", 30, CUDA_LAUNCH_BLOCKING="1")
def blocking() -> Lines:
    """Launches one by one change no bit."""
    yield from _blocking(_ALONE)


@check("right", 30, ranks=2, CUDA_LAUNCH_BLOCKING="1")
def blocking_of_stages() -> Lines:
    """Launches one by one change no bit at stages 1 to 3."""
    yield from _blocking(_SHARED)


def _blocking(configs: dict[str, dict[str, Any]]) -> Lines:
    training.start()
    for name, one in configs.items():
        plain, found = kept(f"plain, {name}"), train(one, _RACE_STEPS).losses
        if plain is None:
            yield Line(f"{name}: blocking launches", "needs the checks of races")
        else:
            yield close(f"{name}: blocking launches", distance(found, plain), 0)
