"""Losses that bring a student's outputs and hidden states near its teacher's."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hadal.errors import ModelError


def distillation_loss(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the Kullback-Leibler divergence of a student's logits from its teacher's.

    The mean over all positions, times the square of the temperature, so that the size of the
    gradients does not depend on it. No gradient goes to the teacher.

    Args:
        student: logits, (..., classes).
        teacher: logits of the same shape.
        temperature: divides both; above 0.

    Returns:
        0-dim, fp32.

    Raises:
        ModelError: the shapes differ, or the temperature is not above 0.
    """
    _expect_alike(student, teacher, "the logits")
    if not temperature > 0:
        raise ModelError(f"distillation_loss: temperature is {temperature}; expected more than 0")
    classes = student.shape[-1]
    mine = F.log_softmax(student.float().reshape(-1, classes) / temperature, dim=1)
    known = F.log_softmax(teacher.detach().float().reshape(-1, classes) / temperature, dim=1)
    return F.kl_div(mine, known, reduction="batchmean", log_target=True) * temperature**2


def hidden_state_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Sequence[int] | None = None
) -> Tensor:
    """Return the mean squared difference of hidden states, averaged over the student's.

    The student's state i is compared with the teacher's state `layers[i]`. No gradient goes to the
    teacher.

    Args:
        student: hidden states, as models of transformers return them: the embeddings' output, and
            then each layer's.
        teacher: the teacher's, of the same shapes.
        layers: indices into `teacher`, as many as `student` has. None spreads the student's states
            evenly over the teacher's, from the first to the last.

    Returns:
        0-dim, fp32.

    Raises:
        ModelError: numbers, indices or shapes do not fit.
    """
    chosen = _spread(len(student), len(teacher)) if layers is None else list(layers)
    if len(chosen) != len(student) or not student:
        raise ModelError(
            f"hidden_state_loss: the student has {len(student)} hidden states, but layers names"
            f" {len(chosen)}; name one for each, and at least one"
        )
    total = student[0].new_zeros((), dtype=student[0].float().dtype)
    for index, (state, layer) in enumerate(zip(student, chosen, strict=True)):
        if not 0 <= layer < len(teacher):
            raise ModelError(
                f"hidden_state_loss: layers[{index}] is {layer}, but the teacher has the hidden"
                f" states 0 to {len(teacher) - 1}"
            )
        known = teacher[layer].detach()
        _expect_alike(state, known, f"hidden state {index}")
        total = total + F.mse_loss(state.float(), known.float())
    return total / len(chosen)


def _spread(count: int, of: int) -> list[int]:
    return [round(index * (of - 1) / max(count - 1, 1)) for index in range(count)]


def _expect_alike(student: Tensor, teacher: Tensor, what: str) -> None:
    if student.shape != teacher.shape:
        raise ModelError(
            f"distillation: {what} of the student have the shape {tuple(student.shape)}, and"
            f" {tuple(teacher.shape)} in the teacher; expected the same"
        )
