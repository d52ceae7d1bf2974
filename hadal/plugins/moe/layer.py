"""A layer of experts: a gate sends each token to a few of them, and counts how evenly.

Names of classes, arguments and parameters are DeepSpeed's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.comm import Ranks, init_distributed
from hadal.comm.collectives import sum_
from hadal.comm.ranks import expert_group_names, expert_groups, group_name, make_expert_groups
from hadal.device import is_in_backward
from hadal.errors import ModelError, expect_one_of
from hadal.listener import Listener, Setting, Update
from hadal.plugins.moe.experts import Experts, plan_dispatch
from hadal.plugins.moe.gate import (
    Routing,
    capacity_of,
    dense,
    jittered,
    largest,
    route_to_many,
    route_to_one,
    route_to_two,
)

_PREFIX = "Train/MoE/"


class Load:
    """Choices per expert of one layer since the last reading, counted only if enabled."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.is_counted = False
        self._counts: Tensor | None = None

    def add(self, counts: Tensor, dropped: Tensor | int) -> None:
        """Count a forward: [E] choices, of which some were dropped.

        A forward that is recomputed in backward is counted once; one in evaluation is not counted.
        """
        if not self.is_counted or is_in_backward() or not torch.is_grad_enabled():
            return
        found = torch.cat([counts, counts.new_zeros(1) + dropped])
        self._counts = found if self._counts is None else self._counts + found

    def take(self, device: torch.device) -> Tensor:
        """Return [E + 1] int64, choices per expert and dropped choices; reset the counts."""
        found, self._counts = self._counts, None
        if found is None:
            found = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device)
        return found


def imbalance(counts: Tensor) -> Tensor:
    """Return the largest of [E] counts over their mean: 1 if all are equal, E if one has all."""
    return counts.max() / counts.double().mean().clamp(min=1e-9)


def loads_of(model: nn.Module) -> list[Load]:
    """Return the counters of all layers of experts in a model."""
    found = (getattr(module, "load", None) for module in model.modules())
    return [load for load in found if isinstance(load, Load)]


class ExpertLoad(Listener):
    """Writes `load_imbalance`, the mean over layers, and `dropped_tokens`, the sum over them."""

    name = "hadal.experts"

    def __init__(self, section: Any, setting: Setting) -> None:
        del section
        self._loads = loads_of(setting.model)
        self._ranks = setting.sharding
        self._write = setting.write
        self._device = setting.device
        for load in self._loads:
            load.is_counted = True

    def after_update(self, update: Update) -> None:
        """Sum the counts of the update over ranks, and write the results."""
        if not self._loads or self._write is None:
            return
        counts = [load.take(self._device) for load in self._loads]
        total = torch.cat(counts)
        sum_(total, self._ranks, "the sum of the experts' loads")
        of_layers = total.split([len(one) for one in counts])
        uneven = torch.stack([imbalance(one[:-1]) for one in of_layers]).mean()
        dropped = torch.stack([one[-1] for one in of_layers]).sum()
        self._write(
            [
                (f"{_PREFIX}load_imbalance", uneven, update.total_samples),
                (f"{_PREFIX}dropped_tokens", dropped, update.total_samples),
            ]
        )

    def on_error(self, error: BaseException) -> None:
        """Discard the counts of an interrupted update."""
        for load in self._loads:
            load.take(self._device)

    def close(self) -> None:
        """Stop counting."""
        for load in self._loads:
            load.is_counted = False


NOISY_POLICIES = (None, "None", "Jitter", "RSample")
_log = logging.getLogger(__name__)


class TopKGate(nn.Module):
    """Gate that routes each token to the `k` experts that a linear layer finds most probable.

    It computes in fp32, also under autocast. In evaluation it draws no random numbers.

    Args:
        model_dim: width of the tokens, m.
        num_experts: experts on all ranks together, E.
        k: experts per token.
        capacity_factor: an expert keeps this multiple of the mean number of tokens.
        eval_capacity_factor: the same in evaluation.
        min_capacity: an expert keeps at least this many tokens.
        noisy_gate_policy: `Jitter` multiplies the gate's inputs by 0.99 to 1.01 in training;
            `RSample` adds Gumbel noise to the choice of one expert.
        drop_tokens: experts drop tokens beyond their capacity; otherwise they have no limit.
        use_rts: with k = 1, an expert keeps random tokens in training; otherwise those that torch's
            `topk` returns first.
        ep_group: no effect: dropping depends on only this rank's tokens.
        top2_2nd_expert_sampling: with k = 2, the second expert is sampled in training.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ModelError(f"a gate with k = {k} needs that many experts; it has {num_experts}")
        expect_one_of(NOISY_POLICIES, "noisy_gate_policy", noisy_gate_policy, ModelError)
        self.wg = _WideLinear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def route(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """Choose the experts of [s, m] tokens; those with zero in [s] `used_token` go to none."""
        draws = self.training
        values = tokens.float()
        if draws and self.noisy_gate_policy == "Jitter":
            values = jittered(values)
        logits = self.wg(values)
        capacity = self.capacity(*logits.shape) if self.drop_tokens else None
        if self.k == 1:
            return route_to_one(
                logits,
                capacity,
                used=used_token,
                is_noisy=draws and self.noisy_gate_policy == "RSample",
                keeps_at_random=draws and self.use_rts,
            )
        if self.k == 2:
            samples = draws and self.top2_2nd_expert_sampling
            return route_to_two(logits, capacity, used=used_token, samples_second=samples)
        return route_to_many(logits, self.k, capacity, used=used_token)

    def capacity(self, tokens: int, experts: int) -> int:
        """Return how many choices an expert keeps of this many tokens."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return capacity_of(tokens, experts, self.k, factor, self.min_capacity)

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, use_tutel: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return balance loss, weights [s, E, capacity], where they are not 0, and counts [E]."""
        routing = self.route(input, used_token)
        tokens, experts = len(input), len(routing.counts)
        capacity = self.capacity(tokens, experts) if self.drop_tokens else largest(routing.counts)
        weights = dense(routing, capacity)
        return routing.balance_loss, weights, weights.bool(), routing.counts


class _WideLinear(nn.Linear):
    """A linear layer in fp32, whatever the weight's dtype and autocast."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())


