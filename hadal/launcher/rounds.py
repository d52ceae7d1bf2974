"""Elastic jobs: ranks restart whenever a host is lost or comes back, or a rank fails.

A *round* is the time from one start of all ranks to the next. A host whose ranks have ended
requests a round; once all available hosts have done so, the next one begins on those that fit.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

from hadal.launcher.front import HELLO_S, Channel, Front, HostState
from hadal.launcher.hosts import address_towards, is_loopback
from hadal.launcher.job import (
    CHANGE,
    ROUND,
    Elastic,
    HostEnded,
    RankEnded,
    Round,
    RoundRequest,
    packed,
    share_of,
)

_TRIES = 3
"""The number of attempts to reach a lost host within the time after which hosts count as lost."""


class RoundPhase(Enum):
    """The phase of a round."""

    GATHERING = auto()
    """No ranks run, or they are ending: hosts request a round."""
    RUNNING = auto()
    FINISHING = auto()
    """A rank has finished its work: there will be no other round."""


class ElasticFront(Front):
    """A running elastic job."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        assert self._job.elastic is not None
        self._elastic: Elastic = self._job.elastic
        self._phase = RoundPhase.GATHERING
        self._gathers_since = self._changed_at = self._began_round_at = time.monotonic()
        self._number = 0
        self._asks: dict[str, int] = {}
        """The hosts that request a round, and the ports of their agents."""
        self._members: tuple[str, ...] = ()
        self._finished: set[tuple[str, int]] = set()
        self._tried_at: dict[str, float] = dict.fromkeys(self._channels, self._began_at)
        self._losses: dict[str, str] = {}
        """The lost hosts, and the message logged for each."""
        self._has_lost = False
        self._restarts = 0
        self._ends_at: float | None = None
        """The deadline for the other ranks, if a host is lost after some ranks have finished."""

    # ---- hosts -------------------------------------------------------------------------------

    def _send_shares(self) -> None:
        """Send a host its share as soon as it answers: it will request a round."""
        for channel in self._channels.values():
            if channel.state is HostState.READY and self._stopped_at is None:
                own = self._own_address(channel)
                channel.tell(packed(share_of(self._job, channel.host, own)))
                channel.state = HostState.RUNNING

    def _own_address(self, channel: Channel) -> str:
        """Return the address at which other hosts reach this one."""
        hello = channel.hello
        if hello is not None and channel.start_command.is_ssh:
            return hello.reached_at
        for other in self._channels.values():
            if (
                other.start_command.is_ssh
                and other.hello
                and not is_loopback(other.hello.reached_at)
            ):
                return address_towards(other.hello.reached_at)
        return self._address or "127.0.0.1"

    def _has_left(self, channel: Channel) -> bool:
        return channel.left is not None and channel.left.code == 0

    def _agent_left(self, channel: Channel, frame: HostEnded) -> None:
        """Do nothing: the end of its process is handled later."""

    def _host_lost(self, channel: Channel, message: str) -> None:
        host = channel.host
        self._asks.pop(host, None)
        if self._losses.get(host) != message:
            self._say(message)
        self._losses[host] = message
        if self._number == 0 and Front._is_over(self):  # no host was ever available
            self._lost.append("no host is available")
            self._stop(signal.SIGTERM)
        if self._phase is RoundPhase.FINISHING:
            self._ends_at = time.monotonic() + self._job.program.grace_s
            self._look_for_end()
        elif host in self._members:
            self._has_lost = True
            self._change()
        self._begin()

    def _wait_on(self, now: float) -> None:
        lost_s = self._job.program.lost_s
        for host, channel in list(self._channels.items()):
            since = now - self._tried_at[host]
            if channel.state is HostState.REACHED_FOR and since > HELLO_S:
                channel.process.kill()
            elif self._may_return(channel) and since > lost_s / _TRIES:
                self._reach_again(host)
        if self._ends_at is not None and now > self._ends_at:
            self._lost += self._losses.values()
            self._stop(signal.SIGTERM)
        self._grow()
        if self._phase is RoundPhase.GATHERING and now - self._gathers_since > self._elastic.join_s:
            self._lost.append(self._shortage())
            self._stop(signal.SIGTERM)

    def _shortage(self) -> str:
        there = [host for host, c in self._channels.items() if c.state is HostState.RUNNING]
        late = [host for host in there if host not in self._asks]
        sizes = ", ".join(map(str, self._elastic.world_sizes))
        return (
            f"no round began in {self._elastic.join_s:g} s (HADAL_JOIN_S): ready are"
            f" {', '.join(self._asks) or 'no hosts'}, and --min_elastic_nodes is"
            f" {self._elastic.least}"
            + (f"; {', '.join(late)} started, and did not come so far" if late else "")
            + (f"; the batch can be trained by {sizes} ranks" if sizes else "")
        )

    def _may_return(self, channel: Channel) -> bool:
        is_gone = channel.state is HostState.GONE and not self._has_left(channel)
        return is_gone and self._phase is not RoundPhase.FINISHING

    def _reach_again(self, host: str) -> None:
        old = self._channels[host]
        for pipe in (old.process.stdin, old.process.stdout, old.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a message that it has not read
                    pipe.close()
        self._tried_at[host] = time.monotonic()
        self._channels[host] = Channel(host, old.start_command, self._variables)
        self._listen_to(self._channels[host])

    def _is_over(self) -> bool:
        returning = any(self._may_return(channel) for channel in self._channels.values())
        return super()._is_over() and not (returning and self._stopped_at is None)

    # ---- rounds ------------------------------------------------------------------------------

    def _asked(self, channel: Channel, frame: RoundRequest) -> None:
        host = channel.host
        self._asks[host] = frame.port
        if self._losses.pop(host, None) is not None:
            self._say(f"host {host} is available again")
        if self._phase is RoundPhase.FINISHING:
            self._stop(signal.SIGTERM)  # its ranks have failed after others have finished
        elif host in self._members:
            self._change()
        self._grow()
        self._begin()

    def _grow(self) -> None:
        """Admit new hosts, if that yields more ranks."""
        lasts_s = time.monotonic() - self._began_round_at
        if self._phase is RoundPhase.RUNNING and lasts_s >= self._elastic.pause_s:
            members = self._chosen([*self._members, *self._asks])
            if self._size_of(members) > self._size_of(self._members):
                self._change()

    def _change(self) -> None:
        """End the round, and with it the ranks that still run."""
        if self._phase is not RoundPhase.RUNNING:
            return
        self._phase = RoundPhase.GATHERING
        self._gathers_since = self._changed_at = time.monotonic()
        for host in self._members:
            channel = self._channels[host]
            if channel.state is HostState.RUNNING and host not in self._asks:
                channel.tell(CHANGE)

    def _begin(self) -> None:
        """Begin a round if all hosts to wait for have requested it, and they are enough."""
        if self._phase is not RoundPhase.GATHERING or self._stopped_at is not None:
            return
        if any(self._is_awaited(c) for c in self._channels.values()):
            return
        members = self._chosen(self._asks)
        if not members or not self._may_restart():
            return
        self._number += 1
        self._members, self._phase, self._has_lost = members, RoundPhase.RUNNING, False
        self._began_round_at = time.monotonic()
        self._failures.clear()
        self._finished.clear()
        self._succeeded.clear()
        world_size = self._size_of(members)
        self._say(f"round {self._number}: {world_size} ranks on {', '.join(members)}")
        first = self._channels[members[0]]
        address, port = self._own_address(first), self._asks[members[0]]
        for rank, host in enumerate(members):
            del self._asks[host]
            coming = Round(self._number, rank, len(members), address, port)
            self._channels[host].tell(f"{ROUND} {packed(coming)}")

    def _is_awaited(self, channel: Channel) -> bool:
        """Return whether to wait for a host: at first for all, later until its ranks have ended."""
        if channel.host in self._asks or channel.state is HostState.GONE:
            return False
        ends = channel.state is HostState.RUNNING and channel.host in self._members
        return self._number == 0 or ends

    def _chosen(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Return the first hosts of the hostfile with a valid total number of ranks."""
        there = [host for host in self._job.pool if host in set(hosts)][: self._elastic.most]
        sizes = self._elastic.world_sizes
        while len(there) >= self._elastic.least:
            if not sizes or self._size_of(there) in sizes:
                return tuple(there)
            there.pop()
        return ()

    def _size_of(self, hosts: Iterable[str]) -> int:
        return sum(len(self._job.pool[host]) for host in hosts)

    # ---- ends --------------------------------------------------------------------------------

    def _ranks_stopped_at(self) -> float | None:
        return self._changed_at if self._phase is RoundPhase.GATHERING else self._stopped_at

    def _rank_failed(self) -> None:
        """Stop if the job is finishing; otherwise the host will request a round."""
        if self._phase is RoundPhase.FINISHING:
            self._stop(signal.SIGTERM)

    def _rank_ended(self, channel: Channel, frame: RankEnded) -> None:
        super()._rank_ended(channel, frame)
        if frame.code == 0 and not frame.was_stopped:
            self._finished.add((channel.host, frame.rank))
            self._phase = RoundPhase.FINISHING
            self._look_for_end()

    def _is_done(self) -> bool:
        """Return whether all ranks of the available hosts have finished."""
        there = [h for h in self._members if self._channels[h].state is not HostState.GONE]
        done = [host for host, _ in self._finished]
        return all(done.count(host) == len(self._job.pool[host]) for host in there)

    def _look_for_end(self) -> None:
        """Stop a finished job: agents would wait long for lost hosts and those standing by."""
        if self._phase is RoundPhase.FINISHING and self._is_done():
            there = {host for host, c in self._channels.items() if c.state is not HostState.GONE}
            if there != set(self._members):
                self._stop(signal.SIGTERM)

    def _may_restart(self) -> bool:
        """Report the failures of the last round; end the job if there were too many."""
        if not self._failures:
            return True
        lines = self._report()
        if self._has_lost:
            self._say(lines[0])
            return True
        if self._restarts == self._elastic.restarts:
            self._say(f"ranks have failed {self._restarts + 1} times (--max_restarts)")
            self._stop(signal.SIGTERM)
            return False
        self._restarts += 1
        for line in lines:
            self._say(line)
        self._say(f"starting again ({self._restarts} of {self._elastic.restarts} times)")
        return True

    def _agents_code(self) -> int:
        return (
            0 if self._phase is RoundPhase.FINISHING and self._is_done() else super()._agents_code()
        )
