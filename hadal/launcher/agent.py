"""torch's elastic agent on a host of an elastic job (`python -m hadal.launcher.agent`).

Its share is the first line of its standard input, on which the rounds follow.

The command that started the job decides its rounds, as it is the first to know which hosts are
available. torch's own rendezvous restarts ranks when a host joins or a rank fails, but not when a
host is lost silently: ranks that wait for it would wait forever.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hadal.launcher.job import (
    CHANGE,
    ROUND,
    HostShare,
    Round,
    RoundRequest,
    encoded,
    rank_command,
    round_in,
    share_in,
)
from hadal.launcher.processes import exit_code, follow_parent

_NAME = "hadal"
_LOOK_S = 0.2
_PIECE_NBYTES = 1 << 16
# The command counts failures and ends the job, as it knows more than the agents of all hosts.
_ANY_NUMBER = 1 << 30


class RoundHandler(RendezvousHandler):
    """A rendezvous that requests each round from the command, which also announces its end."""

    def __init__(self, share: HostShare, heard: bytes) -> None:
        self._wait = timedelta(seconds=max(10.0, share.program.lost_s))
        self._own = TCPStore(
            "localhost", share.port, is_master=True, wait_for_workers=False, timeout=self._wait
        )
        self._input = heard
        self._round: Round | None = None
        self._is_over = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Request a round and wait for it."""
        while True:
            begun = self._asked()
            try:
                return self._joined(begun)
            except DistError:  # its first host is already lost: there will be another round
                continue

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 if the round is over."""
        self._listen(0.0)
        return int(self._is_over)

    def get_backend(self) -> str:
        """Return the name under which torch finds this class."""
        return _NAME

    def get_run_id(self) -> str:
        """Return a constant: there is only one job."""
        return _NAME

    def is_closed(self) -> bool:
        """Return False: the command ends a job by a signal."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the command ends a job by a signal."""

    def shutdown(self) -> bool:
        """Return True: the agent ends with its process."""
        return True

    def _asked(self) -> Round:
        self._round = None
        os.write(1, encoded(RoundRequest(self._own.port)))
        while self._round is None:
            self._listen(_LOOK_S)
        self._is_over = False
        return self._round

    def _joined(self, begun: Round) -> RendezvousInfo:
        is_first = begun.node_rank == 0
        shared = (
            self._own
            if is_first
            else TCPStore(begun.address, begun.port, is_master=False, timeout=self._wait)
        )
        store = PrefixStore(f"round {begun.number}", shared)
        # Ranks get a new port each time: the old one may still be in use.
        met = RendezvousStoreInfo.build(begun.node_rank, store, begun.address)
        return RendezvousInfo(store, begun.node_rank, begun.nodes, met)

    def _listen(self, seconds: float) -> None:
        """Read the command's messages."""
        ready, _, _ = select.select([0], [], [], seconds)
        if not ready:
            return
        piece = os.read(0, _PIECE_NBYTES)
        if not piece:
            raise RendezvousClosedError("the command that decides the rounds is gone")
        *lines, self._input = (self._input + piece).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == ROUND:
                self._round, self._is_over = round_in(rest), False
            elif word == CHANGE:
                self._is_over = True


def main() -> int:
    """Run a host's ranks, round by round."""
    heard = b""
    while b"\n" not in heard:
        piece = os.read(0, _PIECE_NBYTES)
        if not piece:
            return exit_code(-signal.SIGTERM)
        heard += piece
    own, _, heard = heard.partition(b"\n")
    share = share_in(own.decode())
    rendezvous_handler_registry.register(_NAME, lambda _: RoundHandler(share, heard))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=max(1, share.nodes),
        nproc_per_node=len(share.slots),
        run_id=_NAME,
        rdzv_backend=_NAME,
        max_restarts=_ANY_NUMBER,
        local_addr=share.address or None,
    )
    python, *rest = rank_command(share.program)
    try:
        elastic_launch(config, python)(*rest)
    except SignalException as error:
        return exit_code(-int(error.sigval))
    return 0


if __name__ == "__main__":
    follow_parent(signal.SIGTERM)
    sys.exit(main())
