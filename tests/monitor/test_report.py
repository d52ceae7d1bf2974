"""The page about a run: made from its file alone, also of a run that was killed or resumed."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.toys import engine_of, train
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPools

from hadal import comm
from hadal.cli.main import main
from hadal.errors import UsageError
from hadal.plugins.monitor.report import read_run, write_page
from hadal.plugins.monitor.report.run import Series, smoothed, thinned


class Page(HTMLParser):
    """The tables' rows, the figures, the pictures' titles, and links to elsewhere."""

    VOID = frozenset({"meta", "link", "br", "path", "use", "rect"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words: dict[str, list[str]] = {}
        self.links: list[str] = []
        self._tags: list[str] = []
        text = path.read_text()
        assert len(text) < 2 << 20
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.links += [value for name, value in attributes if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        self._tags.append("")

    def handle_data(self, data: str) -> None:
        tag = self._tags[-1] if self._tags else ""
        if tag in ("td", "th"):
            self.rows[-1][-1] += data
        elif tag and data.strip():
            self.words.setdefault(tag, []).append(data.strip())

    @property
    def figures(self) -> dict[str, str]:
        return dict(zip(self.words["dt"], self.words["dd"], strict=True))


def keys_of(folder: Path, **others: Any) -> dict[str, Any]:
    section = {"enabled": True, "output_path": str(folder), "job_name": "run", "report": True}
    return {"jsonl_monitor": section, **others}


def train_and_report(folder: Path, updates: int, others: dict[str, Any]) -> list[float]:
    engine = engine_of(2, **keys_of(folder, **others))
    for _ in range(4):  # rank 1 comes late
        time.sleep(0.05 * comm.get_rank())
        comm.all_reduce(torch.ones(1000))
    losses = [float(loss) for loss in train(engine, range(updates))]
    engine.save_checkpoint(folder / "checkpoints")
    logging.getLogger("hadal.engine.engine").warning("something <b>odd</b> was seen")
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_has_the_figures_of_the_file(ranks: RankPools, tmp_path: Path) -> None:
    others = {
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "p")},
        "comms_logger": {"enabled": True},
        "bf16": {"enabled": True},
    }
    losses = ranks(2).run(train_and_report, tmp_path, 5, others)
    path = tmp_path / "run" / "report.html"
    page, run = Page(path), read_run(tmp_path / "run")
    means = np.mean(losses, axis=0)
    assert run.series["train_loss"].values == pytest.approx(means, rel=1e-2)
    first, last = (run.series["train_loss"].values[place] for place in (0, -1))
    assert page.figures["loss"] == f"{first:.4g} → {last:.4g}"
    assert page.figures["updates"] == "5"
    assert page.figures["state"] == "ended"
    assert page.figures["ranks"] == "2"
    numel = 6 * 9 + 9 + 2 * 9 + 9 * 4 + 4
    assert page.figures["parameters"] == str(numel)
    # Weights are whole, gradients, masters and moments are cut; padding comes on top.
    nbytes = run.memory["bytes"]
    assert nbytes["weights"] >= 2 * numel
    assert nbytes["masters"] == 4 * nbytes["weights"] // 2 // 2
    assert nbytes["optimizer state"] >= 2 * nbytes["masters"] * 0.9
    cells = [cell for row in page.rows for cell in row]
    assert "something <b>odd</b> was seen" in cells
    assert str(tmp_path / "checkpoints" / "global_step5") in cells
    assert "zero_optimization.stage" in cells
    assert any("reduce_scatter" in cell for cell in cells)
    (late,) = (row for row in run.communication if row["nbytes"] == 4000)
    assert late["straggler"] == 1 and late["waited_s"] > 0.02
    assert any(re.fullmatch(r"1, \d+\.\d\d ms a call", cell) for cell in cells)
    profiled = next(row for row in page.rows if row[:2] == ["Sequential", "Sequential"])
    assert profiled[2:5] == [str(numel), str(3 * (6 * 9 + 9 * 4)), "100.0"]
    titles = page.words["figcaption"]
    assert {"Loss", "Learning rate", "Gradient norm", "Samples per second"} <= set(titles)
    assert "Time of an update by phase" in titles
    assert all(link.startswith("#") for link in page.links), "nothing is loaded from elsewhere"


PROGRAM = """
import sys
import torch
from torch import nn
import hadal

def main() -> None:
    hadal.init_distributed(dist_backend="gloo")
    folder = sys.argv[1]
    place = {"enabled": True, "output_path": folder, "job_name": "run", "report": True}
    profiler = {"enabled": True, "profile_step": 1, "output_file": folder + "/profile.txt"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "comms_logger": {"enabled": True},
        "flops_profiler": profiler,
        "jsonl_monitor": place,
    }
    engine, *_ = hadal.initialize(model=nn.Linear(3, 1), config=config)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()

