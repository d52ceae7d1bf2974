"""`hadal bench comm`: measurements, tables and plots; and `ds_bench`, which calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools

import hadal
from hadal.cli import bench as bench_comm, deepspeed
from hadal.cli.main import command_line, main
from hadal.comm import Ranks, benchmark as bench
from hadal.comm.benchmark import (
    KINDS,
    WAYS,
    Trial,
    numel_of_memory,
    numels_between,
    sweep,
)
from hadal.comm.comms_log import bus_factor
from hadal.errors import UsageError


def test_sizes_are_powers_of_two_that_all_ranks_can_share() -> None:
    assert numels_between(1, 16, 2, 1) == [1, 2, 4, 8, 16]
    assert numels_between(1, 16, 2, 2) == [2, 4, 8, 16]
    assert numels_between(1, 16, 2, 3) == [3, 6, 15]
    assert numels_between(1, 1, 2, 4) == [4]
    assert numels_between(64, 1 << 24, 4, 2) == [64 * 4**power for power in range(10)]


def measured(kind: str, numel: int, seconds: float) -> dict[str, Any]:
    speed = 4 * numel / seconds
    return {
        "kind": kind,
        "nbytes": 4 * numel,
        "numel": numel,
        "seconds": seconds,
        "algorithm_bandwidth": speed,
        "bus_bandwidth": speed / 2,
    }


def test_the_picture_shows_speed_and_time_over_the_message() -> None:
    pytest.importorskip("matplotlib")
    found = [measured("all_gather", numel, 1e-4) for numel in (2, 4)]
    found.append(measured("broadcast", 2, 1e-3))
    figure = bench_comm.figure_of(found, "2 ranks", "GBps", 1e-9)
    speed, time = figure.axes
    assert [line.get_label() for line in speed.lines] == ["all_gather", "broadcast"]
    assert list(speed.lines[0].get_xdata()) == [8, 16]
    assert list(speed.lines[0].get_ydata()) == pytest.approx([4e-5, 8e-5])
    assert list(time.lines[1].get_ydata()) == pytest.approx([1000.0])
    assert (speed.get_ylabel(), time.get_xlabel()) == ("bus bandwidth, GBps", "message, bytes")


def every_kind(way: str, is_async: bool) -> list[tuple[str, int, float]]:
    trial = Trial(torch.bfloat16, trials=2, warmups=1, is_async=is_async, way=way)
    kinds = [kind for kind in KINDS if kind != "pt2pt" or way != "training"]
    found = list(sweep(kinds, [2, 64], trial))
    for one in found:
        assert one.seconds > 0 and one.nbytes == 2 * one.numel
        assert one.algorithm_bandwidth == pytest.approx(one.nbytes / one.seconds)
        kind = "send" if one.kind == "pt2pt" else one.kind
        assert one.bus_bandwidth == pytest.approx(one.algorithm_bandwidth * bus_factor(kind, 2))
    memory = numel_of_memory(0.001, torch.float32, Ranks.world())
    assert memory % 2 == 0 and memory > 1000
    return [(one.kind, one.numel, one.seconds) for one in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
def test_every_kind_is_measured_equally_on_all_ranks(
    ranks: RankPools, way: str, is_async: bool
) -> None:
    first, second = ranks(2).run(every_kind, way, is_async)
    assert first == second  # the slowest rank counts
    assert len(first) == 2 * (len(KINDS) - (way == "training"))


def test_unmeasurable_data_are_refused() -> None:
    hadal.init_distributed()
    with pytest.raises(UsageError, match=r"'all_gathr' cannot be measured.*all_gather"):
        list(sweep(["all_gathr"], [1], Trial()))
    with pytest.raises(UsageError, match=r"'nccl' cannot be measured.*'hadal'"):
        list(sweep(["all_gather"], [1], Trial(way="nccl")))
    with pytest.raises(UsageError, match="training has no pt2pt"):
        bench.measure("pt2pt", 1, Trial(way="training"), Ranks.world())


@pytest.mark.slow
def test_the_command_starts_ranks_and_shows_their_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "comm.json", tmp_path / "comm.svg"
    words = ["all_reduce", "pt2pt", "--minsize", "0", "--maxsize", "3", "--factor", "2"]
    words += ["--trials", "2", "--warmups", "1"]
    words += ["--json", str(out), "--output", str(picture), "--dtype", "torch.bfloat16"]
    assert main(["bench", "comm", *words]) == 0
    shown = capfd.readouterr().out
    told = json.loads(out.read_text())
    assert (told["ranks"], told["device"], told["way"]) == (2, "cpu", "hadal")
    assert [(one["kind"], one["nbytes"]) for one in told["measured"]] == [
        *(("all_reduce", 4), ("all_reduce", 8), ("all_reduce", 16)),
        *(("pt2pt", 4), ("pt2pt", 8), ("pt2pt", 16)),
    ]
    assert "2 ranks on cpu, torch.bfloat16, hadal.comm" in shown and "[rank" not in shown
    assert any(line.split()[:3] == ["all_reduce", "4", "B"] for line in shown.splitlines())
    assert picture.read_bytes().startswith(b"<?xml") and str(picture) in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["all_gathr"], "no kind 'all_gathr'; did you mean all_gather?"),
        (["--dtype", "float33"], "--dtype float33: torch has no such dtype; did you mean float32?"),
        (["--dtype", "xyz"], "--dtype xyz: torch has no such dtype; use one of "),
        (["--all", "pt2pt"], "--all measures every kind"),
        (["pt2pt", "--dist", "training"], "training has no pt2pt"),
        (["--maxsize", "3"], "--minsize 6 is more than --maxsize 3"),
        (["--backend", "cpu:glo"], "--backend cpu:glo: this torch has no glo"),
        (["--output", "x.docx"], "x.docx: pictures cannot be written as .docx"),
        (["--output", "no/x.png"], "no/x.png cannot be written: no is not a directory"),
        (["--json", "no/x.json"], "no/x.json cannot be written"),
    ],
)
def test_faults_are_found_before_ranks_start(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_comm, "start", None)  # no rank can be
    if "--output" in words:
        pytest.importorskip("matplotlib")
    assert main(["bench", "comm", *words]) == 1
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_default_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> Any:
        own = command_line().parse_args(["bench", "comm", *words])
        bench_comm._check(own)
        return own

    usual = parsed()
    assert usual.kinds == ["all_gather", "reduce_scatter"]
    assert bench_comm._count(usual, 2) == 20
    assert parsed("--all").kinds == list(KINDS)
    assert parsed("--all", "--dist", "training").kinds == [k for k in KINDS if k != "pt2pt"]
    assert bench_comm._count(parsed("broadcast", "--mem-factor", "0.1"), 2) == 1


def test_the_table_marks_the_highest_bandwidth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [measured("all_gather", 1 << 10, 1e-4), measured("all_gather", 1 << 20, 1e-3)]
    monkeypatch.setenv("FORCE_COLOR", "1")
    bench_comm._print_table(found, "2 ranks", "GBps", 1e-9)
    title, _, *_, low, high = capsys.readouterr().out.splitlines()
    assert "2 ranks" in title
    assert "4 KiB" in low and "1,024" in low and "100.0" in low and "0.04" in low and "0.02" in low
    assert "\x1b[1;32m" in high and "4 MiB" in high and "\x1b[1;32m" not in low


def test_matplotlib_is_looked_for_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "comm", "--mem_factor", "2"])
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["bench", "comm", "--output", "x.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--scan --all-reduce --all-to-all --maxsize 20 --trials 3 --warmups 0",
            "all_reduce all_to_all --trials 3 --warmups 0 --bw_unit Gbps --dtype torch.float"
            " --dist hadal --minsize 0 --factor 2 --maxsize 20",
        ),
        (
            "--mem_factor .2 --bw_unit GBps --raw --dtype torch.bfloat16 --async_op --dist torch",
            "--all --trials 50 --warmups 5 --bw_unit GBps --dtype torch.bfloat16 --dist torch"
            " --mem_factor .2 --async_op --raw",
        ),
        (
            "--local_rank 1 --pt2pt --backend gloo --async-op",
            "pt2pt --trials 50 --warmups 5 --bw_unit Gbps --dtype torch.float --dist hadal"
            " --mem_factor 0.1 --backend gloo --async_op",
        ),
    ],
)
def test_ds_bench_leads_to_it(flags: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(deepspeed, "main", lambda words: given.append(words) or 0)
    monkeypatch.setattr(sys, "argv", ["ds_bench", *flags.split()])
    assert deepspeed.bench() == 0
    assert given == [["bench", "comm", *words.split()]]
