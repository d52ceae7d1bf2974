"""Sends and receives between two processes of one host, which read from each other's memory.

A sender offers a tensor by a small message on a Unix socket: its address and length. A thread of
the receiver copies it to its destination and acknowledges it. Short tensors travel in the message
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from torch import Tensor

# Bytes that travel in the message: below, a copy more is cheaper than an answer.
_SHORT = 4096
_LONGEST_READ = 1 << 30
MEETING_S = 60.0
# kind, group, tag, purpose, number, address, bytes
_HEADER = struct.Struct("<BQIIQQQ")
_OFFER, _SHORT_OFFER, _TAKEN, _REFUSED = 1, 2, 3, 4
_Channel = tuple[int, int]
"""A group and a tag: offers and receives are matched by their order within it, and compared."""
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class _Vector(ctypes.Structure):
    """`struct iovec`: an address and a length."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def system() -> ctypes.CDLL | None:
    """Return the C library; None if the system has no cross-memory attach."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    many, vector = ctypes.c_ulong, ctypes.POINTER(_Vector)
    library.process_vm_readv.argtypes = (ctypes.c_int, vector, many, vector, many, many)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


def read(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes of another process's memory, with the interpreter's lock released."""
    library = system()
    assert library is not None  # or no neighbour was met
    while nbytes:
        piece = min(nbytes, _LONGEST_READ)
        here, there = _Vector(target, piece), _Vector(source, piece)
        copied = library.process_vm_readv(pid, here, 1, there, 1, 0)
        if copied <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        source, target, nbytes = source + copied, target + copied, nbytes - copied


# Names of purposes, by their numbers.
_names: dict[int, str] = {0: ""}


@lru_cache(1 << 14)
def number_of(purpose: str) -> int:
    """Return the number that a purpose of messages has on every rank; 0 if it is empty."""
    number = zlib.crc32(purpose.encode()) if purpose else 0
    _names[number] = purpose
    return number


