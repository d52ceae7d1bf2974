"""torch's fused kernels behind Hadal's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hadal.device import (
    collective_backend,
    current_device,
    fused_attention,
    fused_attention_backward,
    fused_step_,
    has_fused_attention,
    synchronize,
)

CPU = torch.device("cpu")


def test_it_is_there_on_cpus_only():
    assert has_fused_attention(CPU)
    assert not has_fused_attention(torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", ["one mask for all rows", "a mask for each"])
def test_it_is_attention_with_its_log_sum_exp(dtype, rows):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, 1, n, 8, generator=generator, dtype=dtype).requires_grad_()
        for n in (5, 20, 20)
    )
    bias = torch.randn(3, 1, 1 if "one" in rows else 5, 20, generator=generator, dtype=dtype)
    scores = query @ key.transpose(-1, -2) * 0.3 + bias
    expected = scores.softmax(-1) @ value
    with torch.no_grad():
        out, lse = fused_attention(query, key, value, bias, 0.3)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        found = fused_attention_backward(out, (query, key, value), (out, lse), bias, 0.3)
    wanted = torch.autograd.grad(expected, (query, key, value), expected.detach())
    torch.testing.assert_close(found, wanted)


def test_gradients_of_some_columns_add_up_to_those_of_all():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 1, n, 4, generator=generator, dtype=torch.float64) for n in (5, 12, 12)
    )
    result = fused_attention(query, key, value, None, 0.5)
    gradient = torch.randn_like(query)
    whole = fused_attention_backward(gradient, (query, key, value), result, None, 0.5)
    parts = [
        fused_attention_backward(
            gradient, (query, key[:, :, cut], value[:, :, cut]), result, None, 0.5
        )
        for cut in (slice(0, 3), slice(3, 12))
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    for number in (1, 2):
        torch.testing.assert_close(torch.cat([part[number] for part in parts], 2), whole[number])


def test_a_fully_masked_row_returns_zero_and_has_no_gradient():
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 6, 4)
    bias = torch.zeros(1, 1, 2, 6)
    bias[:, :, 0] = -torch.inf
    out, lse = fused_attention(query, key, key, bias, 1.0)
    assert (out[:, :, 0] == 0).all()
    assert lse[0, 0, 0] == 0
    lse[0, 0, 0] = -1e30  # as the merge of parts writes it
    found = fused_attention_backward(torch.ones_like(out), (query, key, key), (out, lse), bias, 1.0)
    assert all(each.isfinite().all() for each in found)
    assert (found[0][:, :, 0] == 0).all()


NUMEL = 1003
ADAM = {"lr": 0.02, "beta1": 0.8, "beta2": 0.97, "eps": 1e-7, "weight_decay": 0.1}
ADAM |= {"amsgrad": False, "maximize": False}
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
    numbers = {**ADAM, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    state_given = [[one] for one in (*moments, largest) if one is not None]
    for count in range(1, 5):
        gradient = torch.randn(NUMEL, generator=generator, dtype=dtype)
        expected.grad = gradient.clone()
        optimizer.step()
        step = torch.tensor(float(count))
        lists = [[found], [gradient], *state_given]
        fused_step_(kind.__name__.lower(), numbers, lists, [step])
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
    numbers = {**ADAM, "lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    for count in range(1, 4):
        expected.grad = torch.randn(NUMEL, generator=generator)
        lists = [[one] for one in (found, expected.grad.clone(), *moments)]
        fused_step_(kind.__name__.lower(), numbers, lists, [torch.tensor(float(count))])
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
    lists = [[one] for one in tensors]
    fused_step_("adamw", {**ADAM, "amsgrad": True}, lists, [COUNT], divisor)


def sgd(tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
    rates = {"lr": 0.02, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    numbers = {**rates, "nesterov": False, "maximize": False, "is_first_step": False}
    fused_step_("sgd", numbers, [[one] for one in tensors[:3]], [], divisor)


def adagrad(tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
    numbers = {"lr": 0.02, "lr_decay": 0.1, "eps": 1e-7, "weight_decay": 0.1, "maximize": False}
    lists = [[one] for one in (*tensors[:2], tensors[3])]
    fused_step_("adagrad", numbers, lists, [COUNT], divisor)


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
