"""The scalars of training: values of each update, the writing rank, and the files after a kill."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.logs import logged
from engine.toys import ROWS, assert_equal, batch_of, engine_of, loss_of, train
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal.plugins.monitor.files import CsvWriter, read_lines

WORLD = 2
EXTRA = {"grad_norm", "skipped_steps", "peak_memory_bytes", "samples_per_sec"}
PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
RATES = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
}


def files(folder: str | Path) -> dict[str, Any]:
    where = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return {"csv_monitor": where, "jsonl_monitor": where}


def read_csv(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in (folder / "job").glob("*.csv"):
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["step", path.stem.removeprefix("Train_Samples_")]
        found[head[1]] = [(int(samples), float(value)) for samples, value in rows]
    return found


def updates_of(folder: Path) -> list[dict[str, Any]]:
    return [one for one in read_lines(folder / "job/events.jsonl") if one["kind"] == "update"]


# ---- what is written ---------------------------------------------------------------------------


def write(stage: int, micro_steps: int, folder: str) -> list[float]:
    """The mean loss of each update on this rank; what every rank has of the monitors is checked."""
    engine = engine_of(
        stage, gradient_accumulation_steps=micro_steps, scheduler=RATES, **files(folder)
    )
    losses = train(engine, range(4 * micro_steps))
    assert engine.monitor.enabled
    assert bool(engine.monitor.writers) == (hadal.comm.get_rank() == 0)
    if hadal.comm.get_rank() == 0:
        # One host: everything is known when the update is over.
        assert len(updates_of(Path(folder))) == 4
    norm = engine.get_global_grad_norm()
    engine.destroy()
    if hadal.comm.get_rank() == 0:
        assert updates_of(Path(folder))[-1]["Train/Samples/grad_norm"] == norm
    return [
        float(torch.stack(losses[n : n + micro_steps]).mean())
        for n in range(0, len(losses), micro_steps)
    ]


@pytest.mark.fast_cells("0-1", "2-1")
@pytest.mark.parametrize(("stage", "micro_steps"), [(0, 1), (1, 4), (2, 1), (3, 4)])
def test_the_scalars_of_each_update(
    stage: int, micro_steps: int, ranks: RankPools, tmp_path: Path
) -> None:
    losses = ranks(WORLD).run(write, stage, micro_steps, str(tmp_path))
    means = [sum(one) / WORLD for one in zip(*losses, strict=True)]
    samples = [ROWS * micro_steps * WORLD * (1 + number) for number in range(4)]
    found = read_csv(tmp_path)
    assert found.keys() == {"lr", "train_loss", *EXTRA}
    assert [at for at, _ in found["train_loss"]] == samples
    assert [value for _, value in found["train_loss"]] == pytest.approx(means, rel=1e-6)
    name = "Train_Samples_lr.csv"
    rates = "".join(
        f"{at},{rate}\r\n" for at, rate in zip(samples, (0.0, 0.001, 0.002, 0.003), strict=True)
    )
    assert (tmp_path / "job" / name).read_bytes() == f"step,lr\r\n{rates}".encode()
    assert [at for at, _ in found["samples_per_sec"]] == samples[1:]
    assert all(value > 0 for _, value in found["samples_per_sec"])
    assert all(value > 1e7 for _, value in found["peak_memory_bytes"])
    assert {value for _, value in found["skipped_steps"]} == {0}
    head, *updates, end = read_lines(tmp_path / "job/events.jsonl")
    assert (head["kind"], head["world_size"], end["kind"]) == ("run", WORLD, "end")
    assert head["ranks"]["data_parallel"] == WORLD
    assert head["config"]["zero_optimization"]["stage"] == stage
    for number, update in enumerate(updates):
        assert (update["kind"], update["step"]) == ("update", number + 1)
        told = {key.rpartition("/")[2]: value for key, value in update.items() if "/" in key}
        assert told == {
            key: dict(rows)[samples[number]]
            for key, rows in found.items()
            if samples[number] in dict(rows)
        }


def write_with(folder: str, keys: Mapping[str, Any], updates: int) -> None:
    engine = engine_of(1, **files(folder), **keys)
    train(engine, range(updates))
    engine.destroy()


def test_extra_scalars_can_be_left_out(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(write_with, str(tmp_path), {"monitor": {"extra": False}}, 2)
    assert read_csv(tmp_path).keys() == {"lr", "train_loss"}


def test_times_and_the_loss_scale_are_written_where_there_are_any(
    ranks: RankPools, tmp_path: Path
) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    keys = {"wall_clock_breakdown": True, "fp16": fp16, "monitor": {"extra": False}}
    ranks(WORLD).run(write_with, str(tmp_path), keys, 2)
    found = read_csv(tmp_path)
    times = {f"elapsed_time_ms_{phase}" for phase in PHASES}
    assert found.keys() == {"lr", "train_loss", "loss_scale", *times}
    assert [value for _, value in found["loss_scale"]] == [16.0, 16.0]
    for name in times:
        assert len(found[name]) == 2 and all(value >= 0 for _, value in found[name])


def skip(folder: str) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = engine_of(1, fp16=fp16, **files(folder))
    inputs = torch.ones(ROWS, 6, dtype=torch.float16)
    for factor in (1.0, torch.inf, 1.0):
        engine.backward(engine(inputs).float().mean() * factor)
        engine.step()
    engine.destroy()


def test_a_skipped_update_is_written_as_one(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(skip, str(tmp_path))
    found = read_csv(tmp_path)
    assert [value for _, value in found["skipped_steps"]] == [0, 1, 1]
    assert [value for _, value in found["loss_scale"]] == [16.0, 8.0, 8.0]
    assert [value == float("inf") for _, value in found["grad_norm"]] == [False, True, False]
    assert updates_of(tmp_path)[1]["Train/Samples/grad_norm"] == "Infinity"


class Words(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


class Batches(Words):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"])


def count_tokens(folder: str, named: bool) -> None:
    engine = engine_of(1, (Words if named else Batches)(20, 4), **files(folder))
    length = 7 + hadal.comm.get_rank()
    for _ in range(3):
        ids = torch.randint(20, (ROWS, length))
        engine.eval()
        with torch.no_grad():
            engine(input_ids=ids) if named else engine({"input_ids": ids})
        engine.train()
        output = engine(input_ids=ids) if named else engine({"input_ids": ids})
        engine.backward(output.square().mean())
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("named", [True, False])
def test_tokens_are_counted_on_all_ranks(named: bool, ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(count_tokens, str(tmp_path), named)
    found = read_csv(tmp_path)
    assert len(found["tokens_per_sec"]) == 2
    for (at, tokens), (same, samples) in zip(
        found["tokens_per_sec"], found["samples_per_sec"], strict=True
    ):
        assert at == same and tokens / samples == pytest.approx(7.5)


def backward_by_hand(folder: str) -> None:
    engine = engine_of(0, **files(folder))
    for step in range(3):
        inputs, targets = batch_of(step)
        loss = loss_of(engine(inputs), targets)
        (engine.scale(loss) if step or hadal.comm.get_rank() else loss).backward()
        engine.step()
    engine.destroy()


def test_a_loss_that_a_rank_does_not_know_is_left_out(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(backward_by_hand, str(tmp_path))
    found = read_csv(tmp_path)
    assert [at for at, _ in found["train_loss"]] == [12, 18] and len(found["lr"]) == 3


def share_sequences(folder: str) -> list[float]:
    engine = engine_of(1, sequence_parallel_size=2, **files(folder))
    losses = [float(loss) for loss in train(engine, range(2))]
    engine.destroy()
    return losses


def test_parts_of_a_sequence_s_loss_add_up(ranks: RankPools, tmp_path: Path) -> None:
    one, other = ranks(WORLD).run(share_sequences, str(tmp_path))
    sums = [a + b for a, b in zip(one, other, strict=True)]
    assert [value for _, value in read_csv(tmp_path)["train_loss"]] == pytest.approx(sums, rel=1e-6)


def train_alike(folder: str) -> None:
    watched, plain = engine_of(2, **files(folder)), engine_of(2)
    for engine in (watched, plain):
        train(engine, range(3))
    assert_equal(watched.state_dict(), plain.state_dict())
    assert plain.monitor.enabled is False
    plain.monitor.write_events([("a", 1, 1)])
    watched.destroy()
    plain.destroy()


def test_monitors_do_not_change_training(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(train_alike, str(tmp_path))


# ---- a program's own scalars -------------------------------------------------------------------


def write_own(folder: str) -> None:
    engine = engine_of(1, **files(folder))
    for step in range(2):
        train(engine, range(step, step + 1))
        engine.monitor.write_events(
            [("Eval/loss", torch.tensor(step + 0.5), engine.global_samples)]
        )
    with pytest.raises(hadal.UsageError, match="expected a number"):
        engine.monitor.write_events([("Eval/loss", "low", 1)])
    engine.destroy()


def test_a_program_s_own_scalars_come_from_rank_0(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(write_own, str(tmp_path))
    assert (tmp_path / "job/Eval_loss.csv").read_bytes() == b"step,loss\r\n6,0.5\r\n12,1.5\r\n"
    kinds = [one["kind"] for one in read_lines(tmp_path / "job/events.jsonl")]
    assert kinds == ["run", "update", "events", "update", "events", "end"]


# ---- faults ------------------------------------------------------------------------------------


def train_on_a_full_disk(folder: str) -> tuple[list[float], list[str]]:
    engine = engine_of(1, **files(folder))
    write = CsvWriter.write

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with logged() as lines:
        train(engine, range(1))
        CsvWriter.write = fail  # type: ignore[method-assign]
        try:
            losses = [float(loss) for loss in train(engine, range(1, 4))]
        finally:
            CsvWriter.write = write  # type: ignore[method-assign]
        engine.destroy()
    return losses, lines


def test_a_full_disk_does_not_end_training(ranks: RankPools, tmp_path: Path) -> None:
    (losses, lines), (_, silent) = ranks(WORLD).run(train_on_a_full_disk, str(tmp_path))
    assert len(losses) == 3 and silent == []
    first, last = lines
    assert "csv_monitor: cannot write (OSError: [Errno 28] No space left on device)" in first
    assert "csv_monitor: 18 scalars of this run were not written" in last
    assert [at for at, _ in read_csv(tmp_path)["lr"]] == [6]
    assert len(updates_of(tmp_path)) == 4


# ---- kill, resume, and programs that just end --------------------------------------------------

PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from engine.toys import engine_of, train
from monitor.test_training import files
folder, until, how = sys.argv[2], int(sys.argv[3]), sys.argv[4]
engine = engine_of(1, **files(folder))
if os.path.exists(folder + "/saved/latest"):
    engine.load_checkpoint(folder + "/saved")
for step in range(engine.global_steps, until):
    train(engine, range(step, step + 1))
    if step == 1:
        engine.save_checkpoint(folder + "/saved")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_program(folder: Path, until: int, how: str) -> int:
    words = [str(Path(__file__).parents[1]), str(folder), str(until), how]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
def test_a_killed_run_resumes_in_the_same_files(tmp_path: Path) -> None:
    assert run_program(tmp_path, 4, "kill") == -signal.SIGKILL
    before = read_csv(tmp_path)
    assert [at for at, _ in before["train_loss"]] == [3, 6, 9, 12]
    assert run_program(tmp_path, 6, "just end") == 0
    after = read_csv(tmp_path)
    assert [at for at, _ in after["train_loss"]] == [3, 6, 9, 12, 9, 12, 15, 18]
    assert after["train_loss"][4:6] == before["train_loss"][2:]
    kinds = [one["kind"] for one in read_lines(tmp_path / "job/events.jsonl")]
    assert kinds == ["run", *["update"] * 4, "run", *["update"] * 4, "end"]


def close_early(folder: str) -> None:
    engine = engine_of(1, **files(folder))
    train(engine, range(2))
    engine.monitor.close_in_time(1.0)
    train(engine, range(2))
    engine.destroy()


def test_a_closed_monitor_stays_closed(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(close_early, str(tmp_path))
    assert len(updates_of(tmp_path)) == 2


def measure(folder: str) -> None:
    autotuning = {"enabled": True, "end_profile_step": 2, "start_profile_step": 1}
    autotuning["metric_path"] = f"{folder}/metrics.json"
    engine = engine_of(1, autotuning=autotuning, **files(f"{folder}/monitors"))
    assert not engine.monitor.enabled
    with pytest.raises(SystemExit):
        train(engine, range(2))
    engine.destroy()
    # All ranks have left together, after the update: no exchange was cut short.
    engine = engine_of(1)
    train(engine, range(1))
    engine.destroy()


def test_an_experiment_of_the_autotuner_writes_nothing(ranks: RankPools, tmp_path: Path) -> None:
    ranks(WORLD).run(measure, str(tmp_path))
    assert not (tmp_path / "monitors").exists()
