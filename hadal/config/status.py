"""The status of a key: its own mark, and the switches of the sections around it."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from hadal.config.optimizer import Optimizer
from hadal.config.scheduler import Scheduler
from hadal.config.section import Section, Status, mark_of


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
    return issubclass(model, Optimizer | Scheduler) and name == "params"


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