class Ended:
    """One send or receive of a tensor: under way, over, or at fault."""

    __slots__ = ("_event", "_fault", "_heir", "_hurry", "_timeout", "purpose", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        timeout: float,
        purpose: int = 0,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self.tensor = tensor  # kept until the other process has taken it
        self.purpose = purpose
        self._hurry = hurry
        self._event = threading.Event()
        self._fault = ""
        self._timeout = timeout
        self._heir: Callable[[], None] | None = None

    def end(self, fault: str = "") -> None:
        """Mark it as over, or as failed with a fault."""
        self._fault = fault
        self._event.set()
        if self._heir is not None:
            self._heir()

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` at the end, from any thread; it may be called twice."""
        self._heir = act
        if self._event.is_set():
            act()

    @property
    def is_over(self) -> bool:
        """Return True if it has ended."""
        return self._event.is_set()

    def wait(self) -> None:
        """Wait for the end; with `hurry`, run here the copies that the thread has not begun.

        Raises:
            RuntimeError: the other process is gone, or did not arrive in time.
        """
        self._hurry()
        if not self._event.wait(self._timeout):
            raise RuntimeError(f"timed out after {self._timeout:g} s")
        if self._fault:
            raise RuntimeError(self._fault)


class _Offer(NamedTuple):
    """A tensor that the other process offers."""

    purpose: int
    number: int
    address: int
    nbytes: int
    short: bytes | None


class Neighbour:
    """Another process of this host whose memory this one reads, and that reads from this one."""

    def __init__(self, pid: int, connection: socket.socket, wake: Callable[[], None]) -> None:
        self.pid = pid
        self._connection = connection
        self._wake = wake
        self._lock = threading.Lock()
        self._offers: dict[_Channel, deque[_Offer]] = defaultdict(deque)
        self._wanted: dict[_Channel, deque[Ended]] = defaultdict(deque)
        self._met: deque[tuple[Ended, _Offer]] = deque()
        self._untaken: dict[int, Ended] = {}
        self._unwritten: deque[bytes] = deque()
        self._number = 0
        self._fault = ""

    # ---- in the caller's thread ------------------------------------------------------------------

    def send(self, tensor: Tensor, group: int, tag: int, purpose: int, timeout: float) -> Ended:
        """Offer a contiguous host tensor for reading; it must not change until the end."""
        nbytes, address, sent = tensor.nbytes, tensor.data_ptr(), Ended(tensor, timeout)
        with self._lock:
            self._check()
            if nbytes <= _SHORT:
                header = _HEADER.pack(_SHORT_OFFER, group, tag, purpose, 0, 0, nbytes)
                self._write(header + ctypes.string_at(address, nbytes))
                sent.end()
                return sent
            self._number += 1
            self._untaken[self._number] = sent
            self._write(_HEADER.pack(_OFFER, group, tag, purpose, self._number, address, nbytes))
            return sent

    def receive(self, tensor: Tensor, group: int, tag: int, purpose: int, timeout: float) -> Ended:
        """Let the other process's offer, of the same purpose, fill a contiguous host tensor."""
        received = Ended(tensor, timeout, purpose, self.take_what_met)
        channel = group, tag
        with self._lock:
            waiting = self._offers.get(channel)
            if not waiting:
                self._check()
                self._wanted[channel].append(received)
                return received
            offer = waiting.popleft()
            if offer.short is None:
                self._met.append((received, offer))
                self._wake()
                return received
        self._take(received, offer)
        return received

    def _check(self) -> None:
        if self._fault:
            raise RuntimeError(self._fault)

    def _write(self, message: bytes) -> None:
        """Send a message, or leave it to the thread if the socket is full. Needs the lock."""
        if not self._unwritten:
            try:
                self._connection.send(message)
                return
            except BlockingIOError:
                pass
            except OSError:
                return  # the thread finds the end of the connection, and reports it
        self._unwritten.append(message)
        self._wake()

    # ---- in the server's thread ------------------------------------------------------------------

    @property
    def wants_to_write(self) -> bool:
        """Return True if messages wait for room in the socket."""
        return bool(self._unwritten)

    def fileno(self) -> int:
        """Return the connection's file descriptor, for a selector."""
        return self._connection.fileno()

    def flush(self) -> None:
        """Send the messages that had no room."""
        with self._lock, contextlib.suppress(OSError):
            while self._unwritten:
                self._connection.send(self._unwritten[0])
                self._unwritten.popleft()

    def listen(self) -> bool:
        """Act on all messages that have come; return False if the connection has ended."""
        while True:
            try:
                message = self._connection.recv(_HEADER.size + _SHORT)
            except BlockingIOError:
                return True
            except OSError:
                message = b""
            if not message:
                return False
            self._act(message)

    def _act(self, message: bytes) -> None:
        kind, group, tag, purpose, number, address, nbytes = _HEADER.unpack_from(message)
        if kind in (_TAKEN, _REFUSED):
            with self._lock:
                sent = self._untaken.pop(number, None)
            if sent is None:
                return  # the answering call was interrupted, and has answered twice
            sent.end("" if kind == _TAKEN else f"process {self.pid} did not expect this message")
            return
        short = message[_HEADER.size :] if kind == _SHORT_OFFER else None
        offer, channel = _Offer(purpose, number, address, nbytes, short), (group, tag)
        with self._lock:
            wanted = self._wanted.get(channel)
            if not wanted:
                self._offers[channel].append(offer)
                return
            received = wanted.popleft()
        self._take(received, offer)

    def take_what_met(self) -> None:
        """Copy the tensors whose offers came before their receives."""
        while True:
            with self._lock:
                if not self._met:
                    return
                received, offer = self._met.popleft()
            try:
                self._take(received, offer)
            except BaseException:
                # A signal may interrupt the wait at any point: the other process needs the
                # answer, and keeps its tensor until then.
                with self._lock:
                    self._met.appendleft((received, offer))
                raise

    def _take(self, received: Ended, offer: _Offer) -> None:
        fault, target, wanted = "", received.tensor.data_ptr(), received.tensor.nbytes
        if offer.purpose != received.purpose:
            came, due = (_names.get(one, "") for one in (offer.purpose, received.purpose))
            fault = f"a message of {came or 'something else'!r} came in place of one of {due!r}"
        elif offer.nbytes != wanted:
            fault = f"{offer.nbytes} bytes were sent where {wanted} are expected"
        elif offer.short is not None:
            ctypes.memmove(target, offer.short, offer.nbytes)
        elif not received.is_over:
            try:
                read(self.pid, offer.address, target, offer.nbytes)
            except OSError as error:
                fault = f"process {self.pid} cannot be read from: {error}"
        received.end(fault)
        if offer.short is None:
            kind = _REFUSED if fault else _TAKEN
            with self._lock:
                self._write(_HEADER.pack(kind, 0, 0, 0, offer.number, 0, 0))

    def close(self) -> None:
        """Close this end of the connection."""
        self._connection.close()

    def end(self) -> None:
        """Fail all sends and receives under way: the other process is gone."""
        self.close()
        with self._lock:
            self._fault = f"connection closed by process {self.pid} of this host"
            left: list[Ended] = [one for line in self._wanted.values() for one in line]
            left += self._untaken.values()
            self._wanted.clear()
            self._untaken.clear()
            self._unwritten.clear()
        for one in left:
            one.end(self._fault)


class PeerServer:
    """Serves reads of this process's memory to its peers, on a thread."""

    def __init__(self) -> None:
        self.address = b"\0hadal-" + secrets.token_hex(12).encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.address)
        self.listener.listen(socket.SOMAXCONN)
        self.listener.settimeout(MEETING_S)
        self.neighbours: dict[bytes, Neighbour] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def add(self, address: bytes, pid: int, connection: socket.socket) -> None:
        """Serve a connection that has passed its test."""
        connection.setblocking(False)
        neighbour = Neighbour(pid, connection, self.wake)
        self.neighbours[address] = neighbour
        self._selector.register(neighbour, selectors.EVENT_READ, address)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="hadal-neighbours", daemon=True
            )
            self._thread.start()

    def wake(self) -> None:
        """Wake the thread to process its queue."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close all connections."""
        self.listener.close()
        for neighbour in self.neighbours.values():
            neighbour.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                if isinstance(key.fileobj, Neighbour):
                    self._attend(key.fileobj, events, key.data)
                else:
                    os.eventfd_read(self._bell)
                    for address, neighbour in tuple(self.neighbours.items()):
                        neighbour.take_what_met()
                        if neighbour.wants_to_write:
                            self._selector.modify(neighbour, _BOTH, address)

    def _attend(self, neighbour: Neighbour, events: int, address: bytes) -> None:
        if events & selectors.EVENT_WRITE:
            neighbour.flush()
            if not neighbour.wants_to_write:
                self._selector.modify(neighbour, selectors.EVENT_READ, address)
        if events & selectors.EVENT_READ and not neighbour.listen():
            self._selector.unregister(neighbour)
            del self.neighbours[address]
            neighbour.end()
