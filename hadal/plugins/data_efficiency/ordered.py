"""Orders of samples that `data_efficiency` requests, and the loaders that follow them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hadal.config import Config
from hadal.config.data_efficiency import DataSampling
from hadal.data.loader import ChosenOrder, ShardedLoader
from hadal.data.reading import Sharding
from hadal.errors import UsageError
from hadal.listener import Listener, Setting
from hadal.order import Order
from hadal.plugins.data_efficiency import batching as by_tokens
from hadal.plugins.data_efficiency.lengths import lengths_of
from hadal.plugins.data_efficiency.metric_files import Origin
from hadal.plugins.data_efficiency.pacing import CustomPace, Pacer
from hadal.plugins.data_efficiency.sampler import PATH as CURRICULUM
from hadal.plugins.data_efficiency.sampler import CurriculumOrder
from hadal.plugins.data_efficiency.seqlen import LengthCurriculum

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
        return ChosenOrder(CURRICULUM, by_metrics, workers, pins)
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
    pacers = _pacers_of(engine.training_dataloader, engine.listeners)
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


def _pacers_of(loader: ShardedLoader | None, listeners: Iterable[Listener]) -> dict[str, Pacer]:
    """Return the schedules of difficulties by metric."""
    order = None if loader is None else loader.given_order
    found = dict(order.pacers) if isinstance(order, CurriculumOrder) else {}
    for one in listeners:
        if isinstance(one, LengthCurriculum):
            found["seqlen"] = one.pacer
    return found
