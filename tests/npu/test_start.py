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


@pytest.mark.usefixtures("npus")
def test_a_group_is_bound_to_its_device(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    envs = [{**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": str(rank)} for rank in range(2)]
    for env, rank in zip(envs, range(2), strict=True):
        env |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    words = [["-c", _MEETING, f"file://{tmp_path}/store", str(rank)] for rank in range(2)]
    for rank, done in enumerate(forks.run_ranks(words, envs=envs, timeout=300)):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:2] == [f"npu:{rank}", f"1 2 npu:{rank}"]
