"""`hybrid_engine`: weights gathered once for each call of `generate`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from engine.toys import assert_close, engine_of, loss_of
from hadal import comm
from hadal.errors import UsageError
from hadal.zero.bucket import Bucket, Weights

LAYERS = 4


class Writer(nn.Module):
    """Writes one number after the other, each a function of the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs

    @torch.no_grad()
    def generate(self, inputs: Tensor, count: int) -> Tensor:
        found = [inputs]
        for _ in range(count):
            found.append(self(found[-1]))
        return torch.stack(found)


def hybrid(stage: int, model: nn.Module, **section: Any) -> Any:
    limits = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 50}
    zero = {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return engine_of(
        stage,
        model,
        zero_optimization={**zero, **(limits if stage == 3 else {})},
        hybrid_engine={"enabled": True, **section},
    )


def step(model: nn.Module, engine: Any, number: int, ranks: range) -> None:
    """One update on the batches of these ranks; without an engine, of the model itself."""
    for rank in ranks:
        torch.manual_seed(10 * number + rank)
        inputs, targets = torch.randn(3, 6), torch.randn(3, 6)
        loss = loss_of((engine or model)(inputs), targets)
        if engine is None:
            (loss / len(ranks)).backward()  # type: ignore[no-untyped-call]
        else:
            engine.backward(loss)


def count_gathers(patch: pytest.MonkeyPatch) -> list[Bucket]:
    found, start = [], Bucket.start_unshard

    def starting(bucket: Bucket, **given: Any) -> None:
        if bucket.state is Weights.SHARDED:
            found.append(bucket)
        start(bucket, **given)

    patch.setattr(Bucket, "start_unshard", starting)
    return found


def generate(stage: int, pins: bool) -> None:
    """Between updates ranks write texts, if pinned of different lengths; training goes on."""
    me, size = comm.get_rank(), comm.get_world_size()
    model, plain = Writer(), Writer()
    engine = hybrid(stage, model, pin_parameters=pins)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    count = 3 + (2 * me if pins or stage < 3 else 0)
    for number in range(3):
        step(model, engine, number, range(me, me + 1))
        engine.step()
        step(plain, None, number, range(size))
        optimizer.step()
        optimizer.zero_grad()
        engine.eval()
        with pytest.MonkeyPatch.context() as patch:
            gathers = count_gathers(patch)
            for call in (engine.module.generate, engine.generate):
                text = call(torch.ones(2, 6), count)
                assert_close({"": text}, {"": plain.generate(torch.ones(2, 6), count)})
        wanted = 0 if stage < 3 else LAYERS if pins else LAYERS * count
        assert len(gathers) == 2 * wanted, (len(gathers), wanted)
        if stage == 3:
            states = {bucket.state for bucket in engine._parts.runtime.buckets}
            assert states == {Weights.SHARDED}
        engine.train()
    assert_close(engine.state_dict(), {k: v.detach() for k, v in plain.named_parameters()})
    engine.destroy()
    assert "generate" not in vars(model)


@pytest.mark.claims("hybrid_engine.enabled", "hybrid_engine.pin_parameters")
@pytest.mark.parametrize(("stage", "pins"), [(0, True), (2, True), (3, True), (3, False)])
def test_generate_gathers_once(stage: int, pins: bool, ranks: RankPools) -> None:
    ranks(2).run(generate, stage, pins)


@on_ranks(2)
def test_a_rank_whose_generation_fails_holds_up_nobody() -> None:
    """The other rank's text is whole, and both train on."""
    model = Writer()
    engine = hybrid(3, model)
    if comm.get_rank():
        with pytest.raises(TypeError):
            model.generate(None, 2)
    else:
        assert len(model.generate(torch.ones(1, 6), 2)) == 3
    step(model, engine, 0, range(comm.get_rank(), comm.get_rank() + 1))
    engine.step()
    engine.destroy()


@on_ranks(2)
def test_copies_generate_with_their_own_weights() -> None:
    model = Writer()
    engine = hybrid(3, model)
    expected = Writer().generate(torch.ones(1, 6), 2)
    file = io.BytesIO()
    with hadal.zero.GatheredParameters(model.parameters()):
        copied = copy.deepcopy(model)
        torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.layers[0].weight.mul_(1.0)
        assert torch.equal(other.generate(torch.ones(1, 6), 2), expected)
    engine.destroy()
    assert torch.equal(copied.generate(torch.ones(1, 6), 2), expected)


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"hybrid_engine\.enabled: Linear has no method `generate`"
    ):
        hybrid(3, nn.Linear(6, 6))
