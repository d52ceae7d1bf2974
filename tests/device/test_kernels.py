"""torch's fused kernels behind Hadal's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hadal.device import (
    AdagradRule,
    AdamRule,
    SgdRule,
    collective_backend,
    current_device,
    fused_adagrad_,
    fused_adam_,
    fused_sgd_,
    synchronize,
)

NUMEL = 1003
WHOLE_VECTORS = NUMEL // 64 * 64  # torch rounds what is left behind them in another way


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_is_torchs_own(kind, decay, maximize, amsgrad, dtype):
    generator = torch.Generator().manual_seed(1)
    expected = nn.Parameter(torch.randn(NUMEL, generator=generator, dtype=dtype))
    found = expected.detach().clone()
    settings = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-7, "weight_decay": decay}
    optimizer = kind([expected], **settings, amsgrad=amsgrad, maximize=maximize, fused=True)
    moments = torch.zeros_like(found), torch.zeros_like(found)
    largest = torch.zeros_like(found) if amsgrad else None
    rule = AdamRule(0.02, 0.8, 0.97, 1e-7, decay, kind is torch.optim.AdamW, maximize)
    for count in range(1, 5):
        gradient = torch.randn(NUMEL, generator=generator, dtype=dtype)
        expected.grad = gradient.clone()
        optimizer.step()
        step = torch.tensor(float(count))
        largest_given = None if largest is None else [largest]
        fused_adam_([found], [gradient], ([moments[0]], [moments[1]]), largest_given, [step], rule)
        assert step == count
        assert_torchs_own(found, expected.detach())
    state = optimizer.state[expected]
    assert_torchs_own(moments[0], state["exp_avg"])
    assert_torchs_own(moments[1], state["exp_avg_sq"])
    if largest is not None:
        assert_torchs_own(largest, state["max_exp_avg_sq"])


def assert_torchs_own(found: Tensor, expected: Tensor) -> None:
    """Compare: equal bits in full vectors; after them equal numbers except the last digits."""
    assert torch.equal(found[:WHOLE_VECTORS], expected[:WHOLE_VECTORS])
    eps = torch.finfo(found.dtype).eps
    assert torch.allclose(found, expected, rtol=8 * eps, atol=eps)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_kernels_agree_with_the_plain_loop(kind):
    generator = torch.Generator().manual_seed(2)
    expected = nn.Parameter(torch.randn(NUMEL, generator=generator))
    found = expected.detach().clone()
    optimizer = kind([expected], lr=0.01, weight_decay=0.1, foreach=False)
    moments = torch.zeros_like(found), torch.zeros_like(found)
    rule = AdamRule(0.01, 0.9, 0.999, 1e-8, 0.1, kind is torch.optim.AdamW)
    for count in range(1, 4):
        expected.grad = torch.randn(NUMEL, generator=generator)
        given = [found], [expected.grad.clone()], ([moments[0]], [moments[1]]), None
        fused_adam_(*given, [torch.tensor(float(count))], rule)
        optimizer.step()
    assert torch.allclose(found, expected.detach(), rtol=1e-6, atol=1e-7)


def test_this_process_has_one_device():
    device = current_device()
    assert device == current_device()
    synchronize(device)
    assert "gloo" in collective_backend()


Step = Callable[[Sequence[Tensor], "Tensor | None"], None]
COUNT = torch.tensor(3.0)


def adam(tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
    rule = AdamRule(0.02, 0.8, 0.97, 1e-7, 0.1, True)
    lists = [[one] for one in tensors]
    fused_adam_(*lists[:2], (lists[2], lists[3]), lists[4], [COUNT], rule, divisor)


def sgd(tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
    rule = SgdRule(0.02, 0.9, 0.1, 0.1)
    fused_sgd_(*([one] for one in tensors[:3]), rule, is_first=False, divisor=divisor)


def adagrad(tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
    rule = AdagradRule(0.02, 0.1, 1e-7, 0.1)
    lists = [[one] for one in tensors]
    fused_adagrad_(*lists[:2], lists[3], [COUNT], rule, divisor)


def starts_of(numel: int) -> Tensor:
    """Return weights, gradients and moments of every magnitude that training sees."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, numel, generator=generator, dtype=torch.float64)
    values *= 10 ** torch.empty_like(values).uniform_(-3, 1, generator=generator)
    values[3:].square_()
    return values


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        *((step, dtype) for step in (adam, adagrad) for dtype in (torch.float32, torch.float64)),
        (sgd, torch.float32),
        (sgd, torch.float64),
        (adam, torch.bfloat16),
        (adam, torch.float16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_element_gets_the_same_bits_wherever_a_slice_is_cut(
    step: Step, dtype: torch.dtype, scales: bool
) -> None:
    """Stages, ranks and layouts cut runs at different elements, with the same bits."""
    divisor = torch.tensor(7.0) if scales else None
    start = starts_of(NUMEL).to(dtype)
    whole = start.clone()
    step(whole, divisor)
    for cuts in ((0, 1, 6, 15, 31, 64, 163, 500, NUMEL), range(0, NUMEL + 1, 17)):
        found = start.clone()
        ends = [*cuts[1:], NUMEL]
        for first, stop in zip(cuts, ends, strict=True):
            if first < stop:
                step(found[:, first:stop], divisor)
        assert torch.equal(found, whole), (found != whole).nonzero()
