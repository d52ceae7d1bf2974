"""Inputs of recomputed calls: sharded, on the host, in preallocated buffers; the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal.comm
from hadal.comm import Ranks
from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.errors import UsageError
from hadal.plugins.activation_checkpointing import Recomputation
from hadal.plugins.activation_checkpointing.keeping import KeptInput

WIDTH, DEPTH = 30, 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"cpu_checkpointing": True},
    {"partition_activations": True},
    {"partition_activations": True, "cpu_checkpointing": True},
    {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": DEPTH,
    },
    {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": DEPTH,
        "cpu_checkpointing": True,
    },
    {"synchronize_checkpoint_boundary": True, "profile": True},
]


def recomputation(options: dict[str, Any], ranks: Ranks | None = None) -> Recomputation:
    return Recomputation(ActivationCheckpointing(**options), ranks)


def block_of(dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, WIDTH)]
    return nn.Sequential(*layers).to(device, dtype)


def gradients_of(
    block: nn.Module, call: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The output and all gradients of a stack of residual blocks."""
    torch.manual_seed(1)
    inputs = torch.randn(7, WIDTH, requires_grad=True, dtype=dtype, device=device)
    values = inputs * 2
    for _ in range(DEPTH):
        values = values + call(block, values)
    values.square().sum().backward()
    assert inputs.grad is not None
    found = [values.detach(), inputs.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found


def same_numbers(options: dict[str, Any], dtype: torch.dtype) -> None:
    device = hadal.device.current_device()
    block, ranks = block_of(dtype, device), Ranks.world()
    call = recomputation(options, ranks).call
    expected = gradients_of(block, lambda block, x: block(x), dtype, device)
    for _ in range(2):  # buffers are used again
        found = gradients_of(block, call, dtype, device)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.fast_cells("bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.claims(
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.synchronize_checkpoint_boundary",
)
def test_every_option_has_the_same_bits(ranks: RankPools, dtype: torch.dtype) -> None:
    for options in OPTIONS:
        ranks(2).run(same_numbers, options, dtype)


def _nbytes_kept(options: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The device, elements and position in its buffer of each input that is kept."""
    kept: list[KeptInput] = []
    before = KeptInput.__init__

    def note(self: KeptInput, *args: Any) -> None:
        before(self, *args)
        kept.append(self)

    KeptInput.__init__ = note  # type: ignore[method-assign]
    try:
        device = hadal.device.current_device()
        x = torch.randn(7, WIDTH, requires_grad=True, device=device) * 1
        plain, exempt, small = torch.ones(4), torch.randn(9, 9), torch.ones(1)
        exempt.no_checkpointing = True  # type: ignore[attr-defined]
        call = recomputation(options, Ranks.world()).call
        out = call(lambda x, n, *_: x.sin() * n, x, 3, plain.int(), exempt, small, None)
        found = [(k._part.device.type, k._part.numel(), k._part.storage_offset()) for k in kept]
        assert torch.equal(out, x.sin() * 3)  # the caller's tensor is whole
        out.sum().backward()
        return found
    finally:
        KeptInput.__init__ = before  # type: ignore[method-assign]


@pytest.mark.slow
def test_each_rank_keeps_its_slice(ranks: RankPools) -> None:
    sharded = {"partition_activations": True}
    assert ranks(2).run(_nbytes_kept, sharded) == [[("cpu", 105, 0)]] * 2
    many = {**sharded, "contiguous_memory_optimization": True, "number_checkpoints": 4}
    assert ranks(2).run(_nbytes_kept, many) == [[("cpu", 105, 0)]] * 2
    assert ranks(1).run(_nbytes_kept, sharded) == [[]]


def test_a_retained_graph_is_recomputed_again() -> None:
    for options in OPTIONS:
        call = recomputation(options).call
        x = torch.randn(9, requires_grad=True)
        y = call(lambda x, k: x.sin() * k, x * 1, k=x * 2)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first[0])


def test_layouts_are_kept() -> None:
    seen: list[tuple[int, ...]] = []

    def stride_of(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.exp()

    options = {**OPTIONS[4], "number_checkpoints": 2}
    call = recomputation(options).call
    for x in (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).t()):
        call(stride_of, x.requires_grad_()).sum().backward()
        assert seen[-1] == seen[-2] == x.stride()
    gaps = torch.randn(6, 4)[:, 1:].requires_grad_()
    call(stride_of, gaps).sum().backward()
    assert seen[-1] == gaps.stride()


def test_hooks_around_go_first() -> None:
    """The outer hooks pack weights that may be freed, independently of inputs."""
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() != weight.data_ptr():
            return tensor
        packed.append(tensor)
        return "the weight"

    def unpack(saved: Any) -> Tensor:
        return weight if isinstance(saved, str) else saved

    options = {**OPTIONS[4], "number_checkpoints": 1}
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = recomputation(options).call(torch.mm, x * 1, weight)
    y.sum().backward()
    assert len(packed) == 1
    assert torch.equal(x.grad, torch.ones(3, 3) @ weight.detach().t())


def test_too_few_buffers_are_reported() -> None:
    call = recomputation({**OPTIONS[4], "number_checkpoints": 2}).call
    x = torch.randn(4, requires_grad=True)
    alive = [call(torch.sin, x) for _ in range(2)]
    with pytest.raises(UsageError, match="number_checkpoints is 2, but 3 recomputed blocks"):
        call(torch.sin, x)
    alive.pop().sum().backward()
    del alive
    call(torch.sin, call(torch.sin, x)).sum().backward()


def test_other_shapes_take_other_buffers() -> None:
    call = recomputation({**OPTIONS[4], "number_checkpoints": 2}).call
    for numel in (4, 6, 4, 1 << 12):
        x = torch.randn(numel, requires_grad=True)
        call(torch.sin, x * 1).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())


def test_all_combinations_are_the_same_in_one_process() -> None:
    block, device = block_of(torch.float32, torch.device("cpu")), torch.device("cpu")
    expected = gradients_of(block, lambda block, x: block(x), torch.float32, device)
    names = ["cpu_checkpointing", "partition_activations", "profile"]
    for flags in itertools.product([False, True], repeat=3):
        call = recomputation(dict(zip(names, flags, strict=True))).call
        found = gradients_of(block, call, torch.float32, device)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.claims("activation_checkpointing.profile")
def test_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    call = recomputation({"profile": True}).call
    x = torch.randn(4, requires_grad=True)
    with caplog.at_level("INFO", "hadal"):
        for _ in range(2):
            call(torch.sin, call(torch.sin, x * 1)).sum().backward()
    lines = [record.getMessage() for record in caplog.records]
    starts = [line.rsplit(" ", 2)[0] for line in lines]
    both = ["recomputed block 1: fwd", "recomputed block 2: fwd"]
    assert starts == [*both, "recomputed block 2: backward", "recomputed block 1: backward"] * 2
    assert all(line.endswith(" ms") for line in lines)
