"""The parts of every section of the configuration: keys, their declarations, and their values.

Words of this folder.

section   a JSON object with known keys: a frozen model; sections of one topic share a file
key       one name in a section, declared by `key(default, meaning, ...)`
mark      a key's properties beyond type and range (see `Mark`)
leftover  a key of older releases that is accepted with a note and does nothing
renamed   an old name for a key of today, accepted with a note
moved     a key of older releases that is in another place today; read there, with a note
alias     a second name, accepted without a note
fault     a reason to refuse the configuration        note  a line worth logging
rule      a check for values that contradict each other
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.fields import FieldInfo

from hadal.config.values import Spelled, lowered, titled
from hadal.errors import Fault

Status = Literal["acts", "not built yet", "no effect"]


@dataclass(frozen=True, slots=True)
class Mark:
    """The part of a key's declaration beyond its type and range.

    `off` are values besides the default that request nothing. `only` restricts the status to these
    values. `serves` names the key without which this one requests nothing. `stages` are the ZeRO
    stages at which the key has an effect.
    """

    status: Status = "acts"
    off: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()
    serves: str = ""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    tunable: bool = False
    null_is_default: bool = False

    def __call__(self, schema: dict[str, Any]) -> None:
        """Write the status into the JSON schema, so that editors can show it."""
        if self.status != "acts":
            schema["x-hadal-status"] = self.status

    def asks(self, value: Any, default: Any) -> bool:
        """Return whether the status applies to this value."""
        if self.only:
            return value in self.only
        return bool(value != default and value not in self.off)


ACTS = Mark()
UNBUILT = Mark(status="not built yet")
NO_EFFECT = Mark(status="no effect")
NULL_IS_DEFAULT = Mark(null_is_default=True)
TUNABLE = Mark(tunable=True)
UNBUILT_AT_STAGE_3 = Mark(status="not built yet", stages=(3,))
STAGE_3 = Mark(stages=(3,))
TUNABLE_AT_STAGE_3 = Mark(stages=(3,), tunable=True)


def key(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    mark: Mark = ACTS,
) -> Any:
    """Declare a key: its default, its meaning (with its unit), its range and its mark."""
    return Field(default, description=meaning, ge=ge, gt=gt, le=le, lt=lt, json_schema_extra=mark)


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of a section. `reads` are the keys that must be valid for it; (): all of them."""

    reads: tuple[str, ...]
    check: Callable[[Any], Iterable[Fault]]


def rule(*reads: str) -> Callable[[Callable[[Any], Iterable[Fault]]], Rule]:
    """Turn a method that yields faults, whose paths begin at its section, into a rule."""
    return lambda check: Rule(reads, check)


def under(path: str, faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield the faults of a section below a path."""
    before = f"{path}." if path else ""
    return (Fault(before + fault.path, fault.message) for fault in faults)


class Moved(NamedTuple):
    """The place of a key of older releases. If it was a switch, `true` is what true stands for."""

    to: str
    true: Any = None


class Section(BaseModel):
    """A JSON object with known keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        protected_namespaces=(),
        arbitrary_types_allowed=True,
        ignored_types=(Rule,),
    )

    switch: ClassVar[str | None] = None
    """Path of the key that turns the section on; while it is off, the others request nothing."""
    off: ClassVar[tuple[Any, ...]] = (False, None, "none")
    """Values of the switch that turn the section off."""
    renamed: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    moved: ClassVar[Mapping[str, Moved]] = {}
    """Maps a key to its place today, from the top level."""
    leftovers: ClassVar[Mapping[str, str]] = {}
    """Maps a leftover to the behaviour that replaces it, as the end of a sentence."""
    required: ClassVar[tuple[str, ...]] = ()
    """Keys that are required if the section is present."""
    may_be_empty: ClassVar[bool] = False
    """True if they are not required of a section without any keys, which is off."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Maps a key that no release has but people look for to what has the feature."""

    @classmethod
    def is_open(cls) -> bool:
        """Return whether undeclared keys are passed on unchanged."""
        return cls.model_config.get("extra") == "allow"

    @property
    def is_on(self) -> bool:
        """True if the section's keys request anything."""
        return self.switch is None or attrgetter(self.switch)(self) not in self.off

    @property
    def is_switched(self) -> bool:
        """True if the JSON sets the switch, on or off."""
        owner, _, name = (self.switch or "").rpartition(".")
        section = attrgetter(owner)(self) if owner else self
        return name in section.model_fields_set

    @classmethod
    def child(cls, name: str, raw: Mapping[str, Any]) -> "Child | None":
        """Return the sections under a key; they may depend on the section's other values."""
        del raw
        return child_of(cls.model_fields[name])

    @classmethod
    def takes_auto(cls, name: str) -> bool:
        """Return whether "auto" is a word of a key, not one that other programs replace."""
        return _has_auto(cls.model_fields[name].annotation)

    def children(self) -> "Iterator[tuple[str, Section]]":
        """Yield the sections below the keys that the JSON sets, with their paths from here."""
        raw = {"type": getattr(self, "type", None)}
        for name in [name for name in type(self).model_fields if name in self.model_fields_set]:
            child, value = type(self).child(name, raw), getattr(self, name)
            if child is not None and value is not None:
                yield from child.sections(name, value)

    def faults(self) -> Iterator[tuple[tuple[str, ...], Iterable[Fault]]]:
        """Yield the faults of each rule after the keys that it reads."""
        for owner in type(self).__mro__:
            for one in vars(owner).values():
                if isinstance(one, Rule):
                    yield one.reads, one.check(self)

    def needs(self, *names: str) -> Iterator[Fault]:
        """Yield a fault for each of these keys of a section that is on which is null."""
        for name in names:
            if getattr(self, name) is None:
                yield Fault(name, "required while the section is on; add it")


