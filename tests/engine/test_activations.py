"""`hadal.engine.activations`: what a micro-step holds and computes, without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.engine.activations import Features, MicroStep, trace
from hadal.engine.clusters import cluster_here
from hadal.engine.precision import Casting
from hadal.errors import ModelError
from hadal.zero.grouping import LeafModules, find_units

WIDTH, ROWS, BLOCKS = 32, 64, 4
FP32 = 4


class Block(nn.Module):
    """Saves its input for the product's gradient, and the mask's output for ReLU's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.relu(self.inner(values))


def traced(model: nn.Module, batch: Any, recomputed: Any = (), **kwargs: Any) -> MicroStep:
    units = find_units(model, {p: 0 for p in model.parameters()}, LeafModules())
    return trace(model, units, batch, Casting(), {}, Features(recomputed), **kwargs)


def blocks(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


ONE = FP32 * ROWS * WIDTH
INPUT = torch.empty(ROWS, WIDTH, device="meta")


@pytest.mark.parametrize("with_values", [False, True])
def test_what_autograd_saves_is_counted(with_values: bool) -> None:
    batch = torch.ones(ROWS, WIDTH)
    found = traced(blocks("cpu"), batch, with_values=with_values)
    # The batch and each block's output but the last one, and each ReLU's; and the loss.
    assert found.kept == (BLOCKS + BLOCKS) * ONE + FP32
    assert [segment.unit for segment in found.forward] == ["", "0", "1", "2", "3"]
    assert [segment.unit for segment in found.backward] == ["", "3", "2", "1", "0"]
    assert found.backward[1].arrived == ["3.inner.bias", "3.inner.weight"]
    product = 2 * ROWS * WIDTH * WIDTH
    assert [segment.flops for segment in found.forward] == [0, *[product] * BLOCKS]
    # The first block's input needs no gradient.
    assert [segment.flops for segment in found.backward] == [0, *[2 * product] * 3, product]
    assert [segment.until for segment in found.backward[1:]] == [2, 3, 4, 5]


class Mixed(nn.Module):
    """A convolution, attention and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        values = self.product(self.convolution(images))
        return nn.functional.scaled_dot_product_attention(values, values, values)


def test_products_are_counted_by_kind() -> None:
    with torch.device("meta"):
        model = Mixed()
    found = traced(model, torch.empty(2, 1, ROWS, WIDTH, device="meta"))
    forward, backward = (
        {kind: products for segment in some for kind, products in segment.products.items()}
        for some in (found.forward, found.backward)
    )
    assert forward["convolution"] == (1, 4 * ONE + FP32 * 10, 2 * 9 * 2 * ROWS * WIDTH)
    assert forward["matrices"] == (1, 4 * ONE + FP32 * WIDTH**2, 2 * 2 * ROWS * WIDTH**2)
    assert forward["attention"].flops == 2 * 4 * ROWS**2 * WIDTH
    # Reads and writes of each product for the input and for the weight; one call of the others.
    assert backward["matrices"][:2] == (2, 8 * ONE + 2 * FP32 * WIDTH**2)
    assert backward["matrices"].flops == 2 * forward["matrices"].flops
    assert [backward[kind].calls for kind in ("convolution", "attention")] == [1, 1]


def test_recomputed_blocks_keep_their_inputs() -> None:
    found = traced(blocks(), INPUT, ["0", "1", "2", "3"])
    assert found.kept == BLOCKS * ONE + FP32
    assert found.inputs_of_recomputed == (BLOCKS - 1) * ONE  # the batch needs no gradient
    assert found.peak < traced(blocks(), INPUT).peak
    product = 2 * ROWS * WIDTH * WIDTH
    assert [segment.flops for segment in found.backward] == [0, *[3 * product] * 3, 2 * product]


def test_a_frozen_block_gets_no_gradients() -> None:
    model = blocks()
    model[1].requires_grad_(False)
    found = traced(model, INPUT)
    names = [name for segment in found.backward for name in segment.arrived]
    assert names == [f"{n}.inner.{kind}" for n in (3, 2, 0) for kind in ("bias", "weight")]


WORDS = 500


class Tied(nn.Module):
    """A language model; its positions are as many as a block's features, and no vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(WIDTH, WIDTH)
        self.blocks = blocks()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        values = self.table(tokens) + self.places(tokens)
        return {"loss": F.cross_entropy(self.head(self.blocks(values)), tokens)}


def tied() -> MicroStep:
    with torch.device("meta"):
        return traced(Tied(), torch.zeros(ROWS, dtype=torch.long))


def test_a_shared_weight_is_complete_at_its_last_use() -> None:
    found = tied()
    assert "table.weight" in found.backward[-1].arrived


def test_logits_are_counted_apart() -> None:
    found = tied()
    one = FP32 * ROWS * WORDS
    held = [segment.peak.logits for segment in found.forward]
    assert held == [0] * (len(held) - 1) + [2 * one]  # the product, and the softmax's logarithm
    # The latter, and the gradients of both.
    held = [segment.peak.logits for segment in found.backward]
    assert max(held) == 3 * one and held[-1] == 0
    # Without an embedding there is no vocabulary.
    assert all(segment.peak.logits == 0 for segment in traced(blocks(), INPUT).backward)


def test_what_each_block_keeps_with_and_without_recomputation() -> None:
    found = traced(blocks(), INPUT).blocks
    # The mask's output, and its own: the next block's input.
    assert found == [(str(number), "Block", 2 * ONE, ONE) for number in range(BLOCKS)]
    again = traced(blocks(), INPUT, [str(number) for number in range(BLOCKS)]).blocks
    assert [block.kept for block in again] == [ONE] * BLOCKS


class Chooses(nn.Module):
    """A model with shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values[values.sum(dim=1) > 0])


def test_shapes_that_depend_on_values_are_named() -> None:
    with pytest.raises(ModelError, match=r"aten.nonzero.*with_values=True"):
        traced(Chooses(), torch.ones(ROWS, WIDTH))
    found = traced(Chooses(), torch.ones(ROWS, WIDTH), with_values=True)
    assert found.forward[-1].flops == 2 * ROWS * WIDTH * WIDTH


def test_an_error_of_the_model_names_the_batch() -> None:
    with pytest.raises(ModelError, match=r"Sequential failed in the planned .*\(8, 3\)"):
        traced(blocks(), torch.empty(8, 3, device="meta"))


class Grouped(nn.Module):
    """Products of groups of rows, each with a matrix of its own, as experts have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, WIDTH, WIDTH, device="meta", dtype=dtype))

    def forward(self, values: Tensor) -> Tensor:
        ends = torch.tensor([ROWS // 2, ROWS], dtype=torch.int32, device=values.device)
        return torch._grouped_mm(values, self.weight, offs=ends)


def test_products_of_groups_are_known_in_every_dtype() -> None:
    """Torch's own shapes are those of bfloat16 alone."""
    kept = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        batch = torch.empty(ROWS, WIDTH, device="meta", dtype=dtype, requires_grad=True)
        step = traced(Grouped(dtype), batch)
        kept[dtype] = step.backward[-1].peak.total
        assert step.forward[-1].flops == 2 * ROWS * WIDTH * WIDTH
    assert kept[torch.float16] == kept[torch.bfloat16] < kept[torch.float32]


def test_inputs_of_another_dtype_than_the_weights_are_told_as_in_training() -> None:
    features = torch.empty(ROWS, WIDTH, device="meta")
    with pytest.raises(ModelError, match=r"weights are bfloat16 and its inputs float32.*Cast the"):
        traced(blocks().bfloat16(), features)


def test_the_model_itself_is_left_alone() -> None:
    model = blocks("cpu")
    before = [(name, type(p), p.device, p.grad) for name, p in model.named_parameters()]
    traced(model, torch.ones(ROWS, WIDTH), ["0"])
    assert [(n, type(p), p.device, p.grad) for n, p in model.named_parameters()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "forward" not in vars(model[0])


def test_a_loss_that_trains_nothing_is_told() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ModelError, match="its loss depends on no parameter that is trained"):
        hadal.plan(layer, {"train_batch_size": 1}, torch.ones(1, 4), cluster="h100x1")


@pytest.mark.parametrize(("cluster", "itemsize"), [("h100x1", 1), ("cpu", 4)])
def test_an_accelerator_keeps_a_byte_per_element_of_dropout(cluster: str, itemsize: int) -> None:
    def kept(p: float) -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(p), nn.Linear(64, 64))
        where = cluster_here(torch.device("cpu"), 1) if cluster == "cpu" else cluster
        found = hadal.plan(model, {"train_batch_size": 8}, torch.ones(8, 64), cluster=where)
        assert found.micro_step is not None
        return found.micro_step.kept

    assert kept(0.1) - kept(0.0) == itemsize * 8 * 64
