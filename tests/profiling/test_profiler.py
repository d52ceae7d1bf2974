"""`flops_profiler`: one update is counted, the next one timed, and a report is written."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import ROWS, batch_of, engine_of, model_of, train
from ranks import RankPools

from hadal.errors import UsageError
from hadal.plugins.profiling import FlopsProfiler, Profile, get_model_profile
from hadal.plugins.profiling.profile import number_to_string, params_to_string

NAME = "flops_profiler"
MACS = ROWS * (6 * 9 + 9 * 4)
NUMEL = 6 * 9 + 9 + 2 * 9 + 9 * 4 + 4
FORWARD = 2 * MACS + 5 * ROWS * 9


def profiled(stage: int, *, updates: int = 3, accumulation: int = 1, **keys: Any) -> Profile | None:
    """The profile of rank 0 after some updates; None on other ranks."""
    section = {"enabled": True, "profile_step": 1, "peak_tflops": 1e-6, **keys}
    engine = engine_of(stage, gradient_accumulation_steps=accumulation, flops_profiler=section)
    train(engine, range(updates * accumulation))
    profiler = engine.flops_profiler
    engine.destroy()
    return profiler and profiler.profile


def profiled_by_all(stage: int, keys: dict[str, Any]) -> Profile | None:
    return profiled(stage, **keys)


@pytest.mark.fast_cells("1", "2")
@pytest.mark.claims(NAME, f"{NAME}.enabled", f"{NAME}.profile_step", f"{NAME}.output_file")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_number_of_micro_steps_has_the_same_counts(
    ranks: RankPools, stage: int, tmp_path: Path
) -> None:
    """At stage 3 parameters are whole in the report, and each layer counts once."""
    accumulation = 4 if stage == 3 else 1
    keys = {"output_file": str(tmp_path / "in" / "report.json"), "profile_step": 1}
    found = ranks(2).run(profiled_by_all, stage, {"accumulation": accumulation, **keys})
    assert found[1] is None
    profile = found[0]
    assert profile.forward.flops == accumulation * FORWARD
    assert profile.tree.parameters == NUMEL
    # The first layer needs no gradient of its inputs.
    assert profile.backward.products == accumulation * 2 * (2 * MACS - ROWS * 6 * 9)
    assert profile.micro_steps == accumulation
    assert profile.step == 1
    assert not profile.is_slowed
    assert profile.mfu == pytest.approx(profile.flops_per_second / 1e6)
    written = json.loads((tmp_path / "in" / "report.json").read_text())
    assert written["flops"] == profile.flops
    assert [each["forward_macs"] for each in written["modules"]["children"]] == [
        ROWS * 6 * 9,
        0,
        0,
        ROWS * 9 * 4,
    ]
    assert all(each["forward_seconds"] > 0 for each in written["modules"]["children"])


def alone(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "report.txt"
    profiled(0, output_file=str(path), **keys)
    return path.read_text()


@pytest.mark.claims(
    f"{NAME}.module_depth",
    f"{NAME}.top_modules",
    f"{NAME}.detailed",
    f"{NAME}.recompute_fwd_factor",
)
def test_the_report_follows_the_keys(tmp_path: Path) -> None:
    text = alone(tmp_path)
    figures = dict(re.findall(r"^ *([^:\n]+): {2,}(.+)$", text, re.MULTILINE))
    assert "Profile Summary at step 1:" in text
    assert figures["params per GPU"] == str(NUMEL)
    assert figures["fwd MACs per GPU"] == f"{MACS} MACs"
    assert figures["fwd flops per GPU"].strip() == str(FORWARD)
    assert figures["batch size per GPU"] == str(ROWS)
    for label in ("fwd latency", "bwd latency", "step latency", "iter latency", "samples/second"):
        assert float(figures[label].split()[0]) > 0
    assert "bwd FLOPS per GPU = 2 * fwd flops / bwd latency" in figures
    assert re.search(r"^├── \(0\) Linear: 63 = 52.07% Params, 162 MACs = 60% MACs,", text, re.M)
    assert "depth 0:\n    params      - {'Sequential': '121'}" in text

    short = alone(tmp_path, detailed=False, module_depth=2, top_modules=2, recompute_fwd_factor=1.0)
    assert "├──" not in short
    assert re.search(r"depth 1:\n    params      - \{'Linear': '\d+', 'LayerNorm': '18'\}", short)
    assert "bwd FLOPS per GPU = 3 * fwd flops / bwd latency" in short
    assert "depth 0" not in alone(tmp_path, module_depth=0)


def test_an_update_that_is_not_profiled_pays_nothing(tmp_path: Path) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    engine = engine_of(
        0, flops_profiler={"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "r")}
    )
    seen = []
    for step in range(4):
        loss = engine(batch_of(step)[0]).square().mean()
        seen.append((len(hooks), torch.utils._python_dispatch._get_current_dispatch_mode()))
        engine.backward(loss)
        engine.step()
        seen.append((len(hooks), torch.utils._python_dispatch._get_current_dispatch_mode()))
    assert seen == [(0, None)] * 8
    engine.destroy()


def test_the_latencies_are_those_of_an_update_that_was_not_counted(tmp_path: Path) -> None:
    assert profiled(0, output_file=str(tmp_path / "r")).is_slowed is False
    early = profiled(0, updates=2, output_file=str(tmp_path / "r"))
    assert early.is_slowed
    assert "which counting slows" in (tmp_path / "r").read_text()


@pytest.mark.slow
def test_a_program_that_just_ends_gets_its_report(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import hadal, torch\n"
        "model = torch.nn.Linear(10, 10)\n"
        "config = {'train_batch_size': 1, 'flops_profiler': {'enabled': True},\n"
        "          'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}}\n"
        "engine, *_ = hadal.initialize(model=model, config=config)\n"
        "for _ in range(2):\n"
        "    engine.backward(engine(torch.ones(1, 10)).sum())\n"
        "    engine.step()\n"
        "assert engine.flops_profiler.flops == 200 and engine.flops_profiler.params == 110\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.count("Profile Summary at step 1:") == 1


def test_a_run_resumed_after_the_step_logs_that_nothing_is_profiled(caplog, tmp_path):
    engine = engine_of(0)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    again = engine_of(0, flops_profiler={"enabled": True, "profile_step": 1})
    again.load_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING):
        train(again, range(2, 4))
    again.destroy()
    assert caplog.text.count("profile_step is 1, but training continues from update 3") == 1


def test_a_failure_in_the_profiled_update_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = engine_of(0, flops_profiler={"enabled": True, "profile_step": 0})
    with pytest.raises(RuntimeError):
        engine(torch.ones(3, 5))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.nn.modules.module._global_forward_hooks
    engine.destroy()


def test_a_trace_is_written_with_the_modules_names(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "trace.json"
    profiled(0, updates=5, trace_file=str(path), output_file=str(tmp_path / "report"))
    names = {each["name"] for each in json.loads(path.read_text())["traceEvents"]}
    assert {"Sequential", "0", "3"} <= names


def test_a_report_that_cannot_be_written_does_not_end_training(caplog, tmp_path):
    (tmp_path / "file").write_text("")
    assert profiled(0, output_file=str(tmp_path / "file" / "report")) is not None
    assert "flops_profiler.output_file cannot be written" in caplog.text


# ---- by hand -----------------------------------------------------------------------------------


def test_a_profiler_by_hand(capsys, tmp_path: Path) -> None:
    model = model_of()
    profiler = FlopsProfiler(model)
    profiler.print_model_profile()
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError, match="start_profile"):
        profiler.get_total_flops()
    profiler.start_profile()
    model(torch.ones(ROWS, 6)).sum().backward()
    profiler.stop_profile()
    model(torch.ones(ROWS, 6))
    assert profiler.get_total_flops() == FORWARD
    assert profiler.get_total_macs(as_string=True) == f"{MACS} MACs"
    assert profiler.get_total_params() == NUMEL
    assert 0 < profiler.get_total_duration() < 10
    profiler.print_model_profile(profile_step=7)
    profiler.print_model_aggregated_profile()
    out = capsys.readouterr().out
    assert "at step 7" in out
    assert out.count("depth 0:") == 2
    profiler.end_profile()
    with pytest.raises(UsageError):
        _ = profiler.flops


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"input_shape": [1, 4]}, r"a tuple of at least one size, got \[1, 4\]"),
        ({"input_shape": ()}, "a tuple of at least one size"),
        ({}, "pass input_shape, or args and kwargs"),
        ({"input_shape": (1, 6), "mode": "backward"}, "expected one of 'forward', 'generate'"),
        ({"model": None, "input_shape": (1, 6)}, "must be a torch.nn.Module, got NoneType"),
    ],
)
def test_a_profile_of_nothing_is_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        get_model_profile(**{"model": model_of(), **arguments})


def test_numbers_as_text() -> None:
    shown = [number_to_string(value) for value in (0, 7.25e9, 1083328, 0.0123, 986, 2e-6, 5e-9)]
    assert shown == ["0 ", "7.25 G", "1.08 M", "12.3 m", "986 ", "2 u", "0.01 u"]
    assert [params_to_string(value) for value in (7.25e9, 986)] == ["7.25 B", "986"]
