"""Colours, tables and errors as every command shows them."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from hadal.cli import terminal
from hadal.cli.parser import expected, integer, number, numel, size
from hadal.errors import ConfigError, Fault, UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.is_colourful(Terminal())
    assert not terminal.is_colourful(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert terminal.is_colourful(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.is_colourful(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.is_colourful(Terminal())


def test_faults_have_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = (Fault("a.b", 'unknown key; did you mean "c"?'), Fault("optimizer", "x" * 200))
    message = "2 faults in ds_config.json\n  a.b  ...\n  optimizer  ..."
    terminal.fail(ConfigError(message, faults))
    assert capsys.readouterr().err.splitlines() == [
        "error: 2 faults in ds_config.json",
        '  a.b        unknown key; did you mean "c"?',
        f"  optimizer  {'x' * 200}",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal.fail(ConfigError(message, faults))
    shown = capsys.readouterr().err
    assert shown.startswith("\x1b[1;31merror: \x1b[0m2 faults")
    assert "\x1b[1ma.b" in shown and '\x1b[36mdid you mean "c"?\x1b[0m' in shown


def test_errors_of_one_line_and_of_more(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.fail(UsageError("no [such] thing\n  at all"), "look :smile: there")
    assert capsys.readouterr().err == "error: no [such] thing\n  at all\nhint: look :smile: there\n"
    terminal.fail(ConfigError("elasticity: too few", (Fault("elasticity", "too few"),)))
    assert capsys.readouterr().err == "error: elasticity: too few\n"


def test_messages_hang_behind_their_label_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    terminal.fail(UsageError("the object is not a multiple of sixteen\n  " + "frame " * 7))
    terminal.say("hadal run", "rank 1 failed first: exit code 1, no more", "error")
    assert stream.getvalue().splitlines() == [
        "error: the object is not a multiple of",
        "       sixteen",
        "  frame frame frame frame frame frame",
        "  frame",
        "hadal run: rank 1 failed first: exit",
        "           code 1, no more",
    ]


def test_piped_output_is_neither_wrapped_nor_padded(capsys: pytest.CaptureFixture[str]) -> None:
    made = terminal.table("name", "count", right=["count"])
    made.add_row("x" * 300, "1")
    made.add_row("[y]", "1,000")
    terminal.show(terminal.heading("things"), made, "z" * 300, Text("end"))
    assert capsys.readouterr().out.splitlines() == [
        "things",
        f"{'name':<300}  count",
        "─" * 307,
        f"{'x' * 300}      1",
        f"{'[y]':<300}  1,000",
        "z" * 300,
        "end",
    ]


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (integer(ge=1), "4", 4),
        (integer(ge=0), "1e4", 10_000),
        (integer(ge=-1), "-1", -1),
        (number(gt=0), "1e-3", 0.001),
        (number(gt=0, lt=1), ".5", 0.5),
        (size, "2GiB", 1 << 31),
        (numel, "7B", 7 * 10**9),
    ],
)
def test_numbers_are_read_by_one_rule(read: object, text: str, value: float) -> None:
    assert callable(read) and read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "wanted"),
    [
        (integer(ge=1), "0", "an integer >= 1"),
        (integer(ge=1), "two", "an integer >= 1"),
        (integer(ge=1), "1.5", "an integer >= 1"),
        (integer(ge=1), "1_000", "an integer >= 1"),
        (integer(ge=1), "٣", "an integer >= 1"),
        (integer(ge=1), "1e999", "an integer >= 1"),
        (integer(ge=1, le=65535), "65536", "an integer from 1 to 65535"),
        (number(gt=0), "nan", "a number > 0"),
        (number(gt=0), "inf", "a number > 0"),
        (number(gt=0, lt=1), "1", "a number between 0 and 1"),
        (size, "64X", "a size such as 500MB or 80GB"),
        (numel, "many", "a number such as 1300000000 or 7B"),
    ],
)
def test_invalid_values_share_one_message(read: object, text: str, wanted: str) -> None:
    assert callable(read)
    with pytest.raises(type(expected("", ""))) as caught:
        read(text)
    assert str(caught.value) == f'expected {wanted}, got "{text}"'
