"""`disable_python_gc`: the cycle collector is disabled while engines that request it live."""

from __future__ import annotations

import gc

import pytest
from ranks import on_ranks

from engine.toys import engine_of, train
from hadal.engine.collector import collector_at_rest, hold_collector


class Owner:
    pass


@pytest.mark.claims("disable_python_gc")
@on_ranks(2)
def test_the_last_engine_returns_it() -> None:
    assert gc.isenabled()
    plain = engine_of(1)
    assert gc.isenabled()
    one = engine_of(1, disable_python_gc=True)
    assert not gc.isenabled()
    other = engine_of(2, disable_python_gc=True)
    train(one, range(1))
    train(other, range(1))
    one.destroy()
    assert not gc.isenabled()
    one.destroy()
    assert not gc.isenabled()
    other.destroy()
    assert gc.isenabled()
    plain.destroy()
    assert gc.isenabled()


@pytest.mark.claims("disable_python_gc")
@pytest.mark.parametrize("was_enabled", [True, False])
def test_it_is_restored_unchanged_and_at_the_end_of_its_owner(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        first, second = Owner(), Owner()
        hold_collector(first)
        release = hold_collector(second)
        del first
        assert not gc.isenabled()
        release()
        release()
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_objects_that_were_made_meanwhile_are_not_scanned_next() -> None:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    scans: list[str] = []
    gc.callbacks.append(watch := lambda phase, _: scans.append(phase))
    with collector_at_rest():
        kept = [[each] for each in range(20_000)]
    kept += [[each] for each in range(10)]
    gc.callbacks.remove(watch)
    assert gc.isenabled() and not scans and gc.get_freeze_count() == 0
    gc.freeze()
    with collector_at_rest():
        kept += [[each] for each in range(20_000)]
    assert gc.isenabled() and gc.get_freeze_count() > 0  # the program's own
    if not was_frozen:
        gc.unfreeze()
