"""Orders of samples that `data_efficiency` requests, and the loaders that follow them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hadal.config import Config
from hadal.config.data_efficiency import CurriculumMetric, DataEfficiency, DataSampling
from hadal.data.loader import ChosenOrder, ShardedLoader
from hadal.data.reading import Sharding, count_batches
from hadal.errors import UsageError
from hadal.listener import Listener, Setting
from hadal.order import Order, Picked
from hadal.plugins.data_efficiency import batching as by_tokens
from hadal.plugins.data_efficiency.clusters import Metric, SampleStream
from hadal.plugins.data_efficiency.lengths import lengths_of
from hadal.plugins.data_efficiency.metric_files import Origin, read_metric, write_row
from hadal.plugins.data_efficiency.pacing import CustomPace, Pacer, pace_rule_of
from hadal.plugins.data_efficiency.seqlen import LengthCurriculum

PATH = "data_efficiency.data_sampling.curriculum_learning"


class CurriculumOrder:
    """Samples of growing difficulty: those that the schedules of all metrics admit.

    The samples of an update are drawn for all ranks together, so they do not depend on the number
    of ranks. An epoch has as many samples as the data set; the difficulties determine which.
    """

    is_own = False

    def __init__(
        self, section: DataEfficiency, data: Origin, sharding: Sharding, accumulation: int
    ) -> None:
        """Create the order; an update has `accumulation` batches of each replica."""
        sampling = section.data_sampling
        curriculum = sampling.curriculum_learning
        metrics = curriculum.curriculum_metrics or {}
        self.pacers = {
            name: Pacer(pace_rule_of(metric), f"{PATH}.curriculum_metrics.{name}")
            for name, metric in metrics.items()
        }
        """The schedules by metric."""
        self._count = data.samples
        self._sharding = sharding
        self._epochs = sampling.num_epochs
        folder = curriculum.data_cluster_path
        self._folder = Path(folder) if folder is not None and sharding.replica == 0 else None
        read = [_read(name, metric, data) for name, metric in metrics.items()]
        drawing = np.random.default_rng(section.seed)
        batch = sharding.stride * accumulation
        self._stream = SampleStream(read, data.samples, batch, drawing, path=PATH)
        self._pending: list[int] = []
        self._consumed = 0
        self._start: Mapping[str, Any] = self._state()

    def __len__(self) -> int:
        """Return this rank's batches in an epoch."""
        return count_batches(self._count, self._sharding)

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield this rank's batches; none after `num_epochs` epochs."""
        sharding = self._sharding
        # Workers may have read ahead of the returned batches: begin after the last of these.
        self._load(self._start)
        left = self._count - done if epoch < self._epochs else 0
        for _ in range(count_batches(left, sharding)):
            while len(self._pending) < sharding.stride:
                self._pending = self._pending + self._drawn()
            first = sharding.replica * sharding.batch_size
            mine = self._pending[first : first + sharding.batch_size]
            # A new list: states of earlier batches hold the old one.
            self._pending = self._pending[sharding.stride :]
            self._consumed += sharding.stride
            yield Picked(mine, sharding.stride, self._state())

    def _drawn(self) -> list[int]:
        step = self._stream.step + 1
        difficulties = {name: pacer.at(step) for name, pacer in self.pacers.items()}
        samples, made = self._stream.next(difficulties)
        if made is not None and self._folder is not None:
            try:
                write_row(self._folder / made.name, made.ids)
            except UsageError as error:
                raise UsageError(
                    f"{PATH}.data_cluster_path: {error}; choose a directory"
                ) from error
        return samples

    def _state(self) -> dict[str, Any]:
        return {"batch": self._pending, "consumed_samples": self._consumed, **self._stream.state()}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state after a batch."""
        self._start = state

    def _load(self, state: Mapping[str, Any]) -> None:
        self._stream.load(state)
        self._pending = list(state["batch"])
        self._consumed = int(state["consumed_samples"])
        for name, pacer in self.pacers.items():
            pacer.current = self._stream.difficulties.get(name, pacer.rule.first)


def _read(name: str, metric: CurriculumMetric, data: Origin) -> Metric:
    return read_metric(
        name,
        f"{PATH}.curriculum_metrics.{name}",
        data,
        metric.index_to_sample_path,
        metric.index_to_metric_path,
        is_percentile=metric.difficulty_type == "percentile",
        maximum=metric.max_difficulty or 1,
        is_single=metric.clustering_type == "single_cluster",
    )


_log = logging.getLogger(__name__)


class ExpectsLoader(Listener):
    """Warns once if training begins with only batches of other loaders.

    Args:
        path: the JSON path of the section that sets the order.
        tells: True on the rank that warns.
    """

    name = "data_efficiency.data_sampling"

    def __init__(self, section: DataSampling, setting: Setting) -> None:
        is_curriculum = section.curriculum_learning.enabled
        part = "curriculum_learning" if is_curriculum else "dynamic_batching"
        self._path = f"{self.name}.{part}"
        self._tells = setting.world.rank == 0
        self.is_made = False
        """True once a loader in this order was created."""

    def before_backward(self) -> None:
        """Warn if there is no such loader."""
        if self.is_made or not self._tells:
            return
        self._tells = False
        _log.warning(
            "%s is on, but this engine has created no training loader that follows it: it has no"
            " effect on batches of other loaders. Pass training_data to initialize, or create the"
            " loader with engine.deepspeed_io(dataset); if a program creates its own loader, as"
            " the Trainer of Hugging Face does, remove the section",
            self._path,
        )


def chosen_order(
    config: Config, sharding: Sharding, listeners: Sequence[Listener]
) -> ChosenOrder | None:
    """Return the order by metrics, or by tokens, if one is on."""
    batching = next((one for one in listeners if isinstance(one, by_tokens.BatchingByTokens)), None)
    expecting = [one for one in listeners if isinstance(one, ExpectsLoader)]
    section = config.data_efficiency
    sampling = section.data_sampling
    accumulation = config.gradient_accumulation_steps

    def made(order: Order) -> Order:
        for one in expecting:
            one.is_made = True
        return order

    def by_metrics(dataset: Any) -> Order:
        return made(CurriculumOrder(section, Origin.of(dataset), sharding, accumulation))

    def in_packs(dataset: Any) -> Order:
        folder = sampling.dynamic_batching.metrics_path
        lengths = lengths_of(dataset, folder, writes=sharding.replica == 0)
        order = by_tokens.PackedOrder(section, lengths, sharding, accumulation)
        if batching is not None:
            batching.order = order
        return made(order)

    workers, pins = sampling.num_workers, sampling.pin_memory
    if sampling.curriculum_learning.enabled:
        return ChosenOrder(PATH, by_metrics, workers, pins)
    if batching is not None:
        path, note, stacked = by_tokens.PATH, batching.note, by_tokens.stacked
        return ChosenOrder(path, in_packs, workers, pins, note, stacked)
    return None


class Curricula(Protocol):
    """An engine, as far as its curricula are concerned."""

    @property
    def training_dataloader(self) -> ShardedLoader | None:
        """The loader whose samples have difficulties."""

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners, of which one may shorten sequences."""


