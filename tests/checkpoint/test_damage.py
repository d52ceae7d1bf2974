"""Damaged files and failed saves: every rank raises with the file's name; nothing changes."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import TINY, assert_equal, engine_of, train
from hypothesis import given, strategies as st
from ranks import on_ranks

from checkpoint.listing import home_of
from hadal import comm
from hadal.checkpoint.folders import find
from hadal.checkpoint.index import read_index, write_index
from hadal.checkpoint.plain import decoded, encoded
from hadal.errors import CheckpointError

INDEX, ONE, TWO = "index.json", "rank_00000.safetensors", "rank_00001.safetensors"
CLIENT = "client_state.safetensors"


def refused(engine: Any, folder: str, named: str, tag: str | None = None) -> str:
    """Check that loading fails on this rank with the file's name, and changes nothing."""
    before, drawn = engine.state_dict(), torch.get_rng_state()
    steps = engine.global_steps
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, tag)
    assert named in str(caught.value), (named, str(caught.value))
    assert_equal(engine.state_dict(), before)
    assert engine.global_steps == steps
    assert torch.equal(torch.get_rng_state(), drawn)
    return str(caught.value)


def on_one(change: Callable[[], None]) -> None:
    """Do something on rank 0 while the other waits."""
    comm.barrier()
    if comm.get_rank() == 0:
        change()
    comm.barrier()


def harmed(data: bytes, found: random.Random) -> bytes:
    """Return the data with bits flipped, truncated, extended, or with a piece of other data."""
    place = found.randrange(len(data))
    match found.randrange(5):
        case 0:
            return data[:place]
        case 1:
            return data + bytes(found.randrange(1, 9))
        case 2:
            end = min(len(data), place + found.randrange(1, 64))
            piece = bytes(255 - byte for byte in data[place:end])
            return data[:place] + piece + data[end:]
        case 3:
            return data[:8] + data[:place][::-1] + b"~"
        case _:
            flipped = bytes([data[place] ^ 1 << found.randrange(8)])
            return data[:place] + flipped + data[place + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "times"), [(3, 90), (1, 40)])
@on_ranks(2, timeout=300)
def test_every_random_damage_is_found(tmp_path: Path, times: int, stage: int) -> None:
    """Save at stage 3 and load at another: by slices of buckets, or by parameters."""
    first = engine_of(3)
    train(first, range(1))
    zero = {"stage": stage, "reduce_bucket_size": 60 if stage == 3 else 10**6}
    engine = engine_of(stage, zero_optimization={**TINY, **zero})
    train(engine, range(1))
    first.save_checkpoint(tmp_path, client_state={"ema": torch.arange(20.0)})
    saved = first.state_dict()
    first.destroy()
    train(engine, range(1, 2))
    found = random.Random(11)
    tag = Path(tmp_path, "global_step1")
    paths = [
        tag / INDEX,
        home_of(tag) / ONE,
        home_of(tag) / TWO,
        home_of(tag) / CLIENT,
        Path(tmp_path, "latest"),
    ]
    for _ in range(times):
        path = found.choice(paths)
        data = path.read_bytes()
        damaged = harmed(data, found)
        on_one(lambda path=path, damaged=damaged: path.write_bytes(damaged))
        refused(engine, tmp_path, path.name)
        on_one(lambda path=path, data=data: path.write_bytes(data))
    _, client_state = engine.load_checkpoint(tmp_path)
    assert torch.equal(client_state["ema"], torch.arange(20.0))
    assert_equal(engine.state_dict(), saved)
    engine.destroy()


# ---- damage with a plan --------------------------------------------------------------------------


def swap(one: Path, other: Path) -> None:
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def reheaded(path: Path, **changes: Any) -> None:
    """Replace a file's header by one with other shapes, dtypes or counts."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = next(name for name in header if name.endswith("state.exp_avg"))
    header[name].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def resealed(folder: Path, **changes: Any) -> None:
    """Rewrite an index with changed values and a valid checksum."""
    content = read_index(folder)
    (folder / INDEX).unlink()
    with suppress(CheckpointError):  # it is read back at once, and may be refused
        write_index(folder, {**content, **changes})


def reparted(folder: Path, *keys: Any) -> None:
    """Rewrite an index with another value (the last of `keys`) in the part's description."""
    parts = read_index(folder)["parts"]
    *path, last, value = keys
    target = parts[0]
    for key in path:
        target = target[key]
    target[last] = value
    resealed(folder, parts=parts)


