"""Names in pickles of others: what loading would run, found without running it."""

from __future__ import annotations

import ast
import builtins
import bz2
import collections
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from checkpoint.deepspeed_cases import CASES, unpack
from hadal.checkpoint.scanning import scan_all, scan_file
from hadal.cli.main import main
from hadal.errors import CheckpointError, UsageError


class Evil:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made

    def __call__(self) -> None:
        """A pickler wants something callable."""


class Own:
    """A class of the program, which a loader would need."""


def scanned(path: Path, data: bytes) -> dict[str, str]:
    path.write_bytes(data)
    scan = scan_file(path)
    assert scan is not None
    return {one.name: one.verdict for one in scan.findings}


CALLS = [
    (os.system, ("touch {mark}",), "posix.system"),
    (subprocess.check_output, (["touch", "{mark}"],), "subprocess.check_output"),
    (eval, ("open('{mark}', 'w')",), "builtins.eval"),
    (exec, ("open('{mark}', 'w')",), "builtins.exec"),
    (builtins.__import__, ("this",), "builtins.__import__"),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("number", range(5))
def test_a_call_is_named_and_not_made(number: int, protocol: int, tmp_path: Path) -> None:
    function, arguments, name = CALLS[number]
    mark = tmp_path / "mark"
    text = repr(arguments).replace("{mark}", str(mark))
    data = pickle.dumps({"weights": [Evil(function, *ast.literal_eval(text))]}, protocol=protocol)
    old = name.replace("builtins", "__builtin__").replace("subprocess", "commands")  # Python 2's
    path = tmp_path / "model.pkl"
    assert scanned(path, data) in ({name: "dangerous"}, {old: "dangerous"})
    assert main(["checkpoint", "scan", str(path)]) == 1
    assert not mark.exists()


# Opcodes by hand: what no pickler writes, but every unpickler runs.
BY_HAND = {
    "a computed module": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x93\x8c\x04trueR.",
    "a name out of the memo": (
        b"\x80\x04\x8c\x06system\x940\x8c\x05posix\x94h\x00\x93\x8c\x04true\x85R."
    ),
    "INST": b"(S'true'\niposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\nS'true'\no.",
    "a name of another line": b"cposix\nsystem\n(S'true'\ntR.",
    "DUP": b"\x80\x04\x8c\x05posix2\x8c\x06system\x93\x8c\x04true\x85R.",
    "before the end is cut": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R",
    "POP": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R0N.",
    "NEWOBJ": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85\x81.",
}


@pytest.mark.parametrize("way", BY_HAND)
def test_opcodes_that_no_pickler_writes(way: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(BY_HAND[way])
    scan = scan_file(path)
    assert scan is not None and not scan.is_harmless
    assert any("system" in one.name for one in scan.findings), scan
    assert bool(scan.faults) == ("cut" in way)


def test_a_name_that_is_computed_is_dangerous(tmp_path: Path) -> None:
    """A module whose name comes out of a call."""
    inner = b"\x8c\x08builtins\x8c\x03str\x93\x8c\x05posix\x85R"
    data = b"\x80\x04" + inner + b"\x8c\x06system\x93\x8c\x04true\x85R."
    assert "dangerous" in scanned(tmp_path / "a.pkl", data).values()
    data = pickle.dumps(Evil(Evil(getattr, "a", "upper")))
    assert "dangerous" in scanned(tmp_path / "b.pkl", data).values()


HARMLESS: list[Any] = [
    {"state_dict": torch.nn.Linear(2, 3).state_dict(), "args": Namespace(lr=1e-3)},
    collections.OrderedDict(a=torch.ones(2).bfloat16(), b=torch.nn.Parameter(torch.ones(1))),
    [np.arange(3), np.float64(2.5), Path("a"), {1, 2}, b"x", 1 + 2j, torch.float16],
    torch.Size([2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HARMLESS)))
@pytest.mark.parametrize("is_zip", [True, False])
def test_state_of_a_training_is_harmless(number: int, is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(HARMLESS[number], path, _use_new_zipfile_serialization=is_zip)
    scan = scan_file(path)
    assert scan is not None
    assert scan.faults == []
    assert [one for one in scan.findings if one.verdict != "harmless"] == []
    assert scan.is_harmless


@pytest.mark.parametrize(
    "case", ["stage2_bf16_world2", "stage3_fp16_world2", "universal2_bf16_world2"]
)
def test_checkpoints_of_deepspeed_are_harmless(case: str, tmp_path: Path) -> None:
    assert case in CASES
    unpack(case, tmp_path)
    scans = scan_all(tmp_path)
    assert len(scans) > 1
    assert [scan for scan in scans if not scan.is_harmless] == []


def test_what_hides_in_archives_and_folders_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = pickle.dumps(Evil(os.system, "true"))
    torch.save({"a": torch.ones(2), "b": Evil(os.system, "true")}, tmp_path / "a.pt")
    torch.save(
        {"b": Evil(os.system, "true")}, tmp_path / "b.bin", _use_new_zipfile_serialization=False
    )
    np.save(tmp_path / "c.npy", np.array([Evil(os.system, "true")], dtype=object))
    np.savez(tmp_path / "d.npz", plain=np.ones(2), odd=np.array([Evil(os.system, "x")], object))
    (tmp_path / "e").write_bytes(evil)  # no suffix
    (tmp_path / "f.pkl").write_bytes(pickle.dumps([1, 2]) + evil)  # the second of two
    with zipfile.ZipFile(tmp_path / "g.zip", "w") as archive:
        archive.writestr("x/y.whatever", evil)
    inner = tmp_path / "far" / "away"
    inner.mkdir(parents=True)
    (inner / "h.pkl").symlink_to(tmp_path / "e")
    (tmp_path / "far" / "back").symlink_to(tmp_path)  # a loop
    np.save(tmp_path / "harmless.npy", np.ones(3))
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "weights.bin").write_bytes(bytes(range(1, 200)))
    (tmp_path / "own.pkl").write_bytes(pickle.dumps(Own()))
    assert main(["checkpoint", "scan", str(tmp_path), "--json"]) == 1
    found = {Path(one["path"]).name: one for one in json.loads(capsys.readouterr().out)}
    evils = ["a.pt", "b.bin", "c.npy", "d.npz", "e", "f.pkl", "g.zip"]
    assert sorted(found) == sorted([*evils, "own.pkl"])
    for name in evils:
        assert {"name": "posix.system", "verdict": "dangerous"} in found[name]["findings"]
    assert [one["verdict"] for one in found["own.pkl"]["findings"]] == ["unknown"]
    assert main(["checkpoint", "scan", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "posix.system" in shown
    assert "8 files with pickles, 0 of them known to be harmless" in shown


def test_the_command_says_what_is_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert main(["checkpoint", "scan", str(tmp_path / "w.pt"), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "torch._utils._rebuild_tensor_v2" in shown
    assert "1 file with pickles, 1 of them known to be harmless" in shown
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(CheckpointError, match="neither a pickle nor an archive"):
        scan_all(tmp_path / "x.txt")
    with pytest.raises(CheckpointError, match="does not exist"):
        scan_all(tmp_path / "nothing")


def tar_of(data: bytes) -> bytes:
    """A file in torch's oldest format."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("storages")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "pack", "told"),
    [
        ("old.pt", tar_of, "old.pt is a tar archive and may hide anything"),
        ("pytorch_model.bin", tar_of, "is a tar archive"),
        ("model.joblib", zlib.compress, "model.joblib is compressed (zlib) and may hide anything"),
        ("model.joblib", gzip.compress, "is compressed (gzip)"),
        ("frame.pkl.gz", gzip.compress, "frame.pkl.gz is compressed (gzip)"),
        ("frame.pkl.xz", lzma.compress, "is compressed (xz)"),
        ("a.PICKLE.BZ2", bz2.compress, "is compressed (bzip2)"),
        ("a.pkl", lambda data: b"\0" + data, "a.pkl is no whole pickle"),
    ],
)
def test_a_pickle_that_cannot_be_read_is_no_all_clear(
    name: str, pack: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(pack(pickle.dumps(Evil(os.system, "id"))))
    (scan,) = scan_all(tmp_path)
    assert any(told in fault for fault in scan.faults)
    assert main(["checkpoint", "scan", str(tmp_path)]) == 1
    assert told in capsys.readouterr().out


def test_other_data_is_left_out(tmp_path: Path) -> None:
    """Tokens in a .bin file, and texts in .data or .p, are no pickles that were damaged."""
    (tmp_path / "tokens.bin").write_bytes(bytes(range(100)))
    (tmp_path / "notes.data").write_text("x^2 + y^2")
    (tmp_path / "a.p").write_text("text")
    (tmp_path / "empty.pt").touch()
    assert scan_all(tmp_path) == []


def test_a_damaged_archive_is_no_all_clear(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[: len(data) // 2])
    scan = scan_file(tmp_path / "w.pt")
    assert scan is not None
    assert not scan.is_harmless
    assert "archive cannot be read" in scan.faults[0]


@settings(max_examples=60)
@example(b"\x93.")  # a whole pickle, of an import without a name
@given(st.binary(max_size=200))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a.pkl"
    for head in (b"", b"\x80\x04"):
        path.write_bytes(head + data)
        scan = scan_file(path)
        assert scan is None or scan.faults or scan.pickles
        assert data != b"\x93." or scan.faults


def test_without_picklescan_its_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    monkeypatch.setitem(sys.modules, "picklescan.scanner", None)
    with pytest.raises(UsageError, match=r'pip install "hadal-train\[scan\]"'):
        scan_all(tmp_path)