# pydantic would evaluate them again for each section, as it does not its own models'.
Section.__annotations__.clear()


class Switched(Section):
    """A section that `enabled` turns on."""

    switch = "enabled"


class OpenParams(Section):
    """Arguments passed to a torch class unchanged."""

    model_config = ConfigDict(extra="allow")


Params: TypeAlias = type[Section]


class Typed(Section):
    """A section whose `type` names a class, and whose `params` are the arguments of that class."""

    required = ("type",)
    types: ClassVar[Mapping[str, Params]] = {}
    """Maps the built-in types to their params; a torch class accepts any."""
    torch_types: ClassVar[tuple[str, ...]] = ()
    """Classes of torch that are known without it."""
    home: ClassVar[str] = ""
    """Module of torch with classes that a type may name."""

    @classmethod
    def child(cls, name: str, raw: Mapping[str, Any]) -> "Child | None":
        """Return the params section for the type."""
        return Child(cls.params_of(raw), "one") if name == "params" else super().child(name, raw)

    @classmethod
    def params_of(cls, raw: Mapping[str, Any]) -> Params:
        """Return the section of params for the type."""
        kind = raw.get("type")
        return cls.types.get(kind, OpenParams) if isinstance(kind, str) else OpenParams

    @classmethod
    def takes_auto(cls, name: str) -> bool:
        """Return True for the type as well, whose rule says that nothing replaced it."""
        return name == "type" or super().takes_auto(name)


SectionType = TypeVar("SectionType", bound=Section)


class _Default:
    """Makes a section's default once; sections are frozen, so all configurations share it."""

    __slots__ = ("kind", "made")

    def __init__(self, kind: type[Section]) -> None:
        self.kind = kind
        self.made: Section | None = None

    def __call__(self) -> Section:
        if self.made is None:
            self.made = self.kind.model_construct()
        return self.made


def section(kind: type[SectionType], meaning: str, *, mark: Mark = ACTS) -> Any:
    """Declare a section that has its defaults if the JSON leaves it out."""
    return Field(default_factory=_Default(kind), description=meaning, json_schema_extra=mark)


@dataclass(frozen=True, slots=True)
class Child:
    """Sections under a key: a single one, a map from free names, or a list."""

    model: type[Section]
    shape: Literal["one", "map", "list"]

    def sections(self, here: str, value: Any) -> Iterator[tuple[str, Section]]:
        """Yield the sections in a checked value with their paths. Params are a plain dict."""
        if isinstance(value, Section):
            yield here, value
        elif self.shape == "one":
            yield here, self.model.model_construct(**value)
        elif self.shape == "map":
            yield from ((f"{here}.{name}", one) for name, one in value.items())
        else:
            yield from ((f"{here}[{index}]", one) for index, one in enumerate(value))


def child_of(field: FieldInfo) -> Child | None:
    """Return the sections under a key, read from its type."""
    return _child(field.annotation)


