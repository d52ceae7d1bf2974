"""Whether steps are fast, and memory is what the estimate says."""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.model import Gpt
from peers.settings import Workload
from torch import Tensor, nn

from gpu_checks import training
from gpu_checks.jobs import run_script
from gpu_checks.right import least_matrix_tflops, matrix_flops, seconds
from gpu_checks.table import (
    ROOT,
    Line,
    Lines,
    check,
    close,
    distance,
    expect,
    is_dry,
    kept,
    measured,
)
from gpu_checks.training import config
from hadal.device import current_device, peak_memory, reset_peak_memory, synchronize
from hadal.errors import HadalError

_TINY = ["--layers=2", "--width=64", "--heads=2", "--vocabulary=128", "--sequence=32"]
_TINY += ["--micro-batch=2", "--device=cpu", "--processes=1"]
_LARGE = ["--layers=32", "--width=2560", "--heads=32", "--peers="]
_HUGE = ["--layers=32", "--width=4096", "--heads=32", "--peers="]

Found = dict[str, Any]


def _measured(*words: str, limit_s: float = 120) -> tuple[dict[str, Found], str]:
    """Return the findings of `gpu.py` by name, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        tiny = [*_TINY, "--steps=2", "--warmup=1"] if is_dry() else []
        script = f"{ROOT}/benchmarks/gpu.py"
        done = run_script(script, *words, *tiny, "--json", str(path), limit_s=limit_s)
        if not path.exists():
            return {}, (done.stdout + done.stderr)[-400:]
        told = json.loads(path.read_text())
    faults = [
        f"{name}: {fault.strip().splitlines()[-1]}" for name, fault in told["failures"].items()
    ]
    return {one["name"]: one for one in told["contestants"]}, "; ".join(faults)[:400]


@check("fast", 140, ranks=0)
def step() -> Lines:
    """A step of GPT-2 XL beside a loop by hand, FSDP2 and DeepSpeed; its update and its memory."""
    found, fault = _measured("--steps=20", limit_s=135)
    if fault:
        yield expect("contestants", fault, "all have figures", False)
    ours = next((one for name, one in found.items() if name.startswith("hadal")), None)
    if ours is None:
        return
    for peer, most in (("by hand", 1.03), ("fsdp2", 1.0), ("deepspeed", 1.0)):
        if peer in found:
            yield measured(f"step / {peer}", ours["step_s"] / found[peer]["step_s"], most=most)
        else:
            yield Line(f"step / {peer}", "not installed" if peer == "deepspeed" else "no figures")
    yield Line("step", f"{ours['step_s'] * 1e3:.1f} ms")
    yield measured("MFU", ours["mfu"] or 0.0, 0.25)
    ordered = sorted(ours["steps"])
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    yield measured("p90 / median", p90 / median(ordered), most=1.03)
    yield from _of_memory(ours, found.get("by hand"))
    yield from _of_update(ours)
    yield from _of_host(ours, found.get("by hand"))


def _of_memory(ours: Found, loop: Found | None) -> Lines:
    apart = abs(ours["held_gib"] / ours["estimate_gib"] - 1)
    yield Line("held memory", f"{ours['held_gib']:.2f} GiB, estimate {ours['estimate_gib']:.2f}")
    yield measured("held memory / estimate, apart", apart, most=0.02)
    if loop:
        more = {one["name"]: one["peak_gib"] - one["held_gib"] for one in (ours, loop)}
        yield measured(
            "memory of a step beyond the loop's",
            more[ours["name"]] - more["by hand"],
            most=1.0,  # a bucket of 5e8 elements
            unit="GiB",
        )
    yield measured("reserved / peak", ours["reserved_gib"] / ours["peak_gib"], most=1.15)


def _of_update(ours: Found) -> Lines:
    """Yield the kernels of `engine.step()`; updates move 34 bytes per parameter."""
    for name, count, spent in ours["update"]:
        yield Line(f"update: {count} x", f"{spent * 1e3:.2f} ms  {name}")
    # 34 bytes at 3 TB/s, the norm and the digests
    limit = ours["parameters"] * 34 / 3e12 + 4e-3
    yield measured("update", ours["update_s"] * 1e3, most=limit * 1e3, unit="ms of kernels")
    # torch adds up the digests' 8-byte words, which nothing else does
    digests = sum(spent for name, _, spent in ours["update"] if "sum_functor<long" in name)
    yield measured("update: digests of weights", digests * 1e3, most=2.0, unit="ms")
    yield measured("update: launches", ours["update_launches"], most=300)


def _of_host(ours: Found, loop: Found | None) -> Lines:
    if loop:
        ratio = ours["host_s"] / loop["host_s"]
        yield measured("host time of a tiny step / by hand", ratio, most=1.05)
    yield measured("host time / step of 8192 tokens", ours["host_s"] / ours["step_s"], most=1.0)
    yield Line("GPU idle in a step", f"{ours['idle_share']:.3f}")
    yield Line("GPU idle in a tiny step", f"{ours['idle_share_small']:.3f}")


def _shapes() -> Iterator[tuple[str, list[str], float]]:
    """Yield what to train, how, and the least share of the peak."""
    total = 0 if is_dry() else torch.cuda.get_device_properties(0).total_memory
    if total > 120e9:
        yield "6.6 B, recomputed", _HUGE, 0.36
    else:
        yield "2.6 B, recomputed", _LARGE, 0.33
    if not is_dry():
        yield "2.6 B", [*_LARGE, "--keep-activations"], 0.42
        yield "2.6 B, compiled", [*_LARGE, "--keep-activations", "--compile"], 0.45


@check("fast", 130, ranks=0)
def larger() -> Lines:
    """The share of the device's peak that larger models reach."""
    for name, words, least in _shapes():
        found, fault = _measured(*words, "--steps=5", "--brief", limit_s=60)
        if fault or not found:
            yield expect(name, fault, "figures", False)
        for one in found.values():
            yield measured(f"{name}: MFU", one["mfu"] or 0.0, least)


