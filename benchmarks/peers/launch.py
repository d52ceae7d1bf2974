"""Starts one process per rank and collects the ranks' measurements.

Nothing here imports torch: the peak memory of a child includes its parent's at the start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from peers.install import deepspeed_variables, environment_python
from peers.settings import Contestant, Workload

_BENCHMARKS = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.05
_SHUTDOWN_SECONDS = 20
_LOG_TAIL = 2000


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the environment variables its ranks run under."""

    python: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The measurements of one start of one contestant; ``steps`` has the slowest rank's seconds."""

    steps: list[float]
    losses: list[float]
    init_s: float
    before_mib: float
    init_mib: float
    peak_mib: float
    parameters: int
    trouble: str | None


def deepspeed_interpreter(directory: Path) -> Interpreter:
    """DeepSpeed's, in the environment in ``directory``."""
    python = str(environment_python(directory.absolute()))
    return Interpreter(python, deepspeed_variables(directory))


class GroupFailure(Exception):
    """A process group ended without a result; the text is the reason."""


def imports_after_torch(interpreter: Interpreter, statement: str, repeat: int) -> float | None:
    """Seconds ``statement`` takes beyond ``import torch``, by medians over fresh processes.

    The two are timed in turn, and once beforehand unmeasured so that bytecode is compiled and
    files are cached. None if the statement cannot be imported.
    """
    baseline, measured = [], []
    try:
        _time_import(interpreter, statement)
        for _ in range(repeat):
            baseline.append(_time_import(interpreter, "import torch"))
            measured.append(_time_import(interpreter, statement))
    except subprocess.CalledProcessError:
        return None
    return median(measured) - median(baseline)


def _time_import(interpreter: Interpreter, statement: str) -> float:
    code = f"import time; began = time.perf_counter(); {statement}\n"
    code += "print(); print(time.perf_counter() - began)"
    variables = environment(interpreter)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [interpreter.python, "-c", code],
        cwd=_BENCHMARKS,
        env=variables,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.split()[-1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(interpreter: Interpreter) -> dict[str, str]:
    """The variables of a child process: it finds the benchmark and this checkout's Hadal."""
    path = [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **interpreter.variables,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _rank_environment(base: dict[str, str], rank: int, port: int, job: Workload) -> dict[str, str]:
    return {
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(job.threads),
    }


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> str | None:
    """Wait for every rank to end; return the fault, or None.

    Once all ranks have written their results, they get only a moment to shut down.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if any(not _result_path(folder, rank).exists() for rank in failed):
            return f"rank {failed[0]} ended with code {codes[failed[0]]}"
        if None not in codes:
            return f"ranks {failed} failed at shutdown, {codes}" if failed else None
        if all(_result_path(folder, rank).exists() for rank in range(len(processes))):
            deadline = min(deadline, time.monotonic() + _SHUTDOWN_SECONDS)
        time.sleep(_POLL_SECONDS)
    return "no end in time"


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _start_ranks(
    command: list[str], base: dict[str, str], workload: Workload, log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    port = _free_port()
    for rank in range(workload.world_size):
        yield subprocess.Popen(
            command,
            cwd=_BENCHMARKS,
            env=_rank_environment(base, rank, port, workload),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_ranks(
    module: str, interpreter: Interpreter, workload: Workload, job: dict[str, Any], timeout: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Run ``python -m module JOB`` on every rank; return the results, and faults at shutdown.

    Raises ``GroupFailure`` with the end of the group's output if a rank wrote no result.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps({**job, "workload": asdict(workload), "output": name})
        command = [interpreter.python, "-m", module, text]
        processes: list[subprocess.Popen[bytes]] = []
        with (folder / "log").open("wb") as log:
            try:
                for process in _start_ranks(command, environment(interpreter), workload, log):
                    processes.append(process)
                trouble = _wait(processes, folder, timeout)
            finally:
                _stop(processes)
        paths = [_result_path(folder, rank) for rank in range(workload.world_size)]
        if not all(path.exists() for path in paths):
            tail = (folder / "log").read_text(errors="replace")[-_LOG_TAIL:]
            raise GroupFailure(f"{trouble}\n{tail}")
        return [json.loads(path.read_text()) for path in paths], trouble


def run_contestant(
    interpreter: Interpreter, workload: Workload, contestant: Contestant, timeout: float
) -> Run:
    """Start the contestant's ranks, let them train, and merge their measurements."""
    job = {"contestant": asdict(contestant)}
    ranks, trouble = run_ranks("peers.worker", interpreter, workload, job, timeout)
    if "unavailable" in ranks[0]:
        raise GroupFailure(f"unavailable: {ranks[0]['unavailable']}")
    return Run(
        steps=[max(times) for times in zip(*(rank["steps"] for rank in ranks), strict=True)],
        losses=ranks[0]["losses"],
        init_s=max(rank["init_s"] for rank in ranks),
        before_mib=max(rank["rss_before"] for rank in ranks),
        init_mib=max(rank["rss_init"] for rank in ranks),
        peak_mib=max(rank["peak"] for rank in ranks),
        parameters=ranks[0]["parameters"],
        trouble=trouble,
    )
