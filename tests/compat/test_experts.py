"""DeepSpeed's names of experts: gates in its forms, and the groups around experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import nn

from hadal.comm import init_distributed
from hadal.compat import groups as own_groups
from hadal.compat.install import alias
from hadal.errors import UsageError

GIVEN = json.loads((Path(__file__).parents[1] / "data/experts.json").read_text())
LOGITS = torch.tensor(GIVEN["logits"])
sharded = alias("deepspeed.moe.sharded_moe")


def routes_of(weights: torch.Tensor) -> list[tuple[int, int, int]]:
    return [tuple(one) for one in weights.nonzero().tolist()]


def test_gates_return_weights_by_token_expert_and_slot() -> None:
    cases = {
        "top1 cf=1.0 min=1 rts=False": (sharded.top1gating, (1.0, 1), {"use_rts": False}),
        "top2 cf=1.0 min=1 sampling=False": (
            sharded.top2gating,
            (1.0, 1),
            {"top2_2nd_expert_sampling": False},
        ),
        "top2 drop=False sampling=False": (
            sharded.top2gating,
            (1.0, 1),
            {"top2_2nd_expert_sampling": False, "drop_tokens": False},
        ),
    }
    for case, (gate, args, options) in cases.items():
        told = GIVEN["gates"][case]
        loss, weights, mask, counts = gate(LOGITS, *args, **options)
        assert weights.shape == (*LOGITS.shape, told["capacity"])
        assert loss.item() == pytest.approx(told["l_aux"], abs=1e-6)
        assert counts.tolist() == told["counts"]
        assert routes_of(mask) == routes_of(weights) == [tuple(one[:3]) for one in told["routes"]]
    told = GIVEN["gates"]["topk k=3 cf=1 min=1 policy=position"]
    found = sharded.topkgating(LOGITS, 3, 1, 1, drop_policy="position", sparse_routes=True)
    loss, capacity, experts, indices, locations, weights, counts = found
    assert (capacity, experts) == (told["capacity"], 4)
    kept = {
        (token, int(indices[choice, token]), int(locations[choice, token]))
        for choice, token in (indices >= 0).nonzero().tolist()
    }
    assert kept == {tuple(one[:3]) for one in told["routes"]}
    slots = sharded._route_slots(indices, locations, experts, capacity)
    tokens = torch.randn(len(LOGITS), 3, requires_grad=True)
    buffers = sharded._sparse_encode(tokens, slots, experts, capacity)
    dense = sharded.topkgating(LOGITS, 3, 1, 1, drop_policy="position")
    expected = torch.einsum("sec,sm->ecm", dense[2].float(), tokens)
    torch.testing.assert_close(buffers, expected)
    found = sharded._sparse_decode(buffers, slots, weights, len(LOGITS))
    torch.testing.assert_close(found, torch.einsum("sec,ecm->sm", dense[1], expected))
    torch.testing.assert_close(
        torch.autograd.grad(buffers.sum(), tokens), torch.autograd.grad(expected.sum(), tokens)
    )
    assert weights[indices < 0].abs().sum() == 0
    assert counts.tolist() == told["counts"]
    assert loss.item() == pytest.approx(told["l_aux"], abs=1e-6)


def test_noise_is_drawn_from_torch_s_own_generator() -> None:
    torch.manual_seed(123)
    assert sharded.multiplicative_jitter(torch.ones(4)).tolist() == pytest.approx(
        GIVEN["jitter"], abs=1e-6
    )
    torch.manual_seed(123)
    told = GIVEN["gates"]["top1 RSample seed123 rts=False"]
    found = sharded.top1gating(LOGITS, 1.0, 1, noisy_gate_policy="RSample", use_rts=False)
    assert found[3].tolist() == told["counts"]
    assert sharded.gumbel_rsample((2, 3), "cpu").shape == (2, 3)
    ones = torch.ones(2, 3)
    assert torch.equal(sharded.einsum("se,se->s", ones, ones), torch.full((2,), 3.0))


def test_tables_of_any_layout_are_deepspeed_s() -> None:
    ranks_of = alias("deepspeed.utils.groups")._get_expert_parallel_ranks
    for case, told in GIVEN["tables"].items():
        found = re.fullmatch(r"world(\d+) ep(\d+) tp(\d+) pp(\d+) data_before=(True|False)", case)
        assert found
        world, size, tensor, stages = map(int, found.groups()[:4])
        assert [*ranks_of(world, tensor, size, stages, found[5] == "True")] == told


def exchange() -> list[list[float]]:
    rank = torch.distributed.get_rank()
    rows = torch.tensor([[1.0], [2.0]]).mul_(10**rank).requires_grad_()
    found = sharded._AllToAll.apply(torch.distributed.group.WORLD, rows)
    (gradient,) = torch.autograd.grad((found * (rank + 1)).sum(), rows)
    return [found.flatten().tolist(), gradient.flatten().tolist()]


def test_buffers_are_exchanged_and_gradients_come_back(ranks: RankPools) -> None:
    assert ranks(2).run(exchange) == [[[1, 10], [1, 2]], [[2, 20], [1, 2]]]


def ask() -> dict[str, object]:
    groups = alias("deepspeed.utils.groups")
    own_groups._newest.clear()  # of an engine that another test left on these ranks
    groups._create_expert_and_data_parallel(2)
    name = "ep_size_2"
    return {
        "parallel": groups._get_expert_parallel_group_ranks(name),
        "rank": groups._get_expert_parallel_rank(name),
        "size": groups._get_expert_parallel_world_size(name),
        "first": groups._get_expert_parallel_src_rank(name),
        "group": groups._get_expert_parallel_group(name)
        is groups._get_expert_parallel_group_dict()[name]
        is groups._get_max_expert_parallel_group(),
        "data": groups._get_expert_data_parallel_group_ranks(name),
        "data rank": groups._get_expert_data_parallel_rank(name),
        "data size": groups._get_expert_data_parallel_world_size(name),
        "data first": groups._get_expert_broadcast_src_rank(name),
        "data group": groups._get_expert_data_parallel_group(name)
        is groups._get_expert_data_parallel_group_dict()[name],
        "largest": groups._get_max_expert_size_name(),
    }


def test_groups_are_requested_by_name(ranks: RankPools) -> None:
    for rank, told in enumerate(ranks(2).run(ask)):
        assert told == {
            "parallel": [0, 1],
            "rank": rank,
            "size": 2,
            "first": 0,
            "group": True,
            "data": [rank],
            "data rank": 0,
            "data size": 1,
            "data first": rank,
            "data group": True,
            "largest": "ep_size_2",
        }
    init_distributed()
    with pytest.raises(UsageError, match="'ep_size_64'"):
        alias("deepspeed.utils.groups")._get_expert_parallel_group("ep_size_64")


def experts_of_a_checkpoint(folder: str) -> list[float]:
    layer = alias("deepspeed").moe.layer.MoE
    expert = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(*(layer(2, expert, 4, ep_size=2) for _ in range(2)))
    for each in model:
        each.set_deepspeed_parallelism()  # type: ignore[operator]
    kind = alias("deepspeed").DeepSpeedEngine
    if dist.get_rank() == 0:
        for number in range(2):
            for expert in range(4):
                name = f"{number}.deepspeed_moe.experts.deepspeed_experts.{expert}.weight"
                path = kind._get_expert_ckpt_name(folder, number, expert, "tag")
                Path(path).parent.mkdir(exist_ok=True)
                torch.save({name: torch.full((2, 2), number * 4.0 + expert)}, path)
    dist.barrier()
    state = model.state_dict()
    kind.load_moe_state_dict(folder, "tag", state, False, model)
    model.load_state_dict(state)
    with pytest.raises(UsageError, match="old_moe_load"):
        kind.load_moe_state_dict(folder, "tag", state, True, model)
    return [each[0, 0].item() for name, each in state.items() if "deepspeed_experts" in name]


def test_a_rank_loads_its_own_experts_from_their_files(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(2).run(experts_of_a_checkpoint, str(tmp_path))
    assert found == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