# ---- compiled ------------------------------------------------------------------------------------


def _compiled_shape() -> Workload:
    if is_dry():
        return Workload(2, 32, 2, 64, 16)
    return Workload(4, 2048, 16, 8192, 1024, 8)


_BACKEND = "aot_eager" if is_dry() else "inductor"


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@check("fast", 100)
def compiled() -> Lines:
    """A compiled engine compiles once, and steps as fast as a compiled loop."""
    training.start()
    shape = _compiled_shape()
    torch.manual_seed(0)
    batch = torch.randint(shape.vocabulary, (shape.micro_batch, shape.sequence + 1))
    given = [batch.to(current_device())]
    plain = training.engine_of(config(0, "bf16"), partial(Gpt, shape))
    wanted = [float(training.make_step(plain, given)) for _ in range(10)]
    plain.destroy()
    engine = training.engine_of(config(0, "bf16"), partial(Gpt, shape))
    engine.compile(backend=_BACKEND)
    losses = [training.make_step(engine, given) for _ in range(2)]
    graphs = _graphs()
    losses += [training.make_step(engine, given) for _ in range(8)]
    again = _graphs() - graphs
    yield expect("compilations after step 2", again, "0", again == 0)
    found = [float(loss) for loss in losses]
    yield close("losses", distance(found, wanted), 1e-2)
    ours = seconds(lambda: training.make_step(engine, given))
    engine.destroy()
    torch._dynamo.reset()
    step = _compiled_loop(shape, given[0])
    yield measured("step / compiled loop", ours / seconds(step), most=1.05)
    yield _with_graphs(shape, given, wanted)


def _compiled_loop(shape: Workload, batch: Tensor) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Gpt(shape).to(current_device(), torch.bfloat16)
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    model.compile(backend=_BACKEND)

    def step() -> None:
        model(batch).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        model.zero_grad()

    return step


def _with_graphs(shape: Workload, given: list[Tensor], wanted: list[float]) -> Line:
    """Train with CUDA graphs; Hadal may refuse them by an error of its own."""
    name, expected = "reduce-overhead", "<= 1e-2 relative, or refused"
    if is_dry():
        return Line(name, "not on CPUs")
    torch._dynamo.reset()
    engine = training.engine_of(config(0, "bf16"), partial(Gpt, shape))
    try:
        engine.compile(compile_kwargs={"mode": "reduce-overhead"})
        found = [float(training.make_step(engine, given)) for _ in range(6)]
    except HadalError as error:
        return expect(name, f"refused: {error}"[:200], expected, True)
    except Exception as error:
        return expect(name, f"{type(error).__name__}: {error}"[:300], expected, False)
    finally:
        engine.destroy()
    far = distance(found, wanted[:6])
    return expect(name, f"{far:.1e}", expected, far <= 1e-2)


