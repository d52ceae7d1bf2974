"""`get_accelerator()` and the code that uses it, on a device that is not a CPU."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from ranks import RankPools, on_ranks

import npu
from hadal.compat.accelerator import get_accelerator
from hadal.compat.checkpointing import checkpoint, model_parallel_cuda_manual_seed
from hadal.device import device_thread
from hadal.plugins.activation_checkpointing.function import get_cuda_rng_tracker

ROOT = Path(__file__).parents[2]


@on_ranks(2, "npus")
def test_every_question_about_a_device() -> None:
    device = get_accelerator()
    rank = torch.distributed.get_rank()
    assert device.is_available() and device.device_count() == 2
    assert (device.device_name(), device.device_name(1)) == ("npu", "npu:1")
    assert device.current_device() == rank and device.current_device_name() == f"npu:{rank}"
    assert device.device() == torch.device("npu", rank) == device.device(rank)
    device.set_device(1 - rank)
    assert device.current_device() == 1 - rank and torch.empty(1, device="npu").get_device() != rank
    device.set_device(rank)
    assert device.communication_backend_name() == "hccl"
    # What it can.
    assert device.supported_dtypes() == [torch.float32, torch.half, torch.bfloat16]
    assert not device.is_fp64_supported()
    makers = {
        device.FloatTensor: torch.float32,
        device.HalfTensor: torch.float16,
        device.BFloat16Tensor: torch.bfloat16,
        device.IntTensor: torch.int32,
        device.LongTensor: torch.int64,
        device.ByteTensor: torch.uint8,
    }
    for maker, dtype in makers.items():
        made = maker([1, 2])
        assert (made.dtype, made.device, made.tolist()) == (dtype, device.device(), [1, 2])
    assert device.on_accelerator(made) and not device.on_accelerator(torch.ones(1))
    # Work that is queued.
    assert not device.is_synchronized_device() and not device.use_host_timers()
    assert not device.resolves_data_dependency() and not device.handles_memory_backpressure()
    side = device.Stream()
    before, after = (device.Event(enable_timing=True) for _ in range(2))
    host = device.pin_memory(torch.zeros(1000))
    assert device.is_pinned(host) and not device.is_pinned(torch.zeros(3))
    with npu.asynchronous(longest_delay=100.0):
        values = torch.full((1000,), 2.0, device=device.device())
        before.record()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            assert device.current_stream() == side != device.default_stream()
            host.copy_(values, non_blocking=True)
            after.record()
        assert device.current_stream() == device.default_stream() and not after.query()
        assert (host == 0).all()
        after.synchronize()
        assert (host == 2).all() and before.elapsed_time(after) >= 0
        values.add_(1)
        host.copy_(values, non_blocking=True)
        device.synchronize()
        assert (host == 3).all()
    device.range_push("here")
    device.range_pop()
    _random(device)
    _memory(device)
    # Launchers and builders.
    assert device.visible_devices_envs() == ["ASCEND_RT_VISIBLE_DEVICES"]
    environment: dict[str, str] = {}
    device.set_visible_devices_envs(environment, [0, 1])
    assert environment == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert device.export_envs() == ["ASCEND", "HCCL"]
    assert device.create_op_builder("FusedAdamBuilder") is not None


def _random(device: Any) -> None:
    """Seeds and states of the device leave the host's alone."""
    host = torch.get_rng_state()
    place = device.device()
    device.manual_seed(5)
    assert device.initial_seed() == 5
    state = device.get_rng_state()
    drawn = torch.rand(4, device=place)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=place), drawn)
    device.manual_seed_all(5)
    for index in range(2):
        generator = device.default_generator(index)
        assert generator.initial_seed() == 5 and generator.device == torch.device("npu", index)
        assert torch.equal(device.get_rng_state(index), state)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    device.manual_seed(6)
    state = device.get_rng_state()
    tracker.add("other", 5)
    with tracker.fork("other"):
        assert torch.equal(torch.rand(4, device=place), drawn)
    assert torch.equal(device.get_rng_state(), state)
    tracker.reset()
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(device.random().get_rng_state(), host)


def _memory(device: Any) -> None:
    gc.collect()  # what earlier tests have left in circles would go at any time
    device.empty_cache()
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    values = torch.empty(1 << 20, dtype=torch.uint8, device=device.device())
    assert device.memory_allocated() - before == values.nbytes
    del values
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() - before == 1 << 20
    assert device.memory_reserved() >= before and device.max_memory_reserved() >= 1 << 20
    # An idle device holds nothing, however much the host does.
    other = 1 - device.current_device()
    assert device.memory_allocated(other) == 0
    device.reset_peak_memory_stats(other)
    assert device.max_memory_allocated(other) == 0
    assert device.total_memory() == 1 << 32
    assert device.available_memory() == (1 << 32) - before
    assert device.memory_stats()["allocated_bytes.all.current"] == before


