"""Buckets made by hand, for tests of the mechanism below the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hadal.comm import Ranks
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.grouping import BucketPlan, Member
from hadal.zero.policy import Partition, Precision
from hadal.zero.sharing import Sharing

CPU = torch.device("cpu")
SHAPES = ((3, 5), (), (7,), (0, 2), (4, 2))
FP32 = Precision()
BF16 = Precision(
    compute=torch.bfloat16,
    master=torch.float32,
    accumulate=torch.bfloat16,
    reduce=torch.bfloat16,
)
WIDE = Precision(
    compute=torch.bfloat16,
    master=torch.float32,
    accumulate=torch.float32,
    reduce=torch.float32,
)
FROZEN_WEIGHTS = Partition(weights=True)


def given_values(rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """The values of a rank's parameters before rank 0's are broadcast."""
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def make_bucket(
    partition: Partition,
    precision: Precision,
    *,
    trainable: bool = True,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    groups: Sequence[int] = (),
) -> Bucket:
    ranks = Ranks.world()
    values = given_values(ranks.rank, shapes)
    groups = groups or [0 if trainable else -1] * len(shapes)
    members = [
        Member(f"layer.{index}", nn.Parameter(value, requires_grad=trainable), group)
        for index, (value, group) in enumerate(zip(values, groups, strict=True))
    ]
    plan = BucketPlan("layer", partition, members, [])
    bucket = Bucket(plan, precision, Sharing.over(ranks), CPU)
    assert (bucket.state is Weights.SHARDED) == partition.weights
    bucket.unshard()
    return bucket
