"""The number of waits for the device in an update: each wait leaves the device idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every, rarely
from ranks import RankPools, on_ranks

import hadal
import npu
from hadal.plugins.sparse_attention import FixedSparsityConfig, MatMul, Softmax

from . import runs
from .features import FEATURES, waits_of


def told(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{phase}: {one}" for phase, waits in found.items() for one in waits)


@pytest.mark.fast_cells("0-bf16")
@every(stage=range(4), precision=["bf16", "fp16"])
def test_an_update(stage: int, precision: str, npus: RankPools) -> None:
    """Nothing is read back, except that fp16 must decide about the loss scale first."""
    # Clocks read events: they wait for nothing.
    config = runs.config(stage, precision, wall_clock_breakdown=True)
    for found in npus(2).run(runs.waited, config):
        counts = {phase: len(waits) for phase, waits in found.items()}
        update = int(precision == "fp16")
        wanted = {"forward": 0, "backward": 0, "step": 0, "update": update}
        assert counts == wanted, told(found)


# Models of transformers, and torch.
UNNAMED = {"engine/precision.py", "moe/experts.py"}


@pytest.mark.parametrize(
    "name", [rarely(name) if feature.is_rare else name for name, feature in FEATURES.items()]
)
def test_an_update_with_a_feature(name: str, npus: RankPools, tmp_path: Path) -> None:
    feature = FEATURES[name]
    for found in npus(2).run(waits_of, name, tmp_path):
        assert len(found) in feature.waits, found
        assert {wait.where.partition(":")[0] for wait in found} <= {*feature.where.split()}, found
        unnamed = {wait.where.partition(":")[0] for wait in found if not wait.name}
        assert unnamed <= UNNAMED, found


UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
NO_NORM = {
    "gradient_clipping": 0.0,
    "zero_optimization": {**runs.TINY, "stage": 2, "compute_grad_norm": False},
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}


LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}}


@pytest.mark.fast_cells("changed1-True-1", "changed5-False-0", "changed7-False-0")
@pytest.mark.parametrize(
    ("changed", "asks", "waits"),
    [
        (UNCHECKED, False, 0),
        (UNCHECKED, True, 1),
        ({**UNCHECKED, "gradient_clipping": 0.0}, False, 0),
        ({}, True, 1),
        ({"gradient_clipping": 0.0}, False, 0),
        (NO_NORM, False, 0),
        ({**UNCHECKED, "optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, False, 0),
        ({**UNCHECKED, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, False, 0),
        ({**UNCHECKED, "optimizer": {"type": "Lion", "params": {"lr": 0.01}}}, False, 0),
    ],
)
def test_the_step_of_the_optimizer(
    changed: dict[str, Any], asks: bool, waits: int, npus: RankPools
) -> None:
    """Norm, clipping and step, without what `zero` does around them."""
    for found in npus(2).run(runs.waited, {**runs.config(2, "bf16"), **changed}, asks):
        mine = [one for one in found["update"] if " in zero/" not in one]
        assert len(mine) in ({0, 1} if asks else {waits}), told(found)  # it may be there already


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "changed"), [(0, {}), (1, LION), (2, SGD), (3, {})])
def test_an_update_that_the_device_skips(
    stage: int, changed: dict[str, Any], npus: RankPools, ranks: RankPools
) -> None:
    """The host learns of it an update later; weights, counts and rates are those of CPUs."""
    config = {**runs.config(stage, "bf16"), **changed}
    wanted = ranks(2).run(runs.overflowing, config)
    found = npus(2).run(runs.overflowing, config)
    for here, there in zip(found, wanted, strict=True):
        assert here["skipped"] == there["skipped"] == 1
        assert not here["overflow"]
        assert here["rates"] == there["rates"] and here["steps"] == there["steps"]
        assert here["updates"] == there["updates"]
        assert [skipped for skipped, *_ in here["updates"]] == [False, False, True, False, False]
        for name, values in there["weights"].items():
            assert torch.equal(here["weights"][name], values), name
    start, end = (
        "update 2 skipped: the gradient of tokens.weight",
        " is not finite, nor is the loss on rank 1",
    )
    assert wanted[0]["lines"] == [f"{start}{end}"]
    # It looks in rows of gradients, and cannot tell parameters apart that share one.
    assert found[0]["lines"] == [f"{start} (or of another parameter in its bucket){end}"]


def _saved(folder: str, is_async: bool) -> list[npu.Wait]:
    with npu.asynchronous(), npu.with_float64():
        engine = runs.built(runs.config(2, "bf16", checkpoint={"async_save": is_async}))
        runs.advanced(engine, 1)
        with npu.waits() as found:
            noise = torch.rand(3, device=engine.device)
            engine.save_checkpoint(folder, client_state={"noise": noise})
            engine.wait_for_checkpoint()
        engine.destroy()
    return found


@pytest.mark.parametrize("is_async", [rarely(False), True])
def test_waits_of_a_save_have_names(is_async: bool, npus: RankPools, tmp_path: Path) -> None:
    for found in npus(2).run(_saved, str(tmp_path), is_async):
        assert found
        assert {f"{w.what} {w.where}" for w in found if not w.name} == set()


def _all_kinds() -> list[str]:
    device = torch.device("npu", 0)
    values, stream = torch.arange(4.0, device=device), torch.Stream(device)
    pinned, index = torch.ones(4).pin_memory(), torch.arange(2, device=device)
    with npu.asynchronous(), npu.waits() as found:
        values.sum().item()
        torch.equal(values, values + 1)
        values.nonzero()
        values.cpu()
        torch.ones(3).to(device)
        torch.tensor([1.0], device=device)
        pinned.copy_(values)
        torch.accelerator.synchronize(device)
        stream.synchronize()
        stream.record_event().synchronize()
        values[torch.tensor([0, 2])]
        values[values > 1]
        values[values > 1] = torch.ones(2, device=device)
        # None of these lets the host wait.
        values.add_(1).mul_(values.amax())
        pinned.copy_(values, non_blocking=True)
        values.copy_(pinned, non_blocking=True)
        torch.full((), 2.0, device=device)
        values[index]
        values[index] = 3.0
        values.masked_fill_(values > 1, 3.0)
    return [wait.what for wait in found]


def test_kinds_of_waits(npus: RankPools) -> None:
    assert npus(1).run(_all_kinds) == [
        [
            "aten::_local_scalar_dense",
            "aten::equal",
            "aten::nonzero",
            "copy to the host",
            "copy to the device",
            "copy to the device",
            "copy to the host",
            "device",
            "stream",
            "event",
            "copy to the device",
            "aten::index",
            "aten::_index_put_impl_",
        ]
    ]


def _products_of_blocks() -> list[str]:
    device = torch.device("npu", 0)
    layout = FixedSparsityConfig(2).make_layout(64)
    scores_of, values_of = MatMul(layout, 16, "sdd", trans_b=True), MatMul(layout, 16, "dsd")
    softmax, query = Softmax(layout, 16), torch.ones(1, 2, 64, 8, device=device)
    bias, keys = torch.zeros(1, 1, 64, 64, device=device), torch.zeros(1, 64, device=device)

    def attend() -> None:
        query.grad = None
        values_of(softmax(scores_of(query, query), 0.5, bias, keys), query).sum().backward()

    query.requires_grad_()
    attend()  # copies the indices to the device
    with npu.asynchronous(), npu.waits() as found:
        attend()
    return [f"{wait.what} in {wait.where}" for wait in found]


def test_products_of_blocks_keep_their_indices_on_the_device(npus: RankPools) -> None:
    assert npus(1).run(_products_of_blocks) == [[]]


def weights_of(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with hadal.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, one in FEATURES.items() if not one.is_rare])
@on_ranks(2, "gpus")
def test_a_feature_trains_on_a_gpu(name: str) -> None:
    engine, update = FEATURES[name].build()
    before = weights_of(engine)
    for _ in range(3):
        update()
    after = weights_of(engine)
    assert engine.device.type == "cuda"
    assert all(bool(one.isfinite().all()) for one in after)
    assert not all(map(torch.equal, before, after))
    engine.destroy()