# ---- sparse attention ----------------------------------------------------------------------------


@check("fast", 90)
def sparse() -> Lines:
    """Block-sparse attention beside dense and causal flash attention, at many lengths."""
    training.start()
    length = 128 if is_dry() else 8192
    for mode in ("fixed", "bigbird"):
        layer, mask = _layer(mode, length)
        values = _values(length)
        far = _distance_from_dense(layer, values, mask)
        density = float(mask.float().mean() * 2)
        name = f"{mode}, density {density:.3f}"
        yield close(f"{name}: output and gradients", far, 1e-2)
        attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
        times = [seconds(partial(_pass, one, values), 5) for one in (attend, layer)]
        least = 2.0 if density < 0.2 else None
        yield measured(f"{name}: times faster than flash", times[0] / times[1], least)
    peaks = [_peak_of_pass(length // part) for part in (2, 1)]
    if not is_dry():
        yield measured("memory at twice the length", peaks[1] / peaks[0], most=2.3)
    count = 2 if is_dry() else 10
    with warnings.catch_warnings(), _limit_raises():
        warnings.filterwarnings("error", message=".*recompile")
        for number in range(1, count + 1):
            layer, _ = _layer("fixed", 256 * number)
            layer(*_values(256 * number))
    yield expect("lengths", f"{count} compiled", "no limit of recompilations", True)


@contextmanager
def _limit_raises() -> Iterator[None]:
    """Make too many recompilations an error, in place of slow code and a warning."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def _layer(mode: str, length: int) -> tuple[nn.Module, Tensor]:
    """Return a causal sparse attention, and its mask of tokens."""
    from hadal.plugins.sparse_attention import SparseSelfAttention, from_config

    heads, _ = _heads()
    section = {"mode": mode, "block": 16 if is_dry() else 64, "attention": "unidirectional"}
    pattern = from_config({"train_batch_size": 1, "sparse_attention": section}, num_heads=heads)
    layer = SparseSelfAttention(pattern, max_seq_length=length).to(current_device())
    layout = pattern.make_layout(length).bool().to(current_device())
    size = length // layout.shape[-1]
    mask = layout.repeat_interleave(size, -2).repeat_interleave(size, -1)
    return layer, mask & torch.ones_like(mask[0]).tril()


def _heads() -> tuple[int, int]:
    return (2, 16) if is_dry() else (16, 64)


def _values(length: int) -> list[Tensor]:
    heads, depth = _heads()
    dtype, device = torch.float32 if is_dry() else torch.bfloat16, current_device()
    torch.manual_seed(0)
    made = [torch.randn(1, heads, length, depth, device=device, dtype=dtype) for _ in range(3)]
    return [value.requires_grad_() for value in made]


def _pass(attend: Callable[..., Tensor], values: Sequence[Tensor]) -> None:
    attend(*values).sum().backward()


def _distance_from_dense(layer: nn.Module, values: Sequence[Tensor], mask: Tensor) -> float:
    attend = partial(nn.functional.scaled_dot_product_attention, attn_mask=mask)
    found = []
    for one in (layer, attend):
        out = one(*values)
        found.append([out, *torch.autograd.grad(out.square().sum(), values)])
    pairs = zip(*found, strict=True)
    far = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
    return math.inf if any(map(math.isnan, far)) else max(far)


def _peak_of_pass(length: int) -> int:
    layer, _ = _layer("fixed", length)
    values, device = _values(length), current_device()
    _pass(layer, values)
    synchronize(device)
    reset_peak_memory(device)
    _pass(layer, values)
    return peak_memory(device)


@check("fast", 20)
def clocks() -> Lines:
    """The device is as fast after the checks of speed as at the start."""
    training.start()
    least = 0.97 * kept("matrix") if kept("matrix") else least_matrix_tflops()
    yield measured("matrix products", matrix_flops() / 1e12, least, unit="TFLOP/s")
