"""Scan of other people's files for pickles, and of pickles for code that loading would run.

Nothing is unpickled. A global is *harmless* if Hadal's or torch's restricted unpickler makes it of
data alone, *dangerous* if it runs commands or code, and *unknown* otherwise: loading the file
without restrictions means trusting it.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hadal.checkpoint.pickled import COMPUTED, Names, pickles_in
from hadal.errors import CheckpointError

_ONLY_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
_SUFFIXES = (*_ONLY_PICKLES, ".bin", ".p", ".data")
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst", ".lz4")
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_TAR, _TAR_PLACE = b"ustar", 257
_ZIP, _NUMPY, _PICKLE = b"PK\x03\x04", b"\x93NUMPY", b"\x80"
_NUMPY_LIMIT = 1 << 16
_OBJECTS = re.compile(rb"['|<>=]O['\d]")
# An entry of a zip file is looked at as a whole if it may be a pickle.
_ENTRY_LIMIT = 1 << 30
_LEGACY = 5
"""Pickles at the beginning of a file of torch.save before it wrote zip files."""

_HARMLESS_MODULES = frozenset({"torch._utils", "torch.storage"})


def _names(module: str, names: str) -> set[str]:
    """Return the full names of a module's globals; `names` separates them with blanks."""
    return {f"{module}.{name}" for name in names.split()}


