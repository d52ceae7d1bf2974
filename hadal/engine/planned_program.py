"""A program that is planned: `initialize` returns a stand-in, whose first forward ends it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from hadal.config import Config, load_config
from hadal.config.optimizer import KINDS
from hadal.config.reading import read
from hadal.device import current_device
from hadal.engine import assemble
from hadal.engine.arguments import choose_config
from hadal.engine.engine import Engine
from hadal.errors import UsageError, few
from hadal.listener import Forward
from hadal.zero.init import Init

_log = logging.getLogger(__name__)

MICRO = "train_micro_batch_size_per_gpu"

Forwarded = Callable[[nn.Module, dict[str, Any], Any], NoReturn]
"""Takes the model, the configuration and the batch of a first forward; it ends the program."""


class PlannedEngine(nn.Module):
    """A stand-in for an engine, which answers as far as the configuration does."""

    def __init__(
        self, model: nn.Module, raw: dict[str, Any], config: Config, forwarded: Forwarded
    ) -> None:
        super().__init__()
        self.module = model
        self.device = current_device()
        self._raw, self._config = raw, config
        self._forwarded = forwarded

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Hand the batch over."""
        both = Forward(args, kwargs, updates=0, micro_step=0, is_training=True)
        self._forwarded(self.module, self._raw, both if args and kwargs else kwargs or args)

    def train_batch(self, data_iter: Iterator[Any]) -> NoReturn:
        """Hand the first micro-batch of a pipeline over."""
        self._forwarded(self.module, self._raw, next(data_iter))

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, *others: Any, **rest: Any
    ) -> DataLoader[Any]:
        """Return a loader of micro-batches."""
        size = batch_size or self._config.train_micro_batch_size_per_gpu
        return DataLoader(dataset, size, collate_fn=rest.get("collate_fn"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not callable(getattr(Engine, name, None)):
                raise
        if hasattr(self._config, name):
            return lambda: getattr(self._config, name)
        return partial(_not_yet, name)


def _not_yet(name: str, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"engine.{name}() before the first forward: a plan has no answer; call it later, or plan"
        " the model alone (hadal plan --model)"
    )


def _tell_left_out(model: nn.Module, chosen: Iterable[Any]) -> None:
    """Warn of parameters that a program would not train, which a plan counts as trained."""
    groups = [each["params"] if isinstance(each, dict) else [each] for each in chosen]
    trained = set(chain(*groups))
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and p not in trained]
    if left_out:
        _log.warning(
            "%d parameters that require gradients are in no param group, but planned as trained:"
            " %s. Freeze them (requires_grad_(False))",
            len(left_out),
            few(left_out, 4),
        )


def plan_instead(forwarded: Forwarded, ranks: int) -> None:
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
        if MICRO in raw:
            # The program has found its own number of ranks, which is one.
            raw = {key: value for key, value in raw.items() if key != "train_batch_size"}
        name = type(optimizer).__name__
        if raw.get("optimizer") is None and name in KINDS:  # the program's own
            raw = {**raw, "optimizer": {"type": name}}
        config = load_config(raw, world_size=ranks, allow_unbuilt=True)
        if not isinstance(optimizer, torch.optim.Optimizer):
            # Programs ask for its param groups.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _tell_left_out(model, given["model_parameters"] or optimizer.param_groups)
        if given["training_data"] is not None:
            size = config.train_micro_batch_size_per_gpu
            loader = DataLoader(given["training_data"], size, collate_fn=given["collate_fn"])
        engine = PlannedEngine(model, raw, config, forwarded)
        engine.optimizer = optimizer
        return engine, optimizer, loader, given["lr_scheduler"]

    assemble.initialize = initialize
    # Weights are never read: a plan needs each whole, with its shape.
    Init.__init__ = partialmethod(Init.__init__, enabled=False)  # type: ignore[assignment]
