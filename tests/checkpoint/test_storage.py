"""Storages: the same six methods on a directory, on objects, and on any other file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import RankPools

from hadal.checkpoint import remote
from hadal.checkpoint.files import check_file, location_of, read_small, storage_of, write_file
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.storage import Location, RemotePath
from hadal.errors import CheckpointError, ConfigError
from hadal.offload.direct import BLOCK_NBYTES, Kept
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

pytest.importorskip("fsspec")

from .disks import SCHEME, FaultyDisk, nothing
from .listing import names_in

KINDS = ("directory", "memory", SCHEME)


def place_of(kind: str, folder: str | Path) -> Location:
    if kind == "directory":
        return Path(folder)
    return RemotePath(f"{kind}://{folder}")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return place_of(request.param, tmp_path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "PAUSES_S", (0.0, 0.0))
    yield
    FaultyDisk.before = staticmethod(nothing)


def test_files_are_written_read_and_removed(place: Location) -> None:
    storage, content = storage_of(place), bytes(range(256)) * 40_000
    assert storage.items(place / "a") == []
    assert storage.find(place / "a" / "b") is None
    seal = write_file(place / "a" / "b" / "file", [content[:100], content[100:]])
    assert (seal.nbytes, seal.head_nbytes) == (len(content), 100)
    file = storage.open(place / "a" / "b" / "file")
    assert file.nbytes == len(content)
    assert file.read(5, 5) == b""
    assert file.read(1000, 2000) == content[1000:2000]
    assert file.read(1500, 1600) == content[1500:1600]
    for start, stop in ((3, len(content)), (70, 90), (0, 0)):
        assert b"".join(map(bytes, file.blocks(start, stop))) == content[start:stop]
        out = bytearray(stop - start)
        file.read_into(memoryview(out), start)
        assert out == content[start:stop]
    check_file(place / "a" / "b" / "file", seal, whole=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        check_file(place / "a" / "b" / "file", seal._replace(checksum=1), whole=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_small(place / "a" / "other", 10)
    storage.replace(place / "a" / "text", b"one")
    storage.replace(place / "a" / "text", b"two!")
    assert read_small(place / "a" / "text", 10) == b"two!"
    found = storage.items(place / "a")
    assert [(one.name, one.is_folder, one.nbytes) for one in found] == [
        ("b", True, 0),
        ("text", False, 4),
    ]
    assert found[1].modified > 1e9
    assert storage.find(place / "a") is not None
    storage.remove(place / "a" / "b")
    storage.remove(place / "a" / "b")
    assert [one.name for one in storage.items(place / "a")] == ["text"]
    storage.remove(place / "a" / "text")
    assert storage.find(place / "a" / "text") is None


@pytest.mark.parametrize("kind", ["memory", SCHEME])
def test_bytes_are_kept_between_two_reads(kind: str, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path) / "file"
    content = secrets.token_bytes(3 * BLOCK_NBYTES + 17)
    write_file(place, [content])
    kept = Kept(1 << 30)
    file = storage_of(place).open(place)
    assert b"".join(map(bytes, file.blocks(0, len(content), kept))) == content
    assert kept.stop > 0
    out = bytearray(len(content) - 5)
    file.read_into(memoryview(out), 5, kept)
    assert out == content[5:]


# ---- what a user gives ---------------------------------------------------------------------------


def test_urls_never_become_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert location_of("runs/a") == Path("runs/a")
    assert location_of(tmp_path) == tmp_path
    assert location_of(f"file://{tmp_path}/x") == tmp_path / "x"
    assert location_of("memory://run/a/") == RemotePath("memory://run/a")
    assert location_of(Path("memory://run/a")) == RemotePath("memory://run/a")  # one slash is left
    place = location_of("memory://run/a")
    assert (place / "b", place.name, str(place.parent)) == (
        RemotePath("memory://run/a/b"),
        "a",
        "memory://run",
    )
    with pytest.raises(CheckpointError, match="s4://x has a scheme that fsspec does not know"):
        location_of("s4://x")
    engine = engine_of(0)
    for act in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match="nope://bucket/run has a scheme"):
            act("nope://bucket/run")
    with pytest.raises(CheckpointError, match="nope://bucket/run has a scheme"):
        engine.save_16bit_model("nope://bucket/run")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s4://bucket/run", "scheme that fsspec does not know"),
        ("gdrive://run", "needs a package that is not installed"),
    ],
)
def test_a_url_of_the_configuration_is_checked_at_the_start(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"on_signal.save_dir  {url} .*{reason}") as caught:
        engine_of(0, checkpoint={"on_signal": {"save_dir": url}})
    assert [fault.path for fault in caught.value.faults] == ["checkpoint.on_signal.save_dir"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    def missing(*_: Any, **options: Any) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(CheckpointError, match=r"gs://bucket/x needs a package .* install gcsfs"):
        location_of("gs://bucket/x")


# ---- faults --------------------------------------------------------------------------------------


class Failing:
    """Lets the first `times` operations of a name fail."""

    def __init__(self, operation: str, times: int, error: Exception) -> None:
        self.operation, self.left, self.error, self.count = operation, times, error, 0

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation:
            self.count += 1
            if self.left:
                self.left -= 1
                raise self.error


@pytest.mark.parametrize("error", [OSError("reset"), RuntimeError("throttled"), TimeoutError()])
@pytest.mark.parametrize("operation", ["write", "info", "cat_file", "pipe_file", "ls", "rm", "mv"])
def test_failed_requests_are_repeated(operation: str, error: Exception, tmp_path: Path) -> None:
    place = place_of(SCHEME, tmp_path)
    storage = storage_of(place)
    for times, is_fatal in ((2, False), (3, True)):
        write_file(place / "file", [b"before"])
        failing = Failing(operation, times, error)
        FaultyDisk.before = staticmethod(failing)
        acts = {
            "write": lambda: write_file(place / "file", [b"text"]),
            "info": lambda: storage.find(place / "file"),
            "cat_file": lambda: read_small(place / "file", 10),
            "pipe_file": lambda: storage.replace(place / "other", b"text"),
            "mv": lambda: storage.replace(place / "other", b"text"),
            "ls": lambda: storage.items(place),
            "rm": lambda: storage.remove(place / "file"),
        }
        if is_fatal:
            with pytest.raises((CheckpointError, OSError)):
                acts[operation]()
        else:
            acts[operation]()
            assert failing.count == 3
        FaultyDisk.before = staticmethod(nothing)


def test_contents_that_come_once_are_uploaded_once(tmp_path: Path) -> None:
    place = place_of(SCHEME, tmp_path)
    failing = Failing("write", 1, OSError("reset"))
    FaultyDisk.before = staticmethod(failing)
    with pytest.raises(CheckpointError, match="file cannot be written: reset"):
        write_file(place / "file", iter([b"text"]))
    assert failing.count == 1


def test_what_does_not_arrive_whole_is_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [3, 4]
    info = FaultyDisk.info

    def cut(self: Any, path: str, **options: Any) -> Any:
        found = info(self, path, **options)
        return {**found, "size": sizes.pop(0)} if sizes and path.endswith("file") else found

    monkeypatch.setattr(FaultyDisk, "info", cut)
    write_file(place_of(SCHEME, tmp_path) / "file", [b"text"])
    assert sizes == []


@pytest.mark.parametrize("act", ["find", "items", "open"])
def test_what_lies_below_a_file_is_not_there_at_once(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that can never succeed is not repeated."""
    place = place_of(SCHEME, tmp_path)
    write_file(place / "latest", [b"text"])
    paused: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", paused.append)
    with suppress(FileNotFoundError):
        assert not getattr(storage_of(place), act)(place / "latest" / "index.json")
    assert paused == []


