"""`hadal.comm`: the results of torch's functions of the same names, and labelled errors."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools

import hadal
from hadal import comm
from hadal.comm.works import NamedWork
from hadal.errors import CommunicationError, UsageError


def filled(value: float, numel: int = 2) -> torch.Tensor:
    return torch.full((numel,), float(value))


def results() -> dict[str, Any]:
    """The result of each function on this rank, for values equal to the rank's number + 1."""
    warnings.simplefilter("error")
    rank, size = comm.get_rank(), comm.get_world_size()
    own = rank + 1
    found: dict[str, Any] = {}

    def note(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [tensor.tolist() for tensor in tensors]

    one = filled(own)
    comm.all_reduce(one, comm.ReduceOp.MAX)
    note("all_reduce", one)
    work = comm.all_reduce(one := filled(own), async_op=True)
    assert isinstance(work, dist.Work) and work.wait() and work.is_completed()
    assert work.get_future().wait() is not None
    note("all_reduce later", one)
    pair = [filled(own), filled(10 * own, 3)]
    comm.all_reduce_coalesced(pair)
    note("all_reduce_coalesced", *pair)
    work = comm.all_reduce_coalesced(pair := [filled(own), filled(10 * own, 3)], async_op=True)
    work.wait()
    work.wait()
    note("all_reduce_coalesced later", *pair)
    comm.all_gather(many := [filled(0) for _ in range(size)], filled(own))
    note("all_gather", *many)
    comm.all_gather_into_tensor(whole := filled(0, 2 * size), filled(own))
    note("all_gather_into_tensor", whole)
    outs = [filled(0, 2 * size), filled(0, size)]
    comm.all_gather_coalesced(outs, [filled(own), filled(-own, 1)])
    note("all_gather_coalesced", *outs)
    comm.reduce_scatter(one := filled(0), [filled(own + place) for place in range(size)])
    note("reduce_scatter", one)
    comm.reduce_scatter_tensor(one, torch.arange(2.0 * size) * own)
    note("reduce_scatter_tensor", one)
    comm.all_to_all_single(whole, torch.arange(2.0 * size) + 10 * own)
    note("all_to_all_single", whole)
    splits = [1, 3]
    comm.all_to_all_single(
        uneven := filled(0, 2 * splits[rank]), filled(own, 4), [splits[rank]] * 2, splits
    )
    note("all_to_all_single, uneven", uneven)
    comm.broadcast(one := filled(own), 1)
    note("broadcast", one)
    comm.reduce(one := filled(own), 0)
    note("reduce", *([one] if rank == 0 else []))
    comm.gather(filled(own), many if rank == 1 else None, 1)
    note("gather", *(many if rank == 1 else []))
    comm.scatter(one, [filled(7), filled(8)] if rank == 0 else None, 0)
    note("scatter", one)
    if rank == 0:
        comm.send(filled(5), 1)
        sender = comm.recv(one)
    else:
        sender = comm.recv(one)
        comm.send(one + 1, 0)
    found["send and recv"] = [sender, one.tolist()]
    works = [comm.isend(filled(own), 1 - rank), comm.irecv(one, 1 - rank)]
    for work in works:
        work.wait()
    note("isend and irecv", one)
    batch = [comm.P2POp(comm.isend, filled(own), 1 - rank), comm.P2POp(comm.irecv, one, 1 - rank)]
    for work in comm.batch_isend_irecv(batch):
        work.wait()
    note("batch_isend_irecv", one)
    comm.all_gather_object(objects := [None] * size, {"rank": rank})
    found["all_gather_object"] = objects
    comm.broadcast_object_list(objects := [rank], 1)
    found["broadcast_object_list"] = objects
    comm.barrier()
    comm.barrier(async_op=True).wait()
    comm.monitored_barrier(timeout=timedelta(seconds=20))
    return found


SUM = [3.0, 3.0]
BOTH = {
    "all_reduce": [[2.0, 2.0]],
    "all_reduce later": [SUM],
    "all_reduce_coalesced": [SUM, [30.0, 30.0, 30.0]],
    "all_reduce_coalesced later": [SUM, [30.0, 30.0, 30.0]],
    "all_gather": [[1.0, 1.0], [2.0, 2.0]],
    "all_gather_into_tensor": [[1.0, 1.0, 2.0, 2.0]],
    "all_gather_coalesced": [[1.0, 1.0, 2.0, 2.0], [-1.0, -2.0]],
    "broadcast": [[2.0, 2.0]],
    "all_gather_object": [{"rank": 0}, {"rank": 1}],
    "broadcast_object_list": [1],
}
ONE_BY_ONE = [
    {
        "reduce_scatter": [[3.0, 3.0]],
        "reduce_scatter_tensor": [[0.0, 3.0]],
        "all_to_all_single": [[10.0, 11.0, 20.0, 21.0]],
        "all_to_all_single, uneven": [[1.0, 2.0]],
        "reduce": [SUM],
        "gather": [],
        "scatter": [[7.0, 7.0]],
        "send and recv": [1, [6.0, 6.0]],
        "isend and irecv": [[2.0, 2.0]],
        "batch_isend_irecv": [[2.0, 2.0]],
    },
    {
        "reduce_scatter": [[5.0, 5.0]],
        "reduce_scatter_tensor": [[6.0, 9.0]],
        "all_to_all_single": [[12.0, 13.0, 22.0, 23.0]],
        "all_to_all_single, uneven": [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]],
        "reduce": [],
        "gather": [[1.0, 1.0], [2.0, 2.0]],
        "scatter": [[8.0, 8.0]],
        "send and recv": [0, [5.0, 5.0]],
        "isend and irecv": [[1.0, 1.0]],
        "batch_isend_irecv": [[1.0, 1.0]],
    },
]


