"""The fate of freed host memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hadal.comm.start import memory_is_tuned
from hadal.device import memory

PROGRAM = """
import resource, sys, torch
from hadal.device import give_back_freed_memory, keep_freed_memory, memory_use

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(12_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

cpu = torch.device("cpu")
if sys.argv[1] == "kept":
    keep_freed_memory(cpu)
faults(12)
print(faults(5))
held = memory_use(cpu).host
give_back_freed_memory()
print(held - memory_use(cpu).host)
"""
NBYTES = 48_000_000


def run(how: str) -> tuple[int, int]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    faults, returned = run.stdout.split()
    return int(faults) * resource.getpagesize(), int(returned)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_reused_and_returned_on_request() -> None:
    cleared, returned = run("kept")
    assert cleared < NBYTES / 10
    assert returned > 0.9 * NBYTES  # and what lies between other pieces
    cleared, _ = run("by default")
    assert cleared > 4.5 * NBYTES


BEGINNING = """
import torch, hadal
from hadal.device import memory_use

cpu = torch.device("cpu")
hadal.init_distributed()
torch.ones(8).to(torch.bfloat16)
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)])
before = memory_use(cpu).host
hadal.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
})
print(memory_use(cpu).host - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_memory_freed_at_the_start_is_returned(tmp_path: Path) -> None:
    """A rank of two holds less than the model did: (2 + 4) / 2 bytes instead of 4."""
    (tmp_path / "program.py").write_text(BEGINNING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc-per-node=2", str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    grown = [int(word) for word in re.findall(r"-?\d+", run.stdout)]
    assert len(grown) == 2 and max(grown) < 0, run.stdout


def test_the_users_malloc_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert not memory_is_tuned()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")
    assert memory_is_tuned()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=x")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    assert memory_is_tuned()


def test_free_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used = tmp_path / "limit", tmp_path / "used"
    monkeypatch.setattr(memory, "_LIMITS", ((limit, used),))
    of_host = memory.free_host_nbytes()
    assert of_host > 1 << 20
    limit.write_text("1000000\n")
    used.write_text("400000\n")
    assert memory.free_host_nbytes() == 600_000
    used.write_text("2000000\n")
    assert memory.free_host_nbytes() == 0
    limit.write_text("max\n")
    assert memory.free_host_nbytes() > 1 << 20
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert memory.free_host_nbytes() == 0


@pytest.mark.parametrize("calls_library", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_bytes_are_distinguished_from_equal_values(
    calls_library: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not calls_library:
        monkeypatch.setattr(memory, "_memcmp", lambda: None)
    values = torch.tensor([0.0, 1.0, torch.nan] * 333 + [2.0], dtype=dtype)
    assert memory.same_bytes(values, values.clone())
    for place, other in ((0, -0.0), (999, 3.0), (2, 0.0)):
        changed = values.clone()
        changed[place] = other
        assert not memory.same_bytes(values, changed)
        assert memory.same_bytes(values[place + 1 :], changed[place + 1 :])
