"""Optimizers of the mup package (Yang et al. 2022), whose rates follow each parameter's width."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hadal.errors import OptimizerError

MUP_KINDS = ("MuAdam", "MuAdamW", "MuSGD")


def build_mup(
    kind: str, params: Mapping[str, Any], groups: Iterable[nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """Let the mup package make one of its optimizers: one of torch's, with a group for each width.

    Raises:
        OptimizerError: the package is not installed, does not take these arguments, or the model
            has no base shapes.
    """
    try:
        package = importlib.import_module("mup")
    except ImportError as error:
        raise OptimizerError(
            f"optimizer.type {kind} needs the mup package, which cannot be imported ({error}):"
            " pip install mup"
        ) from error
    arguments = dict(params)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        optimizer: Optimizer = getattr(package, kind)(groups, **arguments)
    except KeyError as error:
        raise OptimizerError(
            f"{kind} needs optimizer.params.{error.args[0]}, which mup has no default for; add it"
        ) from error
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise OptimizerError(
            f"{kind} cannot be made with {dict(params)}: {error}. Call mup.set_base_shapes on the"
            " model before hadal.initialize."
        ) from error
    return optimizer
