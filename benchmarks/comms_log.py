"""The cost of the log of collectives: nanoseconds of a call, off and on.

    python benchmarks/comms_log.py

One process, so that no call waits: torch's smallest all-reduce, that of `hadal.comm` with the log
off and on, and the check of the log that every collective makes while it is off. The minimum of
many repetitions, as other work on the machine only adds to it.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist

import hadal
from hadal import comm
from hadal.comm.comms_log import opened


def least_ns(call: Callable[[], object], number: int = 2000, repeat: int = 25) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e9


def nothing(*_: object) -> None:
    return None


def main() -> None:
    hadal.init_distributed()
    one = torch.ones(1)

    def log_on(**choice: bool) -> float:
        comm.reset_log()
        comm.start_log(**choice)
        found = least_ns(lambda: comm.all_reduce(one))
        comm.stop_log()
        return found

    rows = {
        "checking the log while it is off": least_ns(lambda: opened("all_reduce", one, None, "")),
        "a function that does nothing": least_ns(lambda: nothing("all_reduce", one, None, "")),
        "torch.distributed.all_reduce": least_ns(lambda: dist.all_reduce(one)),
        "hadal.comm.all_reduce, log off": least_ns(lambda: comm.all_reduce(one)),
        "hadal.comm.all_reduce, log on": log_on(),
        "hadal.comm.all_reduce, log on, debug": log_on(debug=True),
    }
    for name, nanoseconds in rows.items():
        print(f"{name:40} {nanoseconds:10,.0f} ns")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
