"""Schedules of data efficiency as programs use DeepSpeed's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config import load_config
from hadal.data.reading import Sharding
from hadal.engine.engine import Engine
from hadal.errors import UsageError
from hadal.plugins.compression.training import (
    PowerIteration,
    blocks_of,
    dominant_eigenvalue,
    relative,
)
from hadal.plugins.data_efficiency.layer_drop import LayerDrop, theta_at
from hadal.plugins.data_efficiency.metric_files import Origin
from hadal.plugins.data_efficiency.ordered import CurriculumOrder
from hadal.plugins.data_efficiency.pacing import Pacer, pace_rule_of
from hadal.plugins.data_efficiency.token_drop import TokenDrop, kept_at, layer_tokens_at


class CurriculumScheduler:
    """The schedule of one difficulty.

    Raises:
        ConfigError: the config has faults, as in the section `curriculum_learning`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        keys = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
        given = {name: config[name] for name in keys if name in config}
        section = {"enabled": True, "curriculum_type": "seqlen", **given}
        checked = load_config({"train_batch_size": 1, "curriculum_learning": section})
        assert checked.curriculum_learning is not None  # given above
        self._follow(Pacer(pace_rule_of(checked.curriculum_learning), "config"), config)

    def _follow(self, pacer: Pacer, config: Mapping[str, Any]) -> None:
        self._pacer = pacer
        self._config = dict(config)
        self.first_step = True

    @classmethod
    def of(cls, pacer: Pacer, config: Mapping[str, Any]) -> CurriculumScheduler:
        """Return the view of an engine's schedule."""
        made = cls.__new__(cls)
        made._follow(pacer, config)
        return made

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the last step."""
        return self._pacer.current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the difficulty; a schedule that is not custom computes the next one anew."""
        self._pacer.current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a custom schedule."""
        self._pacer.set_custom(schedule_function)

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step without changing the state."""
        before = self._pacer.current
        try:
            self._pacer.current = self._pacer.rule.first
            return self._pacer.at(global_steps)
        finally:
            self._pacer.current = before

    def update_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step, and remember it."""
        return self._pacer.at(global_steps)

    def get_state(self) -> dict[str, Any]:
        """Return the difficulties and the schedule."""
        return {
            "min_difficulty": self._pacer.rule.first,
            "max_difficulty": self._pacer.rule.last,
            "current_difficulty": self._pacer.current,
            "schedule_type": self._pacer.rule.kind,
            "schedule_config": self._config.get("schedule_config") or {},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over the result of `get_state`, schedule included."""
        current = self._pacer
        fresh = type(self)(state)
        current.rule, current.current = fresh._pacer.rule, int(state["current_difficulty"])
        self._config = dict(state)