@on_ranks(1, "npus")
def test_recomputation_draws_the_same_numbers() -> None:
    """The same numbers are dropped again, from the device's own generator and a named one."""
    model_parallel_cuda_manual_seed(9)
    place = get_accelerator().device()

    def forward(values: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(values, 0.5)
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(dropped, 0.5)

    gradients = []
    for recomputes in (False, True):
        model_parallel_cuda_manual_seed(9)
        values = torch.ones(200, device=place, requires_grad=True)
        output = checkpoint(forward, values) if recomputes else forward(values)
        torch.rand(3, device=place)
        output.sum().backward()
        assert values.grad is not None
        assert torch.equal(values.grad, output.detach())
        gradients.append(values.grad)
    assert torch.equal(*gradients) and 0 < int(gradients[0].count_nonzero()) < 200


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import npu
npu.join()
import hadal
hadal.install_as_deepspeed()
import deepspeed, torch
from deepspeed.accelerator import get_accelerator
deepspeed.init_distributed()
print(torch.distributed.get_backend_config(), get_accelerator().current_device_name())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
engine, _, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    },
)
inputs = torch.ones(2, 4, dtype=torch.bfloat16).to(engine.local_rank)
with npu.asynchronous():
    losses = []
    for _ in range(3):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
deepspeed.comm.all_reduce(loss)
deepspeed.comm.barrier()
import deepspeed.comm as dist
print(engine.device, dist.get_world_size())
"""


def test_a_program_for_deepspeed(npus: RankPools) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env = {key: value for key, value in env.items() if key not in ("RANK", "WORLD_SIZE")}
    done = forks.run(["-c", _PROGRAM, str(ROOT / "tests")], env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "npu" in line]
    assert told == ["cpu:gloo,npu:hccl npu:0", "npu:0 1"]


def _reported() -> list[str]:
    from hadal.device import inventory

    return [*inventory.devices(), inventory.lacks_fused_kernels()]


def test_available_features_are_reported(npus: RankPools) -> None:
    (told,) = npus(1).run(_reported)
    assert told == ["test device, 4.3 GB", "test device, 4.3 GB", ""]


# ---- devices that are not here -------------------------------------------------------------------


class _Module:
    """Stands for `torch.cuda` or `torch.xpu`, and writes down what it is asked."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked
        self.asker = threading.current_thread()  # others belong to stores of earlier tests
        self.Stream, self.Event = "a class of streams", "a class of events"
        self.FloatTensor = "a class of tensors"
        self.default_generators = ("first", "second")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "nvtx":
            raise AttributeError(name)

        def answer(*given: Any) -> Any:
            if threading.current_thread() is self.asker:
                self.asked.append(" ".join([name, *map(str, given)]))
            return {"initial_seed": 3, "is_bf16_supported": False}.get(name, name)

        return answer


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_questions_are_passed_on(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = _Module(asked)
    found = torch.accelerator
    for name, answer in {
        "is_available": True,
        "current_accelerator": torch.device(kind),
        "current_device_index": 1,
        "device_count": 4,
        "memory_allocated": 11,
        "max_memory_allocated": 12,
        "memory_reserved": 13,
        "max_memory_reserved": 14,
        "get_memory_info": (15, 16),
        "memory_stats": {"a": 1},
    }.items():
        monkeypatch.setattr(found, name, lambda *_, answer=answer: answer)
    for name in ("set_device_index", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(found, name, getattr(module, f"torch_{name}"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = get_accelerator()
    assert device.communication_backend_name() == backend
    assert (device.current_device_name(), device.device_count()) == (f"{kind}:1", 4)
    assert (device.Stream, device.Event) == (module.Stream, module.Event)
    assert device.FloatTensor == module.FloatTensor
    assert device.current_stream() == "current_stream" and device.stream("one") == "stream"
    assert device.default_stream(0) == "default_stream"
    assert not device.is_bf16_supported() and torch.bfloat16 not in device.supported_dtypes()
    assert (device.memory_allocated(), device.max_memory_allocated(2)) == (11, 12)
    assert (device.memory_reserved(), device.max_memory_reserved()) == (13, 14)
    assert (device.available_memory(), device.total_memory()) == (15, 16)
    assert device.memory_stats() == {"a": 1}
    assert device.default_generator(1) == "second" and device.initial_seed() == 3
    device.manual_seed(7)
    device.manual_seed_all(8)
    device.set_device(2)
    device.synchronize(3)
    device.empty_cache()
    device.reset_peak_memory_stats(0)
    device.set_rng_state(torch.zeros(1), 2)
    assert device.get_rng_state(1) == "get_rng_state"
    assert asked == [
        f"current_stream {kind}:1",
        "stream one",
        f"default_stream {kind}:0",
        "is_bf16_supported",
        "is_bf16_supported",
        "initial_seed",
        "manual_seed 7",
        "manual_seed_all 8",
        "torch_set_device_index 2",
        f"torch_synchronize {kind}:3",
        "torch_empty_cache",
        f"torch_reset_peak_memory_stats {kind}:0",
        f"set_rng_state tensor([0.]) {kind}:2",
        f"get_rng_state {kind}:1",
    ]


def _devices_of_threads() -> list[int]:
    found: list[int] = []

    def look() -> None:
        found.append(torch.accelerator.current_device_index())

    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    try:
        thread = device_thread(look, name="looking", daemon=True)
        torch.accelerator.set_device_index(0)  # the thread's start may come later
        thread.start()
        thread.join()
    finally:
        torch.accelerator.set_device_index(before)
    return found


def test_threads_compute_on_the_device_of_their_maker(npus: RankPools) -> None:
    assert npus(1).run(_devices_of_threads) == [[1]]
