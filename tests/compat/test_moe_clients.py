"""Programs with experts under DeepSpeed's names: a vision model, and one with a Megatron's mpu."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from engine.parts import PARTS, WIDTH, Part, core, sequences_of, whole_model
from moe.models import filled
from moe.test_training import global_name
from ranks import RankPools
from torch import Tensor, nn
from torch.nn import functional as F

from hadal import comm
from hadal.compat.install import alias

CLASSES, EXPERTS, UPDATES = 4, 2, 3
ADAM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}


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


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("stage", [0, 2])
def test_a_vision_model_with_experts_trains(stage: int, ranks: RankPools) -> None:
    assert all(loss == loss < 10 for loss in ranks(2).run(learn_pictures, stage))


class Layered(nn.Module):
    """A feed-forward block, whole or one of its slices, and experts behind it."""

    def __init__(self, block: nn.Module, ep_size: int) -> None:
        super().__init__()
        self.block = block
        self.experts = alias("deepspeed.moe.layer").MoE(
            WIDTH,
            nn.Linear(WIDTH, WIDTH),
            num_experts=EXPERTS,
            ep_size=ep_size,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        values = values + self.block(values)
        more, balance, _ = self.experts(values)
        return values + more, balance


def layered(block: nn.Module, ep_size: int, place: int) -> Layered:
    model = Layered(block, ep_size)
    filled(model.experts, place)
    return model


def loss_of(model: Any, step: int, reader: int) -> Tensor:
    inputs, targets = sequences_of(step, reader)
    outputs, balance = model(inputs)
    return (outputs - targets).square().mean() + 0.1 * balance


def through_megatron(stage: int) -> dict[str, Any]:
    """Four ranks: two slices of the block, two readers, whose ranks share the experts."""
    mpu = core()
    part, reader = comm.get_rank() % PARTS, comm.get_rank() // PARTS
    groups = alias("deepspeed.utils.groups")
    model = layered(Part(part), 2, reader)
    split = alias("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
    engine, *_ = alias("deepspeed").initialize(
        model=model,
        model_parameters=split({"params": list(model.parameters()), "name": "all"}),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": len(sequences_of(0, 0)[0]),
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
            },
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": stage},
        },
    )
    assert mpu.get_pipeline_model_parallel_world_size() == 1
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == reader
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
    losses, norms = [], []
    for step in range(UPDATES):
        loss = loss_of(engine, step, reader)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = {global_name(n, reader, 1): v.clone() for n, v in engine.module.state_dict().items()}
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_megatron_with_slices_and_experts_trains_as_one_process(
    stage: int, ranks: RankPools
) -> None:
    model = layered(whole_model(), 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(UPDATES):
        found = [loss_of(model, step, reader) for reader in range(2)]
        torch.stack(found).mean().backward()
        losses.append([loss.item() for loss in found])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    wanted = model.state_dict()
    for rank, one in enumerate(ranks(4).run(through_megatron, stage)):
        assert one["losses"] == pytest.approx([row[rank // PARTS] for row in losses], rel=1e-5)
        assert one["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in one["weights"].items():
            whole = wanted[name]
            if whole.shape != value.shape:
                whole = whole.chunk(PARTS, 0 if ".up." in name else 1)[rank % PARTS]
            torch.testing.assert_close(value, whole, rtol=1e-5, atol=1e-6)
