"""Losses of whole sequences: one value on all ranks, and gradients that add up to one process's."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal import comm
from hadal.plugins.sequence import mean_over_sequence, sequence_loss
from hadal.plugins.sequence.cross_entropy import as_parts

LENGTH, WORDS = 8, 7


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(WORDS, (2, LENGTH), generator=generator)
    targets[:, :5] = -100  # with two ranks, the first has none
    return torch.randn(2, LENGTH, 4, generator=generator), targets


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, WORDS)


def whole() -> tuple[Tensor, Tensor]:
    inputs, targets = data()
    alone = model()
    loss = F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten())
    return loss.detach(), torch.autograd.grad(loss, alone.weight)[0]


def transformers_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's mean, put together as transformers and DeepSpeed's tutorials do."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        losses = torch.stack(collectives.all_gather(loss, group=group))
        counts = torch.stack(collectives.all_gather((targets != -100).sum(), group=group))
    losses = torch.where(counts > 0, losses, 0.0)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("way", ["sequence_loss", "mean_over_sequence", "transformers"])
@on_ranks(2)
def test_parts_add_up(way: str) -> None:
    ranks = comm.Ranks.world()
    inputs, targets = (one.chunk(ranks.size, dim=1)[ranks.rank] for one in data())
    mine = model()
    logits = mine(inputs)
    if way == "sequence_loss":
        loss = sequence_loss(logits, targets, ranks.group)
    elif way == "mean_over_sequence":
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = mean_over_sequence(losses, (targets != -100).sum(), ranks.group)
    else:
        loss = as_parts(transformers_loss(logits, targets, ranks.group) * 1.0, ranks.group)
    expected, gradient = whole()
    torch.testing.assert_close(loss.detach(), expected)
    (found,) = torch.autograd.grad(loss, mine.weight)
    comm.all_reduce(found)  # as the engine adds up parts
    torch.testing.assert_close(found, gradient)
    plain = logits.sum()
    assert as_parts(plain, ranks.group) is plain


def _in_an_engine(way: str) -> float:
    ranks = comm.Ranks.world()
    engine = hadal.initialize(
        model=model(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": ranks.size,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )[0]
    group = engine.topology.sequence_parallel.group
    inputs, targets = (one.chunk(ranks.size, dim=1)[ranks.rank] for one in data())
    function = sequence_loss if way == "sequence_loss" else transformers_loss
    loss = function(engine(inputs), targets, group)
    engine.backward(loss)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert loss.item() == pytest.approx(whole()[0].item())
    return norm


@pytest.mark.parametrize("way", ["sequence_loss", "transformers"])
def test_an_engine_gets_one_processs_gradients(way: str, ranks: RankPools) -> None:
    inputs, targets = data()
    alone = model()
    F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten()).backward()
    expected = float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9))
    assert ranks(2).run(_in_an_engine, way) == pytest.approx([expected] * 2)
