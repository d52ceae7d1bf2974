"""Disk faults, caused by real means: each raises one error that names the file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

import hadal
from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.errors import OffloadError
from hadal.offload import DiskStore, Region, aligned

from .test_store import PAGE, files_under, filled
from .test_tiers import config_of, model_of, small_blocks, train, trained

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, resource, sys
from hadal.errors import OffloadError, UsageError
from hadal.config.offload import Aio
from hadal.offload import DiskStore, aligned
PAGE = 4096
"""


def started(code: str, *prefix: str) -> subprocess.Popen[str]:
    """Start another process, which may end in any way."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(code: str, *prefix: str) -> str:
    process = started(code, *prefix)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out + err


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, Aio(block_size=4 * PAGE))


def written(store: DiskStore, nbytes: int = 32 * PAGE) -> Region:
    region = store.allocate("blocks.0 masters", nbytes)
    store.start_write(region, 0, filled(nbytes)).wait()
    return region


@pytest.mark.parametrize("act", ["start_read", "start_write"])
def test_a_shortened_file(act: str, store: DiskStore) -> None:
    region = written(store)
    os.truncate(store.path, 5 * PAGE)
    request = getattr(store, act)(region, 0, aligned(32 * PAGE))
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(OffloadError) as caught:
            request.wait()
    told = str(caught.value)
    assert str(store.path) in told and "blocks.0 masters" in told
    assert "truncated to 20480 bytes, but 131072 were reserved" in told
    assert "last checkpoint" in told
    store.close()


def test_growing_and_shrinking_meanwhile_is_no_truncation(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, passing = written(store), [store.allocate("passing", PAGE)]
    look = os.fstat

    def look_amid_changes(descriptor: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", look)
        store.free(passing.pop())
        status = look(descriptor)
        passing.append(store.allocate("passing", 8 * PAGE))
        return status

    for start in (store.start_read, store.start_write):
        monkeypatch.setattr(os, "fstat", look_amid_changes)
        start(region, 0, aligned(PAGE)).wait()
        assert os.fstat is look
    store.close()


def test_a_truncated_file_is_not_extended_again(store: DiskStore) -> None:
    passing, region = store.allocate("passing", PAGE), written(store)
    last = store.allocate("last", PAGE)
    os.truncate(store.path, 2 * PAGE)
    with pytest.raises(
        OffloadError, match=r"more cannot be added: .* truncated to 8192 bytes, but 139264 were"
    ):
        store.allocate("more", PAGE)
    store.free(last)
    assert store.path.stat().st_size == 2 * PAGE
    for start in (store.start_read, store.start_write):
        with pytest.raises(OffloadError, match="truncated to 8192 bytes, but 135168 were"):
            start(region, 16 * PAGE, aligned(PAGE)).wait()
    assert store.path.stat().st_size == 2 * PAGE
    store.start_write(passing, 0, filled(PAGE)).wait()
    store.close()


def test_a_deleted_file(store: DiskStore, tmp_path: Path) -> None:
    region = written(store)
    store.path.unlink()
    for start in (store.start_read, store.start_write):
        with pytest.raises(OffloadError, match=r"states: 'blocks.0 masters'.*file was deleted"):
            start(region, 0, aligned(32 * PAGE)).wait()
    store.close()
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("verifies", [True, False])
def test_a_damaged_page(verifies: bool, tmp_path: Path) -> None:
    keys = {"block_size": 4 * PAGE, "verify_checksums": verifies}
    config = load_config({"train_batch_size": 1, "aio": keys})
    store = DiskStore(tmp_path, config.aio)
    region = store.allocate("blocks.0 masters", 30 * PAGE + 100)
    store.start_write(region, 0, filled(30 * PAGE + 100)).wait()
    buffer = aligned(30 * PAGE + 100)
    store.start_read(region, 0, buffer).wait()
    for place in (9 * PAGE + 17, 30 * PAGE + 99):
        with open(store.path, "r+b") as file:
            file.seek(region.extent.start + place)
            before = file.read(1)
            file.seek(region.extent.start + place)
            file.write(bytes([before[0] ^ 1]))
        request = store.start_read(region, 0, buffer)
        if verifies:
            with pytest.raises(OffloadError) as caught:
                request.wait()
            told = str(caught.value)
            assert str(store.path) in told and "'blocks.0 masters' is damaged" in told
            assert f"at byte {place - place % (2 * PAGE)} of it" in told
        else:
            request.wait()
            assert not buffer.equal(filled(30 * PAGE + 100))
        store.start_write(region, 0, filled(30 * PAGE + 100)).wait()
        store.start_read(region, 0, buffer).wait()
    store.close()


def test_an_error_that_nobody_waited_for_is_logged_at_the_end(
    store: DiskStore, tmp_path: Path
) -> None:
    region = written(store)
    os.truncate(store.path, 0)
    store.start_write(region, 0, aligned(PAGE))
    with pytest.raises(OffloadError, match="truncated to 0 bytes"):
        store.close()
    assert files_under(tmp_path) == []


def test_a_foreign_file_is_kept_and_reported(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = store.path.with_name("notes")
    stranger.write_text("mine")
    store.close()
    assert files_under(tmp_path) == [stranger.parent, stranger]
    assert f"{stranger.parent} cannot be removed" in caplog.text


def test_a_full_disk_raises_before_anything_is_written(store: DiskStore, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(OffloadError) as caught:
        store.allocate("blocks.0 masters", 1 << 60)
    told = str(caught.value)
    assert f"{1 << 60} bytes are needed" in told and "are free" in told
    assert str(tmp_path) in told and "nvme_path" in told
    assert abs(int(told.split(" are free")[0].split()[-1]) - free) < 1 << 32
    assert store.path.stat().st_size == 0
    written(store)
    store.close()


def test_an_impossible_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"file/in cannot hold .*Not a directory.*nvme_path"):
        DiskStore(tmp_path / "file" / "in")


@pytest.mark.slow
def test_limits_of_the_system_and_forks(tmp_path: Path) -> None:
    out = output_of(
        f"""
        store = DiskStore({str(tmp_path)!r}, Aio(block_size=PAGE))
        region = store.allocate("small", 64 * PAGE)
        buffer = aligned(64 * PAGE)
        other = DiskStore({str(tmp_path)!r})
        child = os.fork()
        if not child:
            try:
                store.start_read(region, 0, buffer)
            except UsageError as error:
                print(error, flush=True)
            other.close()
            sys.exit()  # which ends what was not closed
        assert os.waitpid(child, 0)[1] == 0
        assert store.path.exists() and other.path.exists()
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PAGE, most))
        store.start_read(region, 0, buffer).wait()
        for attempt in (
            lambda: store.allocate("large", PAGE),
            lambda: store.start_write(region, 0, buffer).wait(),
        ):
            try:
                attempt()
            except OffloadError as error:
                print(error, flush=True)
        store.start_write(region, 0, buffer[: 10 * PAGE]).wait()
        assert store.nbytes == os.stat(store.path).st_size == 64 * PAGE
        store.start_write(region, 0, buffer)  # and nobody waits
        """
    )
    forked, reserving, writing, logged, *_ = out.splitlines()
    assert "only the process that opened a store may use it" in forked
    assert "no room for large" in reserving and "ulimit -f" in reserving
    assert "states: 'small'" in writing and "cannot be written: File too large" in writing
    assert "and was not waited for" in logged and "File too large" in logged
    assert files_under(tmp_path) == []


def mounting() -> list[str]:
    """Return the words that start a process with its own mounts; empty if that is not allowed."""
    for flags in (["-m"], ["-U", "-r", "-m"]):
        prefix = ["unshare", *flags]
        trial = [*prefix, "mount", "-t", "tmpfs", "none", "/mnt"]
        if shutil.which("unshare") and not subprocess.run(trial, capture_output=True).returncode:
            return prefix
    return []


@pytest.mark.slow
def test_a_full_disk_and_one_without_direct_transfers(tmp_path: Path) -> None:
    if not (prefix := mounting()):
        pytest.skip("nothing can be mounted here")
    full, cached = tmp_path / "full", tmp_path / "cached"
    full.mkdir()
    cached.mkdir()
    out = output_of(
        f"""
        import subprocess
        mount = ["mount", "none", "-t"]
        subprocess.run([*mount, "tmpfs", "-o", "size=1m", {str(full)!r}], check=True)
        subprocess.run([*mount, "ramfs", {str(cached)!r}], check=True)
        store = DiskStore({str(full)!r})
        region = store.allocate("first", 200 * PAGE)
        try:
            store.allocate("second", 200 * PAGE)
        except OffloadError as error:
            print(error)
        store.start_write(region, 0, aligned(200 * PAGE)).wait()
        for _ in range(2):
            store = DiskStore({str(cached)!r}, Aio(block_size=PAGE))
            region = store.allocate("it", 10 * PAGE + 5)
            buffer, again = aligned(10 * PAGE + 5).fill_(7), aligned(10 * PAGE + 5)
            store.start_write(region, 0, buffer).wait()
            store.start_read(region, 0, again).wait()
            assert again.equal(buffer)
            store.close()
        """,
        *prefix,
    )
    assert f"no room for second on the disk of {full}: 819200 bytes are needed" in out
    assert (
        out.count(f"the file system of {cached} does not support direct I/O") == 2
    )  # once per store


@pytest.mark.slow
def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    process = started(
        f"""
        store = DiskStore({str(tmp_path)!r})
        store.start_write(store.allocate("it", 64 * PAGE), 0, aligned(64 * PAGE)).wait()
        print(store.path, flush=True)
        sys.stdin.read()
        """
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.stat().st_size == 64 * PAGE
    stranger = tmp_path / "hadal-elsewhere-1-00000000"
    stranger.mkdir()
    DiskStore(tmp_path).close()
    assert path.exists()  # it lives
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    (path.parent / "lock").rename(path.parent / "lock.old")
    with pytest.raises(OSError):
        path.parent.rmdir()
    DiskStore(tmp_path).close()
    assert path.exists()  # no lock, no proof
    (path.parent / "lock.old").rename(path.parent / "lock")
    store = DiskStore(tmp_path)
    assert not path.parent.exists()
    assert files_under(tmp_path) == [
        stranger,
        *sorted([store.path.parent, *store.path.parent.iterdir()]),
    ]
    store.close()
    assert files_under(tmp_path) == [stranger]


# ---- checksums -----------------------------------------------------------------------------------


def verified(stage: int, dtype: str, path: str) -> dict[str, Any]:
    config = config_of(stage, dtype, "nvme", "nvme" if stage == 3 else None, path)
    return {**config, "aio": {"verify_checksums": True, "block_size": 20_000}}


@on_ranks(1)
def test_a_damaged_page_is_never_trained_with(tmp_path: Path) -> None:
    with small_blocks():
        for dtype in ("bf16", "fp32"):
            plain = trained(config_of(3, dtype, None, None, tmp_path), 3)
            losses, state = trained(verified(3, dtype, tmp_path), 3)
            assert losses == plain[0]
            assert all(map(torch.equal, state, plain[1]))
        engine, *_ = hadal.initialize(model=model_of(), config=verified(2, "fp32", tmp_path))
        train(engine, 1)
        (file,) = Path(tmp_path).rglob("states")
        whole = bytearray(file.read_bytes())
        for place in range(100, len(whole), 4096):
            whole[place] ^= 1
        with open(file, "r+b") as damaged:
            damaged.write(whole)
        with pytest.raises(OffloadError, match=r"states: 'the .*' is damaged at byte"):
            train(engine, 1, first=1)
        engine.destroy()