class DeepSpeedDataSampler:
    """Batches of one rank, as lists of samples, in the order of the section `data_efficiency`.

    Args:
        data_efficiency_config: that section.
        one_epoch_total_samples: the samples of the data set.
        micro_batch_size: the samples of a batch of one rank.
        data_parallel_rank: this rank among those with different samples.
        data_parallel_size: their number.
        data_parallel_group: not needed: all ranks draw the same order.
        gradient_accumulation_steps: the batches of an update.
        global_rank: not needed.
        drop_last: leave out a last batch that is not full.

    Raises:
        ConfigError: the section has faults.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        given = {"train_batch_size": 1, "data_efficiency": dict(data_efficiency_config)}
        section = load_config(given).data_efficiency
        assert section is not None  # given above
        sharding = Sharding(micro_batch_size, data_parallel_size, data_parallel_rank, drop_last)
        self._order = CurriculumOrder(
            section, Origin(one_epoch_total_samples), sharding, gradient_accumulation_steps
        )
        self._epochs = section.data_sampling.num_epochs
        self._one_epoch = one_epoch_total_samples
        self.consumed_samples = 0
        """The samples of all ranks so far."""
        self._state: Any = None

    def __len__(self) -> int:
        """Return the samples of all epochs and ranks."""
        return self._one_epoch * self._epochs

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Set the functions of custom schedules, by metric."""
        for name, function in schedule_func_dict.items():
            if name in self._order.pacers:
                self._order.pacers[name].set_custom(function)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, from after the last one that was returned."""
        first, done = divmod(self.consumed_samples, self._one_epoch)
        for epoch in range(first, self._epochs):
            for picked in self._order.batches(epoch, done if epoch == first else 0):
                self.consumed_samples += picked.samples
                self._state = picked.state
                yield list(picked.indices)
            if self._state is not None:
                self._order.load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch."""
        return {"consumed_samples": self.consumed_samples, "order": self._state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after a place that `state_dict` returned."""
        self.consumed_samples = state_dict["consumed_samples"]
        self._state = state_dict["order"]
        if self._state is not None:
            self._order.load_state_dict(self._state)


class ProgressiveLayerDrop:
    """The keep probability of layers."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the keywords of a forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Return the current keep probability."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Compute the keep probability of a step, from 0."""
        self.current_theta = theta_at(self.theta, self.gamma, global_step + 1)


class LayerDropOfEngine(ProgressiveLayerDrop):
    """The view of an engine's."""

    def __init__(self, listener: LayerDrop, theta: float, gamma: float) -> None:
        super().__init__(theta, gamma)
        self._listener = listener

    def get_theta(self) -> float:
        """Return the engine's keep probability after its last update."""
        return self._listener.theta


class RandomLTDScheduler:
    """An engine's schedule of kept tokens."""

    def __init__(self, listener: TokenDrop) -> None:
        self._listener = listener
        self.model_layer_num = listener.rule.layers
        self.random_ltd_layer_num = listener.rule.dropping

    @property
    def state(self) -> dict[str, Any]:
        """The numbers so far; programs read `state["consumed_layer_tokens"]`."""
        return self.state_dict()

    def get_current_seq(self) -> int:
        """Return the tokens that dropping layers see."""
        return self._listener.kept

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of layers that drop tokens."""
        return self.random_ltd_layer_num

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Return the tokens of all layers in the first `train_iters` updates."""
        rule, samples = self._listener.rule, self._listener.samples
        return samples * sum(layer_tokens_at(rule, update) for update in range(train_iters))

    def update_seq(self, global_steps: int) -> int:
        """Return the tokens that dropping layers see in an update, from 0; nothing changes."""
        return kept_at(self._listener.rule, global_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores under `random_ltd`."""
        return dict(self._listener.state_dict())

    get_state = state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        self._listener.load_state_dict(state_dict)


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a converted model or engine, with the names of the model itself.

    At stage 3 it is whole on every rank; all ranks must call it.
    """
    return model.module_state_dict() if isinstance(model, Engine) else model.state_dict()


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the level that DeepSpeed adds to names of converted layers."""
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}


# ---- eigenvalues of blocks -----------------------------------------------------------------------


_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Eigenvalue:
    """Power iteration over the gradients of a backward with `create_graph=True`."""

    verbose: bool = False
    max_iter: int = 100
    tol: float = 1e-2
    stability: float = 0
    gas_boundary_resolution: int = 1
    layer_name: str = ""
    layer_num: int = 0

    def __post_init__(self) -> None:
        if not self.layer_name or self.layer_num <= 0:
            raise UsageError(
                f"Eigenvalue: expected layer_name and layer_num > 0, got {self.layer_name!r} and"
                f" {self.layer_num}; name the list of blocks, and their number"
            )

    def get_layers(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks."""
        return blocks_of(module, self.layer_name, self.layer_num)

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products of all elements."""
        return torch.stack([(x * y).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def nan_to_num(self, x: Tensor) -> Tensor:
        """Return a tensor with 0 in place of non-finite values."""
        return x.nan_to_num(0.0, 0.0, 0.0)

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors whose common norm is 1."""
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [self.nan_to_num(part / norm) for part in v]

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Return magnitudes relative to the largest; an exact 0 becomes 1.0."""
        return relative(value_list)

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]] | list[Any]:
        """Return each parameter's (eigenvalue of its block relative to the largest, block) by `id`.

        An empty list if gradients carry no graph.

        Args:
            module: a model after `loss.backward(create_graph=True)`.
            device: unused: it follows from the gradients.
            scale: the loss scale.
        """
        del device
        rule = PowerIteration(self.max_iter, self.tol, self.stability)
        blocks, values = self.get_layers(module), []
        for number, block in enumerate(blocks):
            trained = [p for p in block.parameters() if p.grad is not None and p.grad.grad_fn]
            if not trained:
                _log.warning("Eigenvalue: the gradients of block %d carry no graph", number)
                return []
            gradients = [p.grad for p in trained if p.grad is not None]
            values.append(dominant_eigenvalue(trained, gradients, rule, scale))
            if self.verbose:
                _log.info("block %d: eigenvalue %.6g", number, values[-1])
        shares = self.post_process(values)
        return {
            id(parameter): (share, number)
            for number, (block, share) in enumerate(zip(blocks, shares, strict=True))
            for parameter in block.parameters()
        }
