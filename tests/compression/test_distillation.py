"""Losses between a student and its teacher."""

from __future__ import annotations

import pytest
import torch

from hadal.errors import ModelError
from hadal.plugins.compression import distillation_loss, hidden_state_loss


def test_the_loss_of_logits_is_their_divergence():
    student, teacher = (torch.randn(2, 3, 5, requires_grad=True) for _ in range(2))
    found = distillation_loss(student, teacher, temperature=2.0)
    p, q = (torch.softmax(x / 2.0, -1) for x in (teacher, student))
    expected = 4.0 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(found, expected)
    found.backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert distillation_loss(teacher, teacher).item() == pytest.approx(0.0, abs=1e-6)


def test_states_are_compared_with_those_that_are_named():
    teacher = [torch.full((2, 4), float(i)) for i in range(7)]
    student = [torch.zeros(2, 4, requires_grad=True) for _ in range(4)]
    assert hidden_state_loss(student, teacher).item() == (0 + 4 + 16 + 36) / 4
    assert hidden_state_loss(student, teacher, [0, 1, 1, 2]).item() == (0 + 1 + 1 + 4) / 4
    half = [state.bfloat16() for state in student]
    assert hidden_state_loss(half, teacher).dtype == torch.float32


def test_mismatches_are_refused():
    x = [torch.zeros(2, 4)]
    with pytest.raises(ModelError, match=r"the logits of the student have the shape \(2, 4\)"):
        distillation_loss(x[0], torch.zeros(2, 5))
    with pytest.raises(ModelError, match="temperature is 0; expected more than 0"):
        distillation_loss(x[0], x[0], temperature=0)
    with pytest.raises(ModelError, match=r"layers\[0\] is 3, but the teacher has the hidden"):
        hidden_state_loss(x, x, [3])
    with pytest.raises(ModelError, match="has 1 hidden states, but layers names 2"):
        hidden_state_loss(x, x, [0, 0])
    with pytest.raises(ModelError, match="hidden state 0 of the student have"):
        hidden_state_loss(x, [torch.zeros(2, 5)])
