"""The `hadal` command: schema, --version, closed pipes."""

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


def test_a_closed_pipe_is_not_an_error(written):
    """Simulates `hadal explain FILE --all | head -1`."""
    config = written({"train_batch_size": 1})
    command = f"{sys.executable} -m hadal explain {config} --all | head -1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == 1


TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        "checkpoint scan PATH",
        "report PATH",
        "compress export PATH out --config c.json",
        "data index PATH --tokenizer t --output out",
        "data analyze PATH --output out",
        "bench io PATH",
        "ssh -f PATH true",
        "run -H PATH x.py",
    ],
)
def test_a_path_that_the_system_refuses_is_an_error(words, capsys):
    assert main(words.replace("PATH", TOO_LONG).split()) in (1, 2)
    assert "File name too long" in capsys.readouterr().err


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
    command = [sys.executable, "-m", "hadal", "explain", written({"train_batch_size": 2})]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "train_batch_size" in ran.stdout
    assert ran.stderr == ""
