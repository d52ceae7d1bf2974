"""A program that is planned: `initialize` returns a stand-in, whose first forward ends it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from hadal.config.reading import read
from hadal.device import current_device
from hadal.engine import assemble
from hadal.engine.arguments import choose_config
from hadal.engine.engine import Engine
from hadal.errors import UsageError

MICRO = "train_micro_batch_size_per_gpu"

Forwarded = Callable[[nn.Module, dict[str, Any], Any], NoReturn]
"""Takes the model, the configuration and the batch of a first forward; it ends the program."""


class PlannedEngine(nn.Module):
    """A stand-in for an engine, which answers as far as the configuration does."""

    def __init__(self, model: nn.Module, raw: dict[str, Any], forwarded: Forwarded) -> None:
        super().__init__()
        self.module = model
        self.device = current_device()
        self._raw = raw
        self._forwarded = forwarded

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Hand the batch over.

        Raises:
            UsageError: the model is called with arguments by place and by name.
        """
        if args and kwargs:
            raise UsageError("the model is called with arguments by place and by name")
        raw = dict(self._raw)
        if MICRO in raw:
            # The program has found its own number of ranks, which is one.
            raw.pop("train_batch_size", None)
        self._forwarded(self.module, raw, kwargs or args)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, *others: Any, **rest: Any
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches."""
        size = batch_size or self._raw.get(MICRO, 1)
        return DataLoader(dataset, size, collate_fn=rest.get("collate_fn"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not callable(getattr(Engine, name, None)):
                raise
        if name in self._raw:
            return lambda: self._raw[name]
        return partial(_not_yet, name)


def _not_yet(name: str, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"engine.{name}() before the first forward: a plan has no answer; call it later, or plan"
        " the model alone (hadal plan --model)"
    )


def plan_instead(forwarded: Forwarded) -> None:
    """Let `initialize` return a stand-in in this process from now on, under any of its names.

    It must be called before the program, or a module under DeepSpeed's name, imports it.
    """

    signature = inspect.signature(assemble.initialize)

    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        model, optimizer, loader = given["model"], given["optimizer"], None
        if model is None:
            raise UsageError("initialize was given no model: there is nothing to plan")
        _, raw = read(choose_config(given["args"], given["config"], given["config_params"]))
        if not isinstance(optimizer, torch.optim.Optimizer):
            # Programs ask for its param groups.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if given["training_data"] is not None:
            size = raw.get(MICRO, 1)
            loader = DataLoader(given["training_data"], size, collate_fn=given["collate_fn"])
        engine = PlannedEngine(model, raw, forwarded)
        engine.optimizer = optimizer
        return engine, optimizer, loader, given["lr_scheduler"]

    assemble.initialize = initialize
