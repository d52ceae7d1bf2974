"""Tiles: the same results as the whole, with any factor of the loss, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.toys import config_of
from hypothesis import given, settings, strategies as st
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from hadal.plugins.sequence.tiles import lengths_of

WIDTH, WORDS = 6, 11
# Batch, length and tiles as DeepSpeed's were measured; some lengths do not divide.
SHAPES = [(1, 8, 2), (2, 8, 4), (1, 7, 3), (1, 5, 4), (3, 5, 2), (1, 2, 4)]


class Head(nn.Module):
    """A hidden layer and a head, whose loss is computed whole or in tiles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor, tiles: int = 0, mask: Tensor | None = None) -> Tensor:
        if not tiles:
            hidden = x + mlp(self, x)
            return loss_of(self, hidden, y) if mask is None else masked(self, hidden, y, mask)
        hidden = x + TiledMLP.apply(mlp, self, x, tiles)
        function = loss_of if mask is None else masked
        return TiledFusedLogitsLoss.apply(function, self, hidden, y, mask, tiles, None, "mean")


def mlp(self: Any, x: Tensor) -> Tensor:
    return self.down(F.gelu(self.up(x)))


def loss_of(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten())


def masked(self: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def batch(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, WIDTH, generator=generator)
    return x.requires_grad_(), torch.randint(WORDS, (rows, length), generator=generator)


def gradients(loss: Tensor, x: Tensor, model: nn.Module, factor: float) -> list[Tensor]:
    x.grad = None
    model.zero_grad()
    (loss * factor).backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [loss.detach(), *(g / factor for g in found if g is not None)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare within a few roundings: 1e-5 in fp32, 1e-12 in fp64."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        rtol = 1e-12 if one.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol / 10)


# ---- the same results ----------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_tiles_are_as_asked_or_one_for_each_position(length: int, tiles: int) -> None:
    found = lengths_of(length, tiles)
    assert sum(found) == length and len(found) == min(length, tiles)
    assert max(found) - min(found) <= 1 and found == sorted(found, reverse=True)


@pytest.mark.parametrize(("rows", "length", "tiles"), SHAPES)
@pytest.mark.parametrize("factor", [1.0, 0.5, 1024.0])
def test_a_loss_in_tiles_is_the_loss(rows: int, length: int, tiles: int, factor: float) -> None:
    model, (x, y) = Head(), batch(rows, length)
    whole = gradients(model(x, y), x, model, factor)
    assert_alike(gradients(model(x, y, tiles), x, model, factor), whole)


@pytest.mark.parametrize("length", [4, 7])
def test_tiles_count_by_their_targets(length: int) -> None:
    model, (x, y) = Head(), batch(2, length)
    y[:, : length // 2] = -100  # the first tile has no target at all
    whole = gradients(model(x, y), x, model, 1.0)
    assert_alike(gradients(model(x, y, 2), x, model, 1.0), whole)
    mask = torch.arange(length).ge(length // 2).expand(2, -1).contiguous()
    y[:] = 3
    whole = gradients(model(x, y, 0, mask), x, model, 1.0)
    assert_alike(gradients(model(x, y, 2, mask), x, model, 1.0), whole)
    y[:] = -100
    nothing = gradients(model(x, y, 2), x, model, 1.0)
    assert all(not one.any() for one in nothing)


def test_a_sum_in_tiles_is_the_sum() -> None:
    def total(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten(), reduction="sum")

    model, (x, y) = Head(), batch(2, 7)
    whole = gradients(total(model, x, y), x, model, 0.25)
    tiled = TiledFusedLogitsLoss.apply(total, model, x, y, None, 3, [], "sum")
    assert_alike(gradients(tiled, x, model, 0.25), whole)


@pytest.mark.parametrize(("rows", "length", "tiles"), SHAPES)
def test_an_mlp_in_tiles_is_the_mlp(rows: int, length: int, tiles: int) -> None:
    model, (x, _) = Head(), batch(rows, length)

    def found(output: Tensor) -> list[Tensor]:
        return [output.detach(), *gradients(output.square().sum(), x, model, 1.0)]

    whole = found(mlp(model, x))
    assert_alike(found(TiledMLP.apply(mlp, model, x, tiles, list(model.parameters()))), whole)
    assert_alike(found(AutogradComputeMLP.apply(mlp, model, x)), whole)
    flat = mlp(model, x.flatten(0, 1))
    torch.testing.assert_close(TiledMLP.apply(mlp, model, x.flatten(0, 1), tiles), flat)


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize(("rows", "length", "tiles"), [(1, 8, 2), (2, 8, 4), (1, 7, 3)])
def test_any_computation_in_tiles(
    rows: int, length: int, tiles: int, reduction: str | None
) -> None:
    # In fp64: large terms cancel in some gradients; how fp32 then rounds is up to the processor.
    model, (x, y) = Head().double(), batch(rows, length)
    x = x.detach().double().requires_grad_()

    def compute(x: Tensor, y: Tensor, bias: Tensor | None, model: nn.Module) -> Tensor:
        return mlp(model, x) * y[..., None]

    whole = compute(x, y, None, model)
    if reduction is not None:
        whole = whole.mean() if reduction == "mean" else whole.sum()
    named = {"x": x, "y": y, "bias": None}
    tiled = sequence_tiled_compute(
        compute, length, tiles, named, {"model": model}, "x", output_reduction=reduction
    )
    torch.testing.assert_close(tiled, whole)
    names = (["x", "y", "bias"], ["model"])
    same = SequenceTiledCompute.apply(
        compute, length, tiles, *names, "x", None, 1, reduction, x, y, None, model
    )
    assert_alike(
        gradients(same.square().mean(), x, model, 1.0),
        gradients(whole.square().mean(), x, model, 1.0),
    )


def test_without_gradients_nothing_is_kept() -> None:
    model, (x, y) = Head(), batch(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y, 3), model(x, y))


def test_losses_may_be_double_or_half() -> None:
    model, (x, y) = Head().double(), batch(2, 7)
    x = x.detach().double()
    torch.testing.assert_close(model(x, y, 3), model(x, y))
    loss = model.to(torch.bfloat16)(x.bfloat16(), y, 3)
    assert loss.dtype == torch.bfloat16


# ---- in an engine --------------------------------------------------------------------------------


def _train(stage: int, tiles: int, **keys: Any) -> tuple[list[float], list[float]]:
    config = config_of(stage, gradient_accumulation_steps=4, **keys)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = hadal.initialize(model=Head(), config=config)[0]
    losses, norms = [], []
    for step in range(12):
        x, y = batch(3, 7, seed=10 * step + comm.get_rank())
        y[:, :3] = -100
        x = x.detach().to(next(engine.module.parameters()).dtype)
        loss = engine(x, y, tiles)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 4 == 3:
            norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_train_identically_at_every_stage(stage: int, ranks: RankPools) -> None:
    whole, tiled = ranks(2).run(_train, stage, 0), ranks(2).run(_train, stage, 3)
    for one, other in zip(whole, tiled, strict=True):
        assert other[0] == pytest.approx(one[0], abs=2e-6)
        assert other[1] == pytest.approx(one[1], rel=1e-5)


def _train_fp16(stage: int, tiles: int) -> tuple[list[float], list[float]]:
    return _train(stage, tiles, fp16={"enabled": True, "initial_scale_power": 10})


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_tiles_under_a_loss_scale(stage: int, ranks: RankPools) -> None:
    whole, tiled = ranks(2).run(_train_fp16, stage, 0), ranks(2).run(_train_fp16, stage, 3)
    for one, other in zip(whole, tiled, strict=True):
        assert other[0] == pytest.approx(one[0], abs=5e-3)
        assert other[1] == pytest.approx(one[1], rel=1e-2)


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: TiledMLP.apply(mlp, m, x, 0), "shards is 0; expected the number"),
        (lambda m, x, y: TiledMLP.apply(mlp, m, x[0, 0], 2), r"shape \(6,\); expected \[batch"),
        (
            lambda m, x, y: TiledFusedLogitsLoss.apply(loss_of, m, x, y[:, 1:], None, 2),
            r"y has the shape \(2, 6\), but x \(2, 7, 6\)",
        ),
        (
            lambda m, x, y: TiledFusedLogitsLoss.apply(loss_of, m, x, y, y[:1], 2),
            r"mask has the shape \(1, 7\)",
        ),
        (
            lambda m, x, y: TiledFusedLogitsLoss.apply(loss_of, m, x, y, None, 2, None, "max"),
            "output_reduction is 'max'; expected one of 'mean', 'sum'",
        ),
        (lambda m, x, y: TiledFusedLogitsLoss.apply(loss_of, m, x[0, 0], y, None, 2), "x has"),
        (
            lambda m, x, y: sequence_tiled_compute(mlp, 9, 2, {"x": x}, {"self": m}),
            r"x has the shape \(2, 7, 6\); expected \[batch, 9, ...\]",
        ),
        (
            lambda m, x, y: sequence_tiled_compute(mlp, 7, 2, {"x": x}, {"self": m}, "hidden"),
            r"grad_requiring_tensor_key is 'hidden'; expected one of None, 'x', 'self'",
        ),
        (
            lambda m, x, y: TiledMLP.apply(lambda m, x: x.sum(), m, x, 2),
            r"the function of TiledMLP returned the shape \(\) for a tile of shape \(2, 4, 6\)",
        ),
        (
            lambda m, x, y: TiledFusedLogitsLoss.apply(lambda m, x, y: x, m, x, y, None, 2),
            r"returned the shape \(2, 4, 6\); expected a loss without dimensions",
        ),
    ],
)
def test_mismatched_shapes_are_an_error(
    call: Callable[[nn.Module, Tensor, Tensor], Any], message: str
) -> None:
    with pytest.raises(SequenceError, match=message):
        call(Head(), *batch(2, 7))
