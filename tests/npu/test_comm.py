"""Collectives on the device, through `hadal.comm`: the same results as on CPUs."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import every
from engine.logs import logged
from ranks import RankPools
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from zero.test_starved import PATHS, held_at_once

import hadal
import npu
from hadal import comm
from hadal.comm import functions
from hadal.comm.collectives import (
    Factors,
    gather_codes,
    start_all_reduce,
    start_gather_in_hops,
    start_reduce_scatter,
)
from hadal.comm.comms_log import stop_log
from hadal.device import collective_backend, current_device
from hadal.errors import CommunicationError

from . import runs


def _tensors(count: int, *shape: int) -> list[Tensor]:
    """Other values on each rank, the same on each device."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    device = current_device()
    return [torch.randn(*shape, generator=generator).to(device) for _ in range(count)]


def _collectives() -> list[list[float]]:
    rank, size = comm.get_rank(), comm.get_world_size()
    other = (rank + 1) % size
    on_npu = current_device().type == "npu"
    results: list[list[float]] = []

    def tell(*tensors: Tensor) -> None:
        assert all(one.device == current_device() for one in tensors)
        results.extend(one.flatten().tolist() for one in tensors)

    with npu.asynchronous() if on_npu else contextlib.nullcontext():
        (one,) = _tensors(1, 6)
        comm.all_reduce(one)
        tell(one)
        (one,) = _tensors(1, 6)
        work = comm.all_reduce(one, torch.distributed.ReduceOp.MAX, async_op=True)
        work.wait()
        tell(one)
        pair = _tensors(2, 3)
        comm.all_reduce_coalesced(pair)
        tell(*pair)
        (one,) = _tensors(1, 4)
        several = [torch.empty_like(one) for _ in range(size)]
        comm.all_gather(several, one)
        tell(*several)
        whole = one.new_empty(4 * size)
        comm.all_gather_into_tensor(whole, one)
        tell(whole)
        pair = _tensors(2, 3)
        wholes = [part.new_empty(3 * size) for part in pair]
        comm.all_gather_coalesced(wholes, pair)
        tell(*wholes)
        (one,) = _tensors(1, 4 * size)
        out = one.new_empty(4)
        comm.reduce_scatter_tensor(out, one)
        tell(out)
        if on_npu:  # gloo has none
            again = torch.empty_like(out)
            comm.reduce_scatter(again, list(one.chunk(size)))
            assert torch.equal(out, again)
            mean = one / size
            comm.all_reduce(one, torch.distributed.ReduceOp.AVG)
            comm.all_reduce(mean)
            torch.testing.assert_close(one, mean)
            lists = [list(_tensors(1, 2 * size)[0].chunk(size)) for _ in range(2)]
            comm.all_to_all(lists[0], lists[1])
            flat = torch.empty(2 * size, device=one.device)
            comm.all_to_all_single(flat, torch.cat(lists[1]))
            assert torch.equal(torch.cat(lists[0]), flat)
        (one,) = _tensors(1, 4 * size)
        out = torch.empty_like(one)
        comm.all_to_all_single(out, one)
        tell(out)
        gives, gets = ([to + rank + 1 for to in range(size)] for _ in range(2))
        (one,) = _tensors(1, sum(gives))
        out = one.new_empty(sum(gets))
        comm.all_to_all_single(out, one, gets, gives)
        tell(out)
        (one,) = _tensors(1, 5)
        comm.broadcast(one, 0)
        tell(one)
        (one,) = _tensors(1, 5)
        comm.reduce(one, 0)
        if rank == 0:
            tell(one)
        (one,) = _tensors(1, 5)
        several = [torch.empty_like(one) for _ in range(size)] if rank == 0 else []
        comm.gather(one, several or None, 0)
        tell(*several)
        out = torch.empty_like(one)
        comm.scatter(out, _tensors(size, 5) if rank == 0 else None, 0)
        tell(out)
        if size > 1:
            if rank == 0:
                comm.send(one, other)
                comm.recv(out, other)
            else:
                comm.recv(out, other)
                comm.send(one, other)
            tell(out)
            works = comm.batch_isend_irecv(
                [comm.P2POp(comm.isend, one, other), comm.P2POp(comm.irecv, out, other)]
            )
            for work in works:
                work.wait()
            tell(out)
        comm.barrier()
        objects: list[Any] = [None] * size
        comm.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": number} for number in range(size)]
        told: list[Any] = ["hello" if rank == 0 else None]
        comm.broadcast_object_list(told, 0)
        assert told == ["hello"]
        group = comm.new_group(list(range(size)))
        (one,) = _tensors(1, 3)
        comm.all_reduce(one, group=group)
        tell(one)
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_as_on_cpus(size: int, npus: RankPools, ranks: RankPools) -> None:
    assert npus(size).run(_collectives) == ranks(size).run(_collectives)


