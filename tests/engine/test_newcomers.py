"""Frozen bases with adapters, and parameters that come into a model after `initialize`."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from contracts.test_memory import held_nbytes
from ranks import on_ranks
from torch import Tensor, nn

from engine.toys import ROWS, assert_equal, batch_of, engine_of, loss_of, model_of, train
from hadal import comm, utils
from hadal.errors import UsageError
from hadal.zero import GatheredParameters

WIDE, RANK = 96, 2


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update (Hu 2021)."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.copy_(torch.linspace(-1, 1, self.down.weight.numel()).view(rank, -1))
            self.up.weight.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


def adapted(wide: int = 9) -> nn.Module:
    torch.manual_seed(3)
    first, last = Adapted(nn.Linear(6, wide)), Adapted(nn.Linear(wide, 4))
    norm = nn.LayerNorm(wide).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), norm, last)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_only_adapters_train(stage: int, bf16: bool) -> None:
    settings = {"bf16": {"enabled": True}} if bf16 else {}
    model = adapted()
    names = {name for name, _ in model.named_parameters()}
    adapters = {name for name in names if ".up." in name or ".down." in name}
    engine = engine_of(stage, model, **settings)
    before = engine.state_dict()
    train(engine, range(3))
    after = engine.state_dict()
    for name in names - adapters:  # to the bit, as it was given
        start = adapted().get_parameter(name).detach().to(before[name].dtype)
        assert torch.equal(after[name], start), name
    if not bf16:
        plain = adapted()
        trained = [p for p in plain.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(2):
                inputs, targets = batch_of(step, rank)
                (loss_of(plain(inputs), targets) / 2).backward()
            optimizer.step()
        for name, parameter in plain.named_parameters():
            assert torch.allclose(after[name], parameter, rtol=1e-5, atol=1e-6), name
    assert all(not torch.equal(before[name], after[name]) for name in adapters)
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_memory_of_frozen_weights(stage: int) -> None:
    """A frozen weight costs itself (cut at stage 3), and neither gradient nor optimizer state."""
    gc.collect()
    already = held_nbytes()
    model = nn.Sequential(Adapted(nn.Linear(6, WIDE)), nn.Tanh(), *blocks())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    engine = engine_of(stage, model)
    inputs, targets = torch.ones(ROWS, 6), torch.ones(ROWS, WIDE)
    for _ in range(2):
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
    del inputs, targets
    gc.collect()
    held = held_nbytes() - already
    ranks = 2
    weights = 4 * (frozen + trained) / (ranks if stage == 3 else 1)
    states = 4 * trained / (ranks if stage > 1 else 1) + 8 * trained / (ranks if stage else 1)
    assert frozen > 20 * trained
    assert weights <= held <= weights + states + 16 * 1024
    engine.destroy()


def blocks() -> list[nn.Module]:
    return [Adapted(nn.Linear(WIDE, WIDE)) for _ in range(4)]


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_module_attached_later_is_not_silently_untrained(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    train(engine, range(1))
    model.append(nn.Linear(4, 4))
    inputs, targets = batch_of(1)
    outputs = engine(inputs)  # it runs
    assert outputs.shape == (ROWS, 4)
    with pytest.raises(UsageError, match=r"4\.weight, 4\.bias would get gradients and never be"):
        engine.backward(loss_of(outputs, targets))
    assert model[4].weight.grad is None
    model[4].requires_grad_(False)
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.engine.apply").addHandler(listener)
    train(engine, range(1, 3))
    logging.getLogger("hadal.engine.apply").removeHandler(listener)
    assert len(told) == (comm.get_rank() == 0)
    assert all("4.weight, 4.bias were added to the model after initialize" in one for one in told)
    model[4].requires_grad_(True)
    with pytest.raises(UsageError, match=r"add_param_group.*before initialize"):
        train(engine, range(2, 3))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_nor_is_one_that_was_frozen(stage: int) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    engine = engine_of(stage, model)
    train(engine, range(1))
    model[0].requires_grad_(True)
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.engine.apply").addHandler(listener)
    try:
        train(engine, range(1, 3))
    finally:
        logging.getLogger("hadal.engine.apply").removeHandler(listener)
    assert len(told) == (comm.get_rank() == 0)  # rank 0 speaks for all, once
    for line in told:
        assert "0.weight, 0.bias get gradients but are not trained" in line
        assert "optimizer.add_param_group" in line
    engine.optimizer.add_param_group({"params": list(model[0].parameters())})
    before = utils.safe_get_full_fp32_param(model[0].weight)
    train(engine, range(3, 4))
    assert not torch.equal(utils.safe_get_full_fp32_param(model[0].weight), before)
    moment = utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    assert int(moment.count_nonzero()) > 0
    with GatheredParameters(model.parameters()):
        copy.deepcopy(model)
    engine.destroy()


@on_ranks(2)
def test_deliberate_omissions_are_accepted() -> None:
    """Who leaves a parameter out of the optimizer before `initialize` trains it himself."""
    model = model_of()
    mine = list(model[3].parameters())
    others = [p for p in model.parameters() if all(p is not q for q in mine)]
    engine = engine_of(2, model, wishes={"model_parameters": others})
    train(engine, range(2))
    assert all(p.grad is not None for p in mine)
    assert_equal(
        {n: p for n, p in engine.state_dict().items() if n.startswith("3.")},
        {n: p for n, p in model_of().state_dict().items() if n.startswith("3.")},
    )
    engine.destroy()