def _child(annotation: Any) -> Child | None:
    origin = get_origin(annotation)
    if origin is None:
        is_section = isinstance(annotation, type) and issubclass(annotation, Section)
        return Child(annotation, "one") if is_section else None
    inner = [_child(argument) for argument in get_args(annotation)]
    found = next((child for child in inner if child is not None), None)
    if found is None or origin in (Union, UnionType, Annotated):
        return found
    return Child(found.model, "map" if origin is dict else "list")


def mark_of(field: FieldInfo) -> Mark:
    """Return the mark that `key` left on a field."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, Mark) else ACTS


def _has_auto(annotation: Any) -> bool:
    inner = get_args(annotation)
    return "auto" in inner if get_origin(annotation) is Literal else any(map(_has_auto, inner))


def default_of(field: FieldInfo) -> Any:
    """Return the value of a key that the JSON leaves out."""
    if isinstance(field.default_factory, _Default):
        return field.default_factory()  # pydantic would inspect its signature at each call
    return field.get_default(call_default_factory=True, validated_data={})


# ---- values as plain JSON, and in messages -------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value as JSON would store it; objects that JSON cannot store become strings."""
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields} | {
            name: plain(extra) for name, extra in (value.model_extra or {}).items()
        }
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that are not objects (or are empty ones) with their JSON paths."""
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, here)
        else:
            yield here, inner


def shown(value: Any) -> str:
    """Format a value as JSON does, for messages; long values are shortened."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def found(value: Any) -> str:
    """Format the value found, with its type if that may be the fault."""
    kinds = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}
    kind = kinds.get(type(value))
    return f"{shown(value)} ({kind})" if kind else shown(value)


_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
    dict: "an object",
}


def expected(field: FieldInfo) -> str:
    """Describe the values that a key accepts: "0, 1, 2 or 3", "an integer >= 1"."""
    return _kind(field.annotation, tuple(field.metadata))


def _kind(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    return either(list(_choices(annotation, limits)))


def _choices(annotation: Any, limits: tuple[Any, ...]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from _choices(inner, (*more, *limits))
    elif origin in (Union, UnionType):
        for member in _null_last(annotation):
            yield from _choices(member, limits)
    elif origin is Literal:
        yield from (json.dumps(value) for value in get_args(annotation))
    else:
        yield _single(annotation, origin, limits)


def _single(annotation: Any, origin: Any, limits: tuple[Any, ...]) -> str:
    if origin in (tuple, list):
        return _several(get_args(annotation))
    if origin is dict:
        return "an object"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "an object"
    return _WORDS.get(annotation, "anything") + _limits(annotation, limits)


def _null_last(annotation: Any) -> list[Any]:
    """Return a union's members, null last."""
    members = [member for member in get_args(annotation) if member is not type(None)]
    return members + [type(None)] * (len(members) < len(get_args(annotation)))


def _several(arguments: tuple[Any, ...]) -> str:
    if arguments[1:] in ((), (Ellipsis,)):
        return f"a list, each {_kind(arguments[0])}"
    return f"a list of {len(arguments)}, each {_kind(arguments[0])}"


def _limits(annotation: Any, limits: tuple[Any, ...]) -> str:
    if annotation not in (int, float, str):
        return ""
    said = [
        f"{sign} {getattr(limit, name)}"
        for kind, name, sign in _SIGNS
        for limit in limits
        if isinstance(limit, kind)
    ]
    if any(isinstance(limit, MinLen) for limit in limits):
        said.append("that is not empty")
    if any(isinstance(limit, StringConstraints) for limit in limits):
        said.append("of 32 to 50 letters and digits")
    return " " + " and ".join(said) if said else ""


def either(choices: list[str]) -> str:
    """Join choices as in a sentence: "a, b or c"."""
    choices = list(dict.fromkeys(choices))
    if len(choices) == 1:
        return choices[0]
    return ", ".join(choices[:-1]) + " or " + choices[-1]


def spellings(field: FieldInfo) -> list[str]:
    """Return other accepted spellings of a key's words: other cases, and synonyms."""
    words = [json.loads(word) for word in _choices(field.annotation, ()) if word[0] == '"']
    others: list[str] = []
    for convert in _conversions(field.annotation, tuple(field.metadata)):
        if convert in (lowered, titled):
            others += [case for word in words for case in (word.lower(), word.upper())]
            others += [word.capitalize() for word in words]
        elif isinstance(convert, Spelled):
            others += convert.names
    return [word for word in dict.fromkeys(others) if word not in words]


def _conversions(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Any]:
    yield from (one.func for one in metadata if isinstance(one, BeforeValidator))
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _conversions(inner, tuple(more))
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _conversions(member, ())
