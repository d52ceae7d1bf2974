"""Layers that are split over ranks compute the same as whole ones, and are pruned and quantized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from compression.test_shrinking import rows
from compression.toys import config, weights
from hadal.errors import ModelError
from hadal.plugins.compression import init_compression, redundancy_clean
from hadal.plugins.compression.parallel import ColumnParallelLinear, RowParallelLinear


def mpu() -> Any:
    group = dist.group.WORLD
    return SimpleNamespace(
        get_model_parallel_group=lambda: group,
        get_model_parallel_world_size=dist.get_world_size,
        get_model_parallel_rank=dist.get_rank,
    )


def pair(gather: bool, skip: bool) -> tuple[nn.Module, nn.Module, nn.Linear, nn.Linear]:
    """Two cut layers, and whole ones with the same weights."""
    torch.manual_seed(2)
    whole = nn.Linear(6, 8), nn.Linear(8, 4)
    cut = (
        ColumnParallelLinear(mpu(), 6, 8, gather_output=gather, skip_bias_add=skip),
        RowParallelLinear(mpu(), 8, 4, input_is_parallel=not gather, skip_bias_add=skip),
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        cut[0].weight.copy_(whole[0].weight.chunk(ranks)[rank])
        cut[0].bias.copy_(whole[0].bias.chunk(ranks)[rank])
        cut[1].weight.copy_(whole[1].weight.chunk(ranks, 1)[rank])
        cut[1].bias.copy_(whole[1].bias)
    return (*cut, *whole)


@pytest.mark.parametrize(("gather", "skip"), [(True, False), (False, False), (False, True)])
@on_ranks(2)
def test_they_compute_the_same_as_whole_layers(gather: bool, skip: bool) -> None:
    first, second, whole_first, whole_second = pair(gather, skip)
    x, same = (torch.randn(3, 6, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x.requires_grad_()
    same.requires_grad_()
    hidden, left = first(x)
    if left is not None:
        own = left if not gather else whole_first.bias
        hidden = hidden + own
    found, left = second(hidden)
    found = found if left is None else found + left
    expected = whole_second(whole_first(same))
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.testing.assert_close(first.weight.grad, whole_first.weight.grad.chunk(ranks)[rank])
    torch.testing.assert_close(second.weight.grad, whole_second.weight.grad.chunk(ranks, 1)[rank])


@on_ranks(2)
def test_they_are_quantized_and_pruned() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, *_ = pair(gather=False, skip=False)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)[0]))[0]

    wishes = config(
        rows(modules=["up"], related=[["down"]]),
        weights(8, 8, modules=["up", "down"], quantize_weight_in_forward=True),
    )
    model = init_compression(Both(), wishes, mpu=mpu()).eval()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, wishes)
        torch.testing.assert_close(model(x), before)
    assert (*model.up.weight.shape, *model.down.weight.shape) == (2, 6, 4, 2)
    assert type(model.up) is ColumnParallelLinear
    with pytest.raises(ModelError, match="ColumnParallelLinear: 2 ranks do not divide 7"):
        ColumnParallelLinear(mpu(), 6, 7)
