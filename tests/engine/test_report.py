"""The log lines of an engine, and the ranks that write them."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from engine.logs import is_of_this_machine
from engine.toys import backward, engine_of, model_of, train
from hadal import comm
from hadal.engine.report import _Columns, duration, hush, number_of


class Ears(logging.Handler):
    """The records that the program's own handlers would get."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__()
        self.heard: list[str] = []
        self._log = logging.getLogger("hadal")
        self._level = level

    def emit(self, record: logging.LogRecord) -> None:
        if not is_of_this_machine(record):
            self.heard.append(record.getMessage())

    def __enter__(self) -> Ears:
        self._before = (self._log.level, list(self._log.handlers))
        if self._level:
            self._log.setLevel(self._level)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *rest: object) -> None:
        logging.getLogger().removeHandler(self)
        self._log.setLevel(self._before[0])
        for handler in [one for one in self._log.handlers if one not in self._before[1]]:
            self._log.removeHandler(handler)


def hear(stage: int, updates: int, keys: dict[str, Any], level: int = logging.INFO) -> list[str]:
    with Ears(level) as ears:
        engine = engine_of(stage, **keys)
        train(engine, range(updates))
        engine.destroy()
    return ears.heard


CYCLE = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3}
LINE = re.compile(
    r"step +(\d+), loss +(\d\.\d+), lr 0\.01, mom 0\.9, norm +(\d\.\d+)"
    r"(, +[\d.k]+ samples/s, +[\d.]+ m?s/step)?, +(\d+\.\d\d) GiB"
)


@pytest.mark.claims("steps_per_print", "timers.throughput.enabled")
def test_lines_of_progress_come_from_rank_0_at_their_interval(ranks: RankPools) -> None:
    told, silent = ranks(2).run(hear, 1, 7, {"steps_per_print": 3})
    assert silent == []
    matches = [LINE.fullmatch(line) for line in told]
    assert [match and match[1] for match in matches] == ["3", "6"]
    assert all(match and match[4] for match in matches)
    off = {"steps_per_print": 3, "timers": {"throughput": {"enabled": False}}}
    told, _ = ranks(2).run(hear, 1, 3, off)
    assert [LINE.fullmatch(line)[4] for line in told] == [None]


def losses_and_lines(updates: int, keys: dict[str, Any]) -> tuple[list[float], list[str]]:
    with Ears() as ears:
        engine = engine_of(1, **keys)
        losses = [float(loss) for loss in train(engine, range(updates))]
        engine.destroy()
    return losses, ears.heard


def test_a_line_has_the_mean_loss_and_the_time_left() -> None:
    params = {"total_num_steps": 4000, "warmup_max_lr": 0.01}
    schedule = {"type": "WarmupDecayLR", "params": params}
    losses, lines = losses_and_lines(6, {"steps_per_print": 3, "scheduler": schedule})
    for line, start in zip(lines, (0, 3), strict=True):
        assert f"loss {sum(losses[start : start + 3]) / 3:#.4g}," in line
        assert re.search(rf"^step    {start + 3}/4000, .*, \d+\.\d\d GiB, .* left$", line)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.01}}}, "lr 0.01, norm"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.8}}}, "mom 0.8, norm"),
        ({"optimizer": {"type": "Muon"}}, "lr 0.02, 0.0003, mom 0.95, 0.9, norm"),
        (
            {"scheduler": {"type": "OneCycle", "params": CYCLE}},
            "lr 0.004, mom 0.8667, norm",
        ),
    ],
)
def test_a_line_has_the_momentum_of_each_group(keys: dict[str, Any], shown: str) -> None:
    """As after the schedule's step, which cycles it; none if the optimizer has none."""
    (line,) = hear(1, 1, {"steps_per_print": 1, **keys})
    assert shown in line


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids).square().mean()


@pytest.mark.parametrize("named", [False, True])
def test_batches_of_tokens_are_measured_in_tokens(named: bool) -> None:
    with Ears() as ears:
        # As `from_pretrained` returns models, unless somebody changes that.
        engine = engine_of(0, Words().eval(), steps_per_print=4)
        for _ in range(4):
            ids = torch.zeros(3, 50, dtype=torch.int64)
            engine.backward(engine(input_ids=ids) if named else engine(ids))
            engine.step()
        engine.destroy()
    tokens = re.search(r", +([\d.]+)(k?) tokens/s, +([\d.]+) (m?s)/step", ears.heard[0])
    assert tokens
    per_second = float(tokens[1]) * (1000 if tokens[2] else 1)
    seconds = float(tokens[3]) / (1000 if tokens[4] == "ms" else 1)
    assert per_second * seconds == pytest.approx(150, rel=0.05)


def test_values_of_a_column_end_at_the_same_place() -> None:
    columns = _Columns()
    lines = [
        columns.line({"step {}": step, "{} tokens/s": rate, "{} left": left})
        for step, rate, left in (("98", "12.3k", "1 h 2 min"), ("99", "9k", "59 s"))
    ]
    assert lines == [
        "step 98, 12.3k tokens/s, 1 h 2 min left",
        "step 99,    9k tokens/s,      59 s left",
    ]


