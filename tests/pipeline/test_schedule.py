"""Schedules are DeepSpeed's, and stages that follow them never wait for each other in a circle."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hadal.errors import UsageError
from hadal.plugins.pipeline import schedule as schedules
from hadal.plugins.pipeline.schedule import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

GIVEN = json.loads((Path(__file__).parents[1] / "data/pipeline.json").read_text())["schedules"]
CODES = {name: code for code, name in GIVEN["codes"].items()}
KINDS: dict[str, type[PipeSchedule]] = {"train": TrainSchedule, "infer": InferenceSchedule}


def sizes(case: str) -> tuple[int, int, int]:
    """Micro-batches, stages and the stage of `stages x micro-batches . stage`."""
    stages, _, rest = case.partition("x")
    micro_batches, _, stage = rest.partition(".")
    return int(micro_batches), int(stages), int(stage)


def written(step: list[PipeInstruction]) -> str:
    return " ".join(f"{CODES[one.name]}{one.kwargs.get('buffer_id', '')}" for one in step)


@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind: str) -> None:
    for case, steps in GIVEN[kind].items():
        assert [written(step) for step in KINDS[kind](*sizes(case))] == steps, case


def test_buffers() -> None:
    for case, count in GIVEN["buffers"].items():
        assert TrainSchedule(*sizes(case)).num_pipe_buffers() == count, case


def test_without_a_pipeline() -> None:
    steps = [written(step) for step in DataParallelSchedule(2, 1, 0)]
    assert steps == ["L0 F0 B0", "L0 F0 B0 RR OS"]


OPPOSITE = {SendActivation: (1, RecvActivation), SendGrad: (-1, RecvGrad)}


class Stage:
    """The work that one stage has done, and the micro-batch in each of its buffers."""

    def __init__(self, schedule: PipeSchedule) -> None:
        self.waiting = deque(one for step in schedule for one in step)
        self.needs_input = not schedule.is_first_stage
        self.needs_gradient = not schedule.is_last_stage
        self.count = schedule.num_pipe_buffers()
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.done: list[tuple[str, int]] = []
        self._next = {ForwardPass: 0, BackwardPass: 0}

    def receive(self, one: PipeInstruction, micro_batch: int) -> None:
        into = self.inputs if isinstance(one, RecvActivation) else self.gradients
        buffer = one.kwargs["buffer_id"]
        assert 0 <= buffer < self.count
        assert buffer not in into, f"{one} overwrites micro-batch {into[buffer]}"
        into[buffer] = micro_batch

    def sent(self, one: PipeInstruction) -> int:
        of = self.outputs if isinstance(one, SendActivation) else self.inputs
        return of[one.kwargs["buffer_id"]]

    def compute(self, one: PipeInstruction, *, trains: bool) -> None:
        kind, buffer = type(one), one.kwargs.get("buffer_id", 0)
        if kind not in self._next:
            return
        due = self._next[kind]  # type: ignore[index]
        self._next[kind] += 1  # type: ignore[index]
        self.done.append((kind.__name__, due))
        if kind is ForwardPass:
            assert not self.needs_input or self.inputs[buffer] == due
            self.inputs[buffer] = self.outputs[buffer] = due
            if not trains:
                del self.inputs[buffer]
        else:
            assert self.outputs.pop(buffer) == due
            assert not self.needs_gradient or self.gradients.pop(buffer) == due
            if not self.needs_input:
                del self.inputs[buffer]

    def free(self, one: PipeInstruction) -> None:
        """A gradient that was sent ends the use of its buffer."""
        if isinstance(one, SendGrad):
            del self.inputs[one.kwargs["buffer_id"]]


def simulated(kind: type[PipeSchedule], micro_batches: int, count: int) -> list[Stage]:
    """Run all stages; a send and a receive each block until the other has come."""
    stages = [Stage(kind(micro_batches, count, number)) for number in range(count)]
    trains = kind is TrainSchedule
    while any(stage.waiting for stage in stages):
        has_moved = False
        for number, stage in enumerate(stages):
            if not stage.waiting:
                continue
            one = stage.waiting[0]
            if type(one) in OPPOSITE:
                by, wanted = OPPOSITE[type(one)]  # type: ignore[index]
                other = stages[number + by]
                if other.waiting and type(other.waiting[0]) is wanted:
                    other.receive(other.waiting.popleft(), stage.sent(one))
                    stage.free(stage.waiting.popleft())
                    has_moved = True
            elif not isinstance(one, (RecvActivation, RecvGrad)):
                stage.compute(stage.waiting.popleft(), trains=trains)
                has_moved = True
        heads = [stage.waiting[0] if stage.waiting else None for stage in stages]
        assert has_moved, f"all stages wait: {heads}"
    return stages


@given(st.sampled_from(list(KINDS)), st.integers(1, 12), st.integers(1, 8))
def test_no_stage_waits_in_vain(kind: str, micro_batches: int, count: int) -> None:
    """Nor is a buffer overwritten that is still needed, or a micro-batch left out or mistaken."""
    for stage in simulated(KINDS[kind], micro_batches, count):
        for name in ("ForwardPass", "BackwardPass")[: 2 if kind == "train" else 1]:
            done = [number for what, number in stage.done if what == name]
            assert done == list(range(micro_batches))


def test_a_circle_of_waits_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every stage received before it sends, the first forward of a later one is in the way."""

    def reordered(self: TrainSchedule, buffer: int | None, before: int | None) -> list[object]:
        found = original(self, buffer, before)
        return sorted(found, key=lambda one: isinstance(one, SendGrad))

    original = TrainSchedule._forward
    monkeypatch.setattr(TrainSchedule, "_forward", reordered)
    with pytest.raises((AssertionError, KeyError)):
        simulated(TrainSchedule, 6, 3)


def test_instructions_show_themselves() -> None:
    assert repr(LoadMicroBatch(3)) == "LoadMicroBatch(buffer_id=3)"
    assert repr(schedules.OptimizerStep()) == "OptimizerStep()"
    assert LoadMicroBatch(3).buffer_id == 3


@pytest.mark.parametrize("sizes", [(0, 2, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)])
def test_stages_that_do_not_exist_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match=rf"{sizes[0]} micro-batches for stage {sizes[2]} of"):
        TrainSchedule(*sizes)


def test_a_stage_knows_its_place() -> None:
    stage = TrainSchedule(4, 3, 1)
    assert (stage.stage, stage.num_stages, stage.num_micro_batches) == (1, 3, 4)
    assert not stage.is_first_stage and not stage.is_last_stage
    assert (stage.prev_stage, stage.next_stage) == (0, 2)
