"""URLs (`s3://`, `gs://`, `az://` and others) as a `Storage`, through the package fsspec.

fsspec and its packages read credentials and timeouts from the environment and their configuration
files. A failed request is repeated, with exponential backoff.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

from hadal.checkpoint.storage import Chunk, RemotePath, StorageItem
from hadal.errors import CheckpointError
from hadal.offload.direct import BLOCK_NBYTES, Kept, kept_first

_T = TypeVar("_T")


class _ReplacedError(OSError):
    """An object was replaced while it was about to be removed."""


_log = logging.getLogger(__name__)
# Seconds before each further attempt, with a jitter of up to a half: ranks that were throttled
# together do not retry together.
PAUSES_S: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
_jitter = random.Random()
# Another attempt cannot succeed after these.
_FINAL = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    NotImplementedError,
    TypeError,
    ImportError,
    _ReplacedError,
)
# The number of bytes per request, and the number of concurrent requests.
_PART_NBYTES, _AT_ONCE = 1 << 23, 8
# The number of bytes that a short read fetches: the next one is often adjacent.
_WINDOW_NBYTES = 1 << 20
# The same for uploads, whose parts are held in memory; S3 accepts 10,000 parts per object.
_UPLOAD_NBYTES, _AT_ONCE_UP = 1 << 25, 4
# One request replaces an object. Other file systems may leave half a file, so they get a draft.
_OBJECT_STORES = frozenset(
    (
        *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2", "b2", "tos"),
        "memory",
    )
)
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")


def filesystem_of(path: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it; no request is sent.

    Raises:
        CheckpointError: the package for its scheme is not installed; the message names it.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a URL, which needs the package fsspec; install it, and the package for"
            " the scheme, such as s3fs, gcsfs or adlfs: pip install fsspec s3fs"
        ) from error
    try:
        found, inside = url_to_fs(path.url, use_listings_cache=False)
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs a package that is not installed: {error}; install it (s3fs for s3://,"
            " gcsfs for gs://, adlfs for az://)"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} has a scheme that fsspec does not know ({error}); use s3://, gs://, az:// or"
            " another of fsspec's, or a directory of this machine"
        ) from error
    except Exception as error:  # a wrong endpoint or wrong credentials, found by the package
        raise CheckpointError(f"{path} cannot be used: {error!r}") from error
    return found, str(inside)


class _Requests:
    """The requests to one file system, each repeated if it fails."""

    def __init__(self, path: RemotePath) -> None:
        self.filesystem, self.inside = filesystem_of(path)
        self._path = path

    def __call__(self, act: Callable[[], _T], *, again: bool = True) -> _T:
        """Call `act` and return its result; repeat it after failures, unless `again` is false."""
        for pause in PAUSES_S if again else ():
            try:
                return act()
            except _FINAL:
                raise
            except Exception as error:  # each package raises its own
                _log.info("%s: %r; trying again in about %.1f s", self._path, error, pause)
                time.sleep(pause * _jitter.uniform(0.5, 1.5))
        try:
            return act()
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


class RemoteFile:
    """An object; its ranges are fetched several at a time."""

    def __init__(self, path: RemotePath, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ask = _Requests(path)
        self._window = (0, b"")

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop); the following ones are kept for the next short read."""
        first, found = self._window
        if not first <= start <= stop <= first + len(found):
            wanted = min(max(stop, start + _WINDOW_NBYTES), self.nbytes)
            first, found = self._window = start, self._fetch(start, max(wanted, stop))
        return found[start - first : stop - first]

    def _fetch(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""

        def fetch() -> bytes:
            found: bytes = self._ask.filesystem.cat_file(self._ask.inside, start=start, end=stop)
            if len(found) != stop - start:
                raise OSError(f"{len(found)} bytes came of {stop - start}")
            return found

        return self._ask(fetch)

    def blocks(self, start: int, stop: int, kept: Kept | None = None) -> Iterator[memoryview]:
        """Yield bytes [start, stop) in order."""
        return kept_first(self._blocks, start, stop, kept)

    def _blocks(self, start: int, stop: int, kept: Kept | None) -> Iterator[memoryview]:
        if stop - start <= _WINDOW_NBYTES:
            if start < stop:
                yield memoryview(bytearray(self.read(start, stop)))
            return
        places = iter(range(start, stop, _PART_NBYTES))
        pool = _pool(os.getpid())
        coming: deque[tuple[int, Future[bytes]]] = deque()

        def ask(count: int) -> None:
            for place in islice(places, count):
                end = min(place + _PART_NBYTES, stop)
                coming.append((place, pool.submit(self._fetch, place, end)))

        ask(_AT_ONCE)
        while coming:
            place, pending = coming.popleft()
            began = time.perf_counter()
            found = memoryview(bytearray(pending.result()))
            seconds = time.perf_counter() - began
            ask(1)
            for offset in range(0, len(found), BLOCK_NBYTES):
                block = found[offset : offset + BLOCK_NBYTES]
                yield block
                if kept is not None:
                    kept.take(block, place + offset, seconds)

    def read_into(self, out: memoryview, start: int, kept: Kept | None = None) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = 0
        for block in self.blocks(start, start + len(out), kept):
            out[done : done + len(block)] = block
            done += len(block)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads that fetch; a forked process gets its own."""
    return ThreadPoolExecutor(_AT_ONCE, f"hadal-fetch-{process}")


class FsspecStorage:
    """Objects behind URLs, or files of any other file system that fsspec knows."""

    def write(self, path: RemotePath, chunks: Iterable[Chunk], *, doubled: bool = False) -> None:
        """Upload a file in parts; the package uploads several at a time if it can."""
        del doubled  # the package has its own buffers
        ask = _Requests(path)

        def upload() -> None:
            self._make_parent(ask, path)
            file = _upload_to(ask, again=not is_whole)
            try:
                nbytes = 0
                for chunk in chunks:
                    nbytes += len(chunk)
                    file.write(chunk)
                file.close()
            except BaseException:
                _abandon(file)
                raise
            found = ask.filesystem.info(ask.inside)["size"]
            if found != nbytes:
                raise OSError(f"{found} bytes arrived of {nbytes}")

        # Chunks that can be iterated only once allow one attempt; single requests are repeated.
        is_whole = iter(chunks) is not chunks
        ask(upload, again=is_whole)

    def replace(self, path: RemotePath, content: bytes, mark: str = "") -> None:
        """Replace an object with one request, or a file by a rename."""
        ask = _Requests(path)
        if hasattr(ask.filesystem, "call_s3"):
            ask(partial(_replace_known, ask, content))
            return
        if path.scheme in _OBJECT_STORES:
            ask(partial(ask.filesystem.pipe_file, ask.inside, content))
            return
        folder, _, name = ask.inside.rpartition("/")
        draft = f"{folder}/.{name}.{mark or os.urandom(8).hex()}.partial"

        def renamed() -> None:
            self._make_parent(ask, path)
            ask.filesystem.pipe_file(draft, content)
            ask.filesystem.mv(draft, ask.inside)

        ask(renamed)

    def _make_parent(self, ask: _Requests, path: RemotePath) -> None:
        if path.scheme not in _OBJECT_STORES:
            ask.filesystem.makedirs(ask.inside.rpartition("/")[0], exist_ok=True)

    def open(self, path: RemotePath) -> RemoteFile:
        """Return an object to read ranges of."""
        found = self.find(path)
        if found is None or found.is_folder:
            raise FileNotFoundError(f"No such file: {path}")
        return RemoteFile(path, found.nbytes)

    def find(self, path: RemotePath) -> StorageItem | None:
        """Return the object at a URL, or the folder that objects below it make."""
        ask = _Requests(path)
        try:
            return _item(path.name, ask(partial(ask.filesystem.info, ask.inside)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def items(self, path: RemotePath) -> list[StorageItem]:
        """Return the objects and folders directly below a URL."""
        ask = _Requests(path)
        try:
            rows = ask(partial(ask.filesystem.ls, ask.inside, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [str(row["name"]).rstrip("/").rpartition("/")[2] for row in rows]
        return sorted(
            _item(name, row)
            for name, row in zip(names, rows, strict=True)
            # Some stores also list the folder itself.
            if name and str(row["name"]).strip("/") != ask.inside.strip("/")
        )

    def remove(self, path: RemotePath) -> None:
        """Remove an object, or everything below a URL."""
        ask = _Requests(path)
        if hasattr(ask.filesystem, "call_s3") and _remove_known(ask):
            return
        with suppress(FileNotFoundError):
            ask(partial(ask.filesystem.rm, ask.inside, recursive=True))


def _item(name: str, row: Mapping[str, Any]) -> StorageItem:
    is_folder = row.get("type") == "directory"
    return StorageItem(
        name, is_folder, 0 if is_folder else int(row.get("size") or 0), _modified(row)
    )


def _modified(row: Mapping[str, Any]) -> float:
    for key in _MODIFIED:
        value = row.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def _upload_to(ask: _Requests, *, again: bool) -> Any:
    """Return a file to write to; it is complete once it is closed.

    With `again` each failed request is repeated, otherwise only those of parts.
    """
    if hasattr(ask.filesystem, "call_s3"):
        return _S3Upload(ask, again)
    has_parts = getattr(ask.filesystem, "async_impl", False)
    options = {"block_size": _UPLOAD_NBYTES} if has_parts else {}
    return ask.filesystem.open(ask.inside, "wb", **options)


# A request to S3 that timed out may still come through after it was repeated. On the condition that
# the object is the one seen before, it cannot undo what was written since, such as the next save's
# index. That needs contents that no other save writes: equal ones have the same ETag.


def _replace_known(ask: _Requests, content: bytes) -> None:
    """Replace an object on S3, unless another request has done so since this attempt began."""
    call = _s3_object(ask)
    try:
        condition = {"IfMatch": call("head_object")["ETag"]}
    except FileNotFoundError:
        condition = {"IfNoneMatch": "*"}
    _on_condition(partial(call, "put_object", Body=content), condition)


def _remove_known(ask: _Requests) -> bool:
    """Remove an object on S3; return false if there is none.

    Raises:
        OSError: it cannot be removed, or has been replaced meanwhile.
    """
    call = _s3_object(ask)
    seen: set[str] = set()

    def removed() -> None:
        etag = call("head_object")["ETag"]
        seen.add(etag)
        if len(seen) > 1:
            raise _ReplacedError(errno.EBUSY, "it was replaced while it was being removed")
        _on_condition(partial(call, "delete_object"), {"IfMatch": etag})

    with suppress(FileNotFoundError):
        ask(removed)
    return bool(seen)


def _s3_object(ask: _Requests) -> Callable[..., Any]:
    """Return a function that calls S3's API by name on the object of these requests."""
    bucket, key, _ = ask.filesystem.split_path(ask.inside)
    return partial(ask.filesystem.call_s3, Bucket=bucket, Key=key)


def _on_condition(act: Callable[..., Any], condition: Mapping[str, str]) -> None:
    try:
        act(**condition)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # a store without conditions
            raise
        act()


class _S3Upload:
    """An upload to S3 in parts, several at a time; s3fs itself sends one after the other."""

    def __init__(self, ask: _Requests, again: bool) -> None:
        self._to = _s3_object(ask)
        self._ask, self._again = ask, again
        self._upload: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._rest = bytearray()
        self._pool = ThreadPoolExecutor(_AT_ONCE_UP, "hadal-upload")

    def write(self, chunk: Chunk) -> None:
        """Append bytes; send a part once it is full."""
        self._rest += chunk
        if len(self._rest) >= _UPLOAD_NBYTES:
            self._send()

    def _call(self, name: str, **given: Any) -> Any:
        return self._ask(partial(self._to, name, **given), again=self._again)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        if len(self._parts) >= _AT_ONCE_UP:
            self._parts[-_AT_ONCE_UP].result()  # limits the parts in memory
        body, self._rest = bytes(self._rest), bytearray()
        self._parts.append(self._pool.submit(self._part, len(self._parts) + 1, body))

    def _part(self, number: int, body: bytes) -> dict[str, Any]:
        send = partial(self._to, "upload_part", UploadId=self._upload, PartNumber=number)
        return {"PartNumber": number, "ETag": self._ask(partial(send, Body=body))["ETag"]}

    def close(self) -> None:
        """Send the remaining bytes and complete the object."""
        if self._upload is None:
            self._call("put_object", Body=bytes(self._rest))
        else:
            self._send()
            parts = {"Parts": [part.result() for part in self._parts]}
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)
        self._pool.shutdown()

    def discard(self) -> None:
        """Remove the parts that were sent."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload is not None:
            self._call("abort_multipart_upload", UploadId=self._upload)


def _abandon(file: Any) -> None:
    """Abandon a file without completing it: closing it would upload the part written so far."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True
