"""The search for the best settings of a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as some

from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.errors import OffloadError
from hadal.offload import DiskStore
from hadal.offload.speed import (
    MeasuredSettings,
    Search,
    Speed,
    SpeedTest,
    TimeBudget,
    keys_of,
    measurer,
)


def as_measured(settings: Aio, seconds: float) -> MeasuredSettings:
    return MeasuredSettings(settings, Speed(10**9, seconds / 2), Speed(10**9, seconds / 2))


def test_the_best_of_all_keys_is_found() -> None:
    wanted = Aio(
        block_size=1 << 22,
        queue_depth=16,
        intra_op_parallelism=4,
        single_submit=False,
        overlap_events=False,
    )
    keys = keys_of(wanted)

    def measure(settings: Aio) -> MeasuredSettings:
        alike = sum(keys_of(settings)[name] == value for name, value in keys.items())
        return as_measured(settings, 10 - alike)

    search = Search(measure)
    measured = list(search.run())
    assert search.best is not None
    assert search.best.settings == wanted
    assert measured[0].settings == Aio()
    assert len(measured) == len({one.settings for one in measured}) == Search.count


def test_small_gains_count_as_noise() -> None:
    search = Search(lambda settings: as_measured(settings, 1 - (settings != Aio()) * 0.02))
    list(search.run())
    assert search.best is not None
    assert search.best.settings == Aio()


@given(
    some.builds(
        Aio,
        block_size=some.integers(1, 1 << 30),
        queue_depth=some.integers(1, 512),
        intra_op_parallelism=some.integers(1, 64),
        single_submit=some.booleans(),
        overlap_events=some.booleans(),
    )
)
def test_settings_survive_their_section(settings: Aio) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    config = load_config(
        {"train_batch_size": 1, "zero_optimization": zero, "aio": keys_of(settings)}
    )
    assert config.notes == ()
    assert config.aio == settings


def test_a_disk_is_measured(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    track = SpeedTest(store, 1 << 20)
    for move in (track.written, track.read):
        speed = move(0.05)
        assert speed.nbytes % (1 << 20) == 0
        assert speed.nbytes > 0
        assert speed.gb_per_s == pytest.approx(speed.nbytes / speed.seconds / 1e9)
        assert speed.seconds >= 0.05
    store.close()
    found = measurer(tmp_path, 1 << 20, 0.1, 1)(Aio(queue_depth=2))
    assert found.settings.queue_depth == 2
    assert found.seconds_per_gb == pytest.approx(1 / found.write.gb_per_s + 1 / found.read.gb_per_s)
    with pytest.raises(OffloadError, match="no room"):
        measurer(tmp_path, 1 << 60, 0.1, 1)(Aio())
    assert list(tmp_path.iterdir()) == []


def test_time_is_divided_evenly() -> None:
    clock = TimeBudget(10, 2)
    assert clock.turn() == pytest.approx(5, abs=0.5)
    assert clock.turn() == pytest.approx(10, abs=0.5)  # the first took no time at all
    assert TimeBudget(0, 1).turn() > 0


def test_noise_is_the_difference_of_two_measurements_of_one_setting() -> None:
    times = iter([1.0, *[2.0] * (Search.count - 1), 1.2, 1.0])
    search = Search(lambda settings: as_measured(settings, next(times)))
    first, *others = search.run()
    assert next(times, None) is None  # the best is the first setting: it was measured twice more
    assert search.noise == pytest.approx(0.2)
    assert search.is_as_good(first) and not any(map(search.is_as_good, others))
