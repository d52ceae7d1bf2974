"""Migration of keys that moved to another section, and of sections that changed their form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.report import Report

Raw = dict[str, Any]

_OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def modernise(raw: Raw, report: Report, client_optimizer: bool = False) -> Raw:
    """Return the configuration with every key in its current place.

    `client_optimizer`: the program passes its own, so that the optimizer's section is ignored.
    """
    raw = dict(raw)
    _boolean_zero(raw, report)
    _bfloat16(raw, report)
    _fp32_allreduce(raw, report)
    _cpu_offload(raw, report)
    _data_efficiency(raw, report)
    _arg_mappings(raw, report)
    _datastates(raw)
    _params(raw, report, client_optimizer)
    return raw


def _boolean_zero(raw: Raw, report: Report) -> None:
    zero = raw.get("zero_optimization")
    bucket = raw.pop("allgather_size", None)
    if isinstance(zero, bool):
        report.note("zero_optimization", f"{str(zero).lower()} is an old form of stage {int(zero)}")
        raw["zero_optimization"] = {"stage": int(zero)}
        if bucket is not None:
            raw["zero_optimization"]["allgather_bucket_size"] = bucket
    if bucket is not None:
        effect = "read as" if isinstance(zero, bool) else "ignored; the key of today is"
        report.note(
            "allgather_size", f"an old name, {effect} zero_optimization.allgather_bucket_size"
        )


def _bfloat16(raw: Raw, report: Report) -> None:
    if "bfloat16" not in raw:
        return
    old = raw.pop("bfloat16")
    if raw.get("bf16") is not None:
        report.fault("bfloat16", 'duplicates "bf16", which is given too; keep "bf16"')
        return
    report.note("bfloat16", 'an old name, read as "bf16"')
    raw["bf16"] = old


def _fp32_allreduce(raw: Raw, report: Report) -> None:
    if "fp32_allreduce" not in raw:
        return
    here, value = "fp32_allreduce", raw.pop("fp32_allreduce")
    if not isinstance(value, bool | None):
        report.fault(here, 'expected true or false; prefer "communication_data_type"')
    elif value and raw.get("communication_data_type") is not None:
        report.fault(here, '"communication_data_type" is given too; keep that')
    else:
        report.note(here, 'an old name, read as "communication_data_type": "fp32" if true')
        if value:
            raw["communication_data_type"] = "fp32"


def _cpu_offload(raw: Raw, report: Report) -> None:
    zero = raw.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    zero = dict(zero)
    raw["zero_optimization"] = zero
    for old, new in _OLD_OFFLOAD.items():
        if old not in zero:
            continue
        here, value = f"zero_optimization.{old}", zero.pop(old)
        if zero.get(new) is not None:
            report.fault(here, f'replaced by "{new}", which is given too; remove "{old}"')
        elif not isinstance(value, bool | None):
            report.fault(here, f'expected true or false; prefer "{new}"')
        else:
            report.note(here, f'an old name, read as "{new}"')
            if value:
                zero[new] = {"device": "cpu"}


def _data_efficiency(raw: Raw, report: Report) -> None:
    outer = raw.get("data_efficiency")
    if not isinstance(outer, Mapping):
        return
    outer = dict(outer)
    raw["data_efficiency"] = outer
    _move(outer, "curriculum_learning", raw, "curriculum_learning", report)
    routing = outer.get("data_routing")
    if "random_ltd" in outer and isinstance(routing, Mapping | None):
        outer["data_routing"] = dict(routing or {})
        new = "data_efficiency.data_routing.random_ltd"
        _move(outer, "random_ltd", outer["data_routing"], new, report)


def _move(outer: Raw, name: str, target: Raw, new: str, report: Report) -> None:
    if name not in outer:
        return
    here, value = f"data_efficiency.{name}", outer.pop(name)
    if target.get(name) is not None:
        report.fault(here, f'duplicates "{new}", which is given too; keep that')
    else:
        report.note(here, f'an old place, read as "{new}"')
        target[name] = value


def _arg_mappings(raw: Raw, report: Report) -> None:
    tuning = raw.get("autotuning")
    if "arg_mappings" in raw and isinstance(tuning, Mapping | None):
        misplaced = raw.pop("arg_mappings")
        if isinstance(tuning, Mapping) and tuning.get("arg_mappings") is not None:
            report.fault("arg_mappings", "autotuning.arg_mappings is given too; keep that")
        else:
            report.note("arg_mappings", "the wrong place, read as autotuning.arg_mappings")
            tuning = {**(tuning or {}), "arg_mappings": misplaced}
            raw["autotuning"] = tuning
    if isinstance(tuning, Mapping) and isinstance(tuning.get("arg_mappings"), Mapping):
        for name in tuning["arg_mappings"]:
            if str(name) != str(name).strip():
                here = f"autotuning.arg_mappings.{name}"
                report.note(here, "surrounding whitespace is ignored")
        stripped = {str(name).strip(): flag for name, flag in tuning["arg_mappings"].items()}
        raw["autotuning"] = {**tuning, "arg_mappings": stripped}


def _datastates(raw: Raw) -> None:
    value = raw.get("datastates_ckpt")
    if isinstance(value, bool):
        raw["datastates_ckpt"] = {} if value else None


def _params(raw: Raw, report: Report, client_optimizer: bool) -> None:
    """Give every optimizer and scheduler its params, and refuse clipping inside them."""
    for name in ("optimizer", "scheduler"):
        section = raw.get(name)
        if isinstance(section, Mapping) and section.get("params") is None:
            raw[name] = {**section, "params": {}}
    optimizer = raw.get("optimizer")
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer["params"], Mapping):
        return
    if "max_grad_norm" in optimizer["params"]:
        if not client_optimizer:
            here = "optimizer.params.max_grad_norm"
            report.fault(here, "refused here; use the top-level key gradient_clipping")
        rest = {k: v for k, v in optimizer["params"].items() if k != "max_grad_norm"}
        raw["optimizer"] = {**optimizer, "params": rest}
