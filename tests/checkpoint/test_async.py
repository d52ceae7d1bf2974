"""Asynchronous saves: they hold the state at the time of the call, and failures are reported."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from engine.logs import logged
from engine.toys import assert_equal, engine_of, train
from ranks import on_ranks

from checkpoint.listing import names_in
from hadal import comm
from hadal.checkpoint import saving
from hadal.errors import CheckpointError

ASYNC = {"checkpoint": {"async_save": True}}


class Gate:
    """A gate that blocks the writing of files until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        real = saving.write_tensors

        def write(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(30)
            return real(*args)

        patch.setattr(saving, "write_tensors", write)


@pytest.mark.fast_cells("0-keys0")
@pytest.mark.claims("checkpoint.writer", "checkpoint.writer.decoupled", "datastates_ckpt")
@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (0, ASYNC),
        (3, ASYNC),
        (1, {"checkpoint": {"writer": {"decoupled": True}}}),
        (2, {"datastates_ckpt": {}}),
    ],
)
@on_ranks(2)
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, stage: int, keys: dict[str, Any]
) -> None:
    engine = engine_of(stage, **keys)
    train(engine, range(2))
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        state = {"ema": torch.ones(3)}
        engine.save_checkpoint(tmp_path, client_state=state)
        saved = engine.state_dict()
        drawn = torch.rand(3)
        state["ema"].zero_()
        losses = train(engine, range(2, 5))
        assert not Path(tmp_path, "latest").exists()
        gate.opened.set()
        engine.wait_for_checkpoint()
    assert Path(tmp_path, "latest").read_text() == "global_step2"
    other = engine_of(stage, **keys)
    _, found = other.load_checkpoint(tmp_path)
    assert torch.equal(found["ema"], torch.ones(3))
    assert_equal(other.state_dict(), saved)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.stack(train(other, range(2, 5))), torch.stack(losses))
    # The next one waits for it, and uses the same memory.
    for tag in ("a", "b"):
        other.save_checkpoint(tmp_path, tag)
        train(other, range(5, 6))
    assert Path(tmp_path, "a", "index.json").is_file()
    other.destroy()  # this waits as well
    assert Path(tmp_path, "latest").read_text() == "b"
    engine.destroy()


TOLD = r"rank 1: .*rank_00001.* cannot be written"


@pytest.mark.parametrize("waits", [True, False], ids=["wait", "next save"])
@on_ranks(2)
def test_a_failure_is_raised_on_all_ranks(tmp_path: Path, waits: bool) -> None:
    """One rank cannot write: every rank raises once, and the next save works."""
    engine = engine_of(1, **ASYNC)
    engine.save_checkpoint(tmp_path, "good")
    engine.wait_for_checkpoint()
    with pytest.MonkeyPatch.context() as patch, logged() as errors:
        gate = Gate(patch)

        def refuse(*args: Any) -> None:
            raise OSError(28, os.strerror(28))

        if comm.get_rank() == 1:
            patch.setattr(os, "fsync", refuse)
        engine.save_checkpoint(tmp_path, "bad")
        train(engine, range(1))
        gate.opened.set()
        if waits:
            with pytest.raises(CheckpointError, match=TOLD):
                engine.wait_for_checkpoint()
            engine.wait_for_checkpoint()  # it is told once
        else:
            engine._state.saver._join()  # so that the disk is whole again for the next one
    assert len(errors) == 1 and re.search(TOLD, errors[0])
    assert Path(tmp_path, "latest").read_text() == "good"
    comm.barrier()
    assert names_in(tmp_path) == ["good", "latest"]
    comm.barrier()
    engine.save_checkpoint(tmp_path, "next")
    engine.wait_for_checkpoint()
    assert Path(tmp_path, "latest").read_text() == "next"
    engine.destroy()


SCRIPT = """
import sys, time, torch, hadal
from hadal.checkpoint import saving
real = saving.write_tensors
def slow(*args):
    time.sleep(0.5)
    return real(*args)
saving.write_tensors = slow
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "checkpoint": {"async_save": True},
}
engine, *_ = hadal.initialize(model=torch.nn.Linear(2, 2), config=config)
engine.store_checkpoint(sys.argv[1])
print("the end")
"""


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    done = forks.run(["-c", SCRIPT, str(tmp_path)], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert (tmp_path / "latest").read_text() == "global_step0"
    assert (tmp_path / "global_step0" / "index.json").is_file()


LARGE = SCRIPT.replace("model=torch.nn.Linear(2, 2)", "model=Told(2, 2)").replace(
    "config = {",
    """
class Told(torch.nn.Linear):
    def get_extra_state(self):
        return "x" * 400_000
    def set_extra_state(self, state):
        pass
config = {""",
)


def test_the_end_of_the_program_waits_for_a_large_head(tmp_path: Path) -> None:
    done = forks.run(["-c", LARGE, str(tmp_path)], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "global_step0" / "index.json").is_file()


@pytest.mark.slow
def test_a_last_save_that_fails_is_the_exit_code(tmp_path: Path) -> None:
    failing = SCRIPT.replace("return real(*args)", 'raise OSError("the disk is gone")')
    done = forks.run(["-c", failing, str(tmp_path)], env=os.environ, timeout=300)
    assert done.returncode == 1
    assert done.stdout == "the end\n"
    assert "was not saved" in done.stderr and "the disk is gone" in done.stderr
    # Who has waited for it knows, and decides.
    waited = failing.replace(
        'print("the end")',
        "try: engine.wait_for_checkpoint()\nexcept OSError: print('the end')",
    )
    done = forks.run(["-c", waited, str(tmp_path)], env=os.environ, timeout=300)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