# ---- engines -------------------------------------------------------------------------------------


def save_and_load(kind: str, folder: str) -> None:
    url = f"{kind}://{folder}/run"
    engine = engine_of(2, checkpoint={"keep_last": 2})
    for step in range(3):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(url, client_state={"ema": torch.full((3,), float(step))})
    engine.save_checkpoint(url, "global_step3")  # replaces
    saved = engine.state_dict()
    for stage in (2, 3):
        other = engine_of(stage)
        path, client_state = other.load_checkpoint(url)
        assert path == f"{url}/global_step3", (path, url)
        assert client_state == {}
        assert_equal(other.state_dict(), saved)
        path, client_state = other.load_checkpoint(url, "global_step2")
        assert torch.equal(client_state["ema"], torch.ones(3))
        other.destroy()
    reports = inspected(url)
    assert [(one.tag, one.is_latest, one.faults) for one in reports] == [
        ("global_step2", False, []),
        ("global_step3", True, []),
    ]
    state = get_fp32_state_dict_from_zero_checkpoint(url)
    assert_equal(state, {name: value.float() for name, value in saved.items()})
    with pytest.raises(CheckpointError, match=r"complete checkpoints there: global_step2, global_"):
        engine.load_checkpoint(url, "nope")
    assert engine.load_checkpoint(f"{url}/nothing") == (None, None)
    engine.destroy()


def test_an_engine_saves_and_loads_objects(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(save_and_load, "memory", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_a_file_system_behind_a_url(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_and_load, SCHEME, str(tmp_path))
    assert names_in(tmp_path / "run") == ["global_step2", "global_step3", "latest"]
    assert not list(tmp_path.rglob("*.lease")) + list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("successor", [b"short", b"longer than the first"])
def test_a_small_file_that_is_replaced_meanwhile_is_read_whole(
    place: Location, successor: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, path = storage_of(place), place / "index.json"
    storage.replace(path, b"the first one")
    opened = type(storage).open
    times: list[bool] = []

    def replaced_behind(self: Any, path: Any) -> Any:
        file = opened(self, path)
        times.append(True)
        if len(times) == 1:
            storage.replace(path, successor)
        return file

    monkeypatch.setattr(remote, "PAUSES_S", ())
    monkeypatch.setattr(type(storage), "open", replaced_behind)
    assert read_small(path, 100) == successor