def test_a_line_has_the_epoch_of_the_engines_loader() -> None:
    with Ears() as ears:
        model = nn.Linear(4, 1)
        data = [torch.ones(4)] * 12
        config = {"train_batch_size": 3, "steps_per_print": 1, "optimizer": {"type": "SGD"}}
        engine, _, loader, _ = hadal.initialize(model=model, config=config, training_data=data)
        for _ in range(2):
            for batch in loader:
                engine.backward(engine(batch).mean())
                engine.step()
        engine.destroy()
    epochs = [re.search(r"step +\d, epoch (\d\.\d\d), loss", line) for line in ears.heard]
    assert [float(found[1]) for found in epochs if found] == [n / 4 for n in range(1, 9)]


def test_a_line_has_the_utilisation_once_flops_are_known(tmp_path: Path) -> None:
    profiler = {"enabled": True, "output_file": str(tmp_path / "profile"), "peak_tflops": 0.001}
    with Ears() as ears:
        engine = engine_of(0, steps_per_print=4, flops_profiler=profiler)
        train(engine, range(12))
        profile = engine.flops_profiler.profile
        engine.destroy()
    lines = [line for line in ears.heard if "samples/s" in line]
    found = re.search(r"([\d.]+)(k?) samples/s, +([\d.]+) % MFU", lines[-1])
    assert found
    rate = float(found[1]) * (1000 if found[2] else 1)
    assert float(found[3]) == pytest.approx(100 * profile.mfu_at(rate), rel=0.01, abs=0.06)
    assert profile.mfu_at(profile.samples_per_second) == pytest.approx(profile.mfu)


PROGRAM = """
import logging, sys, torch, hadal
if sys.argv[1] == "before": logging.basicConfig()
config = {"train_batch_size": 3, "steps_per_print": 1, "optimizer": {"type": "SGD"}}
engine, *_ = hadal.initialize(model=torch.nn.Linear(2, 2), config=config)
if sys.argv[1] == "after": logging.basicConfig()
engine.backward(engine(torch.ones(3, 2)).sum())
engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("configured", ["before", "after", "never"])
def test_lines_appear_once_with_any_logging_setup(configured: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, configured],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert len(re.findall(r"step     1, loss", done.stderr)) == 1, done.stderr
    assert ("INFO:hadal" in done.stderr) == (configured != "never")


LOOP = """
import sys, tqdm, torch, hadal
config = {"train_batch_size": 3, "steps_per_print": 1, "optimizer": {"type": "SGD"}}
engine, *_ = hadal.initialize(model=torch.nn.Linear(2, 2), config=config)
for number in tqdm.trange(4, mininterval=0):
    engine.backward(engine(torch.ones(3, 2)).sum())
    engine.step()
    if number % 2:
        print("printed", number)