main()
"""


@pytest.mark.slow
def test_a_program_that_never_destroys_its_engine_has_a_page(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "hadal", "run", "--num_accelerators", "2"]
    subprocess.run([*command, str(program), str(tmp_path)], check=True)
    page, run = Page(tmp_path / "run" / "report.html"), read_run(tmp_path / "run")
    assert page.figures["updates"] == "4" and page.figures["state"] == "ended"
    assert run.profile is not None and run.profile["modules"]["class"] == "Linear"
    cells = [cell for row in page.rows for cell in row]
    assert any("reduce_scatter" in cell or "all_to_all" in cell for cell in cells), cells


@pytest.mark.slow
def test_a_profile_is_in_the_file_before_the_end(tmp_path: Path) -> None:
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "p")}
    engine = engine_of(0, **keys_of(tmp_path, flops_profiler=profiler))
    train(engine, range(5))
    profile = read_run(tmp_path / "run").profile
    assert profile is not None and profile["modules"]["parameters"] > 0
    engine.destroy()


def a_run(folder: Path, updates: int = 3, **changes: Any) -> Path:
    """A file as a run writes it, without training."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "kind": "run",
        "time": 1000.0,
        "world_size": 1,
        "ranks": {"world": 1},
        "model": {"class": "Net", "tensors": 1, "parameters": 10, "trained": 10},
        "versions": {},
        "machine": {},
        "config": {"train_batch_size": 1},
        "origins": {},
    }
    lines = [head]
    for step in range(1, updates + 1):
        value: Any = changes.get("loss", lambda step: 1.0 / step)(step)
        name = "Train/Samples/train_loss"
        lines.append(
            {"kind": "update", "step": step, "samples": step, "time": 1000.0 + step, name: value}
        )
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_that_was_killed_has_a_page_too(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    path.write_text(path.read_text() + '{"kind":"update","step":4,"sam')
    page = Page(write_page(tmp_path, tmp_path / "elsewhere" / "page.html"))
    assert page.figures["updates"] == "3"
    assert page.figures["state"] == "running, or killed"


def test_updates_that_were_trained_again_count_once(tmp_path: Path) -> None:
    path = a_run(tmp_path, updates=4)
    again = a_run(tmp_path / "again", updates=6, loss=lambda step: 10.0 * step)
    resumed = again.read_text().splitlines(keepends=True)
    path.write_text(path.read_text() + "".join([resumed[0], *resumed[3:]]))
    run = read_run(path)
    assert list(run.series["train_loss"].values) == [1.0, 0.5, 30, 40, 50, 60]
    assert len(run.starts) == 2


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    def lost(step: int) -> float | str:
        return "NaN" if step == 2 else 1.0

    run = read_run(a_run(tmp_path, loss=lost))
    assert math.isnan(run.series["train_loss"].values[1])
    assert Page(write_page(tmp_path)).figures["loss"] == "1 → 1"


def test_long_runs_have_small_pages(tmp_path: Path) -> None:
    a_run(tmp_path, updates=60_000)
    assert write_page(tmp_path).stat().st_size < 200_000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_the_mean_is_that_of_the_last_values(values: list[float], window: int) -> None:
    found = smoothed(np.array(values), window)
    for place in range(len(values)):
        wanted = np.mean(values[max(0, place + 1 - window) : place + 1])
        assert found[place] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    series = Series(np.arange(len(values), dtype=float), np.array(values))
    few = thinned(series, most)
    assert few.values.size <= most + 2
    assert few.steps[0] == 0
    assert few.steps[-1] == len(values) - 1
    assert (few.values.min(), few.values.max()) == (min(values), max(values))
    assert all(series.values[int(step)] == value for step, value in zip(*few_of(few), strict=True))


def few_of(series: Series) -> tuple[Any, Any]:
    return series.steps, series.values


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda folder: folder / "nothing", "does not exist; pass the directory of a run"),
        (lambda folder: folder, r'no events.jsonl; train with "jsonl_monitor"'),
        (
            lambda folder: [a_run(folder / name) for name in ("a", "b")].pop().parent.parent,
            "several runs; pass the directory of one of them: a, b",
        ),
    ],
)
def test_a_directory_that_is_not_a_run_is_refused(make: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=fault):
        read_run(make(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "run"},
        {"kind": "run", "time": 1, "model": {}, "machine": {}, "versions": {}, "ranks": {}},
        {"kind": "update", "step": 1, "time": 1, "train_loss": [1]},
        {"kind": "update", "step": "x", "time": 1},
        {"kind": "checkpoint", "tag": "a"},
        {"kind": "communication", "rows": [{"operation": "all_reduce"}]},
        {"kind": "profile", "modules": 3},
        {"kind": "warning", "time": "soon", "message": "m"},
    ],
    ids=str,
)
def test_a_line_of_another_form_is_named(line: dict[str, Any], tmp_path: Path) -> None:
    path = a_run(tmp_path)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"events\.jsonl is damaged, or was not written by jsonl_"):
        write_page(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "one")
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "runs" / "one" / "report.html").exists()
    assert re.search("pass the directory of a run", run_and_fail(tmp_path / "no", capsys))


def run_and_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder)]) == 1
    return capsys.readouterr().err
