"""Ranks for tests: real processes joined by gloo, started once and given many tasks.

A `RankPool` holds one process per rank. `run(function, *args)` calls an importable top-level
function on every rank and returns one result per rank. What goes wrong ends as a `RanksFailed`
soon, with each rank's traceback or, for a rank that hangs, the stack of each of its threads; the
pool then starts anew for the next task. `RankPools` starts pools when they are first asked for.

Nothing here knows pytest: `conftest.py` makes fixtures of it. Run as a program, this file is one
rank (see `_serve`); `forks` starts it, since importing torch takes longer than most tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import costs
import forks

DEFAULT_TIMEOUT = 180.0  # against hanging: a busy machine takes its time
START_TIMEOUT = 300.0
# How long the other ranks may run after one has failed: they may be about to fail too.
GRACE = 5.0
GROUP_TIMEOUT = timedelta(minutes=30)  # far beyond any task's: it is the pool that ends a hang


class RanksFailed(Exception):
    """A task did not return on every rank; `errors` maps a rank to what it raised."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RemoteError(Exception):
    """Stands for an exception of a rank that could not be pickled."""


@dataclasses.dataclass
class _Reply:
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


class _Process:
    """One rank: its process, the pipe to it, its lifeline and the file it writes stacks to."""

    def __init__(self, rank: int, world_size: int, meeting_point: str, device: str) -> None:
        self.rank = rank
        self.pipe, far_pipe = Pipe(duplex=True)
        far_lifeline, self.lifeline = os.pipe()
        self.log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 (lives as long as self)
        environment = dict(os.environ)
        environment.update(
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            LOCAL_RANK="0" if device.endswith("staged") else str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            PYTHONUNBUFFERED="1",
        )
        if not device.startswith("cuda"):
            environment["CUDA_VISIBLE_DEVICES"] = ""
        arguments = [rank, world_size, meeting_point, device, far_pipe.fileno(), far_lifeline]
        self.process = forks.server(rank).start(
            [__file__, *map(str, arguments)],
            env=environment,
            stdout=self.log.fileno(),
            stderr=self.log.fileno(),
            pass_fds=(far_pipe.fileno(), far_lifeline),
        )
        far_pipe.close()
        os.close(far_lifeline)

    def written(self, since: int = 0) -> str:
        """The rank's standard output and error."""
        nbytes = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), nbytes - since, since).decode(errors="replace")

    def stacks(self) -> str:
        """The stack of every thread of the rank, as faulthandler writes them."""
        if self.process.poll() is not None:
            return f"the process has ended with status {self.process.returncode}\n{self.tail()}"
        before = os.fstat(self.log.fileno()).st_size
        self.process.send_signal(signal.SIGUSR1)
        seen, deadline = "", time.monotonic() + 2.0
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            now = self.written(before)
            if now and now == seen:
                break
            seen = now
        return seen or "the process did not answer the request for its stacks"

    def tail(self) -> str:
        return self.written()[-4000:]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.pipe.close()
        os.close(self.lifeline)
        self.log.close()