def test_they_behave_like_torchs_without_a_warning(ranks: RankPools) -> None:
    for found, own in zip(ranks(2).run(results), ONE_BY_ONE, strict=True):
        assert found == BOTH | own


def groups() -> dict[str, Any]:
    rank = comm.get_rank()
    first = comm.new_group([0, 2])
    mine = first if rank != 1 else None
    mesh = comm.initialize_mesh_device((3,), ("data",))
    one = filled(rank + 1)
    if mine is not None:
        comm.all_reduce(one, group=mine)
    found = {
        "sum": one.tolist(),
        "ranks": comm.get_all_ranks_from_group(mine),
        "global": comm.get_global_rank(mine, 1),
        "rank": comm.get_rank(mine),
        "size": comm.get_world_size(mine),
        "mesh": mesh.get_group("data").size(),
    }
    if mine is not None:
        comm.destroy_process_group(mine)
    return found


def test_groups(ranks: RankPools) -> None:
    first, second, third = ranks(3).run(groups)
    assert first == {
        "sum": [4.0, 4.0],
        "ranks": [0, 2],
        "global": 2,
        "rank": 0,
        "size": 2,
        "mesh": 3,
    }
    assert third == {**first, "rank": 1}
    alone = {"sum": [2.0, 2.0], "ranks": [0, 1, 2], "global": 1, "rank": 1, "size": 3, "mesh": 3}
    assert second == alone


def late(how: str) -> str:
    """Rank 1 never arrives in time; return the error on rank 0."""
    limit = timedelta(milliseconds=300)
    group = dist.new_group([0, 1], timeout=limit)
    told = ""
    if comm.get_rank() == 0:
        tensor = torch.ones(1000)
        try:
            if how == "at once":
                comm.all_reduce(tensor, group=group)
            elif how == "later":
                comm.all_reduce(tensor, group=group, async_op=True).wait()
            elif how == "received":
                comm.irecv(tensor, 1, group=group).wait()
            else:
                comm.monitored_barrier(group, limit)
        except CommunicationError as error:
            assert isinstance(error, RuntimeError)
            told = str(error)
    else:
        time.sleep(1.5)
    dist.barrier()
    return told


@pytest.mark.fast_cells("barrier")
@pytest.mark.parametrize("how", ["at once", "later", "received", "barrier"])
def test_a_timeout_names_the_operation_and_the_group(ranks: RankPools, how: str) -> None:
    told = ranks(2).run(late, how)[0]
    name = {"received": "recv", "barrier": "a monitored barrier"}.get(how, "all_reduce")
    assert told.startswith(f"rank 0 waited in vain for another rank in {name}")
    kind = {"received": "recv of 4000 bytes of torch.float32", "barrier": "barrier of 0 bytes"}
    assert kind.get(how, "all_reduce of 4000 bytes of torch.float32") in told
    assert "among ranks [0, 1] of the group '" in told
    assert told.endswith(
        "Another rank waits elsewhere, hangs, or cannot be reached over the network."
    )
    if how == "barrier":
        assert "1" in told.split("): ")[1]  # who is missing


def test_tensors_of_several_kinds_are_separate_messages() -> None:
    hadal.init_distributed()
    with pytest.raises(UsageError, match=r"all_reduce_coalesced.*one dtype.*bfloat16.*float32"):
        comm.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])


def test_without_a_process_group_this_process_is_alone() -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.get_global_rank()) == (0, 1, 0)
    assert comm.get_world_group() is None and comm.get_all_ranks_from_group() == [0]
    comm.barrier()
    comm.monitored_barrier()
    comm.destroy_process_group()
    assert comm.is_available() and not comm.is_initialized()


def test_a_compiled_function_keeps_its_collective() -> None:
    hadal.init_distributed()

    def double(tensor: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(tensor)
        return tensor * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(filled(3)).tolist() == [6.0, 6.0]


def test_a_work_of_ours_is_one_of_torchs() -> None:
    hadal.init_distributed()
    work = comm.broadcast(filled(1), 0, async_op=True)
    assert isinstance(work, NamedWork) and isinstance(work, dist.Work)
    assert work.wait(timedelta(seconds=5))
    work.synchronize()


def test_the_names_are_all_there() -> None:
    assert all(hasattr(comm, name) for name in comm.__all__)
    flags = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_coalesced")
    assert all(getattr(comm, f"has_{name}")() for name in flags)
    assert comm.has_coalescing_manager() is False
