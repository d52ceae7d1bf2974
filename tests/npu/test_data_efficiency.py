"""Curricula, token dropping and layer drop on a device whose work is late."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from data_efficiency import test_layer_drop as layer_drop, test_token_drop as token_drop
from data_efficiency.test_sampler import STREAMS, engine_with, write_measures
from ranks import RankPools, on_ranks
from torch import nn

import npu
from hadal.device import current_device
from hadal.plugins.data_efficiency.layer_drop import drop_layers
from hadal.plugins.data_efficiency.token_drop import convert_to_random_ltd, draw, put_back, take


def _stream(folder: Path) -> tuple[list[list[int]], float]:
    """The samples of each update as the model sees them, and its weight at the end."""
    engine, found = engine_with(folder), []
    torch.nn.init.ones_(engine.module.weight)
    torch.nn.init.zeros_(engine.module.bias)
    loader = iter(engine.training_dataloader)
    for _ in range(8):
        batch = next(loader).to(engine.device)
        engine.backward(engine(batch / 120).square().mean())
        engine.step()
        found.append(batch)
    samples = [batch.flatten().int().tolist() for batch in found]
    weight = engine.module.weight.item()
    engine.destroy()
    return samples, weight


def _late_stream(folder: Path) -> tuple[list[list[int]], float]:
    with npu.asynchronous():
        return _stream(folder)


def test_samples_by_difficulty(npus: RankPools, ranks: RankPools, tmp_path: Path) -> None:
    write_measures(tmp_path)
    found, expected = npus(2).run(_late_stream, tmp_path), ranks(2).run(_stream, tmp_path)
    both = [mine + theirs for mine, theirs in zip(found[0][0], found[1][0], strict=True)]
    assert both == STREAMS["value"]["batches"][:8]
    for (_, here), (_, there) in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-5)


class _Middle(token_drop.Layer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.shapes.append((tuple(hidden.shape), None))
        return hidden + torch.tanh(self.l(hidden))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(_Middle() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def _dropping(kind: str, stage: int) -> tuple[list[float], Any, list[str]]:
    """The losses, what the layers saw, and what the host waited for in the fourth update."""
    is_here = current_device().type == "npu"
    with contextlib.ExitStack() as stack:
        if is_here:
            stack.enter_context(npu.asynchronous())
            stack.enter_context(npu.with_float64())  # else the host adds squares up
        if kind == "tokens":
            engine: Any = token_drop.engine_with(_Net(), token_drop.section(first=8), stage=stage)
            convert_to_random_ltd(engine, _Middle)
            shape = (2, 16, 8)
        else:
            torch.manual_seed(7)
            model = drop_layers(layer_drop.Blocks(), layer_drop.Block)
            engine = layer_drop.engine_with(model, layer_drop.ALWAYS, stage=stage)
            shape = (2, 4)
        losses, waits = [], ["none measured"]
        for step in range(6):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            values = values.to(engine.device)
            with npu.waits() if is_here else contextlib.nullcontext([]) as waited:
                loss = engine(values)
                engine.backward(loss)
                engine.step()
            losses.append(loss.detach())
            if step == 3:
                waits = [f"{wait.what} in {wait.where}" for wait in waited]
        if kind == "tokens":
            seen = [[shape[1] for shape, _ in layer.shapes] for layer in engine.module.h]
        else:
            seen = engine.module.uses
        engine.destroy()
        return [loss.item() for loss in losses], seen, waits


@pytest.mark.fast_cells("tokens-3")
@pytest.mark.parametrize(("kind", "stage"), [("tokens", 1), ("tokens", 3), ("layers", 3)])
def test_nothing_is_read_back(npus: RankPools, ranks: RankPools, kind: str, stage: int) -> None:
    found = npus(2).run(_dropping, kind, stage)
    expected = ranks(2).run(_dropping, kind, stage)
    for (losses, seen, waits), (theirs, wanted, _) in zip(found, expected, strict=True):
        assert not waits, waits
        assert seen == wanted
        if kind == "layers":  # the same layers are skipped; tokens are drawn by the device
            assert losses == pytest.approx(theirs, rel=1e-4)


@on_ranks(1, "npus")
def test_indices_are_drawn_on_the_device() -> None:
    with npu.asynchronous(), npu.waits() as waited:
        hidden = torch.arange(2 * 9 * 3.0, device=current_device()).view(2, 9, 3)
        index = draw(2, 9, 4, 1, hidden.device)
        part = take(hidden, index, "batch_seq_dim")
        whole = put_back(hidden, -part, index, "batch_seq_dim")
    assert not waited, list(waited)
    index, hidden, whole = index.cpu(), hidden.cpu(), whole.cpu()
    assert (index.diff() > 0).all()
    kept = torch.zeros(2, 9, dtype=torch.bool).scatter(1, index, value=True)
    assert torch.equal(whole, torch.where(kept[..., None], -hidden, hidden))
