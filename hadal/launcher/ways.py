"""The words that start the process on each host: here, or there over OpenSSH."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hadal.launcher.job import where_hadal_is

CONNECT_S = 10
ALIVE_S, ALIVE_TIMES = 5, 3
"""A host that is silent for so many seconds, so many times, is lost."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a host's process is started, and reached."""

    words: tuple[str, ...]
    is_ssh: bool = False


def here() -> Way:
    """A process on this machine."""
    return Way((sys.executable, "-u", "-m", "hadal.launcher.node", "--may-fall-silent"))


def by_ssh(
    host: str, *, port: int | None = None, arguments: Sequence[str] = (), venv_script: str = ""
) -> Way:
    """A process on another host. Nothing asks for a password: keys must be set up.

    The command it is given is the same whatever the job: that travels on its standard input.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": ALIVE_TIMES,
    }
    words = ["ssh", "-T"]
    for key, value in options.items():
        words += ["-o", f"{key}={value}"]
    if port is not None:
        words += ["-p", str(port)]
    return Way((*words, *arguments, host, there(venv_script)), is_ssh=True)


def there(venv_script: str = "") -> str:
    """The shell's line that starts the process on another host.

    With a script that sets up an environment, Python is the one of that environment.
    """
    python = "python" if venv_script else shlex.quote(sys.executable)
    path = f'PYTHONPATH={shlex.quote(where_hadal_is())}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    node = f"cd / && {path} exec {python} -u -m hadal.launcher.node"
    return f". {shlex.quote(venv_script)} && {node}" if venv_script else node


def is_here(host: str) -> bool:
    """Whether a name is this machine's: one of its own, or that of an address it can bind."""
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


def address_towards(other: str) -> str:
    """This machine's address on the way to another one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)
            return str(route.getsockname()[0])
    except OSError:
        return ""


def free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