class RankPool:
    """`world_size` processes in one gloo group, started at the first task.

    `device`: "cpu", or an accelerator and the backend that joins it beside gloo: "npu:hccl" (the
    test device), or "npu:staged" or "cuda:staged", where all share the first one (`staged.py`).
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self.grace = GRACE
        self._processes: list[_Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._checking = False

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[Any]:
        """Call `function(*args)` on every rank; return each rank's result, rank 0 first."""
        replies = self._ask(pickle.dumps((sys.path, _address(function), args)), timeout)
        return [reply.value for reply in replies]

    def map(
        self,
        function: Callable[..., Any],
        args_of_ranks: Sequence[tuple[Any, ...]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Any]:
        """Call `function` with its own arguments on each rank; return each rank's result."""
        if len(args_of_ranks) != self.world_size:
            raise ValueError(f"{len(args_of_ranks)} arguments for {self.world_size} ranks")
        return self.run(_own_arguments, _address(function), list(args_of_ranks), timeout=timeout)

    def raises(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[BaseException | None]:
        """The exception of `function(*args)` on each rank (None if it returns)."""
        return self.run(_caught, _address(function), args, timeout=timeout)

    def kill(self, rank: int) -> None:
        """Kill one rank as an operator would (SIGKILL)."""
        self.start()
        self._processes[rank].process.kill()

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.end()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def start(self) -> None:
        """Start the processes, where none run: a task would do it."""
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="hadal_ranks_")
        meeting_point = str(Path(self._folder.name, "store"))
        self._processes = [
            _Process(rank, self.world_size, meeting_point, self.device)
            for rank in range(self.world_size)
        ]
        self._gather("start", START_TIMEOUT)

    def _ask(self, task: bytes, timeout: float) -> list[_Reply]:
        self.start()
        for process in self._processes:
            # A rank that has died is found by `_gather`, with what it wrote.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.pipe.send_bytes(task)
        return self._gather("task", timeout)

    def _gather(self, what: str, timeout: float) -> list[_Reply]:
        """Wait for one reply per rank; end and report the pool where that fails."""
        pending = {process.pipe: process for process in self._processes}
        replies: dict[int, _Reply] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left):
                process = pending.pop(pipe)
                reply = _received(process)
                replies[process.rank] = reply
                if reply.error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + self.grace)
        if not failed and not pending:
            return [replies[rank] for rank in range(self.world_size)]
        message = self._report(what, timeout, replies)
        if pending or not self._is_sound():
            self.close()
        errors = {rank: reply.error for rank, reply in replies.items() if reply.error is not None}
        raise RanksFailed(message, errors)

    def _is_sound(self) -> bool:
        """True if all ranks, after an exception, are alive and meet in the next collective."""
        if self._checking:
            return False
        self._checking = True
        try:
            self._ask(pickle.dumps((sys.path, _address(_own_rank), ())), GRACE)
        except RanksFailed:
            return False
        finally:
            self._checking = False
        return True

    def _report(self, what: str, timeout: float, replies: dict[int, _Reply]) -> str:
        silent = [rank for rank in range(self.world_size) if rank not in replies]
        raised = [rank for rank, reply in replies.items() if reply.error is not None]
        lines = [
            f"{what} on {self.world_size} ranks: raised on {sorted(raised)}, "
            f"no answer from {silent} (limit {timeout:g} s, or {self.grace:g} s after a failure)"
        ]
        for rank, process in enumerate(self._processes):
            if rank in silent:
                lines.append(f"--- rank {rank} hangs; its threads:\n{process.stacks()}")
            elif rank in raised:
                lines.append(f"--- rank {rank} raised:\n{replies[rank].traceback}")
        return "\n".join(lines)


class RankPools:
    """One pool per world size, started when first asked for: `pools(2).run(function)`."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, self._device)
            with costs.aside():
                self._pools[world_size].start()
        return self._pools[world_size]

    def close(self) -> None:
        """End the processes of every pool."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


def on_ranks(
    size: int | str, pools: str = "ranks", **options: float
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that each of `size` ranks calls with the test's arguments.

    `size` may be the name of an argument of the test. `pools` is the fixture of the ranks; options
    go to `RankPool.run`.
    """

    def test_of(function: Callable[..., None]) -> Callable[..., None]:
        arguments = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(**given: Any) -> None:
            pool = given[pools](given[size] if isinstance(size, str) else size)
            pool.run(function, *(given[name] for name in arguments), **options)

        function.__qualname__ += ".__wrapped__"  # where ranks find it
        names = dict.fromkeys([*arguments, *([size] if isinstance(size, str) else []), pools])
        shown = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return test

    return test_of


def _address(function: Callable[..., Any]) -> tuple[str, str]:
    """The location of the function for a rank: its module's name and its own."""
    if "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} cannot be imported; use a top-level function")
    return function.__module__, function.__qualname__


def _found(address: tuple[str, str]) -> Callable[..., Any]:
    found: Any = importlib.import_module(address[0])
    for name in address[1].split("."):
        found = getattr(found, name)
    return found


