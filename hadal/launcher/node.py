"""The process on each host (`python -m hadal.launcher.node`), which runs its share of a job.

It sends a hello, reads its share from standard input (or from `--job`), and passes it to torch's
elastic agent. If that input ends, or over ssh heartbeats stop, the command that started the job is
gone, and this process ends its ranks and itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from hadal.launcher.job import (
    GRACE_S,
    LOST_S,
    Hello,
    HostEnded,
    HostShare,
    encoded,
    job_in,
    packed,
    rank_command,
    share_in,
    share_of,
)
from hadal.launcher.processes import PASSED_ON, exit_code, follow_parent, following, signal_children
from hadal.launcher.variables import expanded, showing

_LOOK_S = 0.2
_NOTE_LINES, _NOTE_LENGTH = 30, 2000
_PIECE_NBYTES = 1 << 16
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HostProcess:
    """The processes of one host."""

    def __init__(self, *, may_fall_silent: bool) -> None:
        self._may_fall_silent = may_fall_silent
        self._heard_at = time.monotonic()
        self._input = b""
        self._agent: subprocess.Popen[bytes] | None = None
        self._grace_s, self._lost_s = GRACE_S, LOST_S
        self._kills_at: float | None = None
        self._notes = b""

    def run(self, share: HostShare | None) -> int:
        """Run the share, or the one sent on the input; return the exit code of torch's agent."""
        for each in _STOPPING:
            signal.signal(each, lambda number, _: self.stop(signal.Signals(number)))
        for each in PASSED_ON:
            signal.signal(each, lambda number, _: self.pass_on(signal.Signals(number)))
        _send(encoded(_hello(os.environ)))
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while share is None and self._kills_at is None:
                words = self._heard(selector) if selector.select(_LOOK_S) else []
                share = share_in(words[0]) if words else None
                for word in words[1:]:
                    self._obey(word)
            if share is None or self._kills_at is not None:
                return exit_code(-signal.SIGTERM)
            self._grace_s, self._lost_s = share.program.grace_s, share.program.lost_s
            self._agent = _started(share)
            assert self._agent.stderr is not None
            selector.register(self._agent.stderr, selectors.EVENT_READ)
            self._watch(self._agent, selector)
        code = exit_code(self._agent.wait())
        notes = self._notes.decode(errors="replace").splitlines()[-_NOTE_LINES:]
        _send(encoded(HostEnded(code, "\n".join(notes)[-_NOTE_LENGTH:])))
        return code

    def stop(self, sent: signal.Signals) -> None:
        """Ask all ranks to end; on a second call, kill them."""
        again = self._kills_at is not None
        self._kills_at = self._kills_at or time.monotonic() + self._grace_s + 2
        if self._agent is not None and self._agent.poll() is None:
            # Killing torch's agent ends its ranks too: they follow their parents.
            self._agent.send_signal(signal.SIGKILL if again else sent)

    def pass_on(self, sent: signal.Signals) -> None:
        """Send all ranks a signal that does not end them; it would kill torch's agent."""
        if self._agent is not None:
            signal_children(self._agent.pid, sent)

    def _obey(self, word: str) -> None:
        """Handle a message: signals go to all ranks, others to the agent of an elastic job."""
        if word in signal.Signals.__members__:
            sent = signal.Signals[word]
            if sent in PASSED_ON:
                self.pass_on(sent)
            else:
                self.stop(sent)
        elif self._agent is not None and self._agent.stdin is not None:
            with contextlib.suppress(OSError):
                self._agent.stdin.write(word.encode() + b"\n")
                self._agent.stdin.flush()

    def _watch(self, agent: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
        while agent.poll() is None or selector.get_map().keys() - {0}:
            ready = selector.select(_LOOK_S)
            for key, _ in ready:
                if key.fd == 0:
                    for word in self._heard(selector):
                        self._obey(word)
                else:
                    self._note(key.fd, selector)
            if not ready and agent.poll() is not None:
                break
            if self._kills_at is not None and time.monotonic() > self._kills_at:
                self.stop(signal.SIGKILL)
            elif self._is_silent():
                self.stop(signal.SIGTERM)

    def _heard(self, selector: selectors.BaseSelector) -> list[str]:
        """Return the messages received; the end of the input is a request to end."""
        if 0 not in selector.get_map():
            return []
        with contextlib.suppress(BlockingIOError):
            piece = os.read(0, _PIECE_NBYTES)
            if not piece:
                selector.unregister(0)
                self.stop(signal.SIGTERM)
            self._heard_at = time.monotonic()
            self._input += piece
        *lines, self._input = self._input.split(b"\n")
        return [line.decode() for line in lines if line]

    def _is_silent(self) -> bool:
        silence = time.monotonic() - self._heard_at
        return not self._may_fall_silent and self._kills_at is None and silence > self._lost_s

    def _note(self, source: int, selector: selectors.BaseSelector) -> None:
        piece = os.read(source, _PIECE_NBYTES)
        if not piece:
            selector.unregister(source)
        self._notes = (self._notes + piece)[-_PIECE_NBYTES:]


def _started(share: HostShare) -> subprocess.Popen[bytes]:
    agent = subprocess.Popen(
        agent_command(share),
        env={**os.environ, **variables_of(share, os.environ, len(os.sched_getaffinity(0)))},
        cwd="/",
        stdin=subprocess.PIPE if share.is_elastic else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=following(signal.SIGTERM),
    )
    if agent.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended, which `_watch` notices
            agent.stdin.write(packed(share).encode() + b"\n")
            agent.stdin.flush()
    return agent


def agent_command(share: HostShare) -> list[str]:
    """Return the command that starts torch's elastic agent for this host's ranks.

    Every user of the host can read it, so it names no variables: they may be secrets.
    """
    if share.is_elastic:
        return [sys.executable, "-u", "-m", "hadal.launcher.agent"]
    place: dict[str, object] = {"nnodes": share.nodes, "nproc-per-node": len(share.slots)}
    if share.port:
        place |= {
            "node-rank": share.node_rank,
            "master-addr": share.address,
            "master-port": share.port,
        }
    else:  # a port that is free now may be taken later: the agent listens first, then reports it
        place |= {
            "rdzv-backend": "c10d",
            "rdzv-endpoint": "localhost:0",
            "rdzv-id": "hadal",
            "local-addr": share.address,
        }
    words = [f"--{key}={value}" for key, value in place.items()]
    rank = rank_command(share.program)
    return [sys.executable, "-m", "torch.distributed.run", *words, "--no-python", *rank]


def variables_of(share: HostShare, there: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to `there` for the ranks of a host."""
    values = {
        # Without it each of several ranks would start as many threads as there are cores.
        "OMP_NUM_THREADS": there.get(
            "OMP_NUM_THREADS", str(max(1, cores // max(1, len(share.slots))))
        ),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(share.program.grace_s + 1)),
    }
    if share.shows_slots:
        values.update(showing(share.slots))
    return {**values, **expanded(share.variables, there)}


def _hello(variables: Mapping[str, str]) -> Hello:
    _, _, reached, _ = (variables.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    return Hello(_addresses(), reached)


def _addresses() -> tuple[str, ...]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        values = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5)
        return tuple(values.stdout.split())
    return ()


def _send(frame: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, frame)


def main(words: list[str]) -> int:
    """Run one host's share of a job."""
    follow_parent(signal.SIGTERM)
    parser = argparse.ArgumentParser(prog="python -m hadal.launcher.node")
    parser.add_argument("--job", help="the job, if no share comes on the standard input")
    parser.add_argument("--node-rank", type=int, help="with --job: the number of this host")
    parser.add_argument("--address", help="with --job: that of rank 0's host")
    parser.add_argument("--may-fall-silent", action="store_true", help="the input needs no signs")
    parsed = parser.parse_args(words)
    share = None
    if parsed.job:
        job = job_in(parsed.job)
        share = share_of(job, list(job.pool)[parsed.node_rank], parsed.address)
    return HostProcess(may_fall_silent=parsed.may_fall_silent).run(share)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
