"""Scan of other people's files for pickles, and of pickles for code that loading would run.

Nothing is unpickled. picklescan finds the globals of a pickle and knows the dangerous ones. A
global is *harmless* if it is made of data alone, and *unknown* if it is neither: loading the file
without restrictions means trusting it. Whatever cannot be read is a fault, as it may hide anything.
"""

from __future__ import annotations

import io
import logging
import os
import pickletools
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hadal.checkpoint.deepspeed.pickles import STAND_INS
from hadal.errors import CheckpointError, needed

_ONLY_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
_SUFFIXES = (*_ONLY_PICKLES, ".bin", ".p", ".data")
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst", ".lz4")
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}
_TAR, _TAR_PLACE = b"ustar", 257
_ZIP, _NUMPY, _PICKLE = b"PK\x03\x04", b"\x93NUMPY", b"\x80"
# An entry of a zip file is looked at as a whole if it may be a pickle.
_ENTRY_LIMIT = 1 << 30
_LEGACY = 5
"""Pickles at the beginning of a file of torch.save before it wrote zip files."""
_HARMLESS_BUILTINS = frozenset(
    (
        *("set", "frozenset", "slice", "range", "complex", "list", "dict", "tuple", "int", "float"),
        *("bool", "str", "bytes", "bytearray", "object"),
    )
)
_HARMLESS = frozenset(
    (
        *("_codecs.encode", "copyreg._reconstructor", "copy_reg._reconstructor"),
        *("collections.defaultdict", "collections.Counter", "collections.deque"),
        *("datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta"),
        *("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"),
        *("torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter"),
        *("torch.serialization._get_layout", "torch._tensor._rebuild_from_type_v2"),
    )
)
"""Globals that are made of data alone, besides those of picklescan and `STAND_INS`."""


@dataclass(frozen=True, slots=True)
class FoundGlobal:
    """A global of a pickle."""

    name: str
    verdict: str
    """"harmless", "unknown" or "dangerous"."""


@dataclass(slots=True)
class Scan:
    """The pickles of one file."""

    path: str
    pickles: int = 0
    findings: list[FoundGlobal] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Parts that could not be read, and so may hide anything."""

    @property
    def is_harmless(self) -> bool:
        """True if everything was read, and nothing in it is more than data."""
        return not self.faults and all(one.verdict == "harmless" for one in self.findings)


def scan_all(path: Path, tell: Callable[[Path], None] = lambda path: None) -> list[Scan]:
    """Scan a file, or the files below a folder that contain pickles; links are followed.

    `tell` is called before each file.

    Raises:
        CheckpointError: there is no such file, or one that is given by name has no pickle in it.
        UsageError: picklescan is not installed.
    """
    _scanner()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a file or a directory")
    if not path.is_dir():
        scan = scan_file(path)
        if scan is None:
            raise CheckpointError(f"{path} is neither a pickle nor an archive that may contain one")
        return [scan]
    scans = []
    for file in files_below(path):
        tell(file)
        scan = scan_file(file)
        if scan is not None:
            scans.append(scan)
    return scans


def files_below(folder: Path) -> list[Path]:
    """Return the regular files below a folder, each once."""
    found: dict[tuple[int, int], Path] = {}
    seen: set[tuple[int, int]] = set()
    for home, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(home)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add((status.st_dev, status.st_ino))
        for path in (Path(home, name) for name in sorted(names)):
            if path.is_file():
                status = path.stat()
                found.setdefault((status.st_dev, status.st_ino), path)
    return sorted(found.values())


def scan_file(path: Path) -> Scan | None:
    """Return the pickles of a file; None if it is of a kind that has none."""
    scan = Scan(str(path))
    try:
        with path.open("rb") as file:
            if file.read(len(_ZIP)) == _ZIP:
                _scan_zip(file, scan)
            else:
                file.seek(0)
                _scan_stream(file, scan, path.name)
    except OSError as error:
        scan.faults.append(f"it cannot be read: {error.strerror or error}")
    return scan if scan.pickles or scan.faults else None


def _scan_zip(file: BinaryIO, scan: Scan) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                _scan_entry(archive, entry, scan)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        scan.faults.append(f"the archive cannot be read: {error}")


def _scan_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, scan: Scan) -> None:
    name = entry.filename
    with archive.open(entry) as content:
        head = content.read(8)
    is_pickle = head.startswith(_PICKLE) and name.rsplit("/", 2)[-2:-1] != ["data"]
    if not (is_pickle or head.startswith(_NUMPY) or name.lower().endswith(_SUFFIXES)):
        return
    if entry.file_size > _ENTRY_LIMIT:
        scan.faults.append(f"{name} is too large for a pickle: {entry.file_size} bytes")
        return
    _scan_stream(io.BytesIO(archive.read(entry)), scan, name)


def _scan_stream(file: BinaryIO, scan: Scan, where: str) -> None:
    """Scan consecutive pickles; torch's older files have raw tensors behind them."""
    head = file.read(_TAR_PLACE + len(_TAR))
    file.seek(0)
    name = _unpacked(where)
    if head.startswith(_NUMPY):
        if not _has_objects(file):
            return
        name, head = ".pkl", _PICKLE
    elif not (head.startswith(_PICKLE) or name.endswith(_SUFFIXES)):
        return
    if not head:
        return
    packing = _packing_of(head) if name.endswith(_SUFFIXES) else ""
    if packing:
        scan.faults.append(
            f"{where} is {packing} and may hide anything; unpack it, and scan what it contains"
        )
        return
    place = file.tell()
    whole, fault = _read_pickles(file)
    file.seek(place)
    found, faults = _globals_of(file, where)
    # Other files may begin with the same byte, such as safetensors.
    is_meant = name.endswith(_SUFFIXES if head.startswith(_PICKLE) else _ONLY_PICKLES)
    if not (whole or found or is_meant):
        return
    scan.pickles += max(whole, 1)
    scan.faults += faults
    if fault and whole < _LEGACY:
        scan.faults.append(f"{where} is no whole pickle: {fault}")
    known = {one.name for one in scan.findings}
    for one in found:
        if one.name not in known:
            scan.findings.append(one)


