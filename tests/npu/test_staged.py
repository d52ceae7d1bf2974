"""Processes that share one device train like those with a device each (see `tests/staged.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forks
from ranks import RankPools

from . import runs

_PROGRAM = """
import json, sys
import torch
import npu
npu.join()
import staged
staged.register("npu")
import hadal
from npu import runs

rank, stages = int(sys.argv[2]), json.loads(sys.argv[3])
hadal.init_distributed("cpu:gloo,npu:staged", init_method=sys.argv[1], rank=rank, world_size=2)
torch.set_num_threads(1)
with npu.asynchronous(), npu.with_float64():
    for stage in stages:
        print(json.dumps(runs.trained(runs.config(stage, "bf16"), 6)["losses"]))
"""


def test_stages_as_with_a_device_each(npus: RankPools, tmp_path: Path) -> None:
    stages = [0, 2, 3]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    words = [
        ["-c", _PROGRAM, f"file://{tmp_path}/store", str(rank), json.dumps(stages)]
        for rank in range(2)
    ]
    envs = [{**env, "RANK": str(rank)} for rank in range(2)]
    found = []
    for done in forks.run_ranks(words, envs=envs, timeout=300):
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    for number, stage in enumerate(stages):
        # In the later updates ranks may ask each other for weights, through the group's store.
        wanted = npus(2).run(runs.trained_late, runs.config(stage, "bf16"), 6)
        assert [rank[number] for rank in found] == [one["losses"] for one in wanted]