def _own_arguments(address: tuple[str, str], args_of_ranks: list[tuple[Any, ...]]) -> Any:
    return _found(address)(*args_of_ranks[_own_rank()])


def _own_rank() -> int:
    return int(os.environ["RANK"])


def _caught(address: tuple[str, str], args: tuple[Any, ...]) -> BaseException | None:
    try:
        _found(address)(*args)
    except Exception as error:
        # The frames hold the engine alive, and tracebacks do not travel.
        return _without_frames(_sendable(error))
    return None


def _without_frames(error: BaseException) -> BaseException:
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RemoteError(f"{type(error).__qualname__}: {error}")
    return error


def _received(process: _Process) -> _Reply:
    try:
        return pickle.loads(process.pipe.recv_bytes())
    except (EOFError, OSError):
        status = process.process.wait()
        death = RemoteError(f"rank {process.rank} died with status {status}")
        return _Reply(error=death, traceback=f"{death}; it had written:\n{process.tail()}")
    except Exception as error:
        return _Reply(error=error, traceback=f"the reply cannot be read: {error!r}")


def _serve(rank: int, world_size: int, meeting_point: str, device: str, pipe: Connection) -> None:
    """Be one rank: join the group, then do the tasks that come through the pipe."""
    import gc

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _share_a_loop()
    store = dist.FileStore(meeting_point, world_size)
    kind, _, backend = device.partition(":")
    if kind == "npu":
        import npu

        npu.join()
    if backend == "hccl":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if backend == "staged":
        import staged

        staged.register(kind)
    backend = f"cpu:gloo,{device}" if backend else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    dist.barrier()
    pipe.send_bytes(pickle.dumps(_Reply()))
    number = modules = 0
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        number += 1
        pipe.send_bytes(_done(task, number))
        if len(sys.modules) > modules:
            # What modules hold never dies: keep it out of the collection after each task.
            modules = len(sys.modules)
            gc.freeze()


def _share_a_loop() -> None:
    """Make all gloo groups of this process from now on share one device, and so one thread.

    Each device has a thread that wakes a hundred times a second, in idle ranks too. Tests leave
    many groups behind: 30 in a rank, and 40,000 switches a second between all of them.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    class SharedLoop(ProcessGroupGloo):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **later: Any
        ) -> None:
            assert not any(later.values()), f"options of a later torch: {later}"
            options = ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedLoop


def _done(task: bytes, number: int) -> bytes:
    """Do one task, then see that all ranks stand at the same place again."""
    import gc
    import traceback
    import warnings

    import torch

    try:
        paths, address, args = pickle.loads(task)
        sys.path.extend(path for path in paths if path not in sys.path)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # With another torch than the tested one warnings are no errors: PYTHONWARNINGS=default.
            warnings.simplefilter("default" if os.environ.get("PYTHONWARNINGS") else "error")
            value = _found(address)(*args)
        gc.collect()
        _agree_on(number)
        return pickle.dumps(_Reply(value=value))
    except BaseException as error:
        text = traceback.format_exc()
        error = _without_frames(_sendable(error))
        gc.collect()
        return pickle.dumps(_Reply(error=error, traceback=text))


def _agree_on(number: int) -> None:
    """A collective left over from the task would meet this one, or hang it."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("the task has ended the pool's process group; use fresh_ranks for that")
    numbers = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    if numbers.tolist() != [number, -number]:
        raise RuntimeError(f"the ranks fell out of step: {numbers.tolist()} after task {number}")


def _watch(lifeline: int) -> None:
    """End this rank, whatever its state, when the process that started it has exited."""
    os.read(lifeline, 1)
    os._exit(1)


def _main() -> None:
    import faulthandler
    import threading

    rank, world_size, meeting_point, device, pipe, lifeline = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_watch, args=(int(lifeline),), daemon=True).start()
    # Tasks are pickled as `ranks.…`, never as `__main__.…`.
    sys.path.insert(0, str(Path(__file__).parent))
    serve = importlib.import_module("ranks")._serve
    serve(int(rank), int(world_size), meeting_point, device, Connection(int(pipe)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
