"""Compilation of an engine's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hadal.errors import UsageError
from hadal.zero.hooks import shield_hooks


def compile_module(
    module: nn.Module, backend: str | Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Compile `module` in place with `torch.compile(backend=backend, **options)`.

    Raises:
        UsageError: `torch.compile` has no such option.
    """
    taken = set(inspect.signature(torch.compile).parameters) - {"model", "backend"}
    unknown = sorted(set(options) - taken)
    if unknown:
        raise UsageError(
            f"engine.compile(compile_kwargs=...) got {unknown[0]!r}, expected some of"
            f" {', '.join(sorted(taken))}; the backend is a separate argument"
        )
    module.compile(backend=backend, **options)
    shield_hooks()  # now that the compiler is there
