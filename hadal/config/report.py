"""The faults, notes and `auto` values collected while loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hadal.errors import ConfigError, Fault, UnbuiltConfigError


@dataclass(slots=True)
class Report:
    """Faults and notes of one configuration; at most one fault per path."""

    faults: dict[str, Fault] = field(default_factory=dict)
    unbuilt: dict[str, Fault] = field(default_factory=dict)
    paths_by_note: dict[str, list[str]] = field(default_factory=dict)
    idle: dict[str, list[str]] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)

    def fault(self, path: str, message: str) -> None:
        """Record a reason to refuse the configuration."""
        self.faults.setdefault(path, Fault(path, message))

    def not_built(self, path: str, message: str) -> None:
        """Record that the configuration requests something that is not built yet."""
        self.unbuilt.setdefault(path, Fault(path, message))

    def note(self, path: str, message: str) -> None:
        """Record a note; keys with the same message share one line."""
        self.paths_by_note.setdefault(message, []).append(path)

    def note_idle(self, path: str, message: str) -> None:
        """Record a key that does nothing here, and why; all of them are logged in one line."""
        self.idle.setdefault(message, []).append(path)

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes, one sentence each."""
        return _sentences(self.paths_by_note) + self.idle_notes

    @property
    def idle_notes(self) -> tuple[str, ...]:
        """The keys that do nothing here, one sentence for each reason."""
        return _sentences(self.idle)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines to log."""
        idle = "; ".join(self.idle_notes)
        together = (f"keys that do nothing here: {idle}",) if idle else ()
        return _sentences(self.paths_by_note) + together

    def is_faulty(self, paths: Iterable[str]) -> bool:
        """Return whether a key, one above or one below it is faulty, so that nothing follows from
        it.
        """
        return any(_touch(fault, path) for path in paths for fault in self.faults)

    def settle(self, name: str, *, allow_unbuilt: bool) -> None:
        """Raise if there is a fault; `allow_unbuilt` turns keys that are not built into notes."""
        if allow_unbuilt:
            for fault in self.unbuilt.values():
                self.note(fault.path, fault.message)
            self.unbuilt.clear()
        paths_by_note = tuple(self.faults.values()) + tuple(self.unbuilt.values())
        if not paths_by_note:
            return
        kind = ConfigError if self.faults else UnbuiltConfigError
        raise kind(written(name, paths_by_note), paths_by_note)


def _sentences(paths_by_message: Mapping[str, list[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(paths)}: {message}" for message, paths in paths_by_message.items())


def _touch(one: str, other: str) -> bool:
    """Return whether two paths are equal or one is below the other."""
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def join(path: str, name: str) -> str:
    """Return the JSON path of a key in a section."""
    return f"{path}.{name}" if path else name


def written(name: str, faults: tuple[Fault, ...]) -> str:
    """Format faults one per line, with paths and messages in columns."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    width = max(len(fault.path) for fault in faults)
    lines = [f"  {fault.path:<{width}}  {fault.message}" for fault in faults]
    return "\n".join([f"{count} in {name}", *lines])


def raise_faults(faults: Iterable[Fault], name: str = "the configuration") -> None:
    """Raise a ConfigError that lists the faults of `name`, if there are any."""
    found = tuple(faults)
    if found:
        raise ConfigError(written(name, found), found)
