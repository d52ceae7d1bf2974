"""Environment variables for ranks beyond their host's own: from env files, and by prefix."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from hadal.errors import LaunchError

DEEPSPEED_ENV, HADAL_ENV = ".deepspeed_env", ".hadal_env"
_COLOURS = ("NO_COLOR", "FORCE_COLOR")
_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "HADAL", *_COLOURS)
_NARROWEST = 40
# The variables that limit visible accelerators: CUDA and ROCm, Intel, Huawei.
_SHOWN_BY = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_LINE = re.compile(rf"\s*(?:export\s+)?(?P<key>{_NAME})\s*=(?P<value>.*)")
_REFERENCE = rf"\$(?P<name>{_NAME})|\$\{{(?P<braced>{_NAME})\}}"
# A `$` before none of the characters that a shell would read as something else.
_DOLLAR = r"(?P<dollar>\$(?![\w{(@*#?!$'\"-]))"
# Between double quotes, and outside quotes: a shell would end the value at a blank there, but
# DeepSpeed puts double quotes around it.
_INSIDE = re.compile(rf"""\\(?P<escaped>["\\$`])|{_REFERENCE}|{_DOLLAR}|(?P<plain>[^$`])""")
_PART = re.compile(
    rf"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\s+\#.*|^\s+"""
    rf"""|\\(?P<escaped>["'\\$` ])|(?P<home>(?:^\s*|:))~(?=[/:]|$)"""
    rf"""|{_REFERENCE}|{_DOLLAR}|(?P<plain>[^'"\\$`])"""
)


def showing(slots: Sequence[int]) -> dict[str, str]:
    """Return the variables that make only these accelerators visible to a process."""
    return dict.fromkeys(_SHOWN_BY, ",".join(map(str, slots)))


def read_env_file(text: str, name: str, earlier: Mapping[str, str]) -> dict[str, str]:
    """Read `KEY=VALUE` lines as a shell does: quotes, comments, `export`, `$NAME` and `${NAME}`.

    Blanks around `=` and inside a value are accepted. No command is run.

    Args:
        text: the file's text.
        name: its name, for errors.
        earlier: variables that its values may name; the others are those of the ranks' host.

    Returns:
        The values, with references to the variables of the host: see `expanded`.

    Raises:
        LaunchError: a line has another form.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise LaunchError(f"{name}, line {number}: expected KEY=VALUE, found {line!r}")
        try:
            values[found["key"]] = _read(found["value"].rstrip(), _PART, {**earlier, **values})
        except ValueError as error:
            raise LaunchError(
                f"{name}, line {number}: cannot read {error}. Only $NAME and ${{NAME}} are"
                " replaced, no command is run, and quotes must be closed; put the value in single"
                " quotes to keep it as it is"
            ) from None
    return values


def _read(text: str, pattern: re.Pattern[str], earlier: Mapping[str, str]) -> str:
    """Return a value without its quotes.

    Raises:
        ValueError: a part cannot be read.
    """
    parts, end = [], 0
    while end < len(text):
        found = pattern.match(text, end)
        if found is None:
            raise ValueError(repr(text[end:]))
        end, kind = found.end(), found.lastgroup
        part = found[kind] if kind is not None else ""
        if kind in ("name", "braced"):
            parts.append(earlier.get(part, f"${{{part}}}"))
        elif kind == "double":
            parts.append(_read(part, _INSIDE, earlier))
        elif kind == "home":
            parts.append(f"{part}${{HOME}}")
        else:
            parts.append(as_it_is(part))
    return "".join(parts)


def as_it_is(value: str) -> str:
    """Return a value that `expanded` turns into this text."""
    return value.replace("$", "$$")


def expanded(values: Mapping[str, str], there: Mapping[str, str] | None = None) -> dict[str, str]:
    """Replace references by a host's variables, or by nothing; without a host leave them."""
    if there is None:
        return {key: Template(value).safe_substitute() for key, value in values.items()}
    known = defaultdict(str, there)
    return {key: Template(value).substitute(known) for key, value in values.items()}


def of_env_files(
    folders: Sequence[Path], names: Sequence[str], passed: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables `passed` and those of the env files in these folders; the last wins."""
    values = dict(passed)
    paths = (folder / name for folder in folders for name in names)
    for path in dict.fromkeys(path.resolve() for path in paths):  # home may be the working folder
        if path.is_file():
            values.update(read_env_file(text_of(path), str(path), values))
    return values


def text_of(path: Path) -> str:
    """Return a file's text.

    Raises:
        LaunchError: it is not a text file, or cannot be read.
    """
    try:
        return path.read_text("utf-8-sig")
    except IsADirectoryError:
        raise LaunchError(f"{path} is a folder; expected a file") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None


def screen_of(variables: Mapping[str, str], pool: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the size of the terminal (COLUMNS, LINES) for ranks, whose lines get a prefix."""
    columns, ranks = variables.get("COLUMNS", ""), sum(map(len, pool.values()))
    if not columns.isdecimal():
        return {}
    host = max(map(len, pool)) + 1 if len(pool) > 1 else 0
    prefix = len(f"[rank {ranks - 1}] ") + host if ranks > 1 else 0
    own = {"COLUMNS": str(max(_NARROWEST, int(columns) - prefix))}
    return own | {key: variables[key] for key in ("LINES",) if key in variables}


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process to pass on to ranks on other hosts."""
    return {key: as_it_is(value) for key, value in variables.items() if key.startswith(_PREFIXES)}
