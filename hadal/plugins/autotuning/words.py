"""The words of the user's command line, and the changes to them for an experiment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hadal.errors import LaunchError

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed")


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the value of `--flag value` or `--flag=value`; None if the flag is missing."""
    at, start = _place(words, flag)
    return words[at].removeprefix(start) if at is not None else None


def with_value(words: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """Return the words with a flag set to `value`; a missing flag is appended."""
    at, start = _place(words, flag)
    if at is None:
        return (*words, flag, value)
    return (*words[:at], f"{start}{value}", *words[at + 1 :])


def _place(words: Sequence[str], flag: str) -> tuple[int | None, str]:
    """Return the place of a flag's value, and how that word begins; None if there is none."""
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return at, f"{flag}="
        if word == flag and at + 1 < len(words) and not words[at + 1].startswith("--"):
            return at + 1, ""
    return None, ""


def config_flag(words: Sequence[str]) -> str:
    """Return the flag with which the program's words name its configuration.

    Raises:
        LaunchError: the words have no such flag.
    """
    for flag in CONFIG_FLAGS:
        if value_of(words, flag):
            return flag
    raise LaunchError(
        f"--autotuning passes each experiment its own configuration with"
        f" {' or '.join(CONFIG_FLAGS)} CONFIG, but {words[0] if words else 'the program'} is called"
        " without this flag; add it"
    )


def mapped(
    words: Sequence[str], mappings: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the words with flags set to the values of mapped keys, except "auto"."""
    for key, flag in mappings.items():
        value = found_at(config, key)
        if value is not None and value != "auto":
            words = with_value(words, flag, str(value))
    return tuple(words)


def found_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of a configuration; None if there is none.

    A key without dots that is not at the top level is searched for in the sections.
    """
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if value is not None or "." in path else next(_below(config, path), None)


def _below(config: Mapping[str, Any], key: str) -> Iterator[Any]:
    for inner in config.values():
        if isinstance(inner, Mapping):
            if inner.get(key) is not None:
                yield inner[key]
            yield from _below(inner, key)
