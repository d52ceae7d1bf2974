"""Scalars from programs: checks and grouping."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hadal.errors import UsageError
from hadal.plugins.monitor.record import GivenScalars, ScalarRecord, events_of


def records_of(*events: Any) -> list[ScalarRecord]:
    return list(GivenScalars(events_of(events), 7.0).records())


@pytest.mark.parametrize(
    ("given_value", "wanted"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, 1),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[2]]), 2),
        (torch.tensor(True), 1),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3),
        (np.array([4.0]), 4.0),
    ],
)
def test_values_become_plain_numbers(given_value: Any, wanted: float | None) -> None:
    (record,) = records_of(("a", given_value, 4))
    (found,) = record.values.values()
    assert found == wanted and type(found) is type(wanted)


def test_missing_values_are_left_out() -> None:
    assert records_of(("a", None, 4)) == []
    (record,) = records_of(("a", 1, 4), ("b", None, 4), ("c", 2, 4))
    assert record.values == {"a": 1, "c": 2}
    with pytest.raises(UsageError, match="as the samples of a"):
        records_of(("a", None, "x"))


@pytest.mark.parametrize("samples", [3, 3.0, np.int32(3), torch.tensor(3)])
def test_samples_are_whole(samples: Any) -> None:
    assert records_of(("a", 1, samples))[0].samples == 3


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (("a", 1), "write_events got .*expected .name, value, samples."),
        (("a", 1, 2, 3), "expected .name, value, samples."),
        (7, "write_events got 7"),
        ((3, 1, 2), "got the name 3"),
        (("a", "high", 2), "'high' as the value of a; expected a number"),
        (("a", torch.zeros(2, 2), 2), r"a tensor of shape \(2, 2\) as the value of a"),
        (("a", 1j, 2), "expected a number"),
        (("a", 1, 2.5), "got 2.5 as the samples of a"),
        (("a", 1, "x"), "got 'x' as the samples of a"),
    ],
)
def test_values_that_are_not_scalars_are_refused(event: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        events_of([("first", 1, 1), event])


names = st.sampled_from("abc")


@given(st.lists(st.tuples(names, st.integers(), st.integers(0, 3))))
def test_groups_hold_every_event_in_order(events: list[tuple[str, int, int]]) -> None:
    records = records_of(*events)
    found = [(name, value, one.samples) for one in records for name, value in one.values.items()]
    assert found == events
    assert all(one.time == 7.0 and one.step is None for one in records)
    for before, after in pairwise(records):
        assert before.samples != after.samples or next(iter(after.values)) in before.values
