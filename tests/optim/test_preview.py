"""Previews of a schedule without a model."""

from __future__ import annotations

import pytest

from hadal.errors import OptimizerError
from hadal.optim.build import preview

ADAM = ("AdamW", {"lr": 0.5, "betas": [0.7, 0.9]})
WARMUP = ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"})


def test_the_preview_uses_the_optimizers_rate_and_momentum():
    (course,) = preview(WARMUP, ADAM, 6)
    assert course.rates == [0.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert course.momenta == [0.7] * 7
    (course,) = preview(("StepLR", {"step_size": 2}), ("SGD", {"lr": 1.0, "momentum": 0.8}), 3)
    assert course.rates == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert course.momenta == [0.8] * 4


def test_lists_give_the_number_of_groups():
    cycle = {"cycle_min_lr": [1.0, 2.0], "cycle_max_lr": 3.0, "cycle_first_step_size": 2}
    first, second = preview(("OneCycle", cycle), None, 4)
    assert (first.rates, second.rates) == ([1, 2, 3, 2, 1], [2, 2.5, 3, 2.5, 2])
    assert first.momenta == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    assert len(preview(("MultiStepLR", {"milestones": [1, 2]}), None, 3)) == 1
    assert len(preview(("OneCycleLR", {"max_lr": [1.0, 2.0], "total_steps": 9}), None, 3)) == 2


@pytest.mark.parametrize("kind", ["NoSuchOptimizer", "LBFGS"])
def test_an_unknown_optimizers_rate_is_used(kind):
    (course,) = preview(WARMUP, (kind, {"lr": 2.0, "comm_backend_name": "nccl"}), 6)
    assert course.rates[-1] == 2.0


def test_schedules_without_a_preview_are_refused():
    with pytest.raises(OptimizerError, match="follows a metric"):
        preview(("ReduceLROnPlateau", {}), None, 3)