def _backends() -> tuple[str, str, str]:
    comm.init_distributed()
    return (
        torch.distributed.get_default_backend_for_device("npu"),
        collective_backend(),
        str(torch.distributed.get_backend_config()),
    )


def test_each_device_has_its_backend(npus: RankPools) -> None:
    for told in npus(2).run(_backends):
        assert told == ("hccl", "cpu:gloo,npu:hccl", "cpu:gloo,npu:hccl")


def _mixed() -> str:
    with pytest.raises((RuntimeError, CommunicationError)) as found:
        comm.all_gather_into_tensor(torch.empty(2), torch.ones(1, device="npu"))
    return str(found.value)


def test_a_mixture_of_devices_is_an_error(npus: RankPools) -> None:
    assert npus(1).run(_mixed)


def _logged() -> list[str]:
    engine = runs.built(runs.config(3, "bf16", comms_logger={"enabled": True}))
    with npu.asynchronous():
        runs.advanced(engine, 2)
        rows = comm.log_summary()
    engine.destroy()
    stop_log()
    assert all(row.seconds > 0 for row in rows)
    return sorted({row.operation for row in rows})


def test_messages_are_logged(npus: RankPools) -> None:
    for told in npus(2).run(_logged):
        assert {"all_gather", "reduce_scatter"} <= set(told)


def _hops() -> list[list[float]]:
    """Ranks of the second node come when those of the first have done other work of the device."""
    world = comm.Ranks.world()
    inside, across = world.in_blocks(2)
    whole = torch.arange(float(4 * world.size))
    other = torch.zeros(3, device="npu")
    full = torch.full_like(whole, torch.nan).to("npu")
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    full[mine].copy_(whole[mine])
    is_first = world.rank < 2
    with npu.asynchronous():
        if is_first:
            pending = start_gather_in_hops(full, across, inside, "a gather in hops")
            other += 1
            torch.npu.current_stream().synchronize()
        gather_codes(0, world)
        if not is_first:
            pending = start_gather_in_hops(full, across, inside, "a gather in hops")
            other += 1
        pending.wait()
        full += 1
        torch.npu.current_stream().synchronize()
    return [full.tolist(), other.tolist()]


def test_other_work_does_not_wait_for_the_hop_between_nodes(npus: RankPools) -> None:
    expected = [[value + 1.0 for value in range(16)], [1.0] * 3]
    assert npus(4).run(_hops, timeout=60) == [expected] * 4


def _messages_of_a_bucket(precision: str) -> dict[str, float]:
    engine = runs.built(runs.config(0, precision, comms_logger={"enabled": True}))
    buckets = len(engine._parts.runtime.gradients)
    runs.advanced(engine, 1)
    comm.reset_log()
    runs.advanced(engine, 2, first=1)
    rows = comm.log_summary()
    engine.destroy()
    stop_log()
    assert buckets > 2
    large = [row for row in rows if row.nbytes > 64]
    return {
        kind: sum(row.count for row in large if row.operation == kind) / buckets
        for kind in {row.operation for row in large}
    }


