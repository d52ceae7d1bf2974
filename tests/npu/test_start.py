"""Start-up on an accelerator: the group knows its device from the beginning."""

from __future__ import annotations

import os
from pathlib import Path

import forks
import pytest

_MEETING = """
import sys
import npu
npu.join()
import torch.distributed as dist
import hadal
from hadal import comm

rank = int(sys.argv[2])
hadal.init_distributed(init_method=sys.argv[1], rank=rank, world_size=2)
print(dist.group.WORLD.bound_device_id)
# A group of this rank alone, which the other one does not make.
alone, row = comm.Ranks.world().in_blocks(1)
print(alone.size, row.size, dist.group.WORLD.bound_device_id)
"""


_OWN_GROUP = """
import atexit, sys
import torch
import npu
npu.join()
import torch.distributed as dist
import hadal

atexit.register(lambda: print("group runs" if dist.is_initialized() else "group has ended"))
if len(sys.argv) > 3:
    torch.accelerator.set_device_index(int(sys.argv[3]))
rank = int(sys.argv[2])
dist.init_process_group("cpu:gloo,npu:hccl", init_method=sys.argv[1], rank=rank, world_size=2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine, *_ = hadal.initialize(model=torch.nn.Linear(4, 4), config=config)
print(engine.device)
dist.barrier()
"""


def outputs(program: str, *arguments: str, folder: Path) -> list[str]:
    """What each of two ranks prints, each started by a launcher."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ranks = ("0", "1")
    envs = [
        {**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2"}
        for rank in ranks
    ]
    words = [["-c", program, f"file://{folder}/store", rank, *arguments] for rank in ranks]
    found = forks.run_ranks(words, envs=envs, timeout=300)
    assert all(done.returncode == 0 for done in found), [done.stderr for done in found]
    return [done.stdout for done in found]


@pytest.mark.usefixtures("npus")
def test_ranks_of_the_programs_own_group_have_their_devices(tmp_path: Path) -> None:
    told = outputs(_OWN_GROUP, folder=tmp_path)
    assert told == [f"npu:{rank}\ngroup has ended\n" for rank in (0, 1)]


@pytest.mark.usefixtures("npus")
def test_a_device_that_the_program_has_chosen_stays(tmp_path: Path) -> None:
    told = outputs(_OWN_GROUP, "1", folder=tmp_path)
    assert told == ["npu:1\ngroup has ended\n"] * 2


@pytest.mark.usefixtures("npus")
def test_a_group_is_bound_to_its_device(tmp_path: Path) -> None:
    for rank, told in enumerate(outputs(_MEETING, folder=tmp_path)):
        assert told.split("\n")[:2] == [f"npu:{rank}", f"1 2 npu:{rank}"]
