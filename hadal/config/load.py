"""`load_config`: turns a ds_config.json into a `Config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from hadal.config.elasticity import elastic_faults, list_of, sizes_of
from hadal.config.general import BATCH_KEYS, Given, Sizes, complete
from hadal.config.idle import report_advice, report_unbuilt
from hadal.config.prepare import Report, modernise, prepare, validate
from hadal.config.reading import Source, read
from hadal.config.rules import bad_types, report_contradictions
from hadal.config.section import default_of, leaves
from hadal.config.top_level import Config, Origin
from hadal.errors import Fault

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("hadal.config")


class Circumstances(TypedDict, total=False):
    """Facts that the program passes along with the configuration, for example from an mpu.

    Without `sequence_parallel_size` and `data_parallel_size`, the keys of the same names say them,
    and `tensor_parallel.autotp_size` says `tensor_parallel_size`.
    """

    world_size: int
    sequence_parallel_size: int | None
    data_parallel_size: int | None
    tensor_parallel_size: int | None
    client_optimizer: bool
    client_scheduler: bool
    rounds_early: bool
    """The meaning of null for `data_types.early_rounding`."""


def load_config(
    source: Source, *, allow_unbuilt: bool = False, **brought: Unpack[Circumstances]
) -> Config:
    """Load a dict, a file, JSON text or its base64; raise one `ConfigError` that lists every fault.

    Logs nothing; see `log_notes`.
    """
    found = examine(source, **brought)
    found.report.settle(found.name, allow_unbuilt=allow_unbuilt)
    # With `allow_unbuilt`, keys that are not built have become notes.
    found.config._notes, found.config._lines = found.report.notes, found.report.lines
    return found.config


class Examined(NamedTuple):
    """A configuration that may have faults."""

    name: str
    """Its name in messages."""
    config: Config
    """The resulting configuration; a key with a fault has its default."""
    report: Report


def examine(source: Source, **brought: Unpack[Circumstances]) -> Examined:
    """Read a configuration and collect its faults, without raising them.

    Raises:
        ConfigError: the source is not a JSON object.
    """
    name, raw = read(source)
    report = Report()
    config, origins = _checked(raw, brought, report)
    config._origins, config._notes, config._lines = origins, report.notes, report.lines
    return Examined(name, config, report)


def log_notes(config: Config) -> None:
    """Log the notes of a configuration that was loaded."""
    for line in config.lines:
        _log.warning("%s", line)


def _checked(
    raw: dict[str, Any], brought: Circumstances, report: Report
) -> tuple[Config, dict[str, Origin]]:
    modernise(raw, report, brought.get("client_optimizer", False))
    prepared = prepare(Config, raw, report)
    values = validate(prepared, report)
    inferred = _infer(values, brought, report)
    defaults = {
        name: default_of(field) for name, field in Config.model_fields.items() if name not in values
    }
    config = Config.model_construct(set(values), **defaults, **values)
    report_contradictions(config, report)
    _check_blocks(config, brought, report)
    ignored = _ignored(config, brought, report)
    typed = ("optimizer", "scheduler")
    faulty = tuple(name for name in typed if report.is_faulty((f"{name}.type",)))
    for fault in bad_types(config, ignored + faulty):
        report.fault(fault.path, fault.message)
    report_unbuilt(config, report, stage=config.zero_optimization.stage, skip=ignored)
    _report_autos(config, report)
    report_advice(config, prepared, report)
    return config, _origins(config, prepared, inferred, report)


def _infer(values: dict[str, Any], brought: Circumstances, report: Report) -> tuple[str, ...]:
    """Fill in values that follow from the others; return the paths of those that do not only
    replace a default."""
    slices = list(_infer_slices(values, brought, report))
    inferred = slices + list(_infer_batch(values, brought, report))
    shared = brought.get("sequence_parallel_size")
    if shared is not None and shared != 1 and "sequence_parallel_size" not in values:
        values["sequence_parallel_size"] = shared
        inferred.append("sequence_parallel_size")
    zero = values.get("zero_optimization") or default_of(Config.model_fields["zero_optimization"])
    if zero.overlap_comm is None:
        # Below stage 2, if the caller ends an update by `step`, its last backward is not known in
        # advance: reductions run after it.
        managed = values.get("managed_gradient_accumulation", True)
        update = {"overlap_comm": managed or zero.stage >= 2}
        values["zero_optimization"] = zero.model_copy(update=update)
    types = values.get("data_types") or default_of(Config.model_fields["data_types"])
    if types.early_rounding is None:
        update = {"early_rounding": brought.get("rounds_early", False)}
        values["data_types"] = types.model_copy(update=update)
    return tuple(inferred)


def _infer_slices(
    values: dict[str, Any], brought: Circumstances, report: Report
) -> tuple[str, ...]:
    """Fill in the tensor-parallel ranks that the program has requested before."""
    path, asked = "tensor_parallel.autotp_size", brought.get("tensor_parallel_size")
    if asked is None or report.is_faulty(("tensor_parallel",)):
        return ()
    field = Config.model_fields["tensor_parallel"]
    section = values.get("tensor_parallel") or default_of(field)
    if section.is_switched:
        if section.autotp_size != asked:
            report.fault(
                path, f"{section.autotp_size} differs from the tp_size of tp_model_init, {asked}"
            )
        return ()
    values["tensor_parallel"] = section.model_copy(update={"autotp_size": asked})
    return (path,)


def _slices(values: Mapping[str, Any]) -> int:
    """Return the number of ranks that share a layer."""
    section = values.get("tensor_parallel")
    return section.autotp_size if section is not None and section.is_on else 1


def _infer_batch(values: dict[str, Any], brought: Circumstances, report: Report) -> tuple[str, ...]:
    ranks = _data_parallel_ranks(values, brought, report)
    open_keys = tuple(key for key in BATCH_KEYS if values.get(key) is None)
    if report.is_faulty(BATCH_KEYS):
        return ()
    elastic = values.get("elasticity")
    if elastic is not None and elastic.enabled:
        return _elastic_batch(values, brought.get("world_size", 1), ranks, report)
    why = 'some are "auto"' if set(BATCH_KEYS) & set(report.autos) else ""
    if not why and "autotuning" in values and values["autotuning"].enabled:
        why = "autotuning is on"
    if why and not values.keys() & set(BATCH_KEYS[:2]):
        values[BATCH_KEYS[1]] = 1
        report.note(BATCH_KEYS[1], f"no batch size is given and {why}; using 1")
    given = Given(*(values.get(key) for key in BATCH_KEYS))
    given = _without_copies(given, values, ranks, report)
    sizes = complete(given, ranks)
    if isinstance(sizes, Sizes):
        values |= dict(zip(BATCH_KEYS, sizes, strict=True))
        return open_keys
    report.fault(sizes.path, sizes.message)
    return ()


def _without_copies(given: Given, values: Mapping[str, Any], ranks: int, report: Report) -> Given:
    """Return the sizes without a batch that counts the samples of all tensor-parallel ranks.

    They read the same samples. DeepSpeed, and transformers for it, count each of them.
    """
    slices = _slices(values)
    if given.train is None or given.micro is None or given.accumulation is None:
        return given
    if slices == 1 or given.train != given.micro * given.accumulation * ranks * slices:
        return given
    report.note(
        BATCH_KEYS[0],
        f"{given.train} counts the samples of all {slices} ranks of tensor_parallel.autotp_size,"
        f" which read the same ones; an update reads {given.train // slices}",
    )
    return given._replace(train=None)


def _elastic_batch(
    values: dict[str, Any], world_size: int, ranks: int, report: Report
) -> tuple[str, ...]:
    """Let elasticity choose all sizes."""
    section = values["elasticity"]
    given = [key for key in BATCH_KEYS if values.get(key) is not None]
    if given and not section.ignore_non_elastic_batch_info:
        report.fault(
            given[0],
            "elasticity.enabled chooses the batch; leave it out, or set "
            "elasticity.ignore_non_elastic_batch_info true",
        )
        return ()
    if report.is_faulty(("elasticity",)) or elastic_faults(section):
        return ()
    sizes = sizes_of(section, world_size, ranks)
    if isinstance(sizes, Fault):
        report.fault(sizes.path, sizes.message)
        return ()
    for key in given:
        report.note(key, f"{values[key]} is overridden by elasticity")
    if ranks not in list_of(section).ranks:
        report.note(
            "elasticity",
            f"{world_size} ranks are not in the list; the batch of {sizes.train} is for them only",
        )
    values |= dict(zip(BATCH_KEYS, sizes, strict=True))
    return BATCH_KEYS


def _data_parallel_ranks(values: Mapping[str, Any], brought: Circumstances, report: Report) -> int:
    """Return the number of ranks that see different samples."""
    shared_key, data_key = "sequence_parallel_size", "data_parallel_size"
    world, asked = brought.get("world_size", 1), values.get(shared_key)
    shared = brought.get("sequence_parallel_size") or asked or 1
    if asked not in (None, shared):
        report.fault(
            shared_key,
            f"{asked} differs from {shared}, which the program passes (by an mpu or a mesh); leave"
            " it out",
        )
    slices = _slices(values)
    if world % slices:
        path = "tensor_parallel.autotp_size"
        report.fault(path, f"{slices} does not divide the {world} ranks; use a divisor")
    elif world // slices % shared:
        among = f" / {slices} of tensor_parallel.autotp_size" if slices > 1 else ""
        report.fault(
            shared_key, f"{shared} does not divide the {world} ranks{among}; use a divisor"
        )
    ranks = brought.get("data_parallel_size") or max(1, world // slices // shared)
    wanted = values.get(data_key)
    if wanted is not None and asked is None and brought.get("sequence_parallel_size") is None:
        report.note_idle(data_key, f"{wanted} has no effect without {shared_key}")
    elif wanted not in (None, ranks):
        report.fault(
            data_key, f"{wanted} is not the {ranks} ranks that see different samples; leave it out"
        )
    return ranks


def _check_blocks(config: Config, brought: Circumstances, report: Report) -> None:
    world, replicas = brought.get("world_size", 1), brought.get("data_parallel_size")
    # One rank shares nothing, so the sizes of blocks do not matter.
    if world == 1 or report.is_faulty(("zero_optimization", "sequence_parallel_size")):
        return
    ranks = world // max(1, _slices({"tensor_parallel": config.tensor_parallel}))
    if replicas is not None:
        ranks = replicas * config.sequence_parallel_size
    for fault in config.zero_optimization.undivided(ranks):
        report.fault(fault.path, fault.message)


def _ignored(config: Config, brought: Circumstances, report: Report) -> tuple[str, ...]:
    """Return the sections that are ignored because the program passes its own object."""
    is_passed = {
        "optimizer": brought.get("client_optimizer"),
        "scheduler": brought.get("client_scheduler"),
    }
    ignored = tuple(name for name in is_passed if is_passed[name])
    for name in ignored:
        if getattr(config, name) is not None:
            report.note(name, f"ignored: the program passes its own {name}")
    return ignored


def _report_autos(config: Config, report: Report) -> None:
    missing = () if config.scheduler is None else config.scheduler.missing
    for path in report.autos:
        if path.removeprefix("scheduler.params.") in missing:
            report.note(path, '"auto" was not replaced by any program, and there is no default')
        elif path not in BATCH_KEYS:
            report.note(path, '"auto" was not replaced by any program; using the default')


def _origins(
    config: Config, prepared: Mapping[str, Any], inferred: tuple[str, ...], report: Report
) -> dict[str, Origin]:
    origins: dict[str, Origin] = {path: "default" for path, _ in leaves(config.as_dict())}
    given = (path for path, value in leaves(prepared) if path in origins and value != {})
    origins |= dict.fromkeys(given, "you")
    origins |= dict.fromkeys(inferred, "inferred")
    origins |= dict.fromkeys(report.autos, "auto")
    return origins