@pytest.mark.fast_cells("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_0_takes_one_message_for_each_bucket(precision: str, npus: RankPools) -> None:
    updates = 2
    assert npus(2).run(_messages_of_a_bucket, precision) == [{"all_reduce": updates}] * 2


def _order_of_collectives(path: str, stage: int) -> dict[str, list[str]]:
    """The collectives of this rank in each communicator, in order."""
    given: dict[int, list[str]] = {}
    many = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")

    def noted(name: str) -> Any:
        original = getattr(functions, name)

        def call(*args: Any, **more: Any) -> Any:
            groups = [one for one in args if isinstance(one, ProcessGroup)]
            if args[0].device.type == "npu":
                given.setdefault(id(groups[0]), []).append(f"{name} {more['label']}")
            return original(*args, **more)

        return patch.object(functions, name, call)

    with ExitStack() as stack:
        for name in many:
            stack.enter_context(noted(name))
        with npu.asynchronous():
            held_at_once(PATHS[path], stage)
    return {str(number): one for number, one in enumerate(given.values())}


@pytest.mark.fast_cells("a head unused at first-3")
@every(path=list(PATHS), stage=[2, 3])
def test_ranks_that_lack_gradients_send_in_one_order(
    path: str, stage: int, npus: RankPools
) -> None:
    first, second = npus(2).run(_order_of_collectives, path, stage)
    assert first == second
    assert len(first) == (2 if stage == 3 else 1)


def _large_sums() -> list[list[float]]:
    """Values that fp16 holds, and their sum would not."""
    ranks = comm.Ranks.world()
    found = []
    for factors in (
        Factors.of_mean(ranks.size),
        Factors(1.0, 1.0),  # as where both ranks share a sequence, or gradients are added up
        Factors(1 / 1.25, 1.25 / ranks.size),
        Factors(1 / ranks.size, 1.0),
    ):
        full = torch.full((8,), 40000.0, device=current_device())
        out = torch.zeros(8 // ranks.size, device=current_device())
        start_reduce_scatter(full, out, ranks, torch.float16, True, "a cut", factors).wait()
        start_all_reduce(full, ranks, torch.float16, "a sum", factors).wait()
        found += [out.tolist(), full.tolist()]
    return found


def test_sums_in_fp16_overflow_only_where_values_do(npus: RankPools) -> None:
    found = npus(2).run(_large_sums)
    wanted = [mean for factor in (1, 2, 1, 1) for mean in ([40000.0 * factor] * n for n in (4, 8))]
    assert found == [wanted] * 2


_DTYPES = (torch.int16, torch.uint16, torch.bool, torch.complex64, torch.int8)


class _WithBuffers(nn.Linear):
    """A layer with a buffer of each dtype, with other values on each rank."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        for dtype in _DTYPES:
            values = torch.full((3,), 1 + 6 * comm.get_rank()).to(dtype)
            self.register_buffer(str(dtype).removeprefix("torch."), values)


def _spread() -> list[bool]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    with npu.asynchronous():
        engine, *_ = hadal.initialize(model=_WithBuffers(), config=config)
        found = [buffer.cpu() for buffer in engine.module.buffers()]
    engine.destroy()
    return [torch.equal(one, torch.ones(3).to(one.dtype)) for one in found]


def test_buffers_of_every_dtype_have_rank_0s_values(npus: RankPools) -> None:
    assert npus(2).run(_spread) == [[True] * len(_DTYPES)] * 2


def told_of_one_queue(connections: str) -> list[str]:
    with patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": connections}), logged() as lines:
        comm.Ranks.world().some([0, 1]).twin()
    return lines


def test_two_communicators_in_one_queue_are_reported(npus: RankPools) -> None:
    (line,), others = npus(2).run(told_of_one_queue, "1")
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 sends all kernels through one queue")
    assert "Unset it" in line and not others
    assert npus(2).run(told_of_one_queue, "8") == [[], []]
