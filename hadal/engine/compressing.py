"""Compression of the model that an engine is about to train."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hadal.config import Config
from hadal.errors import UsageError
from hadal.plugins.compression.names import is_score
from hadal.zero.access import GatheredParameters
from hadal.zero.place import held_place
from hadal.zero.state import safe_get_full_fp32_param, safe_set_local_fp32_param
from hadal.zero.views import flattened


def prepare_model(config: Config, model: nn.Module) -> None:
    """Apply `compression_training`, if the program has not called `init_compression` itself.

    It runs before the optimizer is built. A teacher passed to `init_compression` is unchanged.

    Raises:
        ConfigError: the groups of `compression_training` do not fit the model.
    """
    section, old = config.compression_training, config.quantize_training
    if not (section.changes_modules or (old and old.enabled)):
        return
    from hadal.plugins.compression.compress import (  # for this alone
        is_teacher,
        prepare,
        with_old_form,
    )
    from hadal.plugins.compression.layers import is_prepared

    if is_prepared(model) or is_teacher(model):
        return
    # Masks are chosen by whole weights, one at a time: these may have been created sharded.
    prepare(model, with_old_form(section, old), GatheredParameters)


def check_scores(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Refuse an optimizer without the scores that pruning learns.

    Raises:
        UsageError: it was made before `init_compression`.
    """
    trained = {parameter for group in groups for parameter in group}
    found = [
        name
        for name, parameter in model.named_parameters()
        if is_score(name) and parameter.requires_grad and parameter not in trained
    ]
    if found and trained:
        raise UsageError(
            f"pruning learns scores that the optimizer does not train: {', '.join(found[:3])}"
            f" ({len(found)} in all); call init_compression before the parameters for the"
            " optimizer are collected"
        )


class ParameterValues:
    """Access to whole parameters of a model in an engine, at every stage."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a whole parameter, in fp32. All ranks must call it, in the same order."""
        found = safe_get_full_fp32_param(parameter)
        return parameter.detach().float() if found is None else found

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of new values, 1-D."""
        place = held_place(parameter, "pruning")
        return place.fragment_of(flattened(whole, place.slot)).clone()

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        """Replace this rank's part of a parameter. All ranks must call it, in the same order."""
        safe_set_local_fp32_param(parameter, part)
