"""The page about a run: made from its file alone, also of a run that was killed or resumed."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from engine.toys import engine_of, train
from hypothesis import given, strategies as st
from ranks import RankPools
from torch import nn

from hadal import comm
from hadal.cli.main import main
from hadal.config import load_config
from hadal.config.monitors import JsonlMonitor
from hadal.errors import UsageError
from hadal.plugins.autotuning.runs import Outcome
from hadal.plugins.autotuning.space import TuningTrial
from hadal.plugins.autotuning.summary import Findings
from hadal.plugins.monitor.files import JsonlWriter, read_lines
from hadal.plugins.monitor.opening import _commit, describe_run
from hadal.plugins.monitor.report import read_run, write_page
from hadal.plugins.monitor.report.page import _modules, charts_of
from hadal.plugins.monitor.report.run import Series, files_of, smoothed, thinned


class Page(HTMLParser):
    """The tables' rows, the figures, the charts, and links to elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words: dict[str, list[str]] = {}
        self.links: list[str] = []
        self._tags: list[str] = []
        self.charts: dict[str, list[Any]] = {}
        self.feed(path.read_text())

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
        if data.startswith('{"runs":'):
            self.charts = {one["title"]: one["curves"] for one in json.loads(data)["charts"]}
        elif self.rows and self.rows[-1] and tag in ("td", "th", "wbr"):
            self.rows[-1][-1] += data
        elif tag and data.strip():
            self.words.setdefault(tag, []).append(data.strip())

    @property
    def figures(self) -> dict[str, str]:
        """Those of the first run."""
        return dict(zip(self.words["dt"], self.words["dd"][:: self.runs], strict=True))

    @property
    def runs(self) -> int:
        return len(self.words["dd"]) // len(self.words["dt"])


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


pages = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")


@pages
@pytest.mark.slow
def test_the_page_has_the_figures_of_the_file(ranks: RankPools, tmp_path: Path) -> None:
    others = {
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "p")},
        "comms_logger": {"enabled": True},
        "bf16": {"enabled": True},
    }
    losses = ranks(2).run(train_and_report, tmp_path, 5, others)
    path = tmp_path / "run" / "report.html"
    page, run = Page(path), read_run(path.with_name("events.jsonl"))
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
    assert {"Loss", "Learning rate", "Gradient norm", "Samples per second"} <= page.charts.keys()
    assert "Time of an update by phase, ms" in page.charts
    assert not page.links, "nothing is loaded from elsewhere"
    told = dict(row for row in page.rows if len(row) == 2)
    assert told["hosts"] == f"{socket.gethostname()} (2 ranks)"
    assert shlex.split(told["command"])[0].endswith("python")
    assert told["directory"] == str(Path.cwd())


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


@pages
@pytest.mark.slow
def test_a_program_that_never_destroys_its_engine_has_a_page(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "hadal", "run", "--num_accelerators", "2"]
    subprocess.run([*command, str(program), str(tmp_path)], check=True)
    page, run = Page(tmp_path / "run" / "report.html"), read_run(tmp_path / "run" / "events.jsonl")
    assert page.figures["updates"] == "4" and page.figures["state"] == "ended"
    assert run.profile is not None and run.profile["modules"]["class"] == "Linear"
    cells = [cell for row in page.rows for cell in row]
    assert any("reduce_scatter" in cell or "all_to_all" in cell for cell in cells), cells


@pytest.mark.slow
def test_a_profile_is_in_the_file_before_the_end(tmp_path: Path) -> None:
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "p")}
    engine = engine_of(0, **keys_of(tmp_path, flops_profiler=profiler))
    train(engine, range(5))
    profile = read_run(tmp_path / "run" / "events.jsonl").profile
    assert profile is not None and profile["modules"]["parameters"] > 0
    engine.destroy()


