"""The models of the equivalence matrix: each is small and odd in one way.

A `Subject` says how its model is built, what a batch holds, what happens in one micro-step and
what happens between updates. The micro-step is written once, against `Trainee`, and played by the
reference and by Hadal alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS = 3  # of a micro batch
WIDTH = 8
TOKENS = 11


@dataclass(frozen=True)
class Moment:
    """The identity of a micro-step: its rank, its update, and its number in the update."""

    rank: int
    update: int
    micro: int


@dataclass(frozen=True)
class Batch:
    """The batch of one rank in one micro-step."""

    inputs: Tensor
    targets: Tensor


class Trainee(Protocol):
    """The actions of a micro-step on the trained object."""

    def __call__(self, *inputs: Any) -> Tensor: ...
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None: ...
    def evaluate(self, inputs: Tensor) -> None: ...
    def edit(self, name: str, values: Tensor, gathered: bool) -> None: ...


def _vectors(generator: torch.Generator) -> Batch:
    inputs = torch.randn(ROWS, 6, generator=generator)
    return Batch(inputs, torch.randn(ROWS, 4, generator=generator))


def _sequences(generator: torch.Generator) -> Batch:
    inputs = torch.randn(ROWS, 5, WIDTH, generator=generator)
    return Batch(inputs, torch.randn(ROWS, 5, WIDTH, generator=generator))


def _tokens(generator: torch.Generator) -> Batch:
    inputs = torch.randint(TOKENS, (ROWS, 4), generator=generator)
    return Batch(inputs, torch.randint(TOKENS, (ROWS, 4), generator=generator))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over the micro-batch, always in fp32."""
    targets = targets.to(outputs.device)
    if targets.is_floating_point():
        return F.mse_loss(outputs.float(), targets.float())
    return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def _one_loss(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    trainee.backward(loss_of(trainee(batch.inputs), batch.targets))


def _by_branch(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    branch = (moment.rank + moment.update + moment.micro) % 3
    trainee.backward(loss_of(trainee(batch.inputs, branch), batch.targets))


def _late_branch(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    branch = 1 if moment.update >= 1 else 0
    trainee.backward(loss_of(trainee(batch.inputs, branch), batch.targets))


def _two_losses(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    trainee.backward(loss_of(trainee(batch.inputs), batch.targets))
    trainee.backward(loss_of(trainee(-batch.inputs), batch.targets) * 0.5)


def _two_forwards(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    first, second = trainee(batch.inputs), trainee(-batch.inputs)
    trainee.backward(loss_of(first, batch.targets))
    trainee.backward(loss_of(second, batch.targets) * 0.5)


def _shared_graph(trainee: Trainee, batch: Batch, moment: Moment) -> None:
    outputs = trainee(batch.inputs)
    trainee.backward(loss_of(outputs, batch.targets), retain_graph=True)
    trainee.backward(outputs.float().square().mean())


def _nothing(trainee: Trainee, batch: Batch, update: int) -> None:
    pass


def _evaluation(trainee: Trainee, batch: Batch, update: int) -> None:
    trainee.evaluate(batch.inputs)


def _edit(gathered: bool) -> Callable[[Trainee, Batch, int], None]:
    def edit(trainee: Trainee, batch: Batch, update: int) -> None:
        if update != 1:
            return
        # Exact in every dtype, so that 16-bit weights and fp32 masters cannot disagree about it.
        steps = torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH)
        trainee.edit("blocks.0.0.weight", (steps % 17 - 8) / 64, gathered)

    return edit


def block(width: int = WIDTH) -> nn.Sequential:
    """A linear layer and a smooth non-linearity: no gradient is zero by luck."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Plain(nn.Module):
    """An input layer, blocks and a head; `use_blocks` is what the odd ones change."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outlet(self.use_blocks(self.norm(self.inlet(inputs))))

    def use_blocks(self, values: Tensor) -> Tensor:
        for each in self.blocks:
            values = each(values)
        return values


class Tied(nn.Module):
    """The embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.middle = block()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


class TiedByMatmul(Tied):
    """The head is the embedding's weight in a plain matmul, which no module hook sees."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.middle(self.embedding(tokens)) @ self.embedding.weight.t()


class Reused(Plain):
    """The same block runs at three places."""

    def use_blocks(self, values: Tensor) -> Tensor:
        first, second = self.blocks
        return first(second(first(first(values))))


class Unused(Plain):
    """A module that no forward calls, and a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.linspace(-1, 1, 5))


class Frozen(Plain):
    """Frozen are the first module, one block in the middle, and one bias of a trained module."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.inlet.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.outlet.bias.requires_grad_(False)


class Scalars(Plain):
    """A 0-dim parameter, an empty one, and a one-element one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.shift = nn.Parameter(torch.tensor([0.25]))

    def use_blocks(self, values: Tensor) -> Tensor:
        return super().use_blocks(values) * self.scale + self.shift + self.empty.sum()


class Primes(nn.Module):
    """No size divides by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 4, bias=False)
        )
        self.offset = nn.Parameter(torch.linspace(-0.5, 0.5, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) + self.offset


class Checkpointed(Plain):
    """Each block is recomputed in backward."""

    def use_blocks(self, values: Tensor) -> Tensor:
        for each in self.blocks:
            values = checkpoint(each, values, use_reentrant=False)
        return values


class ReentrantReused(Plain):
    """One block is used twice, each time recomputed by a backward of its own."""

    def use_blocks(self, values: Tensor) -> Tensor:
        for index in (0, 1, 0):
            values = checkpoint(self.blocks[index], values, use_reentrant=True)
        return values


class _InTiles(torch.autograd.Function):
    """A module on one row after the other, forgotten and run again in backward, each row by itself.

    As functions do that save memory on long sequences: weights are read in backward, their
    gradients come once for each row, by a backward of its own.
    """

    @staticmethod
    def forward(ctx: Any, module: nn.Module, values: Tensor) -> Tensor:
        ctx.module = module
        kind = values.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(values)
        return torch.cat([module(row) for row in values.split(1)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (values,) = ctx.saved_tensors
        found = []
        for row, its_gradient in zip(values.split(1), gradient.split(1), strict=True):
            leaf = row.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                output = ctx.module(leaf)
            torch.autograd.backward(output, its_gradient)
            found.append(leaf.grad)
        return None, torch.cat(found)


class _TiledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        tiled: Tensor = _InTiles.apply(self.inner.forward, values)  # past the module's hooks
        return tiled


class Tiled(Plain):
    """Blocks that run in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_TiledBlock() for _ in range(2))


class Branched(Plain):
    """Which block runs is an argument; branch 2 runs none."""

    def forward(self, inputs: Tensor, branch: int = 0) -> Tensor:
        values = self.norm(self.inlet(inputs))
        if branch < len(self.blocks):
            values = self.blocks[branch](values)
        return self.outlet(values)


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        attended, _ = self.attention(inputs, inputs, inputs, need_weights=False)
        return self.outlet(attended)


class Recurrent(nn.Module):
    """An LSTM keeps its own list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lstm(inputs)[0]


def _all_parameters(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as most training scripts do: groups alternate inside a module."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr_factor": 0.5},
    ]


@dataclass(frozen=True)
class Subject:
    """A model, its batches, its micro-step, what happens between updates, and its groups."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = _vectors
    micro_step: Callable[[Trainee, Batch, Moment], None] = _one_loss
    after_update: Callable[[Trainee, Batch, int], None] = _nothing
    groups: Callable[[nn.Module], list[dict[str, Any]]] = _all_parameters
    has_attention: bool = False


SUBJECTS: Mapping[str, Subject] = {
    "plain": Subject(Plain),
    "groups": Subject(Plain, groups=_two_groups),
    "tied": Subject(Tied, batch=_tokens),
    "tied_matmul": Subject(TiedByMatmul, batch=_tokens),
    "reused": Subject(Reused),
    "unused": Subject(Unused),
    "frozen": Subject(Frozen),
    "scalars": Subject(Scalars),
    "primes": Subject(Primes),
    "checkpointed": Subject(Checkpointed),
    "reentrant_reused": Subject(ReentrantReused),
    "tiled": Subject(Tiled),
    "branches": Subject(Branched, micro_step=_by_branch),
    "late": Subject(Branched, micro_step=_late_branch),
    "two_losses": Subject(Plain, micro_step=_two_losses),
    "two_forwards": Subject(Plain, micro_step=_two_forwards),
    "shared_graph": Subject(Plain, micro_step=_shared_graph),
    "evaluated": Subject(Plain, after_update=_evaluation),
    "edited": Subject(Plain, after_update=_edit(gathered=True)),
    "edited_in_place": Subject(Plain, after_update=_edit(gathered=False)),
    "attention": Subject(Attention, batch=_sequences, has_attention=True),
    "attention_evaluated": Subject(
        Attention, batch=_sequences, has_attention=True, after_update=_evaluation
    ),
    "lstm": Subject(Recurrent, batch=_sequences),
}


def built(subject: Subject) -> nn.Module:
    """The model with the same weights wherever it is built."""
    torch.manual_seed(1234)
    return subject.build()


def batch_at(subject: Subject, moment: Moment) -> Batch:
    """The batch of a rank in a micro-step, the same wherever it is asked for."""
    generator = torch.Generator()
    generator.manual_seed(1 + moment.rank + 10 * moment.update + 1000 * moment.micro)
    return subject.batch(generator)


def groups_of(
    subject: Subject, model: nn.Module, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The param groups, with every relative setting made absolute."""
    groups = []
    for group in subject.groups(model):
        factor = group.pop("lr_factor", 1.0)
        if factor != 1.0:
            group["lr"] = settings["lr"] * factor
        groups.append(group)
    return groups


def named_by_identity(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's first full name (a tied one has several)."""
    return {parameter: name for name, parameter in model.named_parameters()}


def trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are not frozen."""
    return [parameter for parameter in parameters if parameter.requires_grad]
