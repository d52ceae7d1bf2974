"""Python processes that have torch imported already: forked from one that has, within 20 ms.

A `ForkServer` is a process that has imported torch and what tests need beside it (pydantic, pytest,
hypothesis), and nothing of Hadal. It forks itself when it is asked to. The child then does what an
interpreter would do with the same words (`script.py ...`, `-c code ...`, `-m module ...`), in the
environment, folder and files that it is given, and ends as one: with its threads joined and its
`atexit` functions called. `Forked` looks like a `Popen`.

What makes processes differ stays different: `server(rank)` has a server, and so the hashes of
strings and the addresses of things, of its own for each of the first ranks.

Nothing here knows pytest. Run as a program, this file is a server.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

SERVERS = 3
_LENGTH = struct.Struct("!II")  # of a request: its bytes, and how many files come with it
_NUMBER = struct.Struct("!i")


class Forked:
    """A process of a server, as `subprocess.Popen` shows one."""

    def __init__(self, args: Sequence[str], status: socket.socket) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._status = status
        self.pid = self._told()

    def _told(self) -> int:
        told = self._status.recv(_NUMBER.size, socket.MSG_WAITALL)
        if not told:
            raise RuntimeError("the server of forked processes has ended")
        return int(_NUMBER.unpack(told)[0])

    def wait(self, timeout: float | None = None) -> int:
        """The status as of `Popen.wait`: negative for a signal."""
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._told())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, sent: int) -> None:
        """Send it, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sent)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One process that has imported torch, and forks."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"  # is read when torch is imported
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(far.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(far.fileno(),),
        )
        far.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Forked:
        """Fork a child for the words that follow `python`; it finds nothing to read."""
        status, far_status = socket.socketpair()
        request = pickle.dumps((list(args), dict(env), cwd or os.getcwd(), list(pass_fds)))
        with open(os.devnull, "rb") as nothing, far_status:
            # The server keeps the fourth, to tell of the child; the others are the child's.
            fds = [nothing.fileno(), stdout, stderr, far_status.fileno(), *pass_fds]
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self._control.sendmsg([_LENGTH.pack(len(request), len(fds))], passed)
            self._control.sendall(request)
        forked = Forked(args, status)
        _forked.add(forked)
        return forked

    def close(self) -> None:
        """End the server; its forked processes continue."""
        self._control.close()
        self._process.wait()


_servers: dict[int, ForkServer] = {}
_forked: weakref.WeakSet[Forked] = weakref.WeakSet()


def server(rank: int = 0) -> ForkServer:
    """The server for a rank, started when it is first asked for and shared from then on."""
    if not _servers:
        atexit.register(_close)
    if rank % SERVERS not in _servers:
        _servers[rank % SERVERS] = ForkServer()
    return _servers[rank % SERVERS]


def processes() -> list[int]:
    """The servers, and what they have forked that is not known to have ended."""
    running = [each.pid for each in _forked if each.returncode is None]
    return [each.pid for each in _servers.values()] + running


def _close() -> None:
    for each in _servers.values():
        each.close()


def run(
    args: Sequence[str], *, env: Mapping[str, str], timeout: float, cwd: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *args], capture_output=True, text=True)`, forked."""
    (done,) = run_ranks([args], envs=[env], timeout=timeout, cwd=cwd)
    return done


def run_ranks(
    args_of_ranks: Sequence[Sequence[str]],
    *,
    envs: Sequence[Mapping[str, str]],
    timeout: float,
    cwd: str | None = None,
    grace: float = 5.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run processes in parallel. Once one has failed, the rest are ended after `grace` s."""
    with contextlib.ExitStack() as files:
        outs = [
            [files.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(2)] for _ in envs
        ]
        processes = [
            server(rank).start(args, env=env, cwd=cwd, stdout=out.fileno(), stderr=err.fileno())
            for rank, (args, env, (out, err)) in enumerate(
                zip(args_of_ranks, envs, outs, strict=True)
            )
        ]
        deadline = time.monotonic() + timeout
        failed = False
        for left in iter(lambda: [each for each in processes if each.poll() is None], []):
            if not failed and any(each.returncode for each in processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                for each in left:
                    each.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                left[0].wait(0.02)
        return [
            subprocess.CompletedProcess(process.args, process.wait(), *map(_read, files_of_one))
            for process, files_of_one in zip(processes, outs, strict=True)
        ]


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


# ---- the server -------------------------------------------------------------------------------


def _serve(control: socket.socket) -> list[str]:
    """Fork when asked. Returns in children, ready to run the words that are returned."""
    ended, ends = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(ends, False)
    signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends it
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
            _tell_of_the_dead(running)
        if control not in ready:
            continue
        request, fds = _received(control)
        if request is None:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (control.detach(), ended, ends, fds[3], *running.values()):
                os.close(fd)
            return _settle(request, fds)
        running[pid] = fds[3]
        for fd in (*fds[:3], *fds[4:]):
            os.close(fd)
        _tell(fds[3], pid)


def _received(control: socket.socket) -> tuple[Any, list[int]]:
    head, passed, _, _ = control.recvmsg(_LENGTH.size, socket.CMSG_SPACE(4 * 64))
    if not head:
        return None, []
    nbytes, nfds = _LENGTH.unpack(head)
    fds = array.array("i")
    for _, _, data in passed:
        fds.frombytes(data)
    assert len(fds) == nfds
    return pickle.loads(control.recv(nbytes, socket.MSG_WAITALL)), list(fds)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, _NUMBER.pack(number))


def _tell_of_the_dead(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = running.pop(pid)
        _tell(told, status)
        os.close(told)


def _settle(request: Any, fds: list[int]) -> list[str]:
    """Take over what an interpreter takes over from whoever starts it."""
    args, env, folder, passed = request
    import fcntl
    import random

    import numpy

    places, got = (0, 1, 2, *passed), (*fds[:3], *fds[4:])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*places, *got) + 1) for fd in got]
    for fd in got:
        os.close(fd)
    for fd, place in zip(moved, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if env.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = paths
    random.seed()
    numpy.random.seed()
    return list(args)


def _become(args: list[str]) -> None:
    """Do the same as `python ARGS`, in a new `__main__`."""
    import runpy
    import types

    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if args[0] == "-m":
        sys.argv = args[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(args[1])
        return
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path.insert(0, "")
        name, text = "<string>", args[1]
    else:
        sys.argv = args
        sys.path.insert(0, os.path.dirname(os.path.abspath(args[0])))
        module.__file__ = name = args[0]
        with open(name, encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    import gc

    import hypothesis.strategies
    import pydantic
    import pytest
    import torch  # noqa: F401

    _ = pydantic.BaseModel, pytest.mark, hypothesis.strategies  # pydantic imports on first use

    # Collections in children pass over what is imported here, and so leave its pages shared.
    gc.collect()
    gc.freeze()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
