"""Whether offloading computes the same, overlaps, and trains what does not fit on the device."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_checks.jobs import run_script
from gpu_checks.table import ROOT, Line, Lines, check, expect, is_dry, measured

_TINY = ["--device=cpu", "--small=0.01", "--largest=1.3"]
_TINY += ["--micro-batch=2", "--accumulation=2", "--steps=1"]
_DISK_BYTES = 24  # of a parameter and update: master and moments, read and written

Found = dict[str, Any]


def _measured(*words: str, limit_s: float) -> tuple[dict[str, Found], str]:
    """Return the findings of `offload_gpu.py` by case, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        tiny = _TINY if is_dry() else []
        script = f"{ROOT}/benchmarks/offload_gpu.py"
        words = (*words, f"--seconds={limit_s - 10:g}", *tiny)
        done = run_script(script, *words, "--json", str(path), limit_s=limit_s)
        if not path.exists():
            return {}, (done.stdout + done.stderr)[-400:]
        runs = json.loads(path.read_text())["runs"]
    faults = [
        f"{one['case']['name']}: {one['found']['fault'][-300:]}"
        for one in runs
        if "fault" in one["found"]
    ]
    return {
        one["case"]["name"]: one["found"] for one in runs if "fault" not in one["found"]
    }, "; ".join(faults)


@check("offload", 130, ranks=0)
def tiers() -> Lines:
    """Every tier computes the same; copies run at the bus's rate, under computation."""
    found, fault = _measured("--only=small", limit_s=125)
    if fault:
        yield expect("cases", fault, "all train", False)
    for name, value in found.get("bits", {}).items():
        if name.endswith("alike"):
            yield expect(name, value, "True", value)
        else:
            yield expect(name, f"{value:.1e}", "<= 1e-06", value <= 1e-6)
    rates = found.get("rates", {})
    for name in ("all on the device", "optimizer on the host", "half of the optimizer"):
        if name in found:
            yield Line(name, _times(found[name]))
    plain, host = found.get("all on the device"), found.get("optimizer on the host")
    if host and rates:
        yield from _of_optimizer(host, rates)
    if plain and host:
        yield measured(
            "forward, backward / all on the device", _compute_s(host) / _compute_s(plain), most=1.05
        )
    if weights := found.get("optimizer and weights on the host"):
        yield Line("optimizer and weights on the host", _times(weights))
        traced = weights["traced"]
        if rates.get("coming_bytes"):
            share = traced["weights_coming_bytes_s"] / rates["coming_bytes"]
            yield measured("weights coming / pinned rate", share, 0.8)
        yield measured("digests / kernels", traced["digests_share"], most=0.02)


def _of_optimizer(host: Found, rates: Found) -> Lines:
    """Yield the update's time and the copies of gradients and new weights."""
    traced = host["traced"]
    yield measured("update of 1.3 B on the host", median(host["updates"]), most=0.35, unit="s")
    for name, key, limit in (
        ("gradients leaving", "gradients_leaving_bytes_s", "leaving_bytes"),
        ("new weights coming", "new_weights_bytes_s", "coming_bytes"),
    ):
        if rates.get(limit):
            yield measured(f"{name} / pinned rate", traced[key] / rates[limit], 0.8)
    yield measured("gradients leaving under kernels", traced["gradients_leaving_hidden"], 0.9)
    # all buckets but the last one
    yield measured("new weights coming under updates", traced["new_weights_hidden"], 0.5)


def _times(found: Found) -> str:
    return (
        f"step {median(found['steps']):.2f} s, update {median(found['updates']):.2f} s,"
        f" init {found['init_s']:.1f} s, peak {found['peak_gib']:.1f} GiB"
    )


def _compute_s(found: Found) -> float:
    return median(a - b for a, b in zip(found["steps"], found["updates"], strict=True))


@check("offload", 130, ranks=0)
def largest() -> Lines:
    """The largest GPT that trains with its optimizer on the host."""
    is_large = not is_dry() and torch.cuda.get_device_properties(0).total_memory > 120e9
    found, fault = _measured("--only=largest", "--largest=9", "--skip-bits", limit_s=125)
    one = found.get("the largest")
    if one is None or not found.get("rates"):
        yield expect("the largest", fault, "trains", False)
        return
    yield Line("parameters", f"{one['parameters'] / 1e9:.2f} 10^9")
    yield Line("the largest", _times(one))
    achieved = one["flops"] / median(one["steps"])
    share = achieved / found["rates"]["matrix_flops"]
    yield measured("of the matrix rate", share, 0.4 if is_large else 0.25)
    yield measured("init", one["init_s"], most=60, unit="s")


@check("offload", 110, ranks=0)
def disk() -> Lines:
    """A model trains with its optimizer on the machine's disk, at the disk's rate."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if not is_dry() and free < 36e9:
        yield Line("optimizer on the disk", f"{free / 1e9:.0f} GB are free, 36 are needed")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ["--only=disk", "--skip-bits", "--steps=1", f"--disk={folder}"]
        found, fault = _measured(*words, limit_s=105)
    one, rates = found.get("optimizer on the disk"), found.get("rates")
    if one is None or rates is None:
        yield expect("optimizer on the disk", fault, "trains", False)
        return
    yield expect("optimizer on the disk", _times(one), "trains", True)
    for name in ("read", "write"):
        yield Line(f"disk, {name}", f"{rates[f'disk_{name}_bytes'] / 1e9:.2f} GB/s")
    both = 2 / (1 / rates["disk_read_bytes"] + 1 / rates["disk_write_bytes"])
    rate = one["parameters"] * _DISK_BYTES / median(one["updates"])
    yield measured("update / disk's rate", rate / both, 0.8)