_NUMPY_CORES = ("numpy.core", "numpy._core")
HARMLESS = frozenset[str]().union(
    _names("builtins", "set frozenset slice range complex list dict tuple int float bool str"),
    _names("builtins", "bytes bytearray object"),
    _names("__builtin__", "set frozenset slice complex bytearray"),
    ("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode"),
    ("copyreg._reconstructor", "copy_reg._reconstructor"),
    _names("collections", "OrderedDict defaultdict Counter deque"),
    _names("datetime", "datetime date time timedelta timezone"),
    _names("pathlib", "PosixPath WindowsPath PurePosixPath Path"),
    _names("pathlib._local", "PosixPath WindowsPath PurePosixPath"),
    ("decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
    *(_names(f"{core}.multiarray", "_reconstruct scalar _frombuffer") for core in _NUMPY_CORES),
    *(_names(f"{core}.numeric", "_frombuffer") for core in _NUMPY_CORES),
    _names("numpy", "ndarray dtype float64 float32 int64 int32"),
    _names("numpy.dtypes", "Float64DType Float32DType Int64DType Int32DType BoolDType"),
    _names("torch", "Tensor Size device Generator dtype"),
    _names("torch.nn.parameter", "Parameter Buffer"),
    ("torch.serialization._get_layout", "torch._tensor._rebuild_from_type_v2"),
    _names("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"),
    ("deepspeed.runtime.zero.config.ZeroStageEnum",),
    ("deepspeed.utils.tensor_fragment.fragment_address",),
)
"""Globals that are made of data alone."""
_TORCH_WORDS = ("Storage", "Tensor")
_TORCH_DTYPES = _names(
    "torch",
    "float64 float32 float16 bfloat16 double float half bool uint8 int8 int16 int32 int64 short int"
    " long complex64 complex128 uint16 uint32 uint64 float8_e4m3fn float8_e5m2",
)

_DANGEROUS_MODULES = frozenset(
    (
        *("os", "posix", "nt", "posixpath", "ntpath", "subprocess", "_posixsubprocess", "pty"),
        *("sys", "runpy", "code", "codeop", "importlib", "imp", "pkgutil", "pip", "ensurepip"),
        *("socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib"),
        *("shutil", "tempfile", "glob", "fileinput", "webbrowser", "antigravity", "ctypes"),
        *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
        *("multiprocessing", "threading", "_thread", "concurrent", "asyncio", "signal", "platform"),
        *("pdb", "bdb", "cProfile", "profile", "timeit", "trace", "doctest", "pydoc", "idlelib"),
        *("operator", "_operator", "functools", "_functools", "inspect", "gc", "types", "site"),
        *("commands", "popen2", "lib2to3", "zipimport", "venv", "unittest", "pytest", "_ctypes"),
        *("distutils", "setuptools", "numpy.f2py", "numpy.testing", "numpy.distutils"),
        *("torch.hub", "torch.utils", "torch.jit", "torch.fx", "torch._dynamo", "torch._inductor"),
        *("torch.distributed", "torch.package", "torch.testing", "torch.multiprocessing"),
    )
)
_DANGEROUS_BUILTINS = (
    "eval exec execfile compile __import__ open file getattr setattr delattr globals locals vars"
    " apply input breakpoint map filter type super classmethod exit quit help memoryview"
)
_DANGEROUS = frozenset[str]().union(
    *(_names(module, _DANGEROUS_BUILTINS) for module in ("builtins", "__builtin__")),
    _names("torch", "load save"),
    ("torch.serialization.load", "torch.storage._load_from_bytes"),
    ("torch._utils._import_dotted_name", "copyreg.add_extension"),
    _names("numpy", "load loadtxt fromfile save"),
    (COMPUTED,),
)
"""Globals that run code, reach files or the network, or find other names; so do the modules."""

HARMLESS_, UNKNOWN_, DANGEROUS_ = "harmless", "unknown", "dangerous"


@dataclass(slots=True)
class FoundGlobal:
    """A global of a pickle."""

    name: str
    verdict: str
    """"harmless", "unknown" or "dangerous"."""
    is_called: bool
    """True if it is called, or an object of it is made; else it is only looked up."""


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
        return not self.faults and all(one.verdict == HARMLESS_ for one in self.findings)

    def take(self, names: Names, where: str) -> None:
        """Add the names of one pickle."""
        self.pickles += 1
        if names.fault:
            self.faults.append(f"{where} is no whole pickle: {names.fault}")
        known = {one.name: one for one in self.findings}
        for name in (*names.imported, *names.called):
            is_called = name in names.called
            if name not in known:
                known[name] = FoundGlobal(name, verdict_of(name), is_called)
                self.findings.append(known[name])
            known[name].is_called |= is_called


def verdict_of(name: str) -> str:
    """Return whether a global is "harmless", "unknown" or "dangerous"."""
    if name in _DANGEROUS:
        return DANGEROUS_
    if name in HARMLESS or name in _TORCH_DTYPES:
        return HARMLESS_
    module, _, last = name.rpartition(".")
    if module in _HARMLESS_MODULES and (last.startswith("_rebuild") or last.endswith("Storage")):
        return HARMLESS_
    if module in ("torch", "torch.cuda") and last.endswith(_TORCH_WORDS):
        return HARMLESS_
    parts = name.split(".")
    above = {".".join(parts[:count]) for count in range(1, len(parts))}
    return DANGEROUS_ if above & _DANGEROUS_MODULES else UNKNOWN_


def scan_all(path: Path, tell: Callable[[Path], None] = lambda path: None) -> list[Scan]:
    """Scan a file, or the files below a folder that contain pickles; links are followed.

    `tell` is called before each file.

    Raises:
        CheckpointError: there is no such file, or one that is given by name has no pickle in it.
    """
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
            head = file.read(8)
            file.seek(0)
            if head.startswith(_ZIP):
                _scan_zip(file, scan)
            elif head.startswith(_NUMPY):
                _scan_array(file, scan, path.name)
            elif head.startswith(_PICKLE) or _unpacked(path.name).endswith(_SUFFIXES):
                _scan_stream(file, scan, path.name)
    except OSError as error:
        scan.faults.append(f"it cannot be read: {error.strerror or error}")
    return scan if scan.pickles or scan.faults else None


def _scan_stream(file: BinaryIO, scan: Scan, where: str) -> None:
    """Scan consecutive pickles; torch's older files have raw tensors behind them."""
    place, name = file.tell(), _unpacked(where)
    head = file.read(_TAR_PLACE + len(_TAR))
    file.seek(place)
    packed = _packing_of(head)
    if packed and name.endswith(_SUFFIXES):
        scan.faults.append(
            f"{where} is {packed} and may hide anything; unpack it, and scan what it contains"
        )
        return
    is_meant = name.endswith(_SUFFIXES if head.startswith(_PICKLE) else _ONLY_PICKLES)
    for number, names in enumerate(pickles_in(file)):
        # Other files may begin with the same byte, such as safetensors.
        is_other = not is_meant and not number and not names.is_whole and not names.imported
        if is_other or (number >= _LEGACY and names.fault and not names.imported):
            return  # no pickle: other data
        scan.take(names, where if not number else f"pickle {number} of {where}")


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


def _scan_array(file: BinaryIO, scan: Scan, where: str) -> None:
    """Scan a file of numpy's, which holds a pickle if its elements are objects."""
    head = file.read(12)
    width = 2 if head[6:7] == b"\x01" else 4  # of the header's length
    file.seek(8 + width)
    header = file.read(min(int.from_bytes(head[8 : 8 + width], "little"), _NUMPY_LIMIT))
    if _OBJECTS.search(header):
        _scan_stream(file, scan, where)


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
    found = io.BytesIO(archive.read(entry))
    scan_one = _scan_array if head.startswith(_NUMPY) else _scan_stream
    scan_one(found, scan, name)
