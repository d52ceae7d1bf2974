"""Inputs of recomputed calls that are stored in host memory, on a device whose work is late."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_checkpointing.test_keeping import OPTIONS, recomputation, same_numbers
from activation_checkpointing.test_modules import engine_of, losses_of
from ranks import RankPools, on_ranks
from sequence.models import llama, recomputes, tokens
from torch.utils.checkpoint import checkpoint

import npu
from hadal.compat.offloading import get_checkpoint_hidden_states_offloading_ctx_manager
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.device import current_device
from hadal.errors import UsageError
from hadal.plugins.activation_checkpointing.keeping import HostLimits, InputKeeper

_FILE = Path(__file__).parents[2] / "benchmarks/activation_checkpointing.py"
_SPEC = importlib.util.spec_from_file_location("gpt_benchmark", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
gpt = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpt)


def _same_late(options: dict[str, Any]) -> None:
    with npu.asynchronous():
        same_numbers(options, torch.float32)


@pytest.mark.slow
def test_every_option_has_the_same_bits(npus: RankPools) -> None:
    for options in OPTIONS:
        npus(2).run(_same_late, options)


def _bytes_left(options: dict[str, Any]) -> int:
    """The bytes on the device between forward and backward, without those of the last output."""
    call = recomputation(options).call
    values = torch.randn(1 << 10, requires_grad=True, device=current_device()) * 1
    before = torch.accelerator.memory_allocated()
    for _ in range(4):
        values = call(lambda x: x.sin().cos().sin(), values)
    torch.accelerator.synchronize()
    found = torch.accelerator.memory_allocated() - before
    values.sum().backward()
    return found


@on_ranks(1, "npus")
def test_no_input_stays_on_the_device() -> None:
    assert _bytes_left({}) == 4 * (1 << 12)
    assert _bytes_left({"cpu_checkpointing": True}) == 0


def _bytes_of_transformers(**counts: int) -> tuple[int, list[torch.Tensor]]:
    """The bytes between forward and backward of a recomputed model, and its gradients."""
    model = recomputes(llama().to(current_device()))
    batch = {name: value.to(current_device()) for name, value in tokens(0).items()}
    make = get_checkpoint_hidden_states_offloading_ctx_manager
    before = torch.accelerator.memory_allocated()
    with make(**counts) if counts else contextlib.nullcontext():
        loss = model(**batch, use_cache=False).loss
        torch.accelerator.synchronize()
        found = torch.accelerator.memory_allocated() - before
        loss.backward()
    return found, [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@on_ranks(1, "npus")
def test_layers_of_transformers_store_little_on_the_device() -> None:
    hidden = 2 * 12 * 32 * 4
    with npu.asynchronous(), npu.with_float64():
        stored, expected = _bytes_of_transformers()
        for kept in (0, 1, 2):
            for copies in (0, 2):
                left, found = _bytes_of_transformers(
                    keep_last_count=kept,
                    max_fwd_stash_count=copies,
                    max_cpu_buffer_pool_count=copies,
                )
                # The first of the two layers' inputs is the embeddings, which are stored only here.
                assert stored - left == (2 - kept) * hidden
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@on_ranks(1, "npus")
def test_copies_to_the_host_are_limited() -> None:
    """Few buffers are kept, few copies in flight, and changes in place are seen."""
    limits = HostLimits(copies=1, buffers=1, newest=1)
    keeper = InputKeeper(ActivationCheckpointing(cpu_checkpointing=True), None, limits)
    with npu.asynchronous():
        device, values = current_device(), []
        for number in range(4):
            one = torch.full((64,), float(number), device=device, requires_grad=True) * 1
            with keeper.around([one]):
                values.append((one, checkpoint(torch.sin, one, use_reentrant=False)))
            assert len(keeper._leaving) <= 1
        one, out = values[-1]
        with torch.no_grad():
            one += 1
        with pytest.raises(UsageError, match=r"of size \(64,\), was changed in place"):
            out.sum().backward()
        for _, out in values[:-1]:
            out.sum().backward()
        del values, one, out, _
        gc.collect()
        assert len(keeper.host._free) == 1


class _Failing(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("backward fails")


@pytest.mark.parametrize("fails", [True, False])
@on_ranks(1, "npus")
def test_memory_of_a_prefetched_input_is_kept_until_its_copy(fails: bool) -> None:
    """The graph dies after an input's copy to the device was started, before its backward."""
    call = recomputation({"cpu_checkpointing": True}).call
    device = current_device()
    first = torch.randn(1 << 12, requires_grad=True, device=device) * 1
    with npu.asynchronous(math.inf):
        middle = call(lambda x: x.sin().cos(), first)
        middle = _Failing.apply(middle) if fails else middle
        loss = call(lambda x: x.sin().cos(), middle).sum()
        if fails:
            with pytest.raises(RuntimeError, match="backward fails"):
                loss.backward()
        else:
            torch.autograd.grad(loss, middle)
        del loss, middle, first
        gc.collect()
        later = [torch.full((1 << 12,), 7.0, device=device) for _ in range(4)]
        torch.accelerator.synchronize()
        assert all(bool((each.cpu() == 7.0).all()) for each in later)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, "npus")
def test_modules_of_an_engine(stage: int) -> None:
    found = []
    for section in (None, {"modules": "units", "cpu_checkpointing": True}):
        with npu.asynchronous(), npu.with_float64():
            engine = engine_of(section, stage)
            found.append(losses_of(engine))
            engine.destroy()
    assert found[0] == found[1]


@pytest.mark.slow
@on_ranks(1, "npus")
def test_a_budget_is_kept() -> None:
    """The peak of an update is what the table promised, within 5 %, at every budget."""
    arguments = argparse.Namespace(
        layers=12, length=128, width=32, heads=2, vocabulary=64, batch=4, stage=2, bf16=False
    )
    nothing, units = (gpt.train(arguments, section) for section in ({}, {"modules": "units"}))
    assert units["losses"] == nothing["losses"] and units["peak"] < 0.6 * nothing["peak"]
    for share in (0.0, 0.3, 0.7, 1.1):
        budget = int(units["peak"] * 1.01 + share * (nothing["peak"] - units["peak"]))
        found = gpt.train(arguments, {"memory_budget": budget})
        assert found["losses"] == nothing["losses"]
        assert abs(found["peak"] / found["promised"] - 1) < 0.05, found
        assert found["peak"] <= budget, (found, budget)
        count = found["choices"].count("STORED")
        assert share < 1 or count == 12
        assert abs(count / 12 - min(share, 1)) < 0.2
    few = gpt.train(arguments, {"memory_budget": int(units["peak"] * 0.95)})
    assert "OFFLOADED" in few["choices"] and few["losses"] == nothing["losses"]
    assert abs(few["peak"] / few["promised"] - 1) < 0.05, found
