"""`hadal plot-schedule`: the plot, and the error if there is nothing to draw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from hadal.cli import plot_schedule
from hadal.cli.main import main
from hadal.config import load_config

ADAM = {"type": "AdamW", "params": {"lr": 3e-4}}
COSINE = {"total_num_steps": 80, "warmup_num_steps": 20, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": [0.1, 0.2, 0.1], "cycle_max_lr": 1.0, "cycle_first_step_size": 30}


def config_of(kind: str, **params: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "optimizer": ADAM,
        "scheduler": {"type": kind, "params": params},
    }


def drawn(source: dict[str, Any], steps: int) -> Any:
    config = load_config(source)
    return plot_schedule.figure_of(config, plot_schedule._courses(config, steps))


def curves(axis: Any) -> list[Any]:
    return [line for line in axis.lines if len(line.get_xdata()) > 2]


def marked(axis: Any) -> list[int]:
    return [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 2]


def test_the_rate_is_drawn_over_the_updates():
    figure = drawn(config_of("WarmupCosineLR", **COSINE), 100)
    (axis,) = figure.axes
    (curve,) = curves(axis)
    assert list(curve.get_xdata()) == list(range(101))
    rates = list(curve.get_ydata())
    assert rates[0] == 0.0 and rates[21] == max(rates)
    assert rates[11] == pytest.approx(1.5e-4)
    assert max(rates) == pytest.approx(3e-4, rel=1e-3)
    assert marked(axis) == [21, 80]
    assert [text.get_text() for text in axis.texts] == ["end of warm-up: 21", "end of training: 80"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("update", "learning rate")
    assert figure.get_suptitle() == "WarmupCosineLR"
    assert "total_num_steps 80" in axis.get_title().replace("\N{NO-BREAK SPACE}", " ")


def test_each_group_that_differs_and_the_momentum_are_drawn():
    rates, momenta = drawn(config_of("OneCycle", **CYCLE), 70).axes
    assert [line.get_label() for line in curves(rates)] == ["param groups 0, 2", "param group 1"]
    assert [text.get_text() for text in rates.get_legend().get_texts()] == [
        "param groups 0, 2",
        "param group 1",
    ]
    (curve,) = curves(momenta)  # alike in all groups
    assert list(curve.get_ydata())[30] == pytest.approx(0.8)
    assert momenta.get_ylabel() == "momentum"
    assert (rates.get_xlabel(), momenta.get_xlabel()) == ("", "update")
    assert marked(rates) == marked(momenta) == [30, 60]


def test_a_scheduler_of_torch_is_drawn_without_marks_beyond_its_end():
    (axis,) = drawn(config_of("StepLR", step_size=2), 5).axes
    (curve,) = curves(axis)
    assert list(curve.get_ydata()) == pytest.approx([3e-4, 3e-4, 3e-5, 3e-5, 3e-6, 3e-6])
    (axis,) = drawn(config_of("WarmupLR", warmup_num_steps=50), 20).axes
    assert marked(axis) == []


def test_the_command_writes_a_png(tmp_path: Path, capsys):
    path, picture = tmp_path / "ds.json", tmp_path / "rates.png"
    path.write_text(json.dumps(config_of("WarmupLR", warmup_num_steps=5)))
    assert main(["plot-schedule", str(path), "--steps", "20", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out == f"{picture}\n"


@pytest.mark.fast_cells("rates.svg-<?xml-")
@pytest.mark.parametrize(
    ("name", "begins", "told"),
    [("rates.svg", b"<?xml", ""), ("rates.pdf", b"%PDF", ""), ("rates", b"\x89PNG", ".png\n")],
)
def test_the_suffix_names_the_format(
    name: str, begins: bytes, told: str, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(config_of("WarmupLR", warmup_num_steps=5)))
    assert main(["plot-schedule", "ds.json", "--steps", "9", "--output", name]) == 0
    shown = capsys.readouterr()
    written = Path(shown.out.strip())
    assert written.read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.glob("rates*")] == [written.name]
    assert shown.err.endswith(told) and bool(shown.err) == bool(told)


def test_a_warm_up_is_marked_where_it_ends():
    linear = {"warmup_num_steps": 20, "warmup_type": "linear"}
    for params, peak in ((linear, 21), ({"warmup_num_steps": 20}, 20)):
        (axis,) = drawn(config_of("WarmupLR", **params), 30).axes
        assert marked(axis) == [peak]
        assert list(curves(axis)[0].get_ydata()).index(3e-4) == peak
        (axis,) = drawn(config_of("WarmupLR", **params), 20).axes
        assert marked(axis) == []


def test_schedules_that_cannot_be_drawn_are_reported(tmp_path: Path, capsys, monkeypatch):
    def told(source: dict[str, Any], *more: str) -> tuple[int, str]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(source))
        code = main(["plot-schedule", str(path), "--steps", "9", *more])
        return code, capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    code, error = told({"train_batch_size": 1})
    assert (code, "no `scheduler` section" in error) == (1, True)
    code, error = told(config_of("WarmupLR", warmup_num_steps=-1))
    assert (code, "scheduler.params.warmup_num_steps" in error) == (1, True)
    code, error = told(config_of("ReduceLROnPlateau"))
    assert (code, "follows a metric" in error) == (1, True)
    code, error = told(config_of("WarmupLR"), "--output", str(tmp_path / "no" / "such.png"))
    assert (code, "cannot be written" in error) == (1, True)
    code, error = told(config_of("WarmupLR"), "--output", "rates.docx")
    assert code == 1
    assert "rates.docx: pictures cannot be written as .docx; use one of ." in error
    assert ".pdf, " in error and ".png, " in error
    code, error = told(config_of("WarmupCosineLR", total_num_steps=9, warmup_min_ratio=0.1))
    assert (code, "note: the rate is 0 in the first update" in error) == (0, True)
    (tmp_path / "schedule.png").unlink()
    assert not list(tmp_path.glob("rates*"))
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, error = told(config_of("WarmupLR"))
    assert (code, "pip install matplotlib" in error) == (1, True)


@pytest.mark.parametrize("steps", ["0", "many"])
def test_it_wants_updates(steps: str, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plot-schedule", "ds.json", "--steps", steps])
    assert caught.value.code == 2
    assert "--steps" in capsys.readouterr().err