def set_custom_schedules(engine: Curricula, given: CustomPace | Mapping[str, CustomPace]) -> None:
    """Set the functions of schedules whose `schedule_type` is "custom". All ranks must call it.

    Functions are not saved: call it after a resume, too.

    Args:
        engine: the engine that trains.
        given: a function from the update, from 1, to its difficulty, an integer; or such functions
            by metric ("seqlen" for `curriculum_learning`). A difficulty that has reached
            `max_difficulty` stays there.

    Raises:
        UsageError: there is no such curriculum, its schedule is not custom, or a value is no
            function.
    """
    # The schedules of difficulties by metric
    order = None if engine.training_dataloader is None else engine.training_dataloader.given_order
    found = dict(order.pacers) if isinstance(order, CurriculumOrder) else {}
    for one in engine.listeners:
        if isinstance(one, LengthCurriculum):
            found["seqlen"] = one.pacer
    pacers = found
    named = given if isinstance(given, Mapping) else dict.fromkeys(pacers, given)
    if not isinstance(given, Mapping) and len(pacers) > 1:
        raise UsageError(
            "set_custom_schedules got one function for the curricula"
            f" {', '.join(pacers)}; pass a dict with a function for each name"
        )
    if not pacers or not named.keys() <= pacers.keys():
        raise UsageError(
            "set_custom_schedules got functions for"
            f" {', '.join(named) or 'a curriculum'}; the configuration has"
            f" {', '.join(pacers) or 'no curriculum; switch on curriculum_learning'}"
        )
    for name, custom in named.items():
        pacers[name].set_custom(custom)
