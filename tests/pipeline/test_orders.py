"""Schedules of any stages, chunks and micro-batches end, in the time that their papers promise."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from hadal.plugins.pipeline.orders import (
    JobKind,
    OrderedSchedule,
    StageJob,
    forward_order,
    idle_share,
    one_forward_one_backward_order,
    order_of,
)
from hadal.plugins.pipeline.schedule import BackwardPass, ForwardPass, TrainSchedule

SINGLE = ("1f1b", "gpipe", "zero_bubble")


def orders(schedule: str, micro_batches: int, stages: int, chunks: int = 1) -> list[list[StageJob]]:
    return [list(order_of(schedule, micro_batches, stages, n, chunks)) for n in range(stages)]


@given(st.sampled_from(SINGLE), st.integers(1, 20), st.integers(1, 8))
def test_no_stage_waits_in_vain(schedule: str, micro_batches: int, stages: int) -> None:
    found = orders(schedule, micro_batches, stages)
    assert 0 <= idle_share(found) < 1
    kinds = 3 if schedule == "zero_bubble" else 2
    for order in found:
        assert Counter(job.kind for job in order) == dict.fromkeys(
            list(JobKind)[:kinds], micro_batches
        )
        for kind in JobKind:  # what arrives first is computed first
            numbers = [job.micro_batch for job in order if job.kind is kind]
            assert numbers == sorted(numbers)


@given(st.integers(1, 5), st.integers(2, 6), st.integers(2, 4))
def test_no_chunk_waits_in_vain(groups: int, stages: int, chunks: int) -> None:
    micro_batches = groups * stages
    found = orders("interleaved", micro_batches, stages, chunks)
    share = idle_share(found)
    # The pipeline fills and drains by chunks (Narayanan et al. 2021, section 2.2).
    bubble = (stages - 1) / chunks / micro_batches
    assert share == pytest.approx(bubble / (1 + bubble))
    assert idle_share([forward_order(micro_batches, stages, chunks)] * stages) < 1


@given(st.integers(1, 20), st.integers(1, 8))
def test_bubbles_are_those_of_the_papers(micro_batches: int, stages: int) -> None:
    usual = (stages - 1) / (micro_batches + stages - 1)
    for schedule in ("1f1b", "gpipe"):
        assert idle_share(orders(schedule, micro_batches, stages)) == pytest.approx(usual)
    # A third: (S - 1) * (F + B - W) in place of (S - 1) * (F + B + W).
    found = idle_share(orders("zero_bubble", micro_batches, stages))
    if micro_batches >= stages:
        expected = (stages - 1) / (3 * micro_batches + stages - 1)
        assert found == pytest.approx(expected)
    assert found <= usual + 1e-9


@given(st.integers(1, 20), st.integers(1, 8))
def test_no_stage_stores_more_than_the_first_one_does(micro_batches: int, stages: int) -> None:
    for stage, order in enumerate(orders("zero_bubble", micro_batches, stages)):
        schedule = OrderedSchedule(micro_batches, stages, stage, order)
        assert schedule.num_pipe_buffers() <= max(2, stages)


@given(st.integers(1, 12), st.integers(1, 6))
def test_the_order_is_that_of_the_instructions(micro_batches: int, stages: int) -> None:
    for stage in range(stages):
        order = one_forward_one_backward_order(micro_batches, stages, stage)
        kinds = {ForwardPass: JobKind.FORWARD, BackwardPass: JobKind.BACKWARD}
        computed = [
            kinds[type(one)]
            for step in TrainSchedule(micro_batches, stages, stage)
            for one in step
            if type(one) in kinds
        ]
        assert computed == [job.kind for job in order]


def test_a_circle_is_found() -> None:
    forward, backward = StageJob(JobKind.FORWARD, 0), StageJob(JobKind.BACKWARD, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        idle_share([[backward, forward], [forward, backward]])
