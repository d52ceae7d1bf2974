"""Cross entropies: torch's own numbers, a few rows at a time and over several ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine.toys import config_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hadal
from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)

ROWS, WIDTH, WORDS = 10, 6, 8


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((2, ROWS // 2, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    target = torch.randint(WORDS, (2, ROWS // 2), generator=generator)
    target[0, :2] = -100
    return hidden, weight, bias, target


def plain(hidden: Tensor, weight: Tensor, target: Tensor, bias: Any, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2).float()
    found = F.cross_entropy(logits, target.flatten(), reduction=reduction)
    return found.view(target.shape) if reduction == "none" else found


def differentiated(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = torch.arange(1.0, loss.numel() + 1).view(loss.shape)
    return list(torch.autograd.grad((loss * weights).sum() * 512.0, leaves))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1, 3, None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_cross_entropy_is_torchs(
    reduction: str, rows: int | None, with_bias: bool
) -> None:
    hidden, weight, bias, target = inputs()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    given = bias if with_bias else None
    loss = linear_cross_entropy(hidden, weight, target, given, reduction=reduction, rows=rows)
    expected = plain(hidden, weight, target, given, reduction)
    torch.testing.assert_close(loss, expected)
    found = differentiated(loss, *leaves)
    torch.testing.assert_close(found, differentiated(expected, *leaves), rtol=1e-5, atol=1e-3)


def test_a_linear_cross_entropy_sums_wide() -> None:
    hidden, weight, _, target = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, target, rows=2)
    found = torch.autograd.grad(loss, (hidden, weight))
    exact = [one.detach().float().requires_grad_() for one in (hidden, weight)]
    expected = torch.autograd.grad(plain(*exact, target, None, "mean"), exact)
    assert loss.dtype == torch.float32 and {one.dtype for one in found} == {torch.bfloat16}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.03, atol=2e-3)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return found


def test_logits_of_all_positions_never_exist() -> None:
    words, rows, width = 1 << 12, 1 << 9, 4
    hidden, weight = torch.randn(rows, width), torch.randn(words, width)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with _Largest() as seen:
        loss = linear_cross_entropy(*leaves, torch.randint(words, (rows,)), rows=16)
        loss.backward()
    assert seen.numel == 16 * words


def test_a_linear_cross_entropy_under_autocast() -> None:
    hidden, weight, bias, target = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias, rows=3)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    expected = torch.autograd.grad(
        plain(hidden, weight, target, bias, "mean"), (hidden, weight, bias)
    )
    assert {one.dtype for one in found} == {torch.float32}
    torch.testing.assert_close(list(found), list(expected), rtol=0.05, atol=5e-3)


def test_no_target_means_no_loss() -> None:
    hidden, weight, _, target = inputs()
    loss = linear_cross_entropy(hidden, weight, target.fill_(-100))
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


def test_only_tensors_that_require_a_gradient_get_one() -> None:
    hidden, weight, _, target = inputs()
    frozen = weight.detach()
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, frozen, target), (hidden,))
    expected = torch.autograd.grad(plain(hidden, frozen, target, None, "mean"), (hidden,))
    torch.testing.assert_close((found,), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cross_entropy_of_logits_is_torchs(dtype: torch.dtype) -> None:
    hidden, weight, _, target = inputs()
    logits = (hidden @ weight.t()).detach().to(dtype).requires_grad_()
    for reduction in ("none", "mean", "sum"):
        loss = vocab_parallel_cross_entropy(logits, target, reduction=reduction)
        wide = logits.float().flatten(0, 1)
        expected = F.cross_entropy(wide, target.flatten(), reduction=reduction)
        torch.testing.assert_close(loss.flatten(), expected.reshape(loss.numel()))
        found, wanted = differentiated(loss.flatten(), logits), differentiated(expected, logits)
        # fp32 sums over the words in another order: processors round some by several units.
        limits = {"rtol": WORDS * 5e-7, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(found, wanted, **limits)


# ---- over ranks ----------------------------------------------------------------------------------


@pytest.mark.fast_cells("False-2", "True-2")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("uneven", [False, True])
@on_ranks("world")
def test_a_vocabulary_over_ranks(uneven: bool) -> None:
    """A vocabulary split over the ranks, where later ones may have fewer columns."""
    hidden, weight, bias, target = inputs()
    rank, size = comm.get_rank(), comm.get_world_size()
    ends = [WORDS * place // size for place in range(size + 1)]
    if uneven:
        ends = [0, *(end + 1 for end in ends[1:-1]), WORDS]
    here = slice(ends[rank], ends[rank + 1])
    group = dist.group.WORLD
    for reduction in ("none", "mean", "sum"):
        expected = plain(hidden, weight, target, bias, reduction)
        wanted = differentiated(expected, hidden, weight, bias)
        mine = [one.detach()[here].clone().requires_grad_() for one in (weight, bias)]
        loss = linear_cross_entropy(
            hidden, mine[0], target, mine[1], reduction=reduction, rows=3, vocab_group=group
        )
        torch.testing.assert_close(loss, expected)
        found = differentiated(loss, hidden, *mine)
        cut = [wanted[0], wanted[1][here], wanted[2][here]]
        torch.testing.assert_close(found, cut, rtol=1e-5, atol=1e-3)
        logits = F.linear(hidden, *mine)
        losses = vocab_parallel_cross_entropy(logits, target, group, reduction=reduction)
        torch.testing.assert_close(losses, expected)
        # The gradient of the hidden states is each rank's part; a program sums them.
        torch.testing.assert_close(differentiated(losses, *mine), cut[1:], rtol=1e-5, atol=1e-3)


@on_ranks(2)
def test_slices_of_a_vocabulary_in_any_order() -> None:
    """Slices that are not in the ranks' order, and row counts that differ if each takes its own."""
    hidden, weight, bias, target = inputs()
    first = comm.get_rank() == 0
    here = slice(WORDS - 3, WORDS) if first else slice(0, WORDS - 3)
    expected = plain(hidden, weight, target, bias, "mean")
    with mock.patch("hadal.plugins.sequence.cross_entropy.ROWS_NUMEL", 2 * (WORDS - 3)):
        loss = linear_cross_entropy(
            hidden,
            weight[here],
            target,
            bias[here],
            vocab_group=dist.group.WORLD,
            vocab_start=here.start,
        )
    torch.testing.assert_close(loss, expected)


