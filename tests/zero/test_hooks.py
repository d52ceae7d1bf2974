"""Reads of parameters that no module announces, and hooks that come off again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.toys import ROWS, assert_close, engine_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.errors import UsageError
from hadal.zero.grouping import LeafModules, find_units
from hadal.zero.hooks import Hooks, ReadWatcher

WIDTH = 6


def seen(act: Callable[[], object]) -> list[nn.Parameter]:
    read: list[nn.Parameter] = []
    with ReadWatcher(read.append):
        act()
    return read


def test_every_argument_is_looked_at():
    one, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    assert seen(lambda: F.linear(torch.ones(1, 2), one))[0] is one
    assert seen(lambda: F.linear(input=torch.ones(1, 2), weight=one))[0] is one
    assert seen(lambda: one @ other)[:2] == [one, other]
    assert len(seen(lambda: torch.stack([one, other]))) == 2
    assert len(seen(lambda: torch.cat([torch.ones(1, 2), one]))) == 1
    assert seen(lambda: one.data)[0] is one
    assert seen(lambda: one.clone())[0] is one
    assert seen(lambda: one[0])[0] is one


def test_questions_about_a_parameter_are_no_reads():
    one = nn.Parameter(torch.ones(2, 2))

    def ask() -> None:
        assert (one.shape, one.dtype, one.device.type) == ((2, 2), torch.float32, "cpu")
        assert (one.ndim, one.dim(), one.size(0), one.numel()) == (2, 2, 2, 4)
        assert one.requires_grad
        assert one.is_leaf
        assert one.grad is None
        assert one.is_floating_point()

    assert seen(ask) == []


class Late:
    """A bucket that may be refreshed while forward runs."""

    def __init__(self) -> None:
        self.refreshes_late = True

    def refresh_in_step(self) -> None:
        self.refreshes_late = False


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
def test_a_module_that_takes_no_hooks_has_its_weights_refreshed_in_the_step():
    """TorchScript's modules; they read weights without torch's functions."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    plain, scripted = Late(), Late()
    kept = {
        p: bucket
        for m, bucket in zip(model, (plain, scripted), strict=True)
        for p in m.parameters()
    }
    runtime: Any = SimpleNamespace(
        bucket_of=kept, gradients=[], gathering=SimpleNamespace(uses=SimpleNamespace(units=[]))
    )
    hooks = Hooks(model, runtime)
    hooks.watch_refreshes(find_units(model, dict.fromkeys(kept, 0), LeafModules()))
    assert (plain.refreshes_late, scripted.refreshes_late) == (True, False)
    assert len(model[0]._forward_pre_hooks) == 1
    hooks.remove()
    assert not model[0]._forward_pre_hooks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Borrower(nn.Module):
    """Reads another module's weight, which that module's hooks do not announce."""

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(8, 8)
        self.own = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(F.linear(x, self.lender.weight.t(), bias=self.lender.bias)))


class Functional(nn.Module):
    """Calls a submodule with parameters that it computed from the submodule's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved = {name: value * 0.5 for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, halved, (x,))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def pair() -> nn.Module:
    return nn.Sequential(Borrower(), Attention())


UNANNOUNCED = [Attention, encoder, Borrower, pair, Functional]


@pytest.mark.fast_cells("Borrower", "Functional")
@pytest.mark.parametrize("make", UNANNOUNCED, ids=lambda make: make.__name__)
@on_ranks(2)
def test_unannounced_reads_find_their_values(make: Callable[[], nn.Module]) -> None:
    inputs = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(2)
        models.append(make())
    plain, model = models
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(3, model, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    for step in range(3):
        optimizer.zero_grad()
        expected = plain(inputs + step).square().mean()
        expected.backward()
        optimizer.step()
        loss = engine(inputs + step).square().mean()
        assert torch.allclose(loss, expected, rtol=1e-5)
        engine.backward(loss)
        engine.step()
        engine.eval()
        plain.eval()
        with torch.no_grad():  # a fast path of torch reads all weights in one operation
            assert torch.allclose(engine(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            assert torch.allclose(engine(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
        engine.train()
        plain.train()
        assert not engine._parts.runtime.gathering.kept_views.are_watched
    engine.destroy()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def hooks_of(model: nn.Module) -> int:
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks)
    for parameter in model.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ())
    return count


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_hooks_come_off(stage: int) -> None:
    model = pair()
    engine = engine_of(stage, model)
    assert hooks_of(model) > 0
    engine.destroy()
    assert hooks_of(model) == 0
    x = torch.ones(1, 2, 8)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Mixer(nn.Module):
    """Reads tensors that have no memory of their own: sparse ones, and what vmap sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed = torch.sparse.mm(torch.eye(WIDTH).to_sparse(), self.first(inputs).t()).t()
        doubled = torch.vmap(lambda row: 2 * row)(mixed)
        outputs: Tensor = self.second(doubled)
        return outputs


@on_ranks(2)
def test_tensors_without_memory_of_their_own_may_be_read() -> None:
    torch.manual_seed(3)
    model = Mixer()
    plain = copy.deepcopy(model)
    engine = engine_of(3, model, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    for _ in range(3):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        optimizer.step()
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy()


@pytest.mark.parametrize(("stage", "is_born"), [(3, True), (0, False), (3, False)])
@on_ranks(2)
def test_a_wrapper_of_torchs_is_refused(stage: int, is_born: bool) -> None:
    if is_born:
        with hadal.zero.Init():
            model: nn.Module = nn.Linear(6, 4)
    else:
        model = engine_of(stage).module
    with pytest.raises(UsageError, match=r"such as (0\.)?weight\) .* `use_cpu: true`"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UsageError, match="Pass the model to initialize instead"):
        nn.parallel.DataParallel(model)
    free = nn.Linear(6, 4)
    assert nn.parallel.DistributedDataParallel(free).module is free
