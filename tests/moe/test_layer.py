"""The layer of experts, on one process and on ranks."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.errors import ModelError, UsageError
from hadal.plugins.moe import MoE, TopKGate, has_moe_layers
from moe.models import EXPERTS, WIDTH, an_expert, filled, layer_of, tokens_of

GIVEN = json.loads((Path(__file__).parents[1] / "data/experts.json").read_text())["layers"]


def pattern(shape: torch.Size) -> Tensor:
    """The weights of the data: -0.3, -0.2, ..., 0.3, and again."""
    return ((torch.arange(shape.numel()) % 7 - 3) / 10).view(shape)


@pytest.mark.parametrize("kind", GIVEN)
def test_names_and_outputs_are_deepspeed_s(kind: str) -> None:
    told = GIVEN[kind]
    dense = nn.Linear(4, 4, bias=False)
    layer = MoE(
        4, dense, num_experts=4, min_capacity=1, use_rts=False, use_residual=kind == "residual"
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(pattern(parameter.shape))
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.weight.mul_(number + 1)  # type: ignore[union-attr, operator]
    assert {
        name: (tuple(one["shape"]), one["allreduce"], one["group_name"])
        for name, one in told["params"].items()
    } == {
        name: (tuple(p.shape), getattr(p, "allreduce", None), getattr(p, "group_name", None))
        for name, p in layer.named_parameters()
    }
    output, loss, counts = layer(torch.tensor(told["x"]))
    assert counts.tolist() == told["counts"]
    assert loss.item() == pytest.approx(told["l_aux"], abs=1e-6)
    assert torch.allclose(output, torch.tensor(told["out"]), atol=1e-6)
    assert kind != "residual" or layer.mlp is dense


def every_expert(layer: MoE, tokens: Tensor) -> Tensor:
    """Compute all experts of all tokens and weight them."""
    routing = layer.deepspeed_moe.gate.route(tokens)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    outputs = torch.stack([expert(tokens) for expert in experts], dim=1)
    weights = torch.zeros(len(tokens), len(experts)).scatter(1, routing.experts, routing.weights)
    return (outputs * weights[..., None]).sum(dim=1)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_drops_it_is_the_weighted_sum_of_all_experts(k: int) -> None:
    layer = layer_of(1, k=k).eval()
    tokens = tokens_of(1).requires_grad_()
    found = layer(tokens)[0]
    expected = every_expert(layer, tokens)
    assert torch.allclose(found, expected, atol=1e-6)
    given = [tokens, *layer.parameters()]
    gradients = [torch.autograd.grad(one.square().sum(), given) for one in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_dropped_values_are_zero() -> None:
    layer = layer_of(1, k=1, drop_tokens=True, capacity_factor=0.5)
    tokens = tokens_of(2, 16)
    output, _, counts = layer(tokens)
    kept = counts.clamp(max=2)  # 16 tokens / 4 experts / 2
    assert int((output.abs().sum(dim=1) > 0).sum()) == int(kept.sum()) < 16
    layer.eval()
    assert torch.equal(layer(tokens)[0], layer(tokens)[0])
    unused = layer(tokens, torch.arange(16.0) % 2)[0]  # zeros and ones in any dtype
    assert not unused[::2].any()


def test_the_gate_is_fp32_under_autocast_and_in_bf16() -> None:
    torch.manual_seed(0)
    gate = TopKGate(WIDTH, EXPERTS, k=2, top2_2nd_expert_sampling=False)
    tokens = tokens_of(3)
    plain = gate.route(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate.route(tokens).weights, plain.weights)
    assert gate.bfloat16().route(tokens.bfloat16()).weights.dtype == torch.float32


def test_a_layer_is_copied_and_pickled() -> None:
    layer = layer_of(1)
    kept = io.BytesIO()
    torch.save(layer, kept)
    kept.seek(0)
    for other in (copy.deepcopy(layer), torch.load(kept, weights_only=False)):
        assert torch.equal(other.eval()(tokens_of(0))[0], layer.eval()(tokens_of(0))[0])
        assert all(
            getattr(p, "group_name", None) == getattr(q, "group_name", None)
            for p, q in zip(other.parameters(), layer.parameters(), strict=True)
        )


def test_the_layers_of_a_model_are_found() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer_of(1))
    assert has_moe_layers(model) == (True, EXPERTS)
    assert has_moe_layers(model[0]) == (False, 0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ModelError, match=r"num_experts=4, ep_size=3.*divides num_experts"):
        MoE(WIDTH, an_expert(), num_experts=4, ep_size=3)
    with pytest.raises(ModelError, match=r"k = 3 needs that many experts; it has 2"):
        MoE(WIDTH, an_expert(), num_experts=2, k=3)
    with pytest.raises(ModelError, match=r"'Noise'; expected one of None, 'None', 'Jitter'"):
        MoE(WIDTH, an_expert(), num_experts=2, noisy_gate_policy="Noise")
    with pytest.raises(ModelError, match=r"used_token has 3 elements, but there are 7 tokens"):
        layer_of(1)(tokens_of(0), torch.ones(3))
    with pytest.raises(ModelError, match=r"an expert \(Flatten\) returned \(1, 7\) for"):
        MoE(7, nn.Flatten(), num_experts=1, drop_tokens=False)(torch.zeros(1, 7))
    with pytest.raises(UsageError, match=r"over 2 ranks \(ep_size\).*divide the 1 ranks"):
        layer_of(2)(tokens_of(0))


# ---- ranks ---------------------------------------------------------------------------------------


def compute(ep_size: int, rows: tuple[int, ...], k: int) -> dict[str, Any]:
    """Outputs and gradients of this rank; those of experts are summed over all ranks, by id."""
    rank = comm.get_rank()
    layer = layer_of(ep_size, k=k, top2_2nd_expert_sampling=False)
    tokens = tokens_of(rank, rows[rank]).requires_grad_()
    output, loss, _ = layer(tokens)
    (output.square().sum() + loss).backward()
    gradients = torch.zeros(EXPERTS, sum(p.numel() for p in an_expert().parameters()))
    for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        number = rank % ep_size * layer.num_local_experts + local
        gradients[number] = torch.cat([_flat(p.grad) for p in expert.parameters()])
    comm.all_reduce(gradients)
    gate = layer.deepspeed_moe.gate.wg.weight.grad
    return {"output": output.detach(), "tokens": tokens.grad, "gate": gate, "experts": gradients}


def _flat(gradient: Tensor | None) -> Tensor:
    assert gradient is not None  # zeros, of an expert without tokens
    return gradient.reshape(-1)


@pytest.mark.parametrize(
    ("ep_size", "rows", "k"),
    [(2, (7, 5), 2), (2, (4, 0), 1), (2, (1, 1), 1), (2, (6, 3), 3)],
    ids=["2 of 4", "a rank without tokens", "experts without tokens", "3 of 4"],
)
def test_experts_on_several_ranks_compute_the_same(
    ranks: RankPools, ep_size: int, rows: tuple[int, ...], k: int
) -> None:
    alone, shared = (ranks(2).run(compute, size, rows, k) for size in (1, ep_size))
    for mine, theirs in zip(alone, shared, strict=True):
        for name, value in mine.items():
            assert torch.allclose(value, theirs[name], atol=1e-5), name


@pytest.mark.slow
def test_experts_over_two_of_four_ranks(ranks: RankPools) -> None:
    alone, shared = (ranks(4).run(compute, size, (5, 2, 0, 4), 2) for size in (1, 2))
    for mine, theirs in zip(alone, shared, strict=True):
        for name, value in mine.items():
            assert torch.allclose(value, theirs[name], atol=1e-5), name


def compute_in_bf16() -> Tensor:
    layer = filled(MoE(WIDTH, an_expert(), EXPERTS, 2, drop_tokens=False), comm.get_rank())
    output: Tensor = layer.bfloat16()(tokens_of(0).bfloat16())[0]
    assert output.dtype == torch.bfloat16
    return output.float().detach()


def test_tokens_travel_in_their_dtype(ranks: RankPools) -> None:
    first, second = ranks(2).run(compute_in_bf16)
    assert torch.equal(first, second)