@on_ranks(2)
def test_positions_over_ranks() -> None:
    """Positions split over the ranks: DeepSpeed's function."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(8, 2, WORDS, generator=generator)
    target = torch.randint(WORDS, (8, 2), generator=generator)
    target[:3] = -100
    size, rank = comm.get_world_size(), comm.get_rank()
    here = slice(rank * 8 // size, (rank + 1) * 8 // size)
    group = dist.group.WORLD
    for reduction in ("none", "mean", "sum"):
        everything = whole.clone().requires_grad_()
        expected = F.cross_entropy(everything.flatten(0, 1), target.flatten(), reduction=reduction)
        mine = whole[here].clone().requires_grad_()
        loss = vocab_sequence_parallel_cross_entropy(mine, target[here], group, reduction=reduction)
        torch.testing.assert_close(loss.flatten(), expected.reshape(loss.numel()))
        (found,) = differentiated(loss.flatten(), mine)
        (wanted,) = differentiated(expected, everything)
        torch.testing.assert_close(found, wanted[here])
    alone = vocab_sequence_parallel_cross_entropy(
        mine, target[here], group, gather_sequence_loss=False
    )
    assert alone.shape == (8 // size, 2)


class Words(nn.Module):
    def __init__(self, linear: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS)
        self.linear = linear

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, head = self.first(x), self.lm_head
        if self.linear:
            return linear_cross_entropy(hidden, head.weight, y, head.bias, rows=3)
        return plain(hidden, head.weight, y, head.bias, "mean")


def _train(stage: int, linear: bool) -> list[float]:
    config = config_of(stage, gradient_accumulation_steps=2)
    engine = hadal.initialize(model=Words(linear), config=config)[0]
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(9 * step + comm.get_rank())
        x = torch.randn(3, 4, WIDTH, generator=generator)
        y = torch.randint(WORDS, (3, 4), generator=generator)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_linear_cross_entropy_trains_identically(stage: int, ranks: RankPools) -> None:
    whole, few = ranks(2).run(_train, stage, False), ranks(2).run(_train, stage, True)
    assert few[0] == pytest.approx(whole[0], abs=2e-6)


# ---- what does not fit ---------------------------------------------------------------------------


@on_ranks(2)
def test_a_rank_without_columns_is_an_error() -> None:
    """All ranks raise, so that none waits for another."""
    rank, group = dist.get_rank(), dist.group.WORLD
    target = torch.zeros(2, dtype=torch.int64)
    expected = r"rank 1 of 2 has no columns of the vocabulary \(all ranks: \[4, 0\]\)"
    with pytest.raises(SequenceError, match=expected):
        vocab_parallel_cross_entropy(torch.zeros(2, 4 * (1 - rank)), target, group)
    weight = torch.zeros(4 * (1 - rank), 3)
    with pytest.raises(SequenceError, match=expected):
        linear_cross_entropy(torch.zeros(2, 3), weight, target, vocab_group=group)


def test_mismatched_shapes_are_an_error() -> None:
    with pytest.raises(SequenceError, match="rank 0 of 1 has no columns"):
        vocab_parallel_cross_entropy(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64))
    hidden, weight, _, target = inputs()
    with pytest.raises(SequenceError, match=r"got hidden states \(2, 5, 6\), a weight \(6, 8\)"):
        linear_cross_entropy(hidden, weight.t(), target)
    with pytest.raises(SequenceError, match="reduction is 'all'"):
        linear_cross_entropy(hidden, weight, target, reduction="all")
    with pytest.raises(SequenceError, match=r"need targets of shape \(2, 5\), but got \(5,\)"):
        vocab_parallel_cross_entropy(torch.zeros(2, 5, WORDS), target[0])
    for wrong, message in (
        (
            target + WORDS,
            rf"a target is \d+, in a vocabulary of {WORDS}; expected 0 to {WORDS - 1}, or -100",
        ),
        (target.float(), r"targets of torch.float32; expected integers"),
    ):
        with pytest.raises(SequenceError, match=message):
            linear_cross_entropy(hidden, weight, wrong)
        with pytest.raises(SequenceError, match=message):
            vocab_parallel_cross_entropy(hidden @ weight.t(), wrong)
    with pytest.raises(SequenceError, match=rf"a bias \(3,\); expected \[{WORDS}\]"):
        linear_cross_entropy(hidden, weight, target, torch.zeros(3))
    with pytest.raises(SequenceError, match="begins at 4, but no group of ranks shares the rest"):
        linear_cross_entropy(hidden, weight, target, vocab_start=4)
    with pytest.raises(SequenceError, match="backend is 'triton'"):
        vocab_sequence_parallel_cross_entropy(hidden, target, None, backend="triton")
