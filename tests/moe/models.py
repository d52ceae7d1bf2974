"""Small models with layers of experts, whose weights do not depend on who has which."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hadal import comm
from hadal.plugins.moe import MoE
from hadal.plugins.moe.layer import MOELayer

WIDTH = 6
EXPERTS = 4


def an_expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def filled(model: nn.Module, place: int = 0) -> nn.Module:
    """Set the model's weights by name; `place`: index among the ranks that share its experts."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(model.named_parameters()):
        if getattr(parameter, "allreduce", True):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    layers = (module for module in model.modules() if isinstance(module, MOELayer))
    for number, layer in enumerate(layers):
        first = place * layer.num_local_experts
        for local, expert in enumerate(layer.experts.deepspeed_experts):
            generator.manual_seed(100 * number + first + local)
            for parameter in expert.parameters():
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def layer_of(ep_size: int, **options: object) -> MoE:
    given = {"num_experts": EXPERTS, "k": 2, "min_capacity": 0, "drop_tokens": False, **options}
    layer = MoE(WIDTH, an_expert(), ep_size=ep_size, **given)  # type: ignore[arg-type]
    filled(layer, comm.get_rank() % ep_size)
    return layer


def tokens_of(rank: int, rows: int = 7) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))
