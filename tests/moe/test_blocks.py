"""Blocks of experts of transformers models, whose experts are distributed over ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import rarely
from engine.toys import tiny_at
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.comm import Ranks, init_distributed
from hadal.comm.ranks import make_expert_groups
from hadal.config.parallelism import ExpertParallel
from hadal.errors import ConfigError, ModelError
from hadal.plugins.moe.blocks import (
    DistributedExperts,
    ExpertPlace,
    distribute,
    find_blocks,
    plan_experts,
)

pytestmark = pytest.mark.runs("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 8,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
}


def model_of(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, **OWN[kind], attn_implementation="eager")
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # A router of zeros would choose by chance.
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / 4)
    return model


def ids_of(seed: int) -> Tensor:
    return torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(seed))


def on_one_rank(model: nn.Module, **section: Any) -> nn.Module:
    init_distributed()
    make_expert_groups(1, Ranks.world())
    distribute(plan_experts(model, ExpertParallel(enabled=True, **section), ExpertPlace(1, 0)))
    return model


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids_of(1), labels=ids_of(1)).loss
    loss.backward()
    return loss.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def same(mine: nn.Module, theirs: nn.Module) -> bool:
    first, second = loss_and_gradients(mine), loss_and_gradients(theirs)
    return torch.allclose(first[0], second[0], atol=1e-6) and all(
        torch.allclose(one, second[1][name], atol=1e-6) for name, one in first[1].items()
    )


FAMILIES = ["mixtral", rarely("qwen2_moe"), "qwen3_moe", rarely("deepseek_v2"), "deepseek_v3"]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.claims("expert_parallel.enabled", "expert_parallel.use_grouped_mm")
def test_a_model_computes_the_same(kind: str) -> None:
    plain = model_of(kind)
    for grouped in (True, False):
        assert same(on_one_rank(copy.deepcopy(plain), use_grouped_mm=grouped), plain)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_router_set_to_the_model_s_own_settings_is_the_same(kind: str) -> None:
    plain = model_of(kind)
    router = on_one_rank(copy.deepcopy(plain), top_k=2)
    blocks = find_blocks(router, ExpertParallel(enabled=True))
    assert all(type(block.router).__mro__[1].__name__ == "SetRouter" for block in blocks)
    assert same(router, plain)


@pytest.mark.parametrize(
    "keys",
    [
        {"top_k": 1},
        {"score_func": "sigmoid"},
        {"route_norm": False},
        {"routed_scaling_factor": 3.0},
        {"route_scale": 3.0},
        {"num_expert_groups": 2, "num_limited_groups": 1},
        {"top_k_attr": "num_hidden_layers", "route_norm": False},
        {"expert_activation": "geglu_tanh"},
        {"expert_activation": "swiglu_clamped"},
        {"expert_activation": "swiglu_oai"},
        {"score_apply": "pre"},
    ],
    ids=str,
)
@pytest.mark.claims(
    *("expert_parallel.top_k", "expert_parallel.score_func", "expert_parallel.route_norm"),
    *("expert_parallel.routed_scaling_factor", "expert_parallel.route_scale"),
    *("expert_parallel.num_expert_groups", "expert_parallel.num_limited_groups"),
    *("expert_parallel.top_k_attr", "expert_parallel.expert_activation"),
    "expert_parallel.score_apply",
)
def test_keys_of_router_and_experts_change_the_result(keys: dict[str, Any]) -> None:
    torch.manual_seed(2)
    plain = model_of("mixtral")
    # The weights have values beyond the limits of the clamped activations.
    block = find_blocks(plain, ExpertParallel(enabled=True))[0]
    tokens = torch.randn(9, SIZES["hidden_size"]) * 9
    expected = by_hand(block, tokens, keys)
    before = block.experts(tokens, *block.router(tokens)[:0:-1])
    on_one_rank(plain, **keys)
    _, weights, experts = block.router(tokens)
    found = block.experts(tokens, experts, weights)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, rtol=1e-3)


def by_hand(block: Any, tokens: Tensor, keys: dict[str, Any]) -> Tensor:
    logits = tokens @ block.router.weight.T
    scores = logits.sigmoid() if keys.get("score_func") == "sigmoid" else logits.softmax(1)
    choice = scores
    if "num_expert_groups" in keys:
        best = scores.view(-1, 2, 2).max(2).values.argmax(1)
        choice = scores.masked_fill(torch.arange(4) // 2 != best[:, None], -1.0)
    experts = choice.topk(keys.get("top_k", 2), dim=1).indices
    weights = scores.gather(1, experts)
    if keys.get("route_norm", True):
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * keys.get("routed_scaling_factor", keys.get("route_scale", 1.0))
    output = torch.zeros_like(tokens)
    is_pre = keys.get("score_apply") == "pre"
    for row, token in enumerate(tokens):
        for number, weight in zip(experts[row].tolist(), weights[row], strict=True):
            given = token * weight if is_pre else token
            gate, up = (block.experts.gate_up_proj[number] @ given).chunk(2)
            inner = activated(gate, up, keys.get("expert_activation", "swiglu"))
            result = block.experts.down_proj[number] @ inner
            output[row] += result if is_pre else result * weight
    return output


def activated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    functional = torch.nn.functional
    if kind == "geglu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if kind == "swiglu":
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    if kind == "swiglu_clamped":
        return functional.silu(gate) * up
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Foreign(nn.Module):
    """A block under names of its own, with gate and up apart."""

    def __init__(self) -> None:
        super().__init__()
        self.chooser = nn.Linear(16, 4, bias=False)
        self.mlps = Separate()
        self.config = type("Config", (), {"count": 4, "wrong": 5})()

    def forward(self, tokens: Tensor) -> Tensor:
        weights, experts = self.chooser(tokens).softmax(-1).topk(2)
        result: Tensor = self.mlps(tokens, experts, weights)
        return result


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w1 = nn.Parameter(torch.randn(4, 8, 16))
        self.w3 = nn.Parameter(torch.randn(4, 8, 16))
        self.w2 = nn.Parameter(torch.randn(4, 16, 8))
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for choice in range(experts.shape[1]):
            e = experts[:, choice]
            gate = torch.einsum("nm,nom->no", tokens, self.w1[e])
            up = torch.einsum("nm,nom->no", tokens, self.w3[e])
            down = torch.einsum("no,nmo->nm", self.act_fn(gate) * up, self.w2[e])
            output = output + down * weights[:, choice, None]
        return output


NAMES = {
    "router_pattern": "chooser",
    "expert_pattern": "mlps",
    "expert_w1": "w1",
    "expert_w2": "w2",
    "expert_w3": "w3",
}


@pytest.mark.claims(
    *("expert_parallel.router_pattern", "expert_parallel.expert_pattern"),
    *("expert_parallel.expert_w1", "expert_parallel.expert_w2", "expert_parallel.expert_w3"),
    *("expert_parallel.moe_layer_pattern", "expert_parallel.num_experts_attr"),
)
def test_blocks_under_other_names_are_found_by_these() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Foreign(), Foreign())
    tokens = torch.randn(5, 16)
    expected = model(tokens)
    model.config = model[1].config
    on_one_rank(model, **NAMES, num_experts_attr="count", moe_layer_pattern="1")
    assert isinstance(model[1].mlps, DistributedExperts)
    assert not isinstance(model[2].mlps, DistributedExperts)
    assert torch.allclose(model(tokens), expected, atol=1e-4)
    for keys, told in {
        (("num_experts_attr", "wrong"),): "config has 5 experts, but 2 has 4",
        (("num_experts_attr", "none"),): "num_experts_attr is 'none', which the model's config",
        (("moe_layer_pattern", "3"),): "and a name that ends with '3'",
        (("expert_w2", "w4"),): "weights 'w1' and 'w4' of three dimensions",
    }.items():
        with pytest.raises(ModelError, match=told):
            on_one_rank(model, **{**NAMES, **dict(keys)})


@pytest.mark.claims("expert_parallel.preset_model")
def test_mistakes_are_named() -> None:
    with pytest.raises(ModelError, match=r"'deepseek_v3', but the model is a 'mixtral'"):
        on_one_rank(model_of("mixtral"), preset_model="deepseek_v3")
    on_one_rank(model_of("mixtral"), preset_model="mixtral")
    with pytest.raises(
        ModelError, match=r"3, which does not divide the 4 experts of model\.layers"
    ):
        plan_experts(model_of("mixtral"), ExpertParallel(enabled=True), ExpertPlace(3, 0))
    block = nn.Module()
    block.gate, block.experts = nn.Linear(2, 4), nn.Module()
    block.experts.gate_up_proj = nn.Parameter(torch.ones(4, 6, 2))
    block.experts.down_proj = nn.Parameter(torch.ones(4, 2, 3))
    with pytest.raises(ModelError, match=r"0 \(Module\) have no forward\(hidden_states, top_k_i"):
        plan_experts(nn.Sequential(block), ExpertParallel(enabled=True), ExpertPlace(2, 0))
    with pytest.raises(ModelError, match="and top_k 9 do not fit 4 experts"):
        on_one_rank(model_of("mixtral"), top_k=9)
    with pytest.raises(ModelError, match=r"no block of Linear has a router \('gate'\)"):
        on_one_rank(nn.Linear(2, 2))


# ---- ranks ---------------------------------------------------------------------------------------


def train(kind: str, size: int, stage: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and weights; those of experts with the number of their first one."""
    model = model_of(kind)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, **tiny_at(stage)},
        **({"expert_parallel": {"enabled": True, "autoep_size": size, **keys}} if size else {}),
    }
    engine, *_ = hadal.initialize(model=model, config=config)
    losses, norms = [], []
    for step in range(3):
        ids = ids_of(10 * step + comm.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    weights = {
        name: value.float()
        for name, value in engine.state_dict().items()
        if value.is_floating_point()
    }
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.mark.slow_cells("mixtral-1")
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("mixtral", 1), ("deepseek_v3", 3), rarely("qwen3_moe", 2), rarely("mixtral", 0)],
)
@pytest.mark.claims("expert_parallel.autoep_size")
def test_experts_on_two_ranks_train_as_on_one(kind: str, stage: int, ranks: RankPools) -> None:
    plain, shared = (ranks(2).run(train, kind, size, stage, {}) for size in (0, 2))
    for rank, (mine, theirs) in enumerate(zip(plain, shared, strict=True)):
        assert theirs["losses"] == pytest.approx(mine["losses"], rel=1e-5)
        assert theirs["norms"] == pytest.approx(mine["norms"], rel=1e-4)
        for name, value in theirs["weights"].items():
            whole = mine["weights"][name]
            if ".experts." in name:
                whole = whole.chunk(2)[rank]
            assert torch.allclose(value, whole, atol=2e-4), name


def refuse() -> str:
    with pytest.raises(ConfigError) as caught:
        train("mixtral", 4, 1, {})
    return str(caught.value)


def test_ranks_that_experts_do_not_divide_are_refused(ranks: RankPools) -> None:
    for told in ranks(2).run(refuse):
        assert "expert_parallel.autoep_size" in told
        assert "4 does not divide the 2 ranks" in told