def _has_objects(file: BinaryIO) -> bool:
    """Go to the elements of a numpy file; return whether they are objects, which are a pickle."""
    try:
        of = np.lib.format
        is_first = of.read_magic(file) == (1, 0)
        read = of.read_array_header_1_0 if is_first else of.read_array_header_2_0
        return bool(read(file)[2].hasobject)
    except ValueError:
        return True


def _read_pickles(file: BinaryIO) -> tuple[int, str]:
    """Return the number of whole pickles at the start of a file, and the fault of what follows."""
    whole = 0
    while file.read(1):
        file.seek(-1, os.SEEK_CUR)
        try:
            for _ in pickletools.genops(file):
                pass
        except Exception as error:  # damaged bytes may raise any kind
            return whole, str(error).split("\n")[0]
        whole += 1
    return whole, ""


def _scanner() -> Callable[[BinaryIO, str], Any]:
    scanner = needed("picklescan.scanner", "hadal checkpoint scan", '"hadal-train[scan]"')
    logging.getLogger("picklescan").setLevel(logging.CRITICAL + 1)
    found: Callable[[BinaryIO, str], Any] = scanner.scan_pickle_bytes
    return found


def _globals_of(file: BinaryIO, where: str) -> tuple[list[FoundGlobal], list[str]]:
    """Return what a file's pickles name, and the fault of one that picklescan gives up on."""
    try:
        found = [_judged(one) for one in _scanner()(file, where).globals]
    except ValueError as error:  # an import whose names are not on the stack as strings
        return [], [f"{where} names what cannot be told: {error}"]
    return sorted(found, key=lambda one: one.name), []


def _judged(found: Any) -> FoundGlobal:
    """Return picklescan's `Global` with a verdict."""
    module, name = found.module, found.name
    full = f"{module}.{name}"
    if module in ("builtins", "__builtin__"):
        return FoundGlobal(full, "harmless" if name in _HARMLESS_BUILTINS else "dangerous")
    is_harmless = full in _HARMLESS or full in STAND_INS or found.safety.value == "innocuous"
    if module in ("torch", "torch._utils", "torch.storage", "torch.cuda"):
        # dtypes, storages, and the functions that make tensors of them.
        is_harmless |= name.startswith("_rebuild_") or name.endswith("Storage") or _is_dtype(name)
    verdict = "dangerous" if found.safety.value == "dangerous" else "unknown"
    return FoundGlobal(full, "harmless" if is_harmless else verdict)


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _unpacked(name: str) -> str:
    """Return a file's name in lower case, without the suffix of a compression."""
    lower = name.lower()
    return next((lower.removesuffix(s) for s in _PACKED_SUFFIXES if lower.endswith(s)), lower)


def _packing_of(head: bytes) -> str:
    """Return what a file is packed in, by its first bytes; "" if it is not.

    Loaders unpack such files: torch its oldest format, a tar archive, and joblib compressed ones.
    """
    if head[_TAR_PLACE:].startswith(_TAR):
        return "a tar archive"
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            return f"compressed ({name})"
    with suppress(zlib.error):  # it has no magic bytes
        return "compressed (zlib)" if zlib.decompressobj().decompress(head) else ""
    return ""
