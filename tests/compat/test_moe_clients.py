"""Programs with experts under DeepSpeed's names."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from engine.parts import WIDTH
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.compat.alias import alias

CLASSES = 4


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(3, 8, 8, generator=draw), number % CLASSES


class Network(nn.Module):
    """Convolutions, two layers of experts, and a head: as the example with CIFAR-10 has them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        layer = alias("deepspeed").moe.layer.MoE
        self.first, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 2)
        self.flat = nn.Linear(4 * 3 * 3, WIDTH)
        self.experts = nn.ModuleList(
            layer(
                hidden_size=WIDTH,
                expert=nn.Linear(WIDTH, WIDTH),
                num_experts=count,
                ep_size=args.ep_world_size,
                use_residual=args.mlp_type == "residual",
                k=args.top_k,
                min_capacity=args.min_capacity,
                noisy_gate_policy=args.noisy_gate_policy,
            )
            for count in args.num_experts
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.relu(self.flat(self.pool(F.relu(self.first(pictures))).flatten(1)))
        for layer in self.experts:
            x, _, _ = layer(x)
        found: Tensor = self.head(x)
        return found


def learn_pictures(stage: int) -> float:
    deepspeed = alias("deepspeed")
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--ep-world-size", type=int)
    parser.add_argument("--num-experts", type=int, nargs="+")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-capacity", type=int)
    parser.add_argument("--noisy-gate-policy")
    parser.add_argument("--mlp-type")
    parser.add_argument("--moe-param-group", action="store_true")
    given = "--deepspeed --ep-world-size 2 --num-experts 2 4 --top-k 1 --min-capacity 0"
    more = "--noisy-gate-policy RSample --mlp-type residual --moe-param-group"
    args = parser.parse_args([*given.split(), *more.split()])
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Network(args)
    parameters: Any = {"params": list(model.parameters()), "name": "parameters"}
    if args.moe_param_group:
        split = alias("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
        parameters = split(parameters)
        assert [group.get("moe", False) for group in parameters] == [False, True]
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=parameters,
        training_data=Pictures(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "wall_clock_breakdown": False,
        },
    )
    assert engine.bfloat16_enabled() and engine.local_rank >= 0 and len(loader) == 3
    device = alias("deepspeed.accelerator").get_accelerator().device_name(engine.local_rank)
    losses = []
    for _ in range(4):
        for pictures, labels in loader:
            logits = engine(pictures.to(device).bfloat16())
            loss = F.cross_entropy(logits.float(), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert deepspeed.moe.layer.MoE and len(optimizer.param_groups) == 2
    return losses[-1]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_vision_model_with_experts_trains(stage: int, ranks: RankPools) -> None:
    assert all(loss == loss < 10 for loss in ranks(2).run(learn_pictures, stage))
