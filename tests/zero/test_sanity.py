"""`enable_sanity_checks`: faults that nothing else sees are told, by name, on every rank."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from engine.toys import TINY, assert_equal, batch_of, engine_of, loss_of, model_of, train
from hypothesis import given, strategies as st
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm, zero
from hadal.errors import HadalError, MismatchError, ModelError
from hadal.zero import views

STAGES = [0, 1, 2, 3]


def digest(values: Tensor) -> int:
    return int(views.digest(values))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8), st.data())
def test_a_digest_tells_one_changed_word_and_two_swapped_ones(
    words: list[int], data: st.DataObject
) -> None:
    tensor = torch.tensor(words)
    assert digest(tensor) == digest(tensor.clone())
    index = data.draw(st.integers(0, len(words) - 1))
    changed = tensor.clone()
    changed[index] ^= data.draw(st.integers(-(2**63), 2**63 - 1).filter(bool))
    assert digest(changed) != digest(tensor)
    other = data.draw(st.integers(0, len(words) - 1))
    swapped = tensor.clone()
    swapped[[index, other]] = tensor[[other, index]]
    assert (digest(swapped) == digest(tensor)) == (words[index] == words[other])


def test_a_digest_tells_changed_signs() -> None:
    values = torch.randn(1000)
    some = values.clone()
    some[[1, 7]] *= -1
    every_second = values.clone()
    every_second[1::2] *= -1
    assert len({digest(each) for each in (values, some, every_second)}) == 3


def _section(stage: int, checks: bool = True) -> dict[str, object]:
    return {"stage": stage, **TINY, "enable_sanity_checks": checks}


def train_checked(stage: int) -> None:
    """Nothing is told of sound training, and no number changes; edits and branches among it."""
    states = []
    for checks in (False, True):
        engine = engine_of(
            stage, zero_optimization=_section(stage, checks), gradient_accumulation_steps=2
        )
        train(engine, range(6))
        with zero.GatheredParameters([engine.module[0].weight], modifier_rank=0), torch.no_grad():
            if comm.get_rank() == 0:
                engine.module[0].weight.mul_(0.5)
        engine.module.eval()
        engine(batch_of(1)[0])
        engine.module.train()
        train(engine, range(6, 10))
        engine.module[0].requires_grad_(False)
        engine.module.append(nn.Linear(4, 4))
        engine.optimizer.add_param_group({"params": engine.module[4].parameters()})
        train(engine, range(10, 12))
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(states[1], states[0])


def fault(stage: int, kind: str) -> HadalError:
    engine = engine_of(stage, zero_optimization=_section(stage))
    train(engine, range(1))
    model, is_last = engine.module, comm.get_rank() == 1
    scale = 1.0
    if kind == "edit" and is_last:
        model[0].weight.data[0, 0] += 0.5
    if kind == "infinite":
        with zero.GatheredParameters(model.parameters()), torch.no_grad():
            model[3].bias[1] = torch.inf
    if kind == "gradient" and is_last:
        model[2].weight.register_hook(lambda gradient: gradient * torch.nan)
    if kind == "gather" and is_last:
        bucket = engine._parts.runtime.bucket_of[model[3].weight]
        seen = bucket.on_gather

        def damage(full: Tensor, places: range) -> None:
            full[0] += 1
            seen(full, places)

        bucket.on_gather = damage
    with pytest.raises(HadalError) as caught:
        inputs, targets = batch_of(1)
        engine.backward(loss_of(engine(inputs), targets) * scale)
        engine.step()
    engine.destroy()
    return caught.value


FAULTS = {
    "edit": (MismatchError, r"hold different weights of 0\.weight: rank 1 differs from rank 0"),
    "gather": (MismatchError, r"got different weights in the gathers of 3.*rank 1 differs"),
    "infinite": (ModelError, r"a weight is not finite: 3\.bias \(rank"),
    "gradient": (ModelError, r"a gradient is not finite: 2\.weight \(rank 1\)"),
}


@pytest.mark.fast_cells("0")
@pytest.mark.claims("zero_optimization.enable_sanity_checks")
@pytest.mark.parametrize("stage", STAGES)
def test_checks_find_faults_and_nothing_else(stage: int, ranks: RankPools) -> None:
    ranks(2).run(train_checked, stage)
    for kind, (error, told) in FAULTS.items():
        # Weights that are cut are no rank's to edit; those that are not are never gathered.
        if kind != ("edit" if stage == 3 else "gather"):
            for caught in ranks(2).run(fault, stage, kind):
                assert type(caught) is error, kind
                assert re.search(told, str(caught)), str(caught)


def overflow() -> None:
    """fp16 skips what overflows: that is no fault."""
    engine = engine_of(2, zero_optimization=_section(2), fp16={"enabled": True})
    inputs, targets = batch_of(0)
    engine.backward(loss_of(engine(inputs.half()), targets) * 1e30)
    engine.step()
    assert engine.skipped_steps == 1
    engine.destroy()


def part(told: list[str]) -> list[str]:
    """Ranks that take different branches are told of, once for each parameter."""
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.zero.sanity").addHandler(listener)
    engine = engine_of(1, model_of(), zero_optimization=_section(1))
    for step in range(2):
        inputs, targets = batch_of(step)
        model = engine.module
        hidden = model[0](inputs) if comm.get_rank() == 0 else inputs.new_ones(3, 9)
        engine.backward(loss_of(model[3](hidden), targets))
        engine.step()
    engine.destroy()
    logging.getLogger("hadal.zero.sanity").removeHandler(listener)
    return told


def test_what_is_allowed_is_no_error(ranks: RankPools) -> None:
    ranks(2).run(overflow)
    told = ranks(2).run(part, [])
    assert [len(lines) for lines in told] == [1, 0]
    assert "0.bias [1, 0], 0.weight [1, 0]" in told[0][0]
    assert "3.weight" not in told[0][0]
