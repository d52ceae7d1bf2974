"""`hadal ssh`: one command on every host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hadal.cli.main import main


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hostfile, and a stand-in of ssh that tells how it was called; host `c` is down."""
    fake = tmp_path / "ssh"
    fake.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "print(*sys.argv[-4:], sep='|')\n"
        "sys.exit(255 if sys.argv[-2] == 'c' else 0)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\nc slots=1\n")
    return str(tmp_path / "hosts")


def test_a_command_runs_on_every_host(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ssh", "-f", hostfile, "--ssh_port", "2222", "--exclude", "c", "echo", "-n", "'a b'"]
    assert main(words) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"{host}: -p|2222|{host}|echo -n 'a b'" for host in "ab"
    ]


def test_the_exit_code_is_the_worst(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ssh", "-f", hostfile, "true"]) == 255
    shown = capsys.readouterr()
    assert shown.err == "c: exit code 255\n"
    assert len(shown.out.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no command"),
        (["-i", "d", "true"], "no host 'd'"),
        (["-f", "/no/such", "true"], "--hostfile /no/such: there is no such file; give the path"),
        (["-f", "/", "true"], "/ is a folder; expected a file"),
    ],
)
def test_faulty_words_are_reported(
    hostfile: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ssh", "-f", hostfile, *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert told in " ".join(shown.split())


def test_a_flag_is_not_taken_for_the_command(
    hostfile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["ssh", "-f", hostfile, "--ssh_prot", "22", "true"])
    assert "did you mean --ssh_port?" in capsys.readouterr().err
    assert main(["ssh", "-f", hostfile, "--exclude", "c", "--", "--ssh_prot"]) == 0
