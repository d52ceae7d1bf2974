"""Layer reduction: a shallower student takes over some of its teacher's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hadal.config.compression import LayerReduction
from hadal.errors import ModelError

_PATH = "compression_training.layer_reduction"


@torch.no_grad()
def take_over_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy the named layers and modules of a teacher into a student, buffers included.

    The student's layer i becomes a copy of the teacher's layer `teacher_layer[i]`. The student's
    dtypes and devices are unchanged.

    Raises:
        ModelError: a module is missing in one of the models, or differs between them, or the
            student has more or fewer layers than `teacher_layer` names. Nothing is copied.
    """
    prefix, chosen = section.module_name_prefix, section.teacher_layer
    assert prefix is not None  # the rules of the configuration check both
    assert chosen is not None
    name, known = f"{_PATH}.module_name_prefix", len(_layers(teacher, prefix, "teacher"))
    mine = len(_layers(student, prefix, "student"))
    if mine != len(chosen):
        raise ModelError(
            f"{_PATH}.teacher_layer names {len(chosen)} layers, but the student's {prefix} has"
            f" {mine}; name one for each, or build the student with {len(chosen)}"
        )
    for index, layer in enumerate(chosen):
        if not 0 <= layer < known:
            raise ModelError(
                f"{_PATH}.teacher_layer[{index}]: the teacher's {prefix} has no layer {layer}, only"
                f" 0 to {known - 1}"
            )
    pairs = [(f"{prefix}.{index}", f"{prefix}.{layer}", name) for index, layer in enumerate(chosen)]
    for index, other in enumerate(section.other_module_name or ()):
        pairs.append((other, other, f"{_PATH}.other_module_name[{index}]"))
    copies: list[tuple[Tensor, Tensor]] = []
    for to, source, where in pairs:
        copies += _copies(
            _part(student, to, "student", where), _part(teacher, source, "teacher", where), to
        )
    for target, value in copies:
        target.copy_(value)


def _layers(model: nn.Module, prefix: str, whose: str) -> nn.ModuleList | nn.Sequential:
    found = _part(model, prefix, whose, f"{_PATH}.module_name_prefix")
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        raise ModelError(
            f"{_PATH}.module_name_prefix: the {whose}'s {prefix} is {type(found).__name__};"
            " expected a ModuleList or Sequential"
        )
    return found


def _part(model: nn.Module, name: str, whose: str, where: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(name for name, _ in model.named_children())
        raise ModelError(
            f"{where}: the {whose} has no module {name!r}; its top-level modules are {known}"
        ) from None


def _copies(student: nn.Module, teacher: nn.Module, name: str) -> list[tuple[Tensor, Tensor]]:
    targets, values = _tensors(student), _tensors(teacher)
    if targets.keys() != values.keys():
        only = sorted(targets.keys() ^ values.keys())
        raise ModelError(
            f"{_PATH}: student and teacher differ in {name}: only one of them has"
            f" {', '.join(only[:3])}"
        )
    for leaf, target in targets.items():
        if target.shape != values[leaf].shape:
            raise ModelError(
                f"{_PATH}: {name}.{leaf} is {tuple(target.shape)} in the student and"
                f" {tuple(values[leaf].shape)} in the teacher; shapes must be the same"
                " (weights created sharded are empty: take the layers over before)"
            )
    return [(target, values[leaf]) for leaf, target in targets.items()]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