def linked(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def not_finite(path: Path) -> None:
    path.write_text(path.read_text().replace(": 1", ": NaN", 1))


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


SEALS = {ONE: [1, 2, 3, 4], TWO: [1, 2, 3, 4], CLIENT: [1, 2, 3, 4]}
CLIMBING = {"../" + ONE: [1, 2, 3, 4], TWO: [1, 2, 3, 4], CLIENT: [1, 2, 3, 4]}
OTHER = "global_step2"
# What is done to a checkpoint's folder, and the file that must be named.
PLANS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ranks swapped": (lambda tag: swap(home_of(tag) / ONE, home_of(tag) / TWO), ONE),
    "checkpoints swapped": (
        lambda tag: swap(home_of(tag) / TWO, home_of(tag.with_name(OTHER)) / TWO),
        TWO,
    ),
    "indices swapped": (lambda tag: swap(tag / INDEX, tag.with_name(OTHER) / INDEX), ONE),
    "shape": (lambda tag: reheaded(home_of(tag) / ONE, shape=[1, 1]), ONE),
    "dtype": (lambda tag: reheaded(home_of(tag) / TWO, dtype="I32"), TWO),
    "huge shape": (lambda tag: reheaded(home_of(tag) / ONE, shape=[1 << 62, 9]), ONE),
    "huge header": (lambda tag: huge_header(home_of(tag) / ONE), ONE),
    "missing": (lambda tag: (home_of(tag) / TWO).unlink(), TWO),
    "missing client": (lambda tag: (home_of(tag) / CLIENT).unlink(), CLIENT),
    "missing index": (lambda tag: (tag / INDEX).unlink(), INDEX),
    "not finite": (lambda tag: not_finite(tag / INDEX), INDEX),
    "deep": (lambda tag: (tag / INDEX).write_text("[" * 100_000), INDEX),
    "version": (lambda tag: (tag / INDEX).write_text('{"format": 10}'), "index.json has format 10"),
    "sealed: version": (lambda tag: resealed(tag, format=10), "index.json has format 10"),
    "sealed: world": (lambda tag: resealed(tag, world_size=10**30), "world_size"),
    "sealed: climbing": (lambda tag: resealed(tag, files=CLIMBING), INDEX),
    "sealed: sizes": (lambda tag: resealed(tag, files=SEALS), ONE),
    "sealed: negative": (lambda tag: resealed(tag, files={**SEALS, ONE: [-1] * 4}), INDEX),
    "sealed: scalars": (lambda tag: resealed(tag, scalars={"dict": [["x", 1]]}), INDEX),
    "sealed: parts": (lambda tag: resealed(tag, parts={"float": "inf"}), INDEX),
    "sealed: no parts": (lambda tag: resealed(tag, parts=[]), INDEX),
    "sealed: groups": (lambda tag: reparted(tag, "param_groups", 0, "options", [7]), INDEX),
    "sealed: bucket": (lambda tag: reparted(tag, "stretches", 0, 1, 1 << 40), INDEX),
    "sealed: count": (lambda tag: reparted(tag, "stretches", 0, 3, 0, 2, 1 << 62), INDEX),
    "sealed: rank": (lambda tag: reparted(tag, "stretches", 0, 3, 0, 0, 7), INDEX),
    "sealed: start": (lambda tag: reparted(tag, "stretches", 0, 3, 0, 1, 8), INDEX),
    "sealed: dtype": (lambda tag: reparted(tag, "stretches", 0, 2, "F16"), ONE),
    "sealed: kind": (lambda tag: reparted(tag, "stretches", 0, 0, "state.x"), "lacks 0.weight"),
    "sealed: shape": (lambda tag: reparted(tag, "buckets", 0, "slots", 0, 1, [1 << 62]), INDEX),
    "sealed: state": (lambda tag: reparted(tag, "state", 0, 1, {"step": {"scalar": 3}}), INDEX),
    "sealed: places": (lambda tag: reparted(tag, "ranks", [0, "../1"]), INDEX),
    "latest climbs": (lambda tag: (tag.parent / "latest").write_text("../outside"), "latest"),
    "latest is the parent": (lambda tag: (tag.parent / "latest").write_text(".."), "latest"),
    "latest is empty": (lambda tag: (tag.parent / "latest").write_text(""), "latest"),
    "latest is large": (lambda tag: (tag.parent / "latest").write_bytes(b"x" * 9999), "latest"),
    "latest is lost": (lambda tag: (tag.parent / "latest").write_text("global_step7"), "latest"),
    "link to another": (
        lambda tag: linked(home_of(tag) / ONE, home_of(tag.with_name(OTHER)) / ONE),
        ONE,
    ),
    "link to nothing": (lambda tag: linked(home_of(tag) / TWO, tag / "nothing"), TWO),
    "link to itself": (lambda tag: linked(home_of(tag) / TWO, home_of(tag) / TWO), TWO),
    "index links to nothing": (lambda tag: linked(tag / INDEX, tag / "nothing"), INDEX),
    "latest links to itself": (
        lambda tag: linked(tag.parent / "latest", tag.parent / "latest"),
        "latest",
    ),
    "pipe": (lambda tag: piped(home_of(tag) / TWO), TWO),
}


