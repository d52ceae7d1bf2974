"""The process of `hadal run`: it starts the hosts' processes, shows their output and ends them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import BinaryIO

from hadal.errors import EXIT_PREEMPTED
from hadal.launcher.ending import Failure, agents_words, report, runs, worst
from hadal.launcher.hosts import address_towards, is_loopback
from hadal.launcher.job import (
    Frame,
    Hello,
    HostEnded,
    Job,
    RankEnded,
    RankOutput,
    RankStarted,
    RoundRequest,
    decoded,
    packed,
    share_of,
    where_hadal_is,
)
from hadal.launcher.printing import Printer
from hadal.launcher.processes import PASSED_ON, exit_code
from hadal.launcher.start_commands import Reach, StartCommand

HELLO_S = 90.0
"""The seconds that a host may take to answer."""
_BEATS = 6
_LOOK_S = 0.2
_PIECE_NBYTES = 1 << 16
_LOST = 255
_HELD_S = 1.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostState(Enum):
    """The state of a host's process."""

    REACHED_FOR = auto()
    READY = auto()
    RUNNING = auto()
    GONE = auto()


class Channel:
    """The connection to one host's process."""

    def __init__(
        self, host: str, start_command: StartCommand, variables: Mapping[str, str]
    ) -> None:
        self.host = host
        self.start_command = start_command
        self.state = (
            HostState.RUNNING if start_command.reach is Reach.ALL else HostState.REACHED_FOR
        )
        self.hello: Hello | None = None
        self.left: HostEnded | None = None
        self.complaints = b""
        self._rest = b""
        self.process = subprocess.Popen(
            start_command.words,
            env={**variables, **dict(start_command.variables)},
            cwd="/" if start_command.reach is Reach.HERE else None,
            stdin=subprocess.DEVNULL if start_command.reach is Reach.ALL else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, word: str) -> None:
        """Send a message; an empty one is a heartbeat."""
        if self.process.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()

    def end(self, sent: signal.Signals) -> None:
        """Ask the process, or the ranks that it runs, to end."""
        if self.start_command.reach is not Reach.ALL and self.state is HostState.RUNNING:
            self.tell(sent.name)
        elif self.process.poll() is None:
            self.process.terminate()

    def pass_on(self, sent: signal.Signals) -> None:
        """Send the ranks a signal that does not end them."""
        if self.start_command.reach is Reach.ALL:
            self.process.send_signal(sent)
        elif self.state is HostState.RUNNING:
            self.tell(sent.name)

    def lines(self, piece: bytes) -> list[bytes]:
        """Add text; return the lines that are complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return lines


class Front:
    """A running job."""

    def __init__(
        self,
        job: Job,
        start_commands: Mapping[str, StartCommand],
        printer: Printer,
        say: Callable[[str], None],
        *,
        note: Callable[[str], None] = lambda text: None,
        address: str = "",
        waits_for_all: bool = True,
        full_tracebacks: bool = False,
    ) -> None:
        self._job = job
        self.limit_s: float | None = None
        """The seconds that the job may take; None: it may take as long as it needs."""
        self._full_tracebacks = full_tracebacks
        self._printer = printer
        self._say, self._note = (_on_its_line(each, printer) for each in (say, note))
        self._address = address
        self._waits_for_all = waits_for_all
        self._failures: list[Failure] = []
        self._succeeded: set[int] = set()
        """Ranks whose program ended by itself, without a failure."""
        self._lost: list[str] = []
        self.lost_hosts: list[str] = []
        """Hosts that were lost, or did not answer."""
        self._hosts: dict[int, str] = {}
        self._stopped_at: float | None = None
        self._signals: list[signal.Signals] = []
        self._passed_on: list[signal.Signals] = []
        self._preempted: set[int] = set()
        """Ranks that saved at a signal and left."""
        self._heard_at = 0.0
        self._interrupted_by: signal.Signals | None = None
        self._selector = selectors.DefaultSelector()
        paths = filter(None, (os.environ.get("PYTHONPATH"), where_hadal_is()))
        self._variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._channels = {
            host: Channel(host, start_command, self._variables)
            for host, start_command in start_commands.items()
        }
        self._began_at = time.monotonic()
        self._has_ended = threading.Event()

    def run(self) -> int:
        """Run in the main thread, handling its signals; return the exit code."""
        handle_signals(self.hear)
        return self.watch()

    def watch(self) -> int:
        """Run until every process on every host has ended; return the exit code."""
        for channel in self._channels.values():
            self._listen_to(channel)
        threading.Thread(target=self._beat, daemon=True).start()
        while not self._is_over():
            for key, _ in self._selector.select(_LOOK_S):
                self._read(key.fd, *key.data)
            self._look()
        return self._end()

    @property
    def interrupted_by(self) -> signal.Signals | None:
        """The signal that ended the job or came as it ended; None if there was none."""
        return self._interrupted_by or next(iter(self._signals), None)

    @property
    def reason(self) -> str:
        """The reason of the job's failure in one line; empty if it did not fail."""
        if self._failures:
            first = min(self._failures, key=lambda failure: failure.order)
            how = "" if first.has_traceback else f"{first.how}: "
            return f"rank {first.rank}: {how}{first.reason}"
        return self._lost[0] if self._lost else ""

    def _listen_to(self, channel: Channel) -> None:
        for is_error, pipe in ((False, channel.process.stdout), (True, channel.process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (channel, is_error))

    def _is_over(self) -> bool:
        return all(channel.state is HostState.GONE for channel in self._channels.values())

    def _beat(self) -> None:
        """Send hosts heartbeats, even while this process's output is blocked."""
        while not self._has_ended.wait(self._job.program.lost_s / _BEATS):
            for channel in list(self._channels.values()):
                if channel.state is HostState.RUNNING:
                    channel.tell("")

    # ---- incoming ----------------------------------------------------------------------------

    def _read(self, source: int, channel: Channel, is_error: bool) -> None:
        if source not in self._selector.get_map():
            return  # it was read to its end together with the other pipe
        piece = os.read(source, _PIECE_NBYTES)
        if not piece:
            self._selector.unregister(source)
            if not is_error:
                self._gone(channel)
        elif is_error:
            channel.complaints = (channel.complaints + piece)[-4000:]
            if channel.start_command.reach is Reach.ALL:  # messages of a queue, for example
                self._printer.unlabelled(piece)
        else:
            for line in channel.lines(piece):
                frame = decoded(line)
                if frame is not None:
                    self._take(channel, frame)
                elif line.strip():
                    self._say(f"{channel.host}: {line.decode(errors='replace')}")

    def _take(self, channel: Channel, frame: Frame) -> None:
        match frame:
            case Hello():
                if channel.start_command.reach is not Reach.ALL:
                    channel.hello, channel.state = frame, HostState.READY
                    self._send_shares()
            case RankOutput():
                self._printer.said(channel.host, frame.rank, frame.is_error, frame.text)
            case RankEnded():
                self._rank_ended(channel, frame)
            case HostEnded():
                channel.left = frame if channel.left is None or frame.code else channel.left
                self._agent_left(channel, frame)
            case RankStarted():
                self._printer.began(channel.host, frame.rank)
                if frame.cores:
                    self._note(f"rank {frame.rank} is bound to {frame.cores}")
                self._preempted.discard(frame.rank)
                if channel.start_command.reach is Reach.ALL:
                    self._hosts[frame.rank] = frame.host
            case RoundRequest():
                self._asked(channel, frame)

    def _rank_ended(self, channel: Channel, frame: RankEnded) -> None:
        began_at, text = self._printer.ended(channel.host, frame.rank, shows=frame.code == 0)
        if frame.code == 0:
            if not frame.was_stopped:
                self._succeeded.add(frame.rank)
            return
        if frame.code == EXIT_PREEMPTED:
            # The others leave with it, at the same update.
            self._preempted.add(frame.rank)
            return
        stopped_at = self._ranks_stopped_at()
        before_stop = stopped_at is None or (began_at or 0) < stopped_at
        if frame.was_stopped and (began_at is None or not before_stop):
            return
        if self._interrupted_by is not None:
            return
        code = 1 if frame.was_stopped else frame.code
        at, host = began_at or time.monotonic(), self._hosts.get(frame.rank, channel.host)
        failure = Failure(
            frame.rank,
            host,
            code,
            at,
            text,
            has_traceback=began_at is not None,
            is_shown=self._printer.has_shown(channel.host, frame.rank),
        )
        self._failures.append(failure)
        self._rank_failed()

    def _ranks_stopped_at(self) -> float | None:
        """Return the time at which the running ranks were requested to end."""
        return self._stopped_at

    def _rank_failed(self) -> None:
        self._stop(signal.SIGTERM)

    def _agent_left(self, channel: Channel, frame: HostEnded) -> None:
        if frame.code != 0:
            self._stop(signal.SIGTERM)

    def _asked(self, channel: Channel, frame: RoundRequest) -> None:
        """Ignore it: only hosts of an elastic job request rounds."""

    def _gone(self, channel: Channel) -> None:
        """Handle the end of a host's process, which may mean that the host is lost."""
        was, channel.state = channel.state, HostState.GONE
        code = channel.process.wait()
        self._drain(channel)
        if channel.start_command.reach is Reach.ALL:
            return
        if self._stopped_at is None and not self._has_left(channel):
            self._host_lost(channel, _loss(channel, was, code, self._job.port))

    def _has_left(self, channel: Channel) -> bool:
        """Return whether a host announced its end, and so is not lost."""
        return channel.left is not None

    def _host_lost(self, channel: Channel, message: str) -> None:
        self._lost.append(message)
        self.lost_hosts.append(channel.host)
        self._stop(signal.SIGTERM)

    def _drain(self, channel: Channel) -> None:
        """Read its remaining standard error, which ssh's shared connections hold open."""
        pipe = channel.process.stderr
        assert pipe is not None
        if pipe.fileno() in self._selector.get_map():
            self._selector.unregister(pipe)
            os.set_blocking(pipe.fileno(), False)
            rest = pipe.read() or b""
            channel.complaints += rest
            if channel.start_command.reach is Reach.ALL:
                self._printer.unlabelled(rest)

    # ---- outgoing ----------------------------------------------------------------------------

    def _send_shares(self) -> None:
        """Send each host its share once rank 0's address and the available hosts are known."""
        states = [channel.state for channel in self._channels.values()]
        if self._stopped_at is not None or (
            self._waits_for_all and HostState.REACHED_FOR in states
        ):
            return
        first = self._channels.get(next(iter(self._job.pool)))
        if not self._address and (first is None or first.hello is None):
            return
        self._address = self._address or self._address_of(first)
        for channel in self._channels.values():
            if channel.state is HostState.READY:
                channel.tell(packed(share_of(self._job, channel.host, self._address)))
                channel.state = HostState.RUNNING

    def _address_of(self, first: Channel | None) -> str:
        """Return the address at which the others can reach rank 0's host."""
        assert first is not None and first.hello is not None
        if len(self._job.pool) == 1:
            return "127.0.0.1"
        if first.start_command.is_ssh and not is_loopback(first.hello.reached_at):
            return first.hello.reached_at
        for other in self._channels.values():  # rank 0 is on this machine
            if (
                other.start_command.is_ssh
                and other.hello
                and not is_loopback(other.hello.reached_at)
            ):
                own = address_towards(other.hello.reached_at)
                return own or (*first.hello.addresses, "127.0.0.1")[0]
        return (*first.hello.addresses, "127.0.0.1")[0]

    def _look(self) -> None:
        """Run the checks that depend on time."""
        now = time.monotonic()
        self._printer.look()
        self._take_signals()
        if self._stopped_at is None:
            self._wait_on(now)
        if self._stopped_at is not None and now - self._stopped_at > self._job.program.grace_s + 4:
            self._kill()

    def _wait_on(self, now: float) -> None:
        """Give up on hosts that do not answer, and on a job beyond its time."""
        if now - self._began_at > HELLO_S:
            silent = [c.host for c in self._channels.values() if c.state is HostState.REACHED_FOR]
            if silent:
                self._lost += [f"host {host} has not answered in {HELLO_S:g} s" for host in silent]
                self.lost_hosts += silent
                self._stop(signal.SIGTERM)
        if self.limit_s is not None and now - self._began_at > self.limit_s:
            self._lost.append(f"not at its end after {self.limit_s:g} s, the time limit")
            self._stop(signal.SIGTERM)

    def _stop(self, sent: signal.Signals) -> None:
        """Ask every process on every host to end, once."""
        if self._stopped_at is not None:
            return
        self._stopped_at = time.monotonic()
        for channel in self._channels.values():
            if channel.state is not HostState.GONE:
                channel.end(sent)

    def hear(self, sent: signal.Signals) -> None:
        """Record a signal, for `_look` to handle."""
        if sent in PASSED_ON:
            self._passed_on.append(sent)
            return
        now = time.monotonic()
        if self._signals and now - self._heard_at > _HELD_S:
            os._exit(exit_code(-sent))  # output is blocked; without this process all others end
        self._heard_at = now
        self._signals.append(sent)

    def _take_signals(self) -> None:
        while self._passed_on:
            sent = self._passed_on.pop(0)
            for channel in self._channels.values():
                channel.pass_on(sent)
        while self._signals:
            self._interrupted(self._signals.pop(0))

    def _interrupted(self, sent: signal.Signals) -> None:
        if self._interrupted_by is not None:
            self._kill()
        elif self._stopped_at is None:
            self._say(f"{sent.name}: ending all {self._job.world_size} ranks")
        self._interrupted_by = sent
        self._stop(sent)

    def _kill(self) -> None:
        """Kill the processes that did not end when asked to."""
        for channel in self._channels.values():
            if channel.state is HostState.RUNNING:
                channel.tell(signal.SIGKILL.name)
            late = time.monotonic() - (self._stopped_at or 0) > self._job.program.grace_s + 6
            if late and channel.process.poll() is None:
                channel.process.kill()

    # ---- the end -----------------------------------------------------------------------------

    def _end(self) -> int:
        self._has_ended.set()
        for channel in self._channels.values():
            channel.process.wait()
        self._take_signals()  # those received since the last look
        self._printer.flush()
        if self._interrupted_by is not None:
            took = time.monotonic() - (self._stopped_at or 0)
            self._say(f"{self._who()} ended ({took:.1f} s)")
        for message in self._lost:
            self._say(message)
        if self._failures:
            for line in self._report():
                self._say(line)
        elif self._preempted and not self._lost:
            noun = "rank" if len(self._preempted) == 1 else "ranks"
            self._say(
                f"{noun} {runs(self._preempted)} saved and left (exit code {EXIT_PREEMPTED}): start"
                " the job again to continue"
            )
            return EXIT_PREEMPTED
        if self._interrupted_by is not None:
            return exit_code(-self._interrupted_by)
        if self._lost:
            return _LOST
        return worst(self._failures) or self._agents_code()

    def _report(self) -> list[str]:
        return report(
            self._failures,
            names_hosts=len(self._job.pool) > 1,
            logs=self._job.program.logs,
            succeeded=self._succeeded,
            folder=self._job.program.folder,
            is_full=self._full_tracebacks,
        )

    def _who(self) -> str:
        starters = [c.host for c in self._channels.values() if c.start_command.reach is Reach.ALL]
        return f"{starters[0]} has" if starters else f"all {self._job.world_size} ranks have"

    def _agents_code(self) -> int:
        """Return the exit code if no rank has failed: torch's agent may have."""
        for channel in self._channels.values():
            code = channel.process.returncode
            left = channel.left
            if left is not None and left.code != 0:
                self._say(f"torch's agent on {channel.host} failed: exit code {left.code}")
                for line in agents_words(left.notes, self._job.port):
                    self._say(f"  {line}")
                return left.code
            if channel.start_command.reach is Reach.ALL and code != 0:
                self._say(f"{channel.host} ended with {code}")
                return exit_code(code)
        return 0


def handle_signals(hear: Callable[[signal.Signals], None]) -> None:
    """Call a function with each signal that ends jobs, or that they handle."""
    for each in (*STOPPING, *PASSED_ON):
        if signal.getsignal(each) is not signal.SIG_IGN:  # by nohup, or a shell's `&`
            signal.signal(each, lambda number, _: hear(signal.Signals(number)))


def _on_its_line(say: Callable[[str], None], printer: Printer) -> Callable[[str], None]:
    """Return `say`, whose lines do not begin on the progress bar of a rank."""

    def said(text: str) -> None:
        printer.begin_line()
        say(text)

    return said


def _loss(channel: Channel, was: HostState, code: int, port: int) -> str:
    """Describe how a host was lost, in one line or more."""
    how = "cannot be reached" if was is HostState.REACHED_FOR else "is lost"
    by = "ssh" if channel.start_command.is_ssh else "its process"
    said = channel.complaints.decode(errors="replace").strip()
    if channel.left is not None:
        by, code = "torch's agent", channel.left.code
        said = "\n".join(agents_words(channel.left.notes, port))
    text = f"host {channel.host} {how} ({by} ended with {code})"
    return f"{text}: {said}" if said else text


def printer_for(
    job: Job, names_hosts: bool, out: BinaryIO | None = None, error: BinaryIO | None = None
) -> Printer:
    """Return a printer to this process's output, or to files, with prefixes that identify ranks."""

    def prefix(host: str, rank: int) -> str:
        if job.world_size == 1:
            return ""
        return f"[{host} rank {rank}] " if names_hosts else f"[rank {rank}] "

    return Printer(out or sys.stdout.buffer, error or sys.stderr.buffer, prefix)
