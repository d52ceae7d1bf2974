"""Runs checks in processes, each within its time, and programs."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpu_checks.table import CHECKS, ROOT, Job, Line, expect, is_dry

PROGRAM = [str(ROOT / "benchmarks/gpu_check.py")]
# Until the processes have imported torch, met and allocated their first memory.
_START_S = 60.0
_PAUSE_S = 0.05
_DRY_LIMIT_S = 600.0
_LEAST_S = 5.0
_NO_TIME = Line("", "no time is left", "runs", False)
_of_scripts = [math.inf]
"""When the part of the checks that start programs ends."""


def run_script(
    *words: str, limit_s: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program; end it, and all that it has started, after its time."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = ""
    try:
        left = min(limit_s, _of_scripts[0] - time.monotonic())
        out, err = process.communicate(timeout=_DRY_LIMIT_S if is_dry() else left)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        late = f"\nit took more than {limit_s:g} s"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err + late)


def _end(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()


class Running:
    """The processes of a job, which run checks one after another and write down lines."""

    def __init__(self, job: Job, names: Sequence[str], folder: Path) -> None:
        self._found, self._folder = folder / "found", folder
        self._read, port = 0, _free_port()
        words = [sys.executable, *PROGRAM, "--job", ",".join(names), str(self._found)]
        with ExitStack() as files:
            self._processes = [
                subprocess.Popen(
                    words,
                    env={**os.environ, **_variables(job, rank, port)},
                    stdout=subprocess.DEVNULL,
                    stderr=files.enter_context((folder / f"{rank}.log").open("w")),
                    start_new_session=True,
                )
                for rank in range(job.ranks)
            ]

    def news(self) -> list[Any]:
        """Return what rank 0 has written since the last call."""
        text = self._found.read_text() if self._found.exists() else ""
        rows = text.split("\n")[:-1]
        news, self._read = rows[self._read :], len(rows)
        return [json.loads(row) for row in news]

    @property
    def has_ended(self) -> bool:
        """True if a process has failed, or all are done."""
        states = [process.poll() for process in self._processes]
        return any(states) or None not in states

    def end(self) -> str:
        """End all processes; return the last lines of the one that failed first."""
        failed = [rank for rank, one in enumerate(self._processes) if one.poll()]
        for process in self._processes:
            _end(process)
            process.wait()
        logs = [(self._folder / f"{rank}.log").read_text() for rank in failed or [0]]
        return " ".join(logs[0].strip().splitlines()[-3:])[-500:]


def _variables(job: Job, rank: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": "0"}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **dict(job.variables)}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_checks(
    job: Job, names: Sequence[str], deadline: float
) -> Iterator[tuple[str, list[Line], float]]:
    """Run checks of one job until the deadline; yield each one's lines and seconds.

    After a check that fails or is late the others run in new processes.
    """
    waiting = list(names)
    while waiting and time.monotonic() < deadline - _LEAST_S:
        with tempfile.TemporaryDirectory() as folder:
            running = Running(job, waiting, Path(folder))
            lines, begun, limit_s, fault = [], time.monotonic(), _START_S, ""
            while waiting and not fault:
                time.sleep(_PAUSE_S)
                fault = "a process ended" if running.has_ended else ""
                for kind, value in running.news():
                    if kind == "line":
                        lines.append(Line(**value))
                    elif kind == "begun":
                        lines, begun, limit_s = [], time.monotonic(), limit_of(value)
                    else:
                        yield waiting.pop(0), lines, value
                        lines, begun, limit_s = [], time.monotonic(), _START_S
                if time.monotonic() > min(begun + limit_s, deadline):
                    fault = f"it took more than {time.monotonic() - begun:.0f} s"
            wrote = running.end()
        if waiting:
            tail = f"{fault}: {wrote}" if wrote else fault
            lines.append(expect("the check", tail, "runs to its end", False))
            yield waiting.pop(0), lines, time.monotonic() - begun
    for name in waiting:
        yield name, [_NO_TIME], 0.0


def run_here(name: str, deadline: float) -> tuple[str, list[Line], float]:
    """Run a check that starts programs itself; return its lines and seconds."""
    begun, lines = time.monotonic(), []
    if begun > deadline - _LEAST_S:
        return name, [_NO_TIME], 0.0
    _of_scripts[:] = [deadline]
    try:
        for line in CHECKS[name].act():
            lines.append(line)
    except Exception:
        tail = traceback.format_exc().strip().splitlines()[-1]
        lines.append(expect("the check", tail, "runs to its end", False))
    return name, lines, time.monotonic() - begun


def limit_of(name: str) -> float:
    """Return the seconds that a check may take."""
    return _DRY_LIMIT_S if is_dry() else CHECKS[name].limit_s


def serve(names: Sequence[str], found: Path) -> None:
    """Run checks in this process, one of a job's; rank 0 writes down what they yield."""
    is_first = os.environ["RANK"] == "0"

    def write(kind: str, value: object) -> None:
        if is_first:
            with found.open("a") as file:
                file.write(json.dumps([kind, value]) + "\n")

    gc.freeze()  # engines collect garbage when they end, over and over
    try:
        for name in names:
            write("begun", name)
            begun = time.monotonic()
            for line in CHECKS[name].act():
                write("line", asdict(line))
            _release()
            write("done", time.monotonic() - begun)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks may wait for this one, and it for them


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
