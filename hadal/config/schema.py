"""The JSON schema of a ds_config.json (draft 2020-12), for editors, and the status of keys."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from hadal.config.optimizer import Optimizer
from hadal.config.plain import spellings
from hadal.config.scheduler import Scheduler
from hadal.config.section import Section, Status, Typed, mark_of
from hadal.config.top_level import Config

Schema = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COMMENTS: Schema = {"^(_|//|\\$)": {}}


def config_schema() -> Schema:
    """Return the schema of the whole configuration."""
    models: set[type[Section]] = {Config, *Optimizer.types.values(), *Scheduler.types.values()}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema([(model, "validation") for model in ordered])
    defs: dict[str, Schema] = found["$defs"]
    open_types: dict[type[Section], set[Status]] = {model: {"acts"} for model in models}
    for model, places in (open_types | statuses(Config)).items():
        _complete(defs[model.__name__], model)
        if len(places) == 1:
            _write_status(defs[model.__name__], model, *places)
    for model in (Optimizer, Scheduler):
        _typed_params(defs, model)
    root = defs.pop("Config")
    root["patternProperties"] = _COMMENTS
    title = {"$schema": _DRAFT, "title": "ds_config.json"}
    return title | {name: root[name] for name in root if name != "title"} | {"$defs": defs}


def _complete(schema: Schema, model: type[Section]) -> None:
    """Add to pydantic's schema: "auto", names of older releases, required keys."""
    properties: dict[str, Schema] = schema.setdefault("properties", {})
    for name, field in model.model_fields.items():
        properties[name] = _tidy(properties[name], _also_taken(model, name))
        # pydantic leaves out a description that is the same as the section's own.
        properties[name].setdefault("description", field.description)
    for name, new in model.aliases.items():
        properties[name] = {"description": f"The same as {new}."}
    for name, new in model.renamed.items():
        properties[name] = {"description": f"An old name of {new}.", "deprecated": True}
    for name, moved in model.moved.items():
        properties[name] = {"description": f"An old form of {moved.to}.", "deprecated": True}
    for name, what in model.leftovers.items():
        properties[name] = {"description": f"A leftover, {what}.", "deprecated": True}
    if model.required and model.may_be_empty:
        schema["anyOf"] = [{"maxProperties": 0}, {"required": list(model.required)}]
    elif model.required:
        schema["required"] = list(model.required)


def _write_status(schema: Schema, model: type[Section], above: Status) -> None:
    """Write into each key's schema the unbuilt status that it has from a section's switch."""
    for name, field in model.model_fields.items():
        status = status_of(field, above)
        if status != "acts":
            schema["properties"][name]["x-hadal-status"] = status


def _also_taken(model: type[Section], name: str) -> list[Schema]:
    """Return the schemas that the loader accepts besides the declared type."""
    field, more = model.model_fields[name], list[Schema]()
    mark = mark_of(field)
    words = spellings(field)
    if words:
        more.append({"enum": words})
    if mark.null_is_default:
        more.append({"type": "null"})
    if not model.takes_auto(name) and model.child(name, {}) is None:
        more.append({"const": "auto"})
    return more


def _tidy(schema: Schema, more: list[Schema]) -> Schema:
    outer = {"title", "description", "default", "x-hadal-status"}
    inner = {name: value for name, value in schema.items() if name not in outer}
    kept = {name: schema[name] for name in schema if name in outer - {"title"}}
    if kept.get("default", ...) is None and not _takes_null(inner):
        del kept["default"]
    if not more or not inner:
        return inner | kept
    choices = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {"anyOf": [*choices, *more]} | kept


def _takes_null(schema: Schema) -> bool:
    return {"type": "null"} in schema.get("anyOf", [schema])


def _typed_params(defs: dict[str, Schema], model: type[Typed]) -> None:
    """Let the type decide which params an editor offers."""
    schema = defs[model.__name__]
    schema["allOf"] = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {"properties": {"params": {"$ref": f"#/$defs/{kind.__name__}"}}},
        }
        for name, kind in model.types.items()
    ]
    schema["properties"]["type"]["examples"] = list(model.types)


# ---- status --------------------------------------------------------------------------------------


def status_of(field: FieldInfo, above: Status) -> Status:
    """Return the status of a key in a section with status `above`."""
    own = mark_of(field).status
    return own if own != "acts" or above == "acts" else above


def status_inside(model: type[Section], above: Status) -> Status:
    """Return the status of keys in a section, whose switch may not be built."""
    if model.switch is None or above != "acts":
        return above
    *owners, name = model.switch.split(".")
    for owner in owners:
        child = model.child(owner, {})
        assert child is not None, f"{model.switch} leads through {owner}, which is no section"
        model = child.model
    return status_of(model.model_fields[name], above)


def has_typed_params(model: type[Section], name: str) -> bool:
    """Return whether the section's `type` determines the arguments that a key accepts."""
    return issubclass(model, Typed) and name == "params"


def statuses(model: type[Section], above: Status = "acts") -> dict[type[Section], set[Status]]:
    """Return the statuses of every section at and below `model`, one for each place it has."""
    above = status_inside(model, above)
    found: dict[type[Section], set[Status]] = {model: {above}}
    for name, field in model.model_fields.items():
        child = model.child(name, {})
        if child is not None and not has_typed_params(model, name):
            for below, several in statuses(child.model, status_of(field, above)).items():
                found.setdefault(below, set()).update(several)
    return found
