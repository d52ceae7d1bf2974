"""Pruning on a device whose work is late: masks, scores and clean models are those of the host."""

from __future__ import annotations

import pytest
import torch
from compression.test_momentum import ALL, seeded_engine
from compression.toys import TOKENS, config
from ranks import RankPools

import npu
from hadal import comm
from hadal.plugins.compression import redundancy_clean


def _trained(name: str, stage: int) -> tuple[list[float], torch.Tensor | None]:
    """The losses, and what the clean model returns where its weights are whole."""
    engine = seeded_engine(ALL[name], stage)
    losses, found = [], None
    for step in range(5):
        tokens = ((TOKENS + step + comm.get_rank()) % 12).to(engine.device)
        loss = engine(tokens).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if stage < 3:
        redundancy_clean(engine, config(ALL[name]))
        with torch.no_grad():
            found = engine.module(TOKENS.to(engine.device)).cpu()
    engine.destroy()
    return losses, found


def _late(name: str, stage: int) -> tuple[list[float], torch.Tensor | None]:
    with npu.asynchronous():
        return _trained(name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_pruned_models_are_those_of_the_host(npus: RankPools, ranks: RankPools, name, stage):
    expected = ranks(2).run(_trained, name, stage)
    for (losses, found), (theirs, values) in zip(
        npus(2).run(_late, name, stage), expected, strict=True
    ):
        assert losses == pytest.approx(theirs, rel=1e-4)
        assert values is None or torch.allclose(found, values, atol=1e-5)
