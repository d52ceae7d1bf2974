"""Orders of samples that `data_efficiency` requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hadal.config import Config
from hadal.engine.loader import ChosenOrder
from hadal.engine.sampler import Sharding
from hadal.listener import Listener
from hadal.order import Order
from hadal.plugins.data_efficiency import batching as by_tokens
from hadal.plugins.data_efficiency.lengths import lengths_of
from hadal.plugins.data_efficiency.metric_files import Origin
from hadal.plugins.data_efficiency.ordered import ExpectsLoader
from hadal.plugins.data_efficiency.sampler import PATH as CURRICULUM
from hadal.plugins.data_efficiency.sampler import CurriculumOrder, Taking


def chosen_order(
    config: Config, sharding: Sharding, listeners: Sequence[Listener]
) -> ChosenOrder | None:
    """Return the order by metrics, or by tokens, if one is on."""
    batching = next((one for one in listeners if isinstance(one, by_tokens.BatchingByTokens)), None)
    expecting = [one for one in listeners if isinstance(one, ExpectsLoader)]
    section = config.data_efficiency
    sampling = section.data_sampling
    taking = Taking(
        sharding.batch_size,
        sharding.replicas,
        sharding.replica,
        config.gradient_accumulation_steps,
        sharding.drop_last,
    )

    def made(order: Order) -> Order:
        for one in expecting:
            one.is_made = True
        return order

    def by_metrics(dataset: Any) -> Order:
        return made(CurriculumOrder(section, Origin.of(dataset), taking))

    def in_packs(dataset: Any) -> Order:
        folder = sampling.dynamic_batching.metrics_path
        lengths = lengths_of(dataset, folder, writes=sharding.replica == 0)
        order = by_tokens.PackedOrder(section, lengths, taking)
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
