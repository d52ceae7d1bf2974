"""`hadal completion`: each installed shell completes the parsers' options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hadal.cli.completion import SHELLS, commands_of
from hadal.cli.main import command_line, main


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """A shell that has read its script into `script` of the test's folder."""
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} is installed")
    assert main(["completion", request.param]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    return str(request.param)


# Simulated keyboard input: bash and zsh pass words, fish completes a line itself.
BASH = """
source ./script
complete -p hadal | grep -q -- '-F _hadal hadal' || exit 9
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_hadal
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { [[ "$*" == '_hadal hadal' ]] || exit 9 }
_files() { }
compadd() { shift; print -l -- "$@" }
_describe() { print -l -- "${(@)told%%:*}" }
source ./script
words=("$@") CURRENT=$#
_hadal
"""
FISH = 'source ./script; complete -C "$argv"'


def completed(shell: str, folder: Path, *words: str) -> set[str]:
    command = {
        "bash": ["bash", "--norc", "-c", BASH, "bash", *words],
        "zsh": ["zsh", "-f", "-c", ZSH, "zsh", *words],
        "fish": ["fish", "--no-config", "-c", FISH, " ".join(words)],
    }[shell]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = {line.partition("\t")[0] for line in done.stdout.splitlines() if line}
    return {word for word in found if word.startswith(words[-1])} - {"train.py", "script"}


def test_completions(shell: str, tmp_path: Path) -> None:
    def asked(*words: str) -> set[str]:
        return completed(shell, tmp_path, "hadal", *words)

    assert asked("expl") == {"explain"}
    assert {"run", "bench", "completion"} <= asked("")
    assert asked("run", "--no_ssh") == {"--no_ssh", "--no_ssh_check"}
    assert asked("run", "-q", "-H", "hosts", "--elastic") == {"--elastic_training"}
    assert asked("run", "--launcher", "s") == {"ssh", "slurm"}
    assert asked("bench", "") >= {"io"}
    assert asked("bench", "io", "--js") == {"--json"}
    assert asked("explain", "--") >= {"--world-size", "--all"}
    assert asked("explain", "--autotu") == set()
    assert asked("completion", "--") == {"--help"}
    assert asked("completion", "") >= {"bash", "zsh", "fish"}


def test_a_programs_own_words_are_left_to_it(shell: str, tmp_path: Path) -> None:
    for words in (("run", "train.py", "--no_s"), ("run", "-q", "a", "b", "ru"), ("ssh", "ls", "-")):
        assert completed(shell, tmp_path, "hadal", *words) == set()
    if shell != "fish":  # that offers flags wherever a word begins with a dash
        assert completed(shell, tmp_path, "hadal", "run", "--hostfile", "--no_s") == set()


def test_every_command_and_flag_is_in_every_script(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {}
    for name in SHELLS:
        main(["completion", name])
        scripts[name] = capsys.readouterr().out
    commands = list(commands_of(command_line(), "hadal"))
    assert {"hadal", "hadal run", "hadal checkpoint export"} <= {each.path for each in commands}
    for each in commands:
        for option in each.options:
            assert all(option.name.lstrip("-") in script for script in scripts.values())