def a_run(folder: Path, updates: int = 3, samples: int = 1, **changes: Any) -> Path:
    """A file as a run writes it, without training; each update has so many samples."""
    folder.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "kind": "run",
        "time": 1000.0,
        "world_size": 1,
        "ranks": {"world": 1},
        "model": {"class": "Net", "tensors": 1, "parameters": 10, "trained": 10},
        "versions": {},
        "machine": {},
        "config": {"train_batch_size": samples},
        "origins": {},
    }
    head |= changes.get("head", {})
    lines = [head]
    for step in range(1, updates + 1):
        value: Any = changes.get("loss", lambda step: 1.0 / step)(step)
        name = "Train/Samples/train_loss"
        head = {"kind": "update", "step": step, "samples": step * samples, "time": 1000.0 + step}
        lines.append({**head, name: value, **changes.get("values", {})})
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pages
def test_a_run_that_was_killed_has_a_page_too(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    path.write_text(path.read_text() + '{"kind":"update","step":4,"sam')
    page = Page(write_page([tmp_path], tmp_path / "elsewhere" / "page.html")[0])
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
    (curve,) = charts_of([run])[0]["curves"]
    assert curve["y"] == [1, None, 1]


@pages
def test_figures_that_no_one_measured_are_not_zeros(tmp_path: Path) -> None:
    a_run(tmp_path)
    profile = {
        "name": "Net",
        "class": "Net",
        "parameters": 1,
        "forward_macs": 1,
        "forward_seconds": None,
        "children": [],
    }
    message = {
        "operation": "all_reduce",
        "nbytes": 4,
        "count": 1,
        "total_nbytes": 4,
        "seconds": 0.0,
        "bus_gb_per_s": 0.0,
        "straggler": None,
        "waited_s": 0.0,
    }
    with (tmp_path / "events.jsonl").open("a") as file:
        for line in (
            {"kind": "profile", "mfu": None, "modules": profile},
            {"kind": "communication", "rows": [message]},
            {"kind": "end", "time": 1010.0, "error": "ValueError: bad sample 17"},
        ):
            file.write(json.dumps(line) + "\n")
    page = Page(write_page([tmp_path])[0])
    unknown = {name for name, value in page.figures.items() if value == "not measured"}
    assert unknown == {"samples/s", "tokens/s", "peak memory", "MFU (profiled)", "skipped updates"}
    assert page.figures["state"] == "ended by ValueError"
    assert ["Net", "Net", "1", "1", "100.0", "not measured"] in page.rows
    assert ["all_reduce", "4", "1", "4", "not measured", "not measured", ""] in page.rows


@pages
def test_several_runs_are_compared(tmp_path: Path) -> None:
    """Their curves share charts; ranks that differ, and keys, stand side by side."""
    a_run(tmp_path / "one", samples=8)
    a_run(tmp_path / "two", samples=16, updates=5, head={"ranks": {"world": 2}})
    path, is_over = write_page([tmp_path])
    page = Page(path)
    assert path == tmp_path / "report.html" and not is_over
    assert page.words["h1"] == ["Net, 2 runs"] and page.runs == 2
    assert [curve["run"] for curve in page.charts["Loss"]] == [0, 1]
    assert page.charts["Loss"][1]["x"] == {
        "update": [1, 2, 3, 4, 5],
        "samples": [16, 32, 48, 64, 80],
        "seconds": [1, 2, 3, 4, 5],
    }
    assert page.rows[0] == ["key", "one", "two"]
    assert page.rows[1:3] == [["ranks.world", "1", "2"], ["train_batch_size", "8", "16"]]


def test_own_scalars_share_the_axes_of_updates(tmp_path: Path) -> None:
    """And are an axis if they never fall."""
    rates = {"Train/Samples/samples_per_sec": 4.0, "Train/Samples/tokens_per_sec": 400.0}
    path = a_run(tmp_path, samples=8, values=rates)
    with path.open("a") as file:
        for samples, epoch, loss in ((8, 0.5, 3), (24, 1.5, 2)):
            line = {"kind": "events", "samples": samples, "time": 1, "epoch": epoch, "Eval": loss}
            file.write(json.dumps(line) + "\n")
    run = read_run(path)
    found = {name: list(at) for name, at in run.places(run.own["Eval"].samples).items()}
    assert found == {
        "samples": [8, 24],
        "update": [1, 3],
        "seconds": [1, 3],
        "tokens": [800, 2400],
        "epoch": [0.5, 1.5],
    }
    assert list(run.places(run.series["train_loss"].samples)["epoch"]) == [0.5, 1, 1.5]


def test_blocks_of_the_same_form_are_one_row(tmp_path: Path) -> None:
    def module(name: str, kind: str, *children: Any, seconds: float | None = 1.0) -> Any:
        numel = sum(child["parameters"] for child in children) or 2
        return {
            "name": name,
            "class": kind,
            "parameters": numel,
            "forward_macs": 3 * numel,
            "forward_seconds": seconds,
            "children": list(children),
        }

    blocks = [
        module(str(n), "Block", module("up", "Linear"), module("down", "Linear")) for n in range(3)
    ]
    root = module("Net", "Net", *blocks, module("3", "Head"), seconds=4.0)
    a_run(tmp_path)
    run = replace(read_run(tmp_path / "events.jsonl"), profile={"modules": root})
    rows = [(row["name"], row["class"], row["parameters"], row["time"]) for row in _modules(run)]
    assert rows == [
        ("Net", "Net", 14, "100.0"),
        ("0–2", "3 × Block", 12, "75.0"),
        ("up", "3 × Linear", 6, "75.0"),
        ("down", "3 × Linear", 6, "75.0"),
        ("3", "Head", 2, "25.0"),
    ]


@pages
def test_long_runs_have_small_pages(tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    a_run(tmp_path, updates=60_000)
    path, _ = write_page([tmp_path])
    assert path.stat().st_size - len(get_plotlyjs().encode()) < 200_000


def fail_and_close(folder: Path) -> None:
    monitor = JsonlWriter(JsonlMonitor(enabled=True, output_path=str(folder), job_name="run"), {})
    try:
        raise ValueError("bad sample 17")
    finally:
        monitor.close()


def test_the_error_that_ended_a_run_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        fail_and_close(tmp_path)
    *_, end = read_lines(tmp_path / "run" / "events.jsonl")
    assert end["error"] == "ValueError: bad sample 17"


def test_versions_of_libraries_that_the_program_imported_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    sys.modules["trl"].__dict__["__version__"] = "1.2"
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    config = load_config({"train_batch_size": 1})
    versions = describe_run(config, nn.Linear(1, 1), {"world": 1}, ["here"])["versions"]
    assert versions["trl"] == "1.2" and "peft" not in versions


def test_the_commit_of_the_program_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text("")
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = _commit()
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
    program.write_text("changed")
    assert _commit() == f"{commit}-dirty"


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
    assert few.samples[0] == 0
    assert few.samples[-1] == len(values) - 1
    assert (few.values.min(), few.values.max()) == (min(values), max(values))
    assert all(series.values[int(step)] == value for step, value in zip(*few_of(few), strict=True))


def few_of(series: Series) -> tuple[Any, Any]:
    return series.samples, series.values


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda folder: folder / "nothing", "does not exist; pass the directory of a run"),
        (lambda folder: folder, r'no events.jsonl; train with "jsonl_monitor"'),
    ],
)
def test_a_directory_that_is_not_a_run_is_refused(make: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=fault):
        files_of(make(tmp_path))


