"""A model in two parts, of layers that are split over ranks, and the same model whole."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.toys import engine_of
from hadal import comm

ROWS, TOKENS, WIDTH, HIDDEN, PARTS = 2, 5, 6, 8, 2
CLIP = 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """A factor in the gradient is a factor in its step, unlike Adam's."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def sequences_of(step: int, reader: int) -> tuple[Tensor, Tensor]:
    """Whole sequences of one data-parallel reader: (rows, tokens, width), and their targets."""
    generator = torch.Generator().manual_seed(100 * step + reader)
    shape = (ROWS, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


# ---- who holds what ------------------------------------------------------------------------------


class Megatron:
    """The interface of Megatron's parallel state: exactly these six methods."""

    def __init__(self, data: comm.Ranks, model: comm.Ranks) -> None:
        self._data, self._model = data, model

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data.group

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model.group

    def get_model_parallel_world_size(self) -> int:
        return self._model.size

    def get_model_parallel_rank(self) -> int:
        return self._model.rank


@cache
def megatron() -> Megatron:
    """Four ranks: 0 and 1 hold a model in two parts, 2 and 3 hold it again."""
    model, data = comm.Ranks.world().in_blocks(PARTS)
    return Megatron(data, model)


def core(**sizes: int) -> ModuleType:
    """The same in the names of Megatron-Core, whose `parallel_state` is a module.

    `sizes` are those of further kinds of ranks.
    """
    known, state = megatron(), ModuleType("parallel_state")

    def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
        return known.get_data_parallel_group()

    state.get_data_parallel_group = get_data_parallel_group  # type: ignore[attr-defined]
    state.get_model_parallel_group = known.get_model_parallel_group  # type: ignore[attr-defined]
    for what in ("world_size", "rank"):
        setattr(state, f"get_data_parallel_{what}", getattr(known, f"get_data_parallel_{what}"))
    for what in ("group", "world_size", "rank"):
        method = getattr(known, f"get_model_parallel_{what}")
        setattr(state, f"get_tensor_model_parallel_{what}", method)
    others = {"pipeline_model_parallel": 1, "context_parallel": 1, "expert_model_parallel": 1}
    for kind, size in {**others, **sizes}.items():
        setattr(state, f"get_{kind}_world_size", lambda size=size: size)
    return state


# ---- the model -----------------------------------------------------------------------------------


class Copied(torch.autograd.Function):
    """Into the parts: the gradients of all parts add up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=megatron().get_model_parallel_group())
        return gradient


class Summed(torch.autograd.Function):
    """Out of the parts: their values add up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=megatron().get_model_parallel_group())
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def mine(whole: Tensor, part: int, dim: int) -> Tensor:
    """My part of a tensor that is cut along `dim`."""
    return whole.chunk(PARTS, dim)[part]


class ColumnParallelLinear(nn.Module):
    """A linear layer some of whose outputs are here."""

    def __init__(self, whole: nn.Linear, part: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight.detach(), part, 0).clone())
        self.bias = nn.Parameter(mine(whole.bias.detach(), part, 0).clone())
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.bias.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.linear(Copied.apply(values), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer that sees some of its inputs; the outputs are whole, and so is the bias."""

    def __init__(self, whole: nn.Linear, part: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight.detach(), part, 1).clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.bias.tensor_model_parallel = False  # type: ignore[attr-defined]

    def forward(self, values: Tensor) -> Tensor:
        return Summed.apply(nn.functional.linear(values, self.weight)) + self.bias


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(values))))


def whole_model() -> Whole:
    torch.manual_seed(6)
    return Whole()


class Part(nn.Module):
    """One part of `Whole`, under the same names."""

    def __init__(self, part: int) -> None:
        super().__init__()
        whole = whole_model()
        self.norm = whole.norm
        self.up = ColumnParallelLinear(whole.up, part)
        self.down = RowParallelLinear(whole.down, part)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(values))))


def part_of(state: dict[str, Tensor], part: int) -> dict[str, Tensor]:
    """The part's values of the whole model."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return {
        name: mine(value, part, dims[name]) if name in dims else value
        for name, value in state.items()
    }


def engine_over(stage: int, model: nn.Module, **changes: Any) -> Any:
    """An engine of four ranks over a part of the model."""
    wishes = {"mpu": megatron(), **changes.pop("wishes", {"optimizer": sgd})}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": None,
        # Two data-parallel ranks take part in it, so that a whole of 4 is seen to be wrong.
        "train_batch_size": ROWS * 2 * 2,
        **changes,
    }
    return engine_of(stage, model, wishes, **settings)
