"""The `hadal` command: explain, schema, --version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hadal import __version__
from hadal.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path):
    def write(config):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hadal {__version__}\n"


def test_explain_shows_what_is_no_default(written, capsys):
    config = written({"train_batch_size": 16, "fp16": {"enabled": "auto"}, "my_key": 1})
    assert main(["explain", config, "--world-size", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train_batch_size", "16", "you"] in lines
    assert ["train_micro_batch_size_per_gpu", "4", "inferred"] in lines
    assert ["fp16.enabled", "false", "auto"] in lines
    assert ["zero_optimization.overlap_comm", "true", "inferred"] in lines
    assert not any(line[0] == "gradient_clipping" for line in lines)
    assert any(line[:2] == ["note:", "my_key:"] for line in lines)


def test_a_closed_pipe_is_no_error(written):
    """As of `hadal explain FILE --all | head -1`."""
    config = written({"train_batch_size": 1})
    command = f"{sys.executable} -m hadal.cli explain {config} --all | head -1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == 1


def test_explain_all_shows_defaults_too(written, capsys):
    assert main(["explain", written({"train_batch_size": 1}), "--all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gradient_clipping", "1.0", "default"] in lines


def test_explain_tells_what_is_not_built_yet(written, capsys):
    config = written({"train_batch_size": 1, "csv_monitor": {"enabled": True}})
    assert main(["explain", config]) == 0
    assert "note: csv_monitor.enabled: true is not built yet" in capsys.readouterr().out


def test_explain_refuses_a_faulty_configuration(written, capsys):
    assert main(["explain", written({"train_batch_size": 0})]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: 1 fault in ds_config.json\n  train_batch_size")


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_explain_wants_ranks(written, size, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", written({"train_batch_size": 1}), "--world-size", size])
    assert caught.value.code == 2
    assert "--world-size" in capsys.readouterr().err


def test_explain_draws_a_table_on_a_terminal(written, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["explain", written({"train_batch_size": 1})]) == 0
    shown = capsys.readouterr().out
    assert "origin" in shown
    assert "│" in shown


def test_schema(tmp_path, capsys):
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["properties"]["zero_optimization"]
    path = tmp_path / "schema.json"
    assert main(["schema", "--output", str(path)]) == 0
    assert json.loads(path.read_text()) == printed
    assert main(["schema", "--output", str(tmp_path / "no" / "such")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["bench"], ["checkpoint"]])
def test_alone_it_prints_help(words, capsys):
    assert main(words) == 0
    assert "\nCommands:\n" in capsys.readouterr().out


def test_it_runs_as_a_module(written):
    command = [sys.executable, "-m", "hadal.cli", "explain", written({"train_batch_size": 2})]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "train_batch_size" in ran.stdout
    assert ran.stderr == ""
