"""A forked process equals an interpreter started with the same arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest

# What a program finds, and what it does at its end.
PROGRAM = """
import atexit, json, os, sys, threading, time
if "HOME_IS" in os.environ:
    import beside
    atexit.register(print, "at exit")
    print(__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ["HOME_IS"], sys.stdin.read())
    some = ("hypothesis", "pydantic", "pytest", "torch", "hadal", "forks")
    print([module for module in some if module in sys.modules])
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
raise ValueError("no such place") if len(sys.argv) > 3 else SystemExit(7)
"""


@pytest.mark.fast_cells("file")
@pytest.mark.parametrize("way", ["file", "-c", "-m"])
def test_it_finds_the_names_of_an_interpreter(tmp_path: Path, way: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").touch()
    words = {"file": [str(tmp_path / "program.py")], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}
    env = {"HOME_IS": "here", "PYTHONPATH": f"/nowhere{os.pathsep}{tmp_path}"}
    folder = str(tmp_path)
    forked = forks.run([*words[way], "a b"], env=env, timeout=60, cwd=folder)
    started = subprocess.run(
        [sys.executable, *words[way], "a b"],
        env=env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert forked.returncode == started.returncode == 7, forked.stderr
    assert forked.stderr == started.stderr == ""
    imported = "['hypothesis', 'pydantic', 'pytest', 'torch']"
    expected = started.stdout.replace("[]", imported)
    assert forked.stdout == expected
    assert expected.endswith(f"{imported}\na thread\nat exit\n")


def test_an_exception_and_a_signal_end_it() -> None:
    first, second = forks.run_ranks(
        [["-c", PROGRAM, "a", "b", "c"], ["-c", "import time; time.sleep(600)"]],
        envs=[{}, {}],
        timeout=60,
        grace=0.1,
    )
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    assert first.stderr.endswith("ValueError: no such place\n")


def test_ranks_differ_as_processes_do() -> None:
    """A set's order is another one on another rank: who relies on it shall be found."""
    words = ["-c", "import random, uuid; print(hash('a'), random.random(), uuid.uuid4())"]
    found = forks.run_ranks([words] * 3, envs=[{}] * 3, timeout=60)
    again = forks.run_ranks([words], envs=[{}], timeout=60)
    hashes, *drawn = zip(*(each.stdout.split() for each in (*found, *again)), strict=True)
    assert len(set(hashes[:3])) == 3
    assert all(len(set(values)) == 4 for values in drawn)
