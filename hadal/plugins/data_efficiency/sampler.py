"""Order of samples by a curriculum of metrics (`data_efficiency.data_sampling`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hadal.config.data_efficiency import CurriculumMetric, DataEfficiency
from hadal.data.orders import count_batches
from hadal.data.reading import Sharding
from hadal.errors import UsageError
from hadal.order import Picked
from hadal.plugins.data_efficiency.clusters import Metric, SampleStream
from hadal.plugins.data_efficiency.metric_files import Origin, read_metric, write_row
from hadal.plugins.data_efficiency.pacing import Pacer, pace_rule_of

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
        return {
            "batch": self._pending,
            "consumed_samples": self._consumed,
            **self._stream.state(),
        }

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