@pages
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
        write_page([tmp_path])
    assert not (tmp_path / "report.html").exists()


@pages
def test_a_damaged_run_among_others_is_named(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / name) for name in ("a", "b")]
    with paths[0].open("a") as file:
        file.write('{"kind": "checkpoint", "tag": "a"}\n')
    with pytest.raises(UsageError, match=f"{paths[0]} or {paths[1]} is damaged, or was not writt"):
        write_page(paths)


@pages
def test_a_search_for_a_configuration_is_shown(tmp_path: Path) -> None:
    results = []
    for stage, gain, peak in ((0, 100.0, 9e9), (1, 99.0, 6e9)):
        outcome = Outcome(f"z{stage}_tmbspg8_gas1", {"peak_memory_per_gpu": peak})
        results.append(TuningTrial(stage, 8, runs=1, outcome=outcome, gain=gain))
    findings = Findings("throughput", results, {"z2_tmbspg8_gas1": "it would take | 9 GB"})
    search = tmp_path / "autotuning_results"
    search.mkdir()
    (search / "summary.txt").write_text(findings.text(61.0, is_whole=True))
    (search / "summary.png").write_bytes(b"a picture")
    assert main(["report", str(search)]) == 0
    page = Page(search / "report.html")
    assert page.words["h1"] == ["Autotuning"]
    assert ["global", "2", "100", "z0_tmbspg8_gas1"] in page.rows
    assert ["z1_tmbspg8_gas1", "99", "6", "front"] in page.rows
    assert "z2_tmbspg8_gas1 was not run: it would take | 9 GB" in page.words["p"]
    assert "z1_tmbspg8_gas1 is within 2% of the best (99) with 3 GB less memory" in page.words["p"]
    assert page.links == [f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"]
    # Beside a run, in the directory of both.
    engine = engine_of(0, **keys_of(tmp_path))
    train(engine, range(2))
    engine.destroy()
    page = Page(write_page([tmp_path])[0])
    assert page.words["h2"][:2] == ["Autotuning", "Training"]
    # Other files of that name are no searches, and hide no mistake.
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "summary.txt").write_text("| it | was | good |")
    with pytest.raises(UsageError, match=r"notes has no events\.jsonl"):
        write_page([search, tmp_path / "notes"])
    assert page.figures["updates"] == "2"


@pages
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_run(tmp_path / "runs" / "one")
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "report.html" in capsys.readouterr().out
    page = path.with_name("report.html")
    assert "location.reload(), 10000" not in page.read_text()
    assert re.search("pass the directory of a run", run_and_fail([tmp_path / "no"], capsys))
    assert re.search("are about a page; pass the", run_and_fail(["--follow"], capsys))


@pages
def test_a_page_is_followed_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_run(tmp_path)
    page, seen = path.with_name("report.html"), []

    def sleep(seconds: float) -> None:
        seen.append("location.reload(), 10000" in page.read_text())
        with path.open("a") as file:
            file.write('{"kind": "end", "time": 1010}\n')

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["report", "--follow", str(tmp_path)]) == 0
    assert seen == [True] and "location.reload(), 10000" not in page.read_text()


def run_and_fail(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", *map(str, arguments)]) == 1
    return capsys.readouterr().err
