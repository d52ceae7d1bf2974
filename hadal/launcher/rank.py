"""The wrapper process of each rank (`python -m hadal.launcher.rank PROGRAM`).

It runs between torch's agent (or Slurm, or MPI) and the program: sets the program's cores and
`--local_rank`, forwards its output, and ends it with all its descendants.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from hadal.errors import LaunchError
from hadal.launcher.job import (
    Program,
    ProgramKind,
    RankEnded,
    RankStarted,
    encoded,
    program_in,
    said,
)
from hadal.launcher.place import (
    RankPlace,
    cores_of,
    find_place,
    group_of,
    meeting_host,
    near_devices,
    slots_of,
)
from hadal.launcher.processes import (
    PASSED_ON,
    adopt_orphans,
    end_all_below,
    exit_code,
    follow_parent,
    following,
    signal_group,
)
from hadal.launcher.variables import showing

_PIECE_NBYTES = 1 << 16
_LOOK_S = 0.2
_CANNOT_START = 127
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Rank:
    """A rank's running program."""

    def __init__(self, program: Program, place: RankPlace) -> None:
        self.place = place
        self._program = program
        self._cores = ""
        self._log: BinaryIO | None = None
        self._kills_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def was_stopped(self) -> bool:
        """True if it was requested to end."""
        return self._kills_at is not None

    def run(self) -> int:
        """Start the program, wait for its end and return its exit code."""
        for each in _STOPPING:
            signal.signal(each, lambda number, _: self.stop(signal.Signals(number)))
        for each in PASSED_ON:
            signal.signal(each, lambda number, _: self._ask(signal.Signals(number)))
        try:
            self._log = _log_of(self._program.logs, self.place.rank)
            self._process = self._started()
        except (OSError, LaunchError) as error:
            message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else error
            self._print(True, f"{message}\n".encode())
            self._report(encoded(RankEnded(self.place.rank, _CANNOT_START, self.was_stopped)))
            return _CANNOT_START
        if self.was_stopped:
            self._ask(signal.SIGTERM)  # the request came before the process existed
        host, pid = os.uname().nodename, self._process.pid
        self._report(encoded(RankStarted(self.place.rank, host, pid, self._cores)))
        self._listen(self._process)
        code = self._process.wait()
        if self.was_stopped or code != 0:
            self._send(signal.SIGKILL)  # for processes that the program left behind
            end_all_below()
        self._report(encoded(RankEnded(self.place.rank, code, self.was_stopped)))
        return exit_code(code)

    def stop(self, sent: signal.Signals) -> None:
        """Ask the program to end; on a second call, kill it."""
        now = time.monotonic()
        if self.was_stopped:
            self._send(signal.SIGKILL)
        else:
            self._ask(sent)
        self._kills_at = self._kills_at or now + self._program.grace_s

    def _started(self) -> subprocess.Popen[bytes]:
        program, place = self._program, self.place
        there = os.environ
        variables = {**meeting_host(there), **there, **place.variables(), **group_of(there)}
        if program.slots:
            variables |= showing(slots_of(place, program.slots))
        if program.binds:
            own = self._own_cores(variables.get("CUDA_VISIBLE_DEVICES"))
            os.sched_setaffinity(0, own)
            variables["OMP_NUM_THREADS"] = str(len(own))
        return subprocess.Popen(
            program.command(place.local_rank),
            cwd=program.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=following(signal.SIGKILL),
        )

    def _own_cores(self, visible: str | None) -> tuple[int, ...]:
        """Return the program's cores: of those listed, or beside its device."""
        place, listed = self.place, self._program.cores
        usable = listed or os.sched_getaffinity(0)
        found = "--bind_core_list" if listed else near_devices(place.local_size, visible, usable)
        if isinstance(found, str):
            own, why = cores_of(place.local_rank, place.local_size, usable), f"equal parts: {found}"
        else:
            own, node, device = found[place.local_rank]
            why = f"on NUMA node {node}, as its device {device}"
        self._cores = f"{len(own)} cores from {own[0]} to {own[-1]} ({why})"
        return own

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Forward the program's output until it has ended."""
        assert process.stdout is not None and process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, False)
            selector.register(process.stderr, selectors.EVENT_READ, True)
            while selector.get_map():
                ready = selector.select(_LOOK_S)
                for key, _ in ready:
                    piece = os.read(key.fd, _PIECE_NBYTES)
                    if piece:
                        self._print(key.data, piece)
                    else:
                        selector.unregister(key.fileobj)
                if not ready and process.poll() is not None:
                    return  # processes that it left behind hold the pipes open
                if self._kills_at is not None and time.monotonic() > self._kills_at:
                    self._send(signal.SIGKILL)

    def _print(self, is_error: bool, piece: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(piece)
            except OSError as error:  # training continues
                self._log = None
                message = f"the file of this rank's output ends here: {error.strerror}\n"
                self._print(True, message.encode())
        for frame in said(self.place.rank, is_error, piece):
            self._report(frame)

    def _report(self, frame: bytes) -> None:
        try:
            os.write(1, frame)
        except OSError:  # the process that started the job is gone
            self.stop(signal.SIGTERM)

    def _ask(self, sent: signal.Signals) -> None:
        """Send a signal that a program may handle.

        Only the Python program receives it: its handler may still need the processes that it has
        started, such as a data loader's workers. Once the program has ended, they are killed.
        """
        if self._program.kind is ProgramKind.BARE:
            self._send(sent)
        elif self._process is not None and self._process.poll() is None:
            self._process.send_signal(sent)

    def _send(self, sent: signal.Signals) -> None:
        if self._process is not None:
            signal_group(self._process.pid, sent)


def _log_of(folder: str, rank: int) -> BinaryIO | None:
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder, f"rank{rank}.log").open("wb", buffering=0)


def main(words: list[str]) -> int:
    """Run one rank."""
    follow_parent(signal.SIGTERM)
    adopt_orphans()
    rank = Rank(program_in("".join(words)), find_place(os.environ))
    with contextlib.suppress(KeyboardInterrupt):
        return rank.run()
    return exit_code(-signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
