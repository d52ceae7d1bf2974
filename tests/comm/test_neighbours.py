"""Tensors between processes of one host, read straight from the other one's memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, RankPools, RanksFailed, on_ranks

from hadal.comm import Ranks, ranks as ranks_module
from hadal.comm.collectives import max_, start_all_gather, start_reduce_scatter, sum_
from hadal.comm.local import cross_memory, neighbours, pairs
from hadal.comm.local.neighbours import Identity, LocalPeers, meet
from hadal.comm.start import may_read_memory
from hadal.comm.works import Work
from hadal.errors import CommunicationError

# Below and above what travels in the message itself, and odd ones.
NUMELS = (1, 7, 1023, 1025, 4097, 300_001)
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


def send(tensor: torch.Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Work:
    (work,) = pairs.exchange("send", tensor, [(tensor, other)], [], ranks, tag, label)
    return work


def receive(tensor: torch.Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Work:
    (work,) = pairs.exchange("recv", tensor, [], [(tensor, other)], ranks, tag, label)
    return work


def exchange() -> list[bool]:
    """Send each of the tensors to all others, and receive theirs in the same order."""
    ranks = Ranks.world()
    found, works, targets = [], [], []
    for number, numel in enumerate(NUMELS):
        for dtype in DTYPES:
            of = [torch.arange(numel).add(r + number).to(dtype) for r in range(ranks.size)]
            for other in ranks.others:
                works.append(send(of[ranks.rank], other, ranks, 90, "a test"))
                target = torch.zeros(numel, dtype=dtype)
                works.append(receive(target, other, ranks, 90, "a test"))
                targets.append((target, of[other]))
    for work in works:
        work.wait()
    found = [torch.equal(target, wanted) for target, wanted in targets]
    return [len(ranks.local_peers.neighbours) == ranks.size - 1, *found]


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("world", [2, 3])
def test_all_lengths_and_dtypes_arrive_in_their_order(world: int, ranks: RankPools) -> None:
    for found in ranks(world).run(exchange):
        assert all(found)


def tags_that_cross() -> list[float]:
    ranks = Ranks.world()
    other = ranks.others[0]
    mine = [torch.full((9000,), 10.0 * tag + ranks.rank) for tag in (91, 92)]
    works = [send(mine[1], other, ranks, 92, "a test"), send(mine[0], other, ranks, 91, "a test")]
    found = [torch.zeros(9000) for _ in mine]
    works += [receive(found[tag - 91], other, ranks, tag, "a test") for tag in (91, 92)]
    for work in works:
        work.wait()
    return [float(one.mean()) for one in found]


def test_tags_do_not_mix(ranks: RankPools) -> None:
    assert ranks(2).run(tags_that_cross) == [[911.0, 921.0], [910.0, 920.0]]


def flood(count: int) -> bool:
    """Far more messages than a socket holds, before anybody asks for one."""
    ranks = Ranks.world()
    other = ranks.others[0]
    leaving = [
        send(torch.full((100,), float(number)), other, ranks, 93, "a test")
        for number in range(count)
    ]
    large = torch.full((50_000,), float(ranks.rank))
    leaving.append(send(large, other, ranks, 93, "a test"))
    dist.barrier()
    found = torch.zeros(100)
    for number in range(count):
        receive(found, other, ranks, 93, "a test").wait()
        if not torch.equal(found, torch.full((100,), float(number))):
            return False
    found = torch.zeros(50_000)
    receive(found, other, ranks, 93, "a test").wait()
    for work in leaving:
        work.wait()
    return bool((found == other).all())


def test_more_messages_than_a_socket_holds_wait_for_their_turn(ranks: RankPools) -> None:
    assert ranks(2).run(flood, 3000) == [True, True]


def both_ways(dtype: torch.dtype) -> list[bool]:
    """The results of collectives with neighbours, and with the backend's sends."""
    ranks = Ranks.world()
    through = []
    for local_peers in (ranks.local_peers, LocalPeers()):
        some = Ranks(ranks.group, ranks.rank, ranks.size, ranks.host_group, local_peers)
        torch.manual_seed(ranks.rank)
        full = torch.randn(24_000).to(dtype)
        out = torch.zeros(24_000 // ranks.size, dtype=dtype)
        start_reduce_scatter(full.clone(), out, some, dtype, False, "a test").wait()
        start_all_gather(full, some, "a test").wait()
        least = torch.tensor([float(ranks.rank), 0.25])
        sum_(least, some, "a test")
        most = torch.tensor(ranks.rank)
        max_(most, some, "a test")
        through.append((out, full, least, most))
    return [torch.equal(one, other) for one, other in zip(*through, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_return_the_same_as_the_backend(dtype: torch.dtype, ranks: RankPools) -> None:
    for same in ranks(3).run(both_ways, dtype):
        assert all(same)


def on_two_hosts() -> list[Any]:
    """Ranks 0 and 1 on one host, 2 and 3 on another: each pair goes its own way."""
    group = dist.new_group([0, 1, 2, 3])
    assert isinstance(group, dist.ProcessGroup)
    met, host = neighbours.PeerServer(), f"host {dist.get_rank() // 2}"
    with (
        patch.object(neighbours, "_peer_server", lambda: met),
        patch.object(neighbours, "_host", lambda: host),
        patch.object(Ranks, "world", lambda: Ranks.of(group)),
    ):
        ranks = Ranks.world()
        return [sorted(ranks.local_peers.neighbours), *both_ways(torch.bfloat16)]


def test_some_may_be_neighbours_and_others_not(ranks: RankPools) -> None:
    found = ranks(4).run(on_two_hosts)
    assert [one[0] for one in found] == [[1], [0], [3], [2]]
    for _, *same in found:
        assert all(same)


def of_another_length() -> None:
    ranks = Ranks.world()
    mine = torch.zeros(5000 + ranks.rank)
    works = [send(mine, ranks.others[0], ranks, 94, "a test")]
    works.append(receive(torch.zeros(5000), ranks.others[0], ranks, 94, "a test"))
    for work in reversed(works):
        work.wait()


def test_a_tensor_of_another_length_is_reported_at_both_ends(ranks: RankPools) -> None:
    raised = [str(error) for error in ranks(2).raises(of_another_length)]
    assert "20004 bytes were sent where 20000 are expected" in raised[0]
    assert "did not expect this message" in raised[1]


def child_begins_anew() -> list[bool]:
    """The connections that a forked process inherits, and those that its parent keeps."""
    ranks = Ranks.world()
    before = neighbours._peer_server()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        after = neighbours._peer_server()
        begins = after is not before and not after.neighbours and after.address != before.address
        os.write(writing, b"anew" if begins else b"as it was")
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reading, 100)
    os.close(reading)
    os.close(writing)
    return [
        told == b"anew",
        neighbours._peer_server() is before,
        *exchange(),
        bool(ranks.local_peers.neighbours),
    ]


def test_a_forked_child_starts_over_and_its_parent_continues(ranks: RankPools) -> None:
    for found in ranks(2).run(child_begins_anew):
        assert all(found)


def knock() -> list[bool]:
    """A stranger connects to a rank's socket while the ranks meet."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    met = neighbours.PeerServer()
    addresses: list[bytes] = [b""] * 2
    dist.all_gather_object(addresses, met.address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        if dist.get_rank() == 1:
            stranger.connect(addresses[0])
            stranger.send(b"let me in")
        dist.barrier()
        with patch.object(neighbours, "_peer_server", lambda: met):
            return [len(Ranks.of(group).local_peers.neighbours) == 1]


def test_a_stranger_is_not_let_in(ranks: RankPools) -> None:
    assert ranks(2).run(knock) == [[True], [True]]


def wait_for_the_dead(fork: bool) -> tuple[str, float]:
    ranks = Ranks.world()
    if ranks.rank == 1:
        child = os.fork() if fork else os.getpid()
        if child == 0:
            time.sleep(60)  # as a worker of a loader that outlives its rank
            os._exit(0)
        dist.send(torch.tensor(child), 0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    child = torch.tensor(0)
    dist.recv(child, 1)
    began = time.monotonic()
    target = torch.zeros(10_000)
    with pytest.raises(RuntimeError) as caught:
        receive(target, 1, ranks, 95, "the wait").wait()
    with pytest.raises(
        CommunicationError, match=r"rank 0 lost rank 1 in the next one: connection closed"
    ):
        send(target, 1, ranks, 95, "the next one")
    seconds = time.monotonic() - began
    if fork:
        os.kill(int(child), signal.SIGKILL)
    return str(caught.value), seconds


@pytest.mark.fast_cells("alone")
@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child"])
def test_a_rank_that_dies_is_reported_at_once(fork: bool) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RanksFailed, match=r"TOLD (.*: )?connection closed by process"):
            pool.run(told, fork)
    finally:
        pool.close()


def told(fork: bool) -> None:
    found, seconds = wait_for_the_dead(fork)
    assert seconds < 30  # that of the child, and of the group, is more
    raise RuntimeError(f"TOLD {found}")


def without_reading(who: int) -> tuple[int, bool]:
    """One rank cannot read from the other: both stay with the backend."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    blind = patch.object(neighbours, "_secret_of", lambda *_: b"-")
    # As processes that have not met yet.
    met = neighbours.PeerServer()
    with patch.object(neighbours, "_peer_server", lambda: met):
        if dist.get_rank() == who:
            with blind:
                ranks = Ranks.of(group)
        else:
            ranks = Ranks.of(group)
    del ranks_module._kept[group]["local_peers"]
    full = torch.arange(2.0).repeat_interleave(5000)
    full[:5000] += 3 * (ranks.rank == 1)
    start_all_gather(full, ranks, "a test").wait()
    return len(ranks.local_peers.neighbours), bool(torch.equal(full[:5000], torch.zeros(5000)))


@pytest.mark.parametrize("who", [0, 1])
def test_where_one_cannot_read_both_stay_with_the_backend(who: int, ranks: RankPools) -> None:
    assert ranks(2).run(without_reading, who) == [(0, True), (0, True)]


def test_another_host_is_not_a_neighbour() -> None:
    here = neighbours.identity(reads=True)
    there = here._replace(host="another host", pid=here.pid + 1, address=b"\0nobody")
    silent = neighbours.identity(reads=False)
    assert silent.host == ""
    for other in (there, silent):
        local_peers = meet([other, here], 1)
        assert local_peers == LocalPeers(other.group)
    # Processes that tell nothing of their host are on no host together.
    nameless = Identity("", 1, b"", 5)
    assert meet([nameless, nameless._replace(pid=2)], 0).neighbours == {}


_FAMILY = """
import os, subprocess, sys
sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
children = [subprocess.Popen(sleeper) for _ in range(2)]
print(os.getpid(), *(child.pid for child in children), flush=True)
for child in children:
    child.wait()
"""


def test_yama_gets_only_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one process, and lets that one's descendants read: a peer, or all peers' launcher.

    Where only the first process of the host is above all of them, nobody is told.
    """
    told: list[int] = []
    library = SimpleNamespace(prctl=lambda _, reader, *__: told.append(reader.value))
    monkeypatch.setattr(neighbours, "system", lambda: library)
    monkeypatch.setattr(neighbours, "_GUARD", tmp_path / "ptrace_scope")
    neighbours._GUARD.write_text("1\n")
    with subprocess.Popen(
        [sys.executable, "-c", _FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        parent, *peers = map(int, launcher.stdout.readline().split())
        assert parent == launcher.pid
        for pids, reader in (
            (peers[:1], peers[0]),
            (peers, parent),
            ([*peers, 2**22 + 1], parent),  # one has died
            ([*peers, os.getpid()], os.getpid()),
        ):
            told.clear()
            neighbours._let_read(pids)
            assert told == [reader]
        told.clear()
        on_host = os.stat("/proc/self/ns/pid").st_ino == neighbours._HOST_PIDS
        monkeypatch.setattr(neighbours, "_line_of", lambda pid: [pid, 1])
        neighbours._let_read(peers)
        assert told == ([] if on_host else [1])
        neighbours._GUARD.write_text("0\n")
        neighbours._let_read(peers[:1])
        neighbours._GUARD.write_text("1\n")
        monkeypatch.setattr(neighbours, "accelerator_kind", lambda: "cuda")
        neighbours._let_read(peers[:1])
        assert told == ([] if on_host else [1])
        launcher.stdin.close()


def out_of_step(numel: int) -> list[str]:
    """Rank 1 sends the messages of blocks 2 and 3; rank 0 has left out the first one."""
    ranks = Ranks.world()
    other, label = ranks.others[0], "the gather of block "
    numbers = (2, 3) if ranks.rank else (3, 4)
    works = [
        (send if ranks.rank else receive)(torch.ones(numel), other, ranks, 94, f"{label}{n}")
        for n in numbers
    ]
    told = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            told.append(str(error))
    dist.barrier()
    return told


@pytest.mark.parametrize("numel", [8, 5000])
def test_a_message_fills_nothing_but_its_own_place(numel: int, ranks: RankPools) -> None:
    told, by_sender = ranks(2).run(out_of_step, numel)
    assert told == [
        "a message of 'something else' came in place of one of 'the gather of block 3'",
        "a message of 'the gather of block 3' came in place of one of 'the gather of block 4'",
    ]
    # Short ones are not answered.
    assert len(by_sender) == (2 if numel > 1024 else 0)
    assert all("did not expect this message" in line for line in by_sender)


def between_hosts() -> list[float]:
    """Messages of gloo: those of one purpose meet, and wait for one another."""
    ranks = Ranks.world()
    other, found = ranks.others[0], [torch.zeros(()), torch.zeros(())]
    with patch.dict(ranks.local_peers.neighbours, clear=True):
        if ranks.rank:
            works = [send(torch.tensor(float(n)), other, ranks, 94, f"block {n}") for n in (2, 3)]
        else:
            works = [receive(found[3 - n], other, ranks, 94, f"block {n}") for n in (3, 2)]
    for work in works:
        work.wait()
    return [float(one) for one in found]


def test_gloo_matches_messages_by_purpose(ranks: RankPools) -> None:
    assert ranks(2).run(between_hosts)[0] == [3.0, 2.0]


@pytest.mark.parametrize(("value", "reads"), [("", True), ("1", True), ("0", False)])
def test_a_variable_keeps_ranks_from_reading(
    value: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADAL_CROSS_MEMORY", value)
    assert may_read_memory() is reads
    monkeypatch.setenv("HADAL_CROSS_MEMORY", "maybe")
    with pytest.raises(CommunicationError, match="must be 0 or 1, found 'maybe'"):
        may_read_memory()


def interrupted(where: str) -> bool:
    """A signal comes while a rank copies for itself what it waits for; it waits once more."""
    ranks = Ranks.world()
    other = ranks.others[0]
    full = torch.full((5000,), 7.0)
    if ranks.rank:
        work = send(full, other, ranks, 97, "a test")
        dist.barrier()
        work.wait()
        return True
    found = torch.zeros(5000)
    dist.barrier()
    neighbour = ranks.local_peers.neighbours[other]
    end = time.monotonic() + 60
    while not any([*neighbour._offers.values()]) and time.monotonic() < end:
        time.sleep(0.01)
    act = getattr(cross_memory if where == "read" else cross_memory.Neighbour, where)
    signals = [True]

    def interrupt(*arguments: Any) -> None:
        act(*arguments)
        if signals and threading.current_thread() is threading.main_thread():
            signals.clear()
            raise KeyboardInterrupt

    target = "hadal.comm.local.cross_memory." + (
        "read" if where == "read" else f"Neighbour.{where}"
    )
    # The thread that serves all neighbours is kept from being faster.
    with patch(target, interrupt), patch.object(neighbour, "_wake"):
        work = receive(found, other, ranks, 97, "a test")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    work.wait()
    neighbour.take_what_met()
    return bool((found == 7).all())


@pytest.mark.parametrize("where", ["read", "_write"])
def test_an_interrupt_loses_nothing(where: str, ranks: RankPools) -> None:
    assert ranks(2).run(interrupted, where) == [True, True]


@on_ranks(2)
def test_a_wait_ends_with_the_groups_timeout() -> Any:
    ranks = Ranks.world()
    with patch("hadal.comm.local.pairs.collective_timeout_s", lambda: 0.05):
        work = receive(torch.zeros(3), ranks.others[0], ranks, 96, "a test")
        with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
            work.wait()
    dist.barrier()
    send(torch.zeros(3), ranks.others[0], ranks, 96, "a test").wait()
    dist.barrier()
