"""Stages on real ranks compute the same as one process, for any values between them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import RankPools, RanksFailed
from torch import Tensor, nn

from hadal import comm
from hadal.errors import PipelineError, UsageError
from hadal.plugins.pipeline.executor import Executor, chunks_of
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.schedule import InferenceSchedule, TrainSchedule

WIDTH, ROWS, MICRO = 4, 2, 4
Pair = namedtuple("Pair", "hidden mask")


@dataclass
class State:
    hidden: Tensor
    mask: Tensor
    note: str = "kept"


class Layer(nn.Module):
    """Passes on its kind of value, with a mask that takes no gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, value: Any) -> Any:
        if isinstance(value, dict):
            hidden, mask = value["hidden"], value["mask"]
        elif isinstance(value, tuple):
            hidden, mask = value
        elif isinstance(value, State):
            assert value.note == "kept"
            hidden, mask = value.hidden, value.mask
        else:
            hidden, mask = value, value > 0
        hidden = torch.tanh(self.linear(hidden)) * mask
        kinds: dict[str, Callable[[], Any]] = {
            "tensor": lambda: hidden,
            "tuple": lambda: (hidden, mask),
            "named": lambda: Pair(hidden, mask),
            "dict": lambda: {"hidden": hidden, "mask": mask},
            "dataclass": lambda: State(hidden, mask),
            "set": lambda: {hidden},
        }
        return kinds[self.kind]()


def data(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(
        rows, WIDTH, generator=generator
    )


class PlainWork:
    """Torch alone, with gradients in `.grad`."""

    def __init__(self, module: PipelineModule, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.module, self.batches = module, iter(batches)
        self.lasts: list[bool] = []

    def load(self) -> tuple[Any, Any]:
        return next(self.batches)

    def forward(self, chunk: int, value: Any) -> Any:
        return self.module(value, chunk)

    def loss(self, outputs: Any, labels: Any) -> Any:
        return (outputs - labels).square().mean()

    def backward(self, root: Tensor | None, loss: Tensor | None, *, is_last: bool) -> None:
        self.lasts.append(is_last)
        if root is not None:
            root.backward()

    def put_off(self) -> list[Any]:
        return []

    def place(self, chunk: int) -> str:
        return self.module.layer_name(self.module.curr_layer or 0)


def layers(kind: str, count: int = 4) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Layer(kind if number < count - 1 else "tensor") for number in range(count)]


def executor_of(module: PipelineModule, work: PlainWork, **options: Any) -> Executor:
    names = [module.chunk_name(number) for number in range(len(module.parts) - 1)]
    return Executor(work, chunks_of(module.mpu().pipe, names, torch.device("cpu")), **options)


def train(kind: str) -> None:
    stages = comm.get_world_size()
    module = PipelineModule(layers(kind), num_stages=stages, partition_method="uniform")
    work = PlainWork(module, [data(number) for number in range(3 * MICRO)])
    executor = executor_of(module, work)
    stage = module.stage_id
    found: list[Tensor] = []
    for _ in range(2):
        found += executor.run(TrainSchedule(MICRO, stages, stage), trains=True)
        assert work.lasts[-MICRO:] == [False] * (MICRO - 1) + [True]
    with torch.no_grad():
        seen = executor.run(InferenceSchedule(MICRO, stages, stage), trains=False)
    whole = nn.Sequential(*layers(kind))
    losses = []
    for number in range(3 * MICRO):
        inputs, labels = data(number)
        loss = (whole(inputs) - labels).square().mean()
        losses.append(loss.item())
        if number < 2 * MICRO:
            loss.backward()
    own = dict(whole.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad)
    if stage == stages - 1:
        assert [loss.item() for loss in found + seen] == pytest.approx(losses)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "named", "dict", "dataclass"])
def test_two_stages(kind: str, ranks: RankPools) -> None:
    ranks(2).run(train, kind)


def test_four_stages(ranks: RankPools) -> None:
    ranks(4).run(train, "tuple")


def fail(kind: str) -> str:
    """The errors of the stages if the second fails at the third micro-batch, and a later batch."""
    module = PipelineModule(layers("tensor"), num_stages=2, partition_method="uniform")
    rows = [ROWS, ROWS, 3 if kind == "shape" else ROWS, ROWS]
    work = PlainWork(module, [data(n, many) for n, many in enumerate(rows)])
    executor = executor_of(module, work)
    calls = 0

    def forward(value: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("no such token")
        return linear(value)

    if module.stage_id == 1 and kind == "raise":
        linear = module.layer(2).linear
        module.layer(2).linear = forward_of(forward)
    told = ""
    try:
        executor.run(TrainSchedule(MICRO, 2, module.stage_id), trains=True)
    except (ValueError, UsageError, PipelineError) as error:
        told = f"{type(error).__name__}: {error}"
    comm.barrier()
    executor.end()
    work.batches = iter([data(n) for n in range(MICRO)])
    executor.run(TrainSchedule(MICRO, 2, module.stage_id), trains=True)
    return told


def forward_of(function: Callable[[Any], Any]) -> nn.Module:
    module = nn.Module()
    module.forward = function  # type: ignore[method-assign]
    return module


def test_an_error_reaches_all_stages_with_its_place(ranks: RankPools) -> None:
    first, second = ranks(2).run(fail, "raise", timeout=60)
    assert second == "ValueError: no such token"
    assert first == (
        "PipelineError: stage 1 (layers 2 to 3), layer 2 (Layer) stopped in the forward of"
        " micro-batch 2 of batch 1: ValueError: no such token"
    )


def test_another_shape_is_an_error_on_all_stages(ranks: RankPools) -> None:
    first, second = ranks(2).run(fail, "shape", timeout=60)
    place = "stage 0 (layers 0 to 1), layer 1 (Layer)"
    assert first.startswith(f"UsageError: {place}, returned float32[3, 4]")
    assert "reset_activation_shape" in first and "micro-batch 2 of batch 1" in second


def refuse() -> None:
    given = layers("tensor")
    given[1].kind = "set"
    module = PipelineModule(given, num_stages=2, partition_method="uniform")
    work = PlainWork(module, [data(0)])
    executor_of(module, work).run(TrainSchedule(1, 2, module.stage_id), trains=True)


def test_values_that_cannot_be_sent_are_refused(ranks: RankPools) -> None:
    with pytest.raises(RanksFailed, match="a set, which cannot be sent"):
        ranks(2).run(refuse, timeout=60)
