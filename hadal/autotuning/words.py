"""The words of the user's command, and those that an experiment changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hadal.errors import LaunchError

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed")


def value_of(words: Sequence[str], flag: str) -> str | None:
    """What a flag says, as `--flag value` or `--flag=value`; None where it is not there."""
    for at, word in enumerate(words):
        given, equals, value = word.partition("=")
        if given == flag and equals:
            return value
        if given == flag and at + 1 < len(words) and not words[at + 1].startswith("--"):
            return words[at + 1]
    return None


def with_value(words: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """The words with another value of a flag; it comes last where it was not there."""
    if value_of(words, flag) is None:
        return (*words, flag, value)
    changed = list(words)
    for at, word in enumerate(words):
        given, equals, _ = word.partition("=")
        if given != flag:
            continue
        if equals:
            changed[at] = f"{flag}={value}"
        else:
            changed[at + 1] = value
        break
    return tuple(changed)


def config_flag(words: Sequence[str]) -> str:
    """The flag after which the program's words name its configuration.

    Raises:
        LaunchError: there is none.
    """
    for flag in CONFIG_FLAGS:
        if value_of(words, flag):
            return flag
    raise LaunchError(
        f"--autotuning gives each experiment a configuration of its own: the program must take its"
        f" name as {' or '.join(CONFIG_FLAGS)} CONFIG, and {words[0] if words else 'it'} is given"
        " none"
    )


def mapped(
    words: Sequence[str], mappings: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[str, ...]:
    """The words, with flags that say what the configuration says; "auto" leaves them alone."""
    for key, flag in mappings.items():
        value = found_at(config, key)
        if value is not None and value != "auto":
            words = with_value(words, flag, str(value))
    return tuple(words)


def found_at(config: Mapping[str, Any], path: str) -> Any:
    """What stands at a path of a configuration; None where nothing does.

    A key without dots that is not at the top level is looked for in the sections.
    """
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None and "." not in path:
        return next(_below(config, path), None)
    return value


def _below(config: Mapping[str, Any], key: str) -> Iterator[Any]:
    for inner in config.values():
        if isinstance(inner, Mapping):
            if inner.get(key) is not None:
                yield inner[key]
            yield from _below(inner, key)
