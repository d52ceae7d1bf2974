"""Gradients of weights that are put off are those of an ordinary backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from hadal.plugins.pipeline.later_weights import LaterWeights, gradients_of
from hadal.plugins.pipeline.wires import put_together, taken_apart


class Model(nn.Module):
    """One layer is used twice; one is transposed; one is frozen."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.last = nn.LayerNorm(4), Conv1D(3, 4)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.recompute = recompute

    def body(self, value: Tensor) -> Tensor:
        return self.twice(self.norm(self.twice(torch.tanh(self.first(value)))))

    def forward(self, value: Tensor) -> Tensor:
        if self.recompute:
            value = checkpoint(self.body, value, use_reentrant=False)
        else:
            value = self.body(value)
        return self.frozen(self.last(value)).square().sum()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same(recompute: bool, dtype: torch.dtype) -> None:
    value = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, apart = Model(recompute).to(dtype), Model(recompute).to(dtype)
    known, found = value.clone().requires_grad_(), value.clone().requires_grad_()
    plain(known).backward()
    later = LaterWeights(apart)
    apart(found).backward()
    assert torch.equal(known.grad, found.grad)
    put_off = later.take()
    assert len(put_off) == 4 and not later.take()
    weights = {apart.first.weight, apart.twice.weight, apart.last.weight}
    assert all(weight.grad is None for weight in weights)
    gradients = gradients_of(put_off)
    assert gradients.keys() == weights
    for expected, parameter in zip(plain.parameters(), apart.parameters(), strict=True):
        seen = gradients.get(parameter, parameter.grad)
        if expected.grad is None:
            assert seen is None
        else:
            torch.testing.assert_close(seen, expected.grad, rtol=0, atol=0)


def test_undeferrable_gradients_are_computed_at_once() -> None:
    layer, value = nn.Linear(4, 4), torch.randn(2, 4)
    later = LaterWeights(nn.Sequential(layer))
    with torch.autocast("cpu", torch.bfloat16):
        layer(value).float().sum().backward()
    with torch.no_grad():
        layer(value)
    layer(value[0]).sum().backward()
    assert not later.take() and layer.weight.grad is not None
    layer(value).sum().backward()
    assert len(later.take()) == 1
    later.close()
    layer(value).sum().backward()
    assert not later.take() and "forward" not in vars(layer)


def test_what_is_deferred_keeps_nothing_else() -> None:
    model, value = nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    later, entry = LaterWeights(model), weakref.ref(value)
    model(value).sum().backward()
    kept = later.take()
    del value
    assert len(kept) == 1 and entry() is None


def test_tensors_that_are_sent_wait_for_no_garbage_collector() -> None:
    gc.disable()
    try:
        value = {"hidden": [torch.ones(2), 3]}
        seen = weakref.ref(value["hidden"][0])
        tensors, layout = taken_apart(value, "a layer")
        value = put_together(layout.frame, tensors)
        del value, tensors
        assert seen() is None
    finally:
        gc.enable()
