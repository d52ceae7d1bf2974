"""This machine's names and addresses in the network."""

from __future__ import annotations

import socket


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
