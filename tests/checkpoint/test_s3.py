"""Checkpoints on an S3 server that throttles, drops connections, stalls and confuses its ETags."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import RankPools

from hadal import comm
from hadal.checkpoint import folders, remote
from hadal.checkpoint.files import check_file, location_of, read_small, storage_of, write_file
from hadal.checkpoint.index import INDEX, read_index, write_index
from hadal.checkpoint.inspection import inspected

from .s3 import needed, server, use
from .s3_server import FAULTS, LATE, STALL_S

pytestmark = needed
MARKS = ["0123456789abcde0", "0123456789abcde1"]


def save_and_load(address: str, bucket: str, also_async: bool) -> None:
    url = use(address, bucket)
    engine = engine_of(2, checkpoint={"keep_last": 2, "async_save": also_async})
    for step in range(3):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(url, client_state={"step": step, "ema": torch.ones(3)})
    engine.wait_for_checkpoint()
    saved = engine.state_dict()
    other = engine_of(3)
    path, client_state = other.load_checkpoint(url)
    assert path == f"{url}/global_step3"
    assert client_state["step"] == 2
    assert_equal(other.state_dict(), saved)
    if comm.get_rank() == 0:
        assert [(one.tag, one.faults) for one in inspected(url)] == [
            ("global_step2", []),
            ("global_step3", []),
        ]
        names = [item.name for item in storage_of(location_of(url)).items(location_of(url))]
        assert names == ["global_step2", "global_step3", "latest"]
    comm.barrier()
    engine.destroy(), other.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_engines_save_and_load_on_s3(fault: str, ranks: RankPools) -> None:
    with server(fault) as address:
        ranks(2).run(save_and_load, address, fault, fault != "none", timeout=300)


def write_late(address: str, bucket: str) -> None:
    """A request that timed out was repeated, and comes through after others have gone on."""
    place = location_of(use(address, bucket))
    storage = storage_of(place)
    for text in (b"one", b"two"):
        storage.replace(place / "latest", text)
    write_index(place / "a", {"save": MARKS[0]})
    time.sleep(STALL_S)
    write_index(place / "b", {"save": MARKS[1]})
    folders.remove(place / "a")
    time.sleep(STALL_S)
    assert read_small(place / "latest", 10) == b"two"
    assert [item.name for item in storage.items(place)] == ["b", "latest"]
    folders.clean(place, 0)
    assert [item.name for item in storage.items(place / "b")] == [INDEX]


def alternate(address: str, bucket: str) -> None:
    """`latest` is what it was before the late request, but that comes after all of these."""
    place = location_of(use(address, bucket))
    for tag in ("one", "two", "one"):
        folders.set_latest(place, tag)
    time.sleep(STALL_S)
    assert folders.latest_tag(place) == "one"


def save_again(address: str, bucket: str) -> None:
    """A tag is saved again after it was removed, and the removal comes late."""
    place = location_of(use(address, bucket))
    write_index(place / "a", {"save": MARKS[0]})
    write_file(place / "a" / MARKS[0] / "file", [b"text"])
    folders.remove(place / "a")
    write_index(place / "a", {"save": MARKS[1]})
    write_file(place / "a" / MARKS[1] / "file", [b"text"])
    time.sleep(STALL_S)
    assert read_index(place / "a")["save"] == MARKS[1]
    assert [item.name for item in storage_of(place).items(place / "a")] == [MARKS[1], INDEX]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "fault", "every"),
    [(write_late, "late PUT", 1), (alternate, "late PUT", 2), (save_again, "late DELETE", 1)],
)
def test_a_request_that_comes_late_undoes_nothing(
    act: Callable[[str, str], None], fault: str, every: int, ranks: RankPools
) -> None:
    assert fault in LATE
    with server(fault, every) as address:
        ranks(1).run(act, address, "late", timeout=100)


def replace_behind(address: str) -> None:
    """Another client replaces an object between the two requests of a removal."""
    place = location_of(use(address, "behind")) / "index.json"
    storage, on_condition = storage_of(place), remote._on_condition
    storage.replace(place, b"one")

    def replaced_behind(*given: Any) -> None:
        remote._on_condition = on_condition
        storage.replace(place, b"two")
        on_condition(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PAUSES_S", (0.1,) * 5)
        patch.setattr(remote, "_on_condition", replaced_behind)
        with pytest.raises(OSError, match="it was replaced while it was being removed"):
            storage.remove(place)
        assert read_small(place, 10) == b"two"
        storage.remove(place), storage.remove(place)
        assert storage.find(place) is None


@pytest.mark.slow
def test_an_object_that_was_replaced_meanwhile_is_not_removed(ranks: RankPools) -> None:
    with server("none") as address:
        ranks(1).run(replace_behind, address, timeout=100)


def upload_in_parts(address: str) -> None:
    place = location_of(use(address, "parts")) / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_UPLOAD_NBYTES", 5 << 20)
        patch.setattr(remote, "PAUSES_S", (0.1,) * 5)
        content = os.urandom(5 << 20) * 4 + b"the end"
        seal = write_file(place, [content[:100], content[100:]])
    check_file(place, seal, whole=True)
    found = storage_of(place).find(place)
    assert found is not None and found.nbytes == len(content)
    # What a failed attempt leaves behind is removed.
    requests: Any = remote._Requests(place)
    uploads = requests.filesystem.call_s3("list_multipart_uploads", Bucket="parts")
    assert not uploads.get("Uploads")


@pytest.mark.fast_cells("etag")
@pytest.mark.parametrize("fault", FAULTS)
def test_large_files_are_uploaded_in_parts(fault: str, ranks: RankPools) -> None:
    with server(fault, 7) as address:
        ranks(1).run(upload_in_parts, address, timeout=300)
