"""Help and errors of every command, in one form; the test walks all parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.cli.main import command_line, main
from hadal.cli.parser import Parser, spelled
from hadal.cli.run import divided


def parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


ALL = {parser.prog: parser for parser in parsers(command_line())}


@pytest.mark.parametrize("name", ALL)
def test_help_has_a_description_and_an_example(name: str) -> None:
    parser = ALL[name]
    description = parser.description or ""
    assert 1 <= len(re.findall(r"\.(?=\s|$)", description)) <= 3 and description[-1] == "."
    assert any(f"{name} " in f"{line} " for line in parser.examples)
    shown = parser.format_help()
    assert max(map(len, shown.splitlines())) <= 100
    for part in (f"\n\nUsage: {name}", "\n\nOptions:\n", "\n\nExample"):
        assert part in shown


@pytest.mark.parametrize("name", ALL)
def test_every_example_is_understood(name: str) -> None:
    for line in ALL[name].examples:
        words = shlex.split(re.sub(r'^eval "\$\((.*)\)"', r"\1", line), comments=True)
        words = words[: words.index(">")] if ">" in words else words
        if not words:
            continue  # a comment
        assert words.pop(0) == "hadal"
        own = ["run", *divided(words[1:])[0]] if words[0] == "run" else words
        assert command_line().parse_args(own).run


def shown_commands(page: Path) -> Iterator[str]:
    """The commands in a page's blocks, and those in the docstring of an example."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) if page.suffix == ".md" else [text]
    for block in blocks:
        yield from re.findall(r"(?m)^(?:\$ |    )?(?:[A-Z_]+=\S+ )*(hadal [a-z-]+ .*)$", block)


ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]


def test_commands_in_pages_and_examples_are_understood() -> None:
    found = [(page.name, line) for page in PAGES for line in shown_commands(page)]
    assert len(found) > 40
    for page, line in found:
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index(">")] if ">" in words else words
        own = ["run", *divided(words[1:])[0]] if words[0] == "run" else words
        try:
            command_line().parse_args(own)
        except SystemExit as ended:
            pytest.fail(f"{page}: {line}", pytrace=ended.code == 0)


@pytest.mark.parametrize("name", ALL)
def test_help_has_one_style(name: str) -> None:
    for action in ALL[name]._actions:
        if action.help is None:
            assert isinstance(action, argparse._SubParsersAction)
        elif action.help != argparse.SUPPRESS:
            first, last = action.help.lstrip("`")[0], action.help[-1]
            assert first.isupper() or not first.isalpha() or action.help.startswith(_WORDS), action
            assert last != "."


# Names that begin a sentence as they are.
_WORDS = ("bash", "dtype", "torch", "`import")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runn"], 'unknown command "runn"\nhint: did you mean run?\n\nUsage: hadal [OPTIONS]'),
        (
            ["bench", "com"],
            'unknown command "com"\nhint: did you mean comm?\n\nUsage: hadal b',
        ),
        (["report", "--jsn"], "unknown flag --jsn\nhint: did you mean --json?\n\nUsage: hadal rep"),
        (["schema", "x"], 'unexpected argument "x"\n\nUsage: hadal schema'),
        (["report", "--js"], "unknown flag --js\nhint: did you mean --json?"),
        (["explain"], "missing CONFIG\n\nUsage: hadal explain [OPTIONS] CONFIG\n"),
        (["estimate"], "missing --params or --model\n\nUsage: hadal estimate [OPTIONS] (--params"),
        (["explain", "x", "--world-size"], "--world-size: expected a value"),
        (
            ["completion", "fsh"],
            'SHELL: expected bash, zsh or fish, got "fsh"\nhint: did you mean f',
        ),
    ],
)
def test_errors_name_the_subcommand_and_the_intended_option(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    command = re.search(r"Usage: (hadal(?: [a-z]+)?)", error)
    assert command is not None
    assert error.endswith(f"\nFor more information, try `{command[1]} --help`.\n")


def test_flags_have_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = command_line().parse_args(["explain", "x", "--world_size", "4"])
    assert parsed.world_size == 4
    assert divided(["--num-gpus", "2", "--num-nodes=1", "a.py", "--num-gpus"]) == (
        ["--num-gpus", "2", "--num-nodes=1"],
        ["a.py", "--num-gpus"],
    )
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert "--world_size" not in capsys.readouterr().out


def test_help_is_coloured_where_colours_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([])
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    main([])
    coloured = capsys.readouterr().out
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    for heading in ("Usage:", "Commands:", "Options:"):
        assert f"\x1b[1m{heading}\x1b[0m" in coloured
    assert "\x1b[1mexplain\x1b[0m" in coloured and "\x1b[1m-h, --help\x1b[0m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    main([])
    assert capsys.readouterr().out == plain


def test_flags_are_declared_by_their_spelling() -> None:
    assert spelled("-o --output FILE", "The file", Path) == (
        ["-o", "--output"],
        {"help": "The file", "type": Path, "metavar": "FILE"},
    )
    assert spelled("--all", "All") == (["--all"], {"help": "All", "action": "store_true"})
    assert spelled("folder RUN", "It", nargs="?")[0] == ["folder"]
    assert spelled("--size N", "Bytes", int, 4)[1]["help"] == "Bytes (default: %(default)s)"
    assert spelled("--to N", "Its end (default: none)", int, 4)[1]["help"].count("default") == 1
