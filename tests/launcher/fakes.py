#!/usr/bin/env python3
"""A fake srun and mpirun: it records its arguments, and starts the ranks on this machine.

Its name is that of the program it stands for. What it is called with is written, as JSON, into the
file that FAKE_CALLS names.
"""

import json
import os
import subprocess
import sys


def main() -> int:
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    with open(os.environ["FAKE_CALLS"], "w") as calls:
        json.dump([name, *words], calls)
    return max(process.wait() for process in tasks(name, words))


def tasks(name: str, words: list[str]) -> list[subprocess.Popen[bytes]]:
    program = words[words.index(sys.executable) :]
    own = words[: words.index(sys.executable)]
    if name == "srun":
        count = next(int(w.partition("=")[2]) for w in own if w.startswith("--ntasks="))
        nodes = next(int(w.partition("=")[2]) for w in own if w.startswith("--nodes="))
    else:
        count, nodes = int(own[own.index("-n") + 1]), 2
    size = count // nodes
    return [
        subprocess.Popen(program, env={**os.environ, **variables(name, rank, count, size)})
        for rank in range(count)
    ]


def place(rank: int, count: int, size: int) -> int:
    """Return a rank's local rank: hosts are filled one by one, or in turn."""
    return rank // (count // size) if os.environ.get("FAKE_PLACES") else rank % size


def variables(name: str, rank: int, count: int, size: int) -> dict[str, str]:
    if name == "srun":
        told = {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": count,
            "SLURM_LOCALID": rank % size,
            "SLURM_NODEID": rank // size,
            "SLURM_STEP_TASKS_PER_NODE": f"{size}(x{count // size})",
            "SLURM_STEP_NODELIST": os.environ.get("FAKE_NODES", "node[03-04]"),
        }
    elif os.environ["FAKE_MPI"] == "openmpi":
        told = {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": count,
            "OMPI_COMM_WORLD_LOCAL_RANK": place(rank, count, size),
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        }
    else:
        told = {
            "PMI_RANK": rank,
            "PMI_SIZE": count,
            "MPI_LOCALRANKID": place(rank, count, size),
            "MPI_LOCALNRANKS": size,
        }
    return {key: str(value) for key, value in told.items()}


if __name__ == "__main__":
    sys.exit(main())
