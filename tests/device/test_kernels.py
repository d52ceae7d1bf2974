"""torch's fused kernels behind their public functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hadal.device import AdamRule, collective_backend, current_device, fused_adam_, synchronize

NUMEL = 1003


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs_own_adam(kind, decay, maximize, amsgrad, dtype):
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
        fused_adam_(found, gradient, moments, largest, step, rule)
        assert step == count
        assert torch.equal(found, expected.detach())
    state = optimizer.state[expected]
    assert torch.equal(moments[0], state["exp_avg"])
    assert torch.equal(moments[1], state["exp_avg_sq"])
    if largest is not None:
        assert torch.equal(largest, state["max_exp_avg_sq"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_it_agrees_with_the_plain_loop(kind):
    generator = torch.Generator().manual_seed(2)
    expected = nn.Parameter(torch.randn(NUMEL, generator=generator))
    found = expected.detach().clone()
    optimizer = kind([expected], lr=0.01, weight_decay=0.1, foreach=False)
    moments = torch.zeros_like(found), torch.zeros_like(found)
    rule = AdamRule(0.01, 0.9, 0.999, 1e-8, 0.1, kind is torch.optim.AdamW)
    for count in range(1, 4):
        expected.grad = torch.randn(NUMEL, generator=generator)
        fused_adam_(found, expected.grad.clone(), moments, None, torch.tensor(float(count)), rule)
        optimizer.step()
    assert torch.allclose(found, expected.detach(), rtol=1e-6, atol=1e-7)


def test_this_process_has_one_device():
    device = current_device()
    assert device == current_device()
    synchronize(device)
    assert "gloo" in collective_backend()