def test_a_link_shows_little_of_where_it_leads(tmp_path: Path) -> None:
    """Errors are logged, and a stranger's `latest` may lead to any file."""
    secret = tmp_path / "key"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/latest").symlink_to(secret)
    for content, shown in (
        ("-----BEGIN KEY-----\n" + 70 * "s", "'-----BEGIN KEY-----'... (90 characters)"),
        (100 * "s", f"'{60 * 's'}'... (100 characters)"),
        (300 * "s", f"'{60 * 's'}'... (300 characters)"),
    ):
        secret.write_text(content)
        with pytest.raises(CheckpointError) as caught:
            find(tmp_path / "home", None)
        assert shown in str(caught.value) and 61 * "s" not in str(caught.value)


@pytest.mark.fast_cells("headers")
@pytest.mark.parametrize("verifies", [True, False], ids=["all bytes", "headers"])
@on_ranks(2, timeout=200)
def test_planned_damage_is_found(tmp_path: Path, verifies: bool) -> None:
    engine = engine_of(1, checkpoint={"verify_checksums": verifies})
    home, kept = Path(tmp_path, "home"), Path(tmp_path, "kept")
    for tag in (OTHER, "global_step1"):
        train(engine, range(1))
        engine.save_checkpoint(home, tag, client_state={"w": torch.ones(3)})
    on_one(lambda: shutil.copytree(home, kept))
    for act, named in PLANS.values():
        on_one(lambda act=act: act(home / "global_step1"))
        refused(engine, str(home), named)
        on_one(lambda: anew(tmp_path))
    engine.load_checkpoint(home)
    engine.destroy()


def anew(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "kept":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(folder / "kept", folder / "home")


@on_ranks(2)
def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    """Without checksums a flipped bit in the weights goes undetected."""
    engine = engine_of(1, checkpoint={"verify_checksums": False})
    engine.save_checkpoint(tmp_path)
    path = home_of(Path(tmp_path, "global_step0")) / ONE
    data = path.read_bytes()
    on_one(lambda: path.write_bytes(data[:-1] + bytes([data[-1] ^ 1])))
    engine.load_checkpoint(tmp_path)
    strict = engine_of(1)
    refused(strict, tmp_path, ONE)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False)))
def test_an_index_reads_as_it_was_written(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder), {"content": encoded(content, "content")})
        assert decoded(read_index(Path(folder))["content"]) == content


# ---- saves that are refused ----------------------------------------------------------------------


def refuse(error: int, function: str, place: str, rank: int | None) -> Callable[..., Any]:
    real = getattr(os, function)

    def act(*args: Any, **options: Any) -> Any:
        if rank in (comm.get_rank(), None) and any(place in str(arg) for arg in args):
            raise OSError(error, os.strerror(error), str(args[0]))
        return real(*args, **options)

    return act


@pytest.mark.fast_cells("mkdir--None-rank 0: .* cannot be written: Read-only file system")
@pytest.mark.parametrize(
    ("function", "place", "rank", "named"),
    [
        ("limit", "", 1, r"rank 1: .*rank_00001.safetensors cannot be written: File too large"),
        ("mkdir", "", None, r"rank 0: .* cannot be written: Read-only file system"),
        (
            "replace",
            ".index.json",
            0,
            r"rank 0: .*index.json cannot be written: No space left on dev",
        ),
        ("replace", ".latest", 0, r"latest cannot be written: No space left on device"),
    ],
)
@on_ranks(2)
def test_a_refused_save_leaves_what_was_there(
    tmp_path: Path, function: str, place: str, rank: int | None, named: str
) -> None:
    """Fail a save: all ranks raise, the earlier checkpoint is kept, and the next save works.

    A limit on the size of files stands for a full disk.
    """
    engine = engine_of(2)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, "same")
    saved = engine.state_dict()
    train(engine, range(1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    patch = pytest.MonkeyPatch()
    if function == "limit":
        if comm.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    else:
        error = errno.EROFS if function == "mkdir" else errno.ENOSPC
        patch.setattr(os, function, refuse(error, function, place, rank))
    try:
        with pytest.raises(CheckpointError, match=named):
            engine.save_checkpoint(tmp_path, "same")
        if function != "limit":
            with pytest.raises(CheckpointError, match=named):
                engine.save_checkpoint(tmp_path, "new")
    finally:
        patch.undo()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    comm.barrier()
    assert Path(tmp_path, "latest").read_text() == "same"
    if place != ".latest":
        other = engine_of(2)
        other.load_checkpoint(tmp_path)
        assert_equal(other.state_dict(), saved)
    comm.barrier()
    engine.save_checkpoint(tmp_path, "next")
    assert not list(tmp_path.glob(".*"))
    assert Path(tmp_path, "latest").read_text() == "next"