"""


@pytest.mark.slow
def test_lines_stay_apart_from_bars_and_prints_on_a_terminal() -> None:
    """Standard output goes elsewhere, and gets what the program prints."""
    shown = []
    read, write = pty.openpty()
    program = [sys.executable, "-c", LOOP]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=write, stdin=subprocess.DEVNULL, text=True
    )
    os.close(write)
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
        while piece := os.read(read, 4096):
            shown.append(piece)
    os.close(read)
    printed, _ = process.communicate(timeout=100)
    assert (process.returncode, printed) == (0, "printed 1\nprinted 3\n")
    # A carriage return, too, begins a line: a bar has been erased before.
    lines = re.split(r"[\r\n]+", b"".join(shown).decode())
    assert [line for line in lines if "loss" in line] == [
        line for line in lines if line.startswith("step ")
    ]
    assert sum("loss" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (59.4, "59.4 s"),
        (3600, "1 h"),
        (3725, "1 h 2 min"),
        (90_061, "1 d 1 h"),
        (float("nan"), "?"),
    ],
)
def test_durations_read_well(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.5"), (999.4, "999"), (999.9, "1k"), (12_345, "12.3k"), (3e6, "3M")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number_of(value) == shown


@pytest.mark.claims("steps_per_print")
@pytest.mark.parametrize("never", [None, float("inf")])
def test_no_lines_where_none_are_asked_for(never: float | None, ranks: RankPools) -> None:
    keys = {} if never is None else {"steps_per_print": never}
    assert ranks(2).run(hear, 0, 3, keys) == [[], []]


@pytest.mark.claims("wall_clock_breakdown", "memory_breakdown")
@pytest.mark.parametrize(("every", "expected"), [(2, ["2", "4"]), (None, ["1", "2", "3", "4"])])
def test_breakdowns_come_with_the_lines_or_with_each_update(
    every: int | None, expected: list[str], ranks: RankPools
) -> None:
    keys = {"steps_per_print": every, "wall_clock_breakdown": True, "memory_breakdown": True}
    told, silent = ranks(2).run(hear, 2, 4, keys)
    assert silent == []
    times = [line for line in told if "ms of one update" in line]
    assert [re.findall(r"\d+", line)[0] for line in times] == expected
    for line in times:
        names = re.findall(r"(\w+) +\d+\.\d\d", line)
        assert names == ["forward", "backward", "backward_inner", "backward_allreduce", "step"]
    for phase in ("forward", "backward", "step"):
        lines = [line for line in told if f"memory around {phase}:" in line]
        assert len(lines) == len(expected)
        found = re.search(r"host ([\d.]+) MiB -> ([\d.]+) MiB, device 0\.0 MiB", lines[0])
        assert found
        assert all(50 < float(mebibytes) < 50_000 for mebibytes in found.groups())


@pytest.mark.claims("dump_state")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_is_logged_once_at_the_start(stage: int, ranks: RankPools) -> None:
    keys = {"dump_state": True, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    (configuration, state), silent = ranks(2).run(hear, stage, 1, keys)
    assert silent == []
    assert configuration.startswith("configuration: {")
    assert f'"stage": {stage}' in configuration
    lines = state.splitlines()
    count = sum(parameter.numel() for parameter in model_of().parameters())
    assert lines[0] == "state of the engine over Sequential"
    assert lines[1] == f"parameters: 6 of {count} elements, {count} to be trained"
    assert lines[2] == "batch: 12 = 3 per device x 2 accumulation x 2 ranks"
    assert lines[3] == "ranks: 2 share the state, 1 each sequence, 1 the model"
    head, *rows = lines[4:]
    assert head.split() == [
        *("bucket", "parameters", "elements", "padding", "mine"),
        *("sharded", "weights", "masters", "gradients", "wire"),
    ]
    cells = [re.split(r"  +", row) for row in rows]
    assert sum(int(row[1]) for row in cells) == 6
    for row in cells:
        numel, padding, mine = (int(cell) for cell in row[2:5])
        assert mine == (numel if stage == 0 else numel // 2)
        assert padding < numel
        sharded = {0: ["nothing"], 3: ["optimizer, gradients, weights", "optimizer, gradients"]}
        assert row[5] in sharded[stage]
        assert row[6:8] == ["bfloat16", "float32"]
    assert sum(int(row[2]) - int(row[3]) for row in cells) == count


def levels(level: str | None, every: int | None = 1) -> tuple[int, list[str]]:
    with Ears(level=0) as ears:
        log = logging.getLogger("hadal")
        log.setLevel(logging.NOTSET)
        engine = engine_of(0, log_level=level, steps_per_print=every)
        train(engine, range(1))
        engine.destroy()
        return log.level, [line for line in ears.heard if line.startswith("step")]


@pytest.mark.claims("log_level")
def test_the_level_is_that_of_the_house(ranks: RankPools) -> None:
    assert ranks(1).run(levels, "ERROR") == [(logging.ERROR, [])]
    ((level, told),) = ranks(1).run(levels, "debug")
    assert (level, len(told)) == (logging.DEBUG, 1)
    ((level, told),) = ranks(1).run(levels, None)
    assert (level, len(told)) == (logging.INFO, 1)  # the key asks for lines
    assert ranks(1).run(levels, None, None) == [(logging.NOTSET, [])]


def overflow_once() -> list[str]:
    with Ears() as ears:
        engine = engine_of(0, fp16={"enabled": True, "initial_scale_power": 4})
        loss = engine(torch.ones(3, 6, dtype=torch.float16)).float().mean()
        engine.backward(loss * torch.inf)
        engine.step()
        logging.getLogger("hadal.engine.engine").error("rank %d is lost", comm.get_rank())
        engine.destroy()
    return ears.heard


def test_warnings_do_not_multiply_and_errors_get_through(ranks: RankPools) -> None:
    first, second = ranks(2).run(overflow_once)
    assert len(first) == 2
    assert "skipped" in first[0]
    assert second == ["rank 1 is lost"]


def test_rank_0_is_never_hushed() -> None:
    before = {name: list(logging.getLogger(name).filters) for name in ("hadal", "hadal.config")}
    hush(0)
    for name, filters in before.items():
        assert logging.getLogger(name).filters == filters


@on_ranks(2)
def test_momentum_of_each_group() -> None:
    for optimizer, expected in (
        ({"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, [(0.8, 0.9)]),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.7}}, [0.7]),
        ({"type": "Adagrad", "params": {"lr": 0.1}}, [0.0]),
    ):
        engine = engine_of(1, optimizer=optimizer)
        assert [m if isinstance(m, float) else tuple(m) for m in engine.get_mom()] == expected
        engine.destroy()
    engine = engine_of(1, optimizer=None)
    assert engine.get_mom() == []
    backward(engine, 0)
    engine.step()
    assert hadal.Engine.get_mom(engine) == [(0.9, 0.999)]
    engine.destroy()