class MOELayer(nn.Module):
    """Gate, experts, and the exchange of tokens between the ranks that share the experts.

    `l_aux` and `exp_counts` are those of the last forward.
    """

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.load = Load(ep_size * num_local_experts)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return [..., m]: the weighted sum of the experts' outputs for each token."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if used_token is not None and used_token.numel() != len(tokens):
            raise ModelError(
                f"used_token has {used_token.numel()} elements, but there are {len(tokens)} tokens;"
                " pass one element for each token"
            )
        routing = self.gate.route(tokens, used_token)
        self.l_aux, self.exp_counts = routing.balance_loss, routing.counts
        self.load.add(routing.counts, routing.counts.sum() - routing.kept.sum())
        dispatch = plan_dispatch(
            routing.experts, routing.kept, self.ep_size * self.num_local_experts, self._ranks()
        )
        rows = self.experts.of_rows(dispatch.to_experts(tokens), dispatch.counts)
        return dispatch.to_tokens(rows, routing.weights).view(hidden_states.shape)

    def _ranks(self) -> Ranks | None:
        """Return the ranks that share the experts: all ranks, unless an engine has set them."""
        if self.ep_size == 1:
            return None
        if self.ep_group_name not in expert_group_names():
            init_distributed()
            make_expert_groups(self.ep_size, Ranks.world())
        return expert_groups(self.ep_group_name).parallel


class MoE(nn.Module):
    """Layer of experts that are distributed over ranks.

    Args:
        hidden_size: width of the tokens, m.
        expert: the module of one expert; every expert is a copy of it.
        num_experts: experts on all ranks together, E.
        ep_size: ranks that share them; it divides both.
        k: experts per token.
        capacity_factor: see `TopKGate`, as the next three.
        eval_capacity_factor: in evaluation.
        min_capacity: the least capacity.
        use_residual: add `expert` itself as a dense layer, weighted against the experts by a
            linear layer ("DeepSpeed-MoE", Rajbhandari et al., 2022).
        noisy_gate_policy: see `TopKGate`, as the next two.
        drop_tokens: drop tokens beyond the capacity.
        use_rts: keep random tokens.
        use_tutel: no effect.
        enable_expert_tensor_parallelism: no effect: every tensor-parallel rank computes the
            experts of all its tokens, whether or not the experts are sharded over these ranks.
        top2_2nd_expert_sampling: see `TopKGate`.

    Raises:
        ModelError: the sizes do not fit, or the policy is unknown.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise ModelError(
                f"MoE(num_experts={num_experts}, ep_size={ep_size}): each of the {ep_size} ranks"
                " must have equally many experts; choose an ep_size that divides num_experts"
            )
        if use_tutel:
            _log.warning("MoE(use_tutel=True) has no effect: the exchange does not use Tutel")
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = group_name(ep_size)
        self.deepspeed_moe = MOELayer(
            TopKGate(
                hidden_size,
                num_experts,
                k,
                capacity_factor,
                eval_capacity_factor,
                min_capacity,
                noisy_gate_policy,
                drop_tokens,
                use_rts,
                None,
                top2_2nd_expert_sampling,
            ),
            Experts(expert, self.num_local_experts, self.expert_group_name),
            self.expert_group_name,
            ep_size,
            self.num_local_experts,
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create the groups; all ranks must call it. Otherwise `initialize` creates them."""
        init_distributed()
        make_expert_groups(self.ep_size, Ranks.world(), data_first=use_data_before_expert_parallel_)

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return [..., m] outputs, the 0-dim balance loss, and the [E] choices per expert.

        The caller adds the balance loss to its own. `used_token` has one element for each token;
        those with zero go to no expert.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense: Any = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts  # type: ignore[return-value]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a layer of experts, and the first one's number of experts."""
    for module in m.modules():
        if isinstance(module, MoE):
            return True, module.num_experts
    return False, 0
