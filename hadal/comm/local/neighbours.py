"""Finding processes of one host that can read each other's memory, and so need no sockets.

Linux lets a process copy from another process of the same user (cross-memory attach): one copy at
memory speed, while a socket needs several. Each pair of processes tests this when their group is
created. If one cannot read from the other (another host, another container, a kernel that forbids
it), the pair uses the backend's sends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from hadal.comm.local.cross_memory import MEETING_S, Neighbour, PeerServer, read, system
from hadal.device import accelerator_kind
from hadal.errors import CommunicationError

# Linux: readers of this process's memory, if the Yama module guards it (prctl.h).
_PR_SET_PTRACER = 0x59616D61
_GUARD = Path("/proc/sys/kernel/yama/ptrace_scope")
_ONLY_ANCESTORS = 1
# The number of the host's own PID namespace, in which process 1 is above all (proc_ns.h).
_HOST_PIDS = 0xEFFFFFFC


class Identity(NamedTuple):
    """The identity by which neighbours find each other."""

    host: str
    """Equal if kernel, network and PID namespace are shared; empty: cannot read others."""
    pid: int
    address: bytes
    """Address of its listening socket."""
    group: int
    """A number for the group being made; the first member's counts."""


@dataclass(frozen=True, slots=True)
class LocalPeers:
    """The neighbours among the ranks of one group."""

    group: int = 0
    """A number that only this group has."""
    neighbours: Mapping[int, Neighbour] = field(default_factory=dict)
    """Neighbours by their rank in the group; the others are reached by the backend's sends."""


@cache
def _peer_server() -> PeerServer:
    server = PeerServer()
    os.register_at_fork(after_in_child=partial(_leave, server))
    return server


def _leave(server: PeerServer) -> None:
    """Drop a parent's connections in a forked child, which makes its own."""
    server.close()
    _peer_server.cache_clear()


def _host() -> str:
    """Return an identifier of kernel, network, PID namespace and user; empty: unknown."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:
        return ""
    return " ".join([*parts, str(os.getuid())])


def identity(*, reads: bool) -> Identity:
    """Return the message to the others before `meet`; without `reads` there are no neighbours."""
    number = secrets.randbits(63)
    if not reads or system() is None or not _host():
        return Identity("", os.getpid(), b"", number)
    return Identity(_host(), os.getpid(), _peer_server().address, number)


def meet(identities: Sequence[Identity], rank: int) -> LocalPeers:
    """Find the neighbours among the ranks of a group. All of them must call it, with the same.

    Raises:
        CommunicationError: a process of this host has given its identity and does not come.
    """
    mine = identities[rank]
    others = {
        number: other
        for number, other in enumerate(identities)
        if number != rank and mine.host and other.host == mine.host and other.pid != mine.pid
    }
    if others:
        unknown = {n: o for n, o in others.items() if o.address not in _peer_server().neighbours}
        try:
            _connect(unknown, rank)
        except OSError as error:
            pids = [other.pid for other in unknown.values()]
            raise CommunicationError(
                f"rank {rank} could not connect with the processes {pids} of this host: {error}."
                " Did one of them die? HADAL_CROSS_MEMORY=0 on all ranks uses gloo instead."
            ) from error
    known = {n: _peer_server().neighbours.get(other.address) for n, other in others.items()}
    return LocalPeers(
        identities[0].group, {n: found for n, found in known.items() if found is not None}
    )


def _connect(others: Mapping[int, Identity], rank: int) -> None:
    """Connect with new processes, and keep those that can read, both ways."""
    known = [neighbour.pid for neighbour in _peer_server().neighbours.values()]
    _let_read([*known, *(other.pid for other in others.values())])
    connections: dict[int, socket.socket] = {}
    for number, other in others.items():
        if number < rank:  # its socket listens already, so that neither waits for the other
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(MEETING_S)
            connection.connect(other.address)
            connection.send(_peer_server().address)
            connections[number] = connection
    by_address = {other.address: number for number, other in others.items() if number > rank}
    while by_address:
        connection, _ = _peer_server().listener.accept()
        connection.settimeout(MEETING_S)
        peer = by_address.get(connection.recv(64))
        if peer is None or _pid_of(connection) != others[peer].pid:
            connection.close()  # a stranger: any process of this host may connect
            continue
        by_address = {address: number for address, number in by_address.items() if number != peer}
        connections[peer] = connection
    for number in _trusted({n: (others[n].pid, c) for n, c in connections.items()}):
        other = others[number]
        _peer_server().add(other.address, other.pid, connections.pop(number))
    for connection in connections.values():
        connection.close()


def _pid_of(connection: socket.socket) -> int:
    """Return the process at the other end, as the kernel reports it."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def _let_read(pids: Sequence[int]) -> None:
    """Let these processes read from this one, even if the system allows that only to ancestors.

    A job on accelerators sends little between processes of a host, so it keeps that protection.
    """
    library = system()
    if library is None or accelerator_kind() is not None or not pids:
        return
    with contextlib.suppress(OSError, ValueError):
        if int(_GUARD.read_text()) == _ONLY_ANCESTORS:
            reader = _reader_of(pids)
            if reader is not None:
                library.prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


def _reader_of(pids: Sequence[int]) -> int | None:
    """Return the process to name for all of these: Yama takes one, and admits its descendants.

    It is their nearest common ancestor, usually the launcher; None if that would name every process
    of the host.
    """
    lines = [line for pid in pids if (line := _line_of(pid))]
    common = [pid for pid in lines[0] if all(pid in line for line in lines)] if lines else []
    reader = common[0] if common else 0
    if reader == 1 and Path("/proc/self/ns/pid").stat().st_ino == _HOST_PIDS:
        return None
    return reader or None


def _line_of(pid: int) -> list[int]:
    """Return a process, its parent, and so on; empty if it is gone."""
    line = []
    while pid:
        try:
            peer = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            break
        line.append(pid)
        pid = int(peer.rpartition(")")[2].split()[1])
    return line


def _trusted(connections: Mapping[int, tuple[int, socket.socket]]) -> list[int]:
    """Return the ranks that could read a secret from here, and whose secret was read."""
    secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    place = ctypes.addressof(secret).to_bytes(8, "little")
    for _, connection in connections.values():
        connection.send(place)
    for pid, connection in connections.values():
        connection.send(_secret_of(pid, int.from_bytes(connection.recv(8), "little")))
    reads = {n: c.recv(16) == secret.raw for n, (_, c) in connections.items()}
    for number, (_, connection) in connections.items():
        connection.send(bytes([reads[number]]))
    return [n for n, (_, c) in connections.items() if c.recv(1) == b"\1" and reads[n]]


def _secret_of(pid: int, address: int) -> bytes:
    found = ctypes.create_string_buffer(16)
    try:
        read(pid, address, ctypes.addressof(found), 16)
    except OSError:
        return b"-"
    return found.raw
