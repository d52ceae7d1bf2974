"""A program that is planned: `initialize` returns a stand-in, whose first forward ends it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, partialmethod
from itertools import chain, count
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from hadal.comm import Ranks
from hadal.config import Config
from hadal.config.reading import read
from hadal.device import current_device
from hadal.engine import assemble, checks
from hadal.engine.arguments import InitializeArguments, choose_config
from hadal.engine.engine import Engine
from hadal.engine.memory import config_for, section_of
from hadal.engine.policies import BatchSizes
from hadal.engine.precision import scale_rule_of
from hadal.engine.state import State
from hadal.engine.topology import requested_ranks
from hadal.errors import UsageError, few
from hadal.listener import Forward
from hadal.plugins.monitor.monitor import Monitor
from hadal.zero.init import Init

_log = logging.getLogger(__name__)

Forwarded = Callable[..., NoReturn]
"""Takes the model, the configuration and the batch of a first forward, and in `requested` the
program's own groups of ranks; it ends the program."""


class _Known(SimpleNamespace):
    """The parts of an engine that a plan knows; asking for another one is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"an engine that is planned has no {name} before its first forward in training; use it"
            " after that, or plan the model alone (hadal plan --model)"
        )


def _nothing(*_: Any, **__: Any) -> Any:
    """Do nothing, in place of work on ranks and shards."""


class PlannedEngine(Engine):
    """A stand-in for an engine, which answers as far as the configuration does.

    It has the attributes and the methods of an engine. Forwards that do not train are the model's.
    """

    compile = zero_grad = destroy = save_checkpoint = _nothing
    is_compiled = False

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: Any,
        schedule: Any,
        hand_over: Callable[[Any], NoReturn],
    ) -> None:
        nn.Module.__init__(self)
        self.module = model
        self._hand_over = hand_over
        # First: of two engines of a model, the last one trains it.
        self._watch = model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        readers = _Known(rank=0, size=config.train_batch_size // (micro * steps))
        shared = config.sequence_parallel_size
        topology = _Known(
            data_parallel=readers,
            sharding=_Known(rank=0, size=readers.size * shared),
            sequence_parallel_size=shared,
            model_parallel_size=Ranks.world().size // (readers.size * shared),
        )
        self._parts: Any = _Known(
            model=model,
            config=config,
            device=current_device(),
            monitor=Monitor(enabled=False),
            topology=topology,
            world=Ranks.world(),
            listeners=(),
            loader=None,
            scale_rule=scale_rule_of(config, current_device()),
            batches=BatchSizes(micro, steps, readers.size, config.managed_gradient_accumulation),
            clocks=_Known(last={}),
            runtime=_Known(bring_together=_nothing),
        )
        self._state = State(cast(Any, self._parts))
        self._state.training = cast(Any, _Known(optimizer=optimizer, schedule=schedule))
        self._state.loss_backward = cast(Any, _Known())
        self._preemption = None
        self._work = SimpleNamespace(batches=None, batch_fn=None)
        if checks.is_in_stages(model):
            self.grid = model.mpu()
            self.num_stages, self.stage_id = model.num_stages, model.stage_id

    monitor = property(lambda self: self._parts.monitor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; in training, hand the batch over."""
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
        if not self._trains:  # the weights are in the dtype in which the program made them
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
            )
        return self.module(*args, **kwargs)

    @property
    def _trains(self) -> bool:
        return self.module.training and torch.is_grad_enabled()

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._trains:
            self._watch.remove()
            both = Forward(args, kwargs, updates=0, micro_step=0, is_training=True)
            self._hand_over(both if args and kwargs else kwargs or args)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> NoReturn:
        """Hand the first micro-batch of a pipeline over."""
        self._watch.remove()
        batch = next(self._work.batches if data_iter is None else data_iter)
        self._hand_over(batch if self._work.batch_fn is None else self._work.batch_fn(batch))

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        """Load nothing: a plan needs no values."""
        return None, {}

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, *_: Any, **rest: Any
    ) -> Any:
        """Return a loader of micro-batches."""
        size = batch_size or self._parts.batches.micro
        return DataLoader(dataset, size, collate_fn=rest.get("collate_fn"))


def _tell_left_out(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Warn of parameters that a program would not train, which a plan counts as trained."""
    trained = set(chain(*(group["params"] for group in groups)))
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and p not in trained]
    if left_out:
        _log.warning(
            "%d parameters that require gradients are in no param group, but planned as trained:"
            " %s. Freeze them (requires_grad_(False))",
            len(left_out),
            few(left_out, 4),
        )


def plan_instead(forwarded: Forwarded) -> None:
    """Let `initialize` return a stand-in in this process from now on, under any of its names.

    It must be called before the program, or a module under DeepSpeed's name, imports it, where the
    ranks to plan for run, or are imagined.
    """

    signature, engines = inspect.signature(assemble.initialize), count(1)

    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        model, optimizer = given["model"], given["optimizer"]
        loader: Any = None
        if model is None:
            raise UsageError("initialize was given no model: there is nothing to plan")
        _, raw = read(choose_config(given["args"], given["config"], given["config_params"]))
        requested, mpu = None, assemble.groups_of(model, given["mpu"])
        if mpu is not None or given["mesh_param"] is not None:
            requested = requested_ranks(mpu, given["mesh_param"], Ranks.world())
        arguments = InitializeArguments(
            *(optimizer, given["model_parameters"], given["lr_scheduler"]),
            *(given["training_data"], given["collate_fn"]),
        )
        config = config_for(raw, Ranks.world().size, requested)
        made = arguments.make_optimizer(config, model)
        if optimizer is not None:
            raw = {**raw, "optimizer": section_of(made)}
            if raw["optimizer"] is None:
                _log.warning("%s is planned as Adam: two values per element", type(made).__name__)
        if given["training_data"] is not None:
            size = config.train_micro_batch_size_per_gpu
            loader = DataLoader(given["training_data"], size, collate_fn=given["collate_fn"])
        schedule = None if made is None else arguments.make_schedule(config, made, loader)
        _tell_left_out(model, made.param_groups if made else ())
        if next(engines) == 2:
            _log.warning("the engine that trains first is planned; others come on top")
        base = assemble.type_for(model, given["engine_type"], given["pipeline_engine_type"])
        kind = type("PlannedEngine", (PlannedEngine, base), {})
        hand_over = partial(forwarded, model, raw, requested=requested)
        engine = kind(model, config, made, schedule, hand_over)
        engine._work.batches = loader and iter(loader)
        return engine, engine.optimizer, loader, schedule

    assemble.initialize = initialize
    # Weights are never read: a plan needs each whole, with its shape.
    Init.__init__ = partialmethod(Init.__init__, enabled=False)  # type: ignore[assignment]
