"""A job's hosts and slots: hostfiles, `--include` and `--exclude`; and this machine's addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping

from hadal.errors import LaunchError

Pool = dict[str, tuple[int, ...]]
"""The slots of each host, in the order of the hostfile. A slot is an accelerator's number."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s|$)")
# ssh would read a name that begins with a dash as a flag, pdsh one that begins with ^ as a file;
# pdsh and mpirun would take one with a comma for two hosts.
_HEX = "[0-9A-Fa-f]*"
_HOST = re.compile(rf"(?:[\w.][\w.-]*@)?(?:\w[\w.-]*|{_HEX}:{_HEX}:[0-9A-Fa-f:.]*(?:%\w+)?)")
_NODE = re.compile(r"([^\s:,@]+)(?::(\d+(?:,\d+)*))?")


def read_hostfile(text: str, name: str = "hostfile") -> Pool:
    """Read `NAME slots=N` lines; ignore comments, blank lines and further words on a line.

    Raises:
        LaunchError: a line has another form, a host is listed twice, or there is none.
    """
    pool: Pool = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = _LINE.match(entry)
        if found is None:
            raise LaunchError(f"{name}, line {number}: expected `NAME slots=N`, found {entry!r}")
        host, count = found[1], int(found[2])
        if not _HOST.fullmatch(host):
            raise LaunchError(
                f"{name}, line {number}: {host!r} is not the name of a host; expected letters,"
                " digits, dots and dashes, or an IPv6 address, both perhaps after `USER@`"
            )
        if host in pool:
            raise LaunchError(
                f"{name}, line {number}: the host {host!r} is listed twice; list it once, with all"
                " its slots"
            )
        pool[host] = tuple(range(count))
    if not pool:
        raise LaunchError(f"{name} names no host; expected lines such as `worker-1 slots=8`")
    return pool


def filtered(
    pool: Mapping[str, Iterable[int]], include: str = "", exclude: str = "", least: int = 1
) -> Pool:
    """Keep what `include` names, or drop what `exclude` names: `NAME[:SLOT,SLOT][@NAME...]`.

    Raises:
        LaunchError: both are given, one cannot be read or names an unknown host or slot, or
            fewer than `least` hosts have a slot left.
    """
    if include and exclude:
        raise LaunchError(
            f"--include {include!r} and --exclude {exclude!r} contradict each other; pass one"
        )
    slots = {host: tuple(own) for host, own in pool.items()}
    if include:
        named = _named(include, "--include", slots)
        slots = {host: named.get(host, ()) for host in slots}
    elif exclude:
        named = _named(exclude, "--exclude", slots)
        slots = {
            host: tuple(slot for slot in own if slot not in named.get(host, ()))
            for host, own in slots.items()
        }
    left = {host: own for host, own in slots.items() if own}
    if len(left) < least:
        raise LaunchError(
            f"no slot is left of {_listed(pool)}"
            + (f" with --include {include!r}" if include else "")
            + (f" without --exclude {exclude!r}" if exclude else "")
        )
    return left


def _named(text: str, flag: str, pool: Mapping[str, tuple[int, ...]]) -> Pool:
    """Return the slots that a filter names: each host's, sorted, without duplicates."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        found = _NODE.fullmatch(part.strip())
        if found is None:
            raise LaunchError(
                f"{flag} {text!r}: cannot read {part.strip()!r}; expected NAME or NAME:SLOT,SLOT,"
                " with @ between hosts, such as worker-1@worker-2:0,2"
            )
        host, slots = found[1], found[2]
        if host not in pool:
            raise LaunchError(f"{flag} {text!r}: no host {host!r}; there are {', '.join(pool)}")
        wanted = pool[host] if slots is None else tuple(int(slot) for slot in slots.split(","))
        strange = [slot for slot in wanted if slot not in pool[host]]
        if strange:
            raise LaunchError(
                f"{flag} {text!r}: {host} has no slot {strange[0]}; it has"
                f" {_listed({host: pool[host]})}"
            )
        named.setdefault(host, set()).update(wanted)
    return {host: tuple(sorted(slots)) for host, slots in named.items()}


def narrowed(pool: Pool, nodes: int | None = None, slots: int | None = None) -> Pool:
    """Keep the first `nodes` hosts, each with the slots 0 to `slots` - 1.

    Raises:
        LaunchError: there are fewer hosts.
    """
    if nodes is not None and nodes > len(pool):
        raise LaunchError(
            f"--num_nodes {nodes}, but there are {len(pool)} hosts: {', '.join(pool)}"
        )
    kept = list(pool)[:nodes]
    return {host: pool[host] if slots is None else tuple(range(slots)) for host in kept}


def _listed(pool: Mapping[str, Iterable[int]]) -> str:
    return ", ".join(f"{host}:{','.join(map(str, slots))}" for host, slots in pool.items())


# ---- this machine's names and addresses ----------------------------------------------------------


def is_here(host: str) -> bool:
    """Return whether a name is this machine's: its own name, or that of an address it can bind."""
    name = socket.gethostname()
    if host in ("localhost", name, name.partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.bind((address[0], 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address is empty or loopback, and so useless to other machines."""
    return not address or address.startswith("127.") or address == "::1"


def address_towards(other: str) -> str:
    """Return this machine's address on the route to another one; empty if there is no route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)
            return str(route.getsockname()[0])
    except OSError:
        return ""
