"""DeepSpeed's configuration classes over Hadal's sections, and the functions that read them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import reduce
from importlib import import_module
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from hadal.compat.kinds import also
from hadal.compat.log import logger
from hadal.config.section import Section
from hadal.errors import ConfigError

_OF_KEYS = {
    "AutoEPConfig": "parallelism:ExpertParallel",
    "CommsLoggerConfig": "monitors:CommsLogging",
    "CompileConfig": "compile:Compile",
    "DeepSpeedBF16Config": "precision:Bf16",
    "DeepSpeedFP16Config": "precision:Fp16",
    "DeepSpeedThroughputTimerConfig": "monitors:ThroughputTiming",
    "DeepSpeedZeroConfig": "zero_optimization:ZeroOptimization",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization:LeafModule",
    "DeepSpeedZeroOffloadOptimizerConfig": "offload:OffloadOptimizer",
    "DeepSpeedZeroOffloadParamConfig": "offload:OffloadParam",
    "HybridEngineConfig": "parallelism:HybridEngine",
    "TPConfig": "parallelism:TensorParallelDegree",
    "TPTrainingConfig": "parallelism:TensorParallel",
    "ZenFlowConfig": "not_built:ZenFlow",
}
"""Classes that are called with a section's keys, and the section in `hadal.config`."""
_OF_CONFIGURATIONS = {
    "DeepSpeedActivationCheckpointingConfig": "activation_checkpointing",
    "DeepSpeedAutotuningConfig": "autotuning",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler",
}
"""Classes that are called with a whole configuration, and its section."""


class DeepSpeedConfigModel(BaseModel):
    """The base of programs' own configuration classes: values "auto" count as left out.

    A field's `json_schema_extra` can say that it is "deprecated", and name its "new_param".
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    @also(AssertionError)
    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**(data if strict else _without_auto(data)))
        for name in self.model_fields_set & type(self).model_fields.keys():
            extra = type(self).model_fields[name].json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated"):
                self._replace(name, extra)

    def _replace(self, name: str, extra: dict[str, Any]) -> None:
        """Set the successor of a deprecated field."""
        new = extra.get("new_param")
        _warn_of_old(name, new, extra.get("deprecated_msg"))
        if new is None or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda same: same)(getattr(self, name))
        delattr(self, name)
        *outer, last = new.split(".")
        owner = reduce(getattr, outer, self)
        _expect_one(name, new, owner.model_fields_set, last)
        setattr(owner, last, value)


def _without_auto(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value != "auto"}


def _warn_of_old(name: str, new: str | None, more: str | None) -> None:
    instead = f" use {new} instead" if new else ""
    said = f": {more}" if more else ""
    logger.warning("Config parameter %s is deprecated%s%s", name, instead, said)


def _expect_one(old: str, new: str, given: Container[str], last: str) -> None:
    if last in given:
        raise ConfigError(f"{old} is an old name of {new}, which is given too; keep {new}")


def _todays(section: type[Section], given: dict[str, Any]) -> dict[str, Any]:
    """Return a section's keys under their names of today; the others are logged."""
    for old in given.keys() - section.model_fields:
        moved = section.moved.get(old)
        new = moved.to.rpartition(".")[2] if moved else section.renamed.get(old)
        if new is None and old not in section.leftovers:
            continue  # unknown
        _warn_of_old(old, new, section.leftovers.get(old))
        value = given.pop(old)
        if new is not None and (value or not moved):
            _expect_one(old, new, given, new)
            given[new] = moved.true if moved else value
    return given


def _section(home: str) -> type[Section]:
    module, _, name = home.partition(":")
    found: type[Section] = getattr(import_module(f"hadal.config.{module}"), name)
    return found


class _OfKeys(type(Section)):  # type: ignore[misc]
    def __instancecheck__(cls, thing: Any) -> bool:
        """Count the sections of a whole configuration as instances too."""
        return super().__instancecheck__(thing) or type(thing) is vars(cls).get("section")


def _of_keys(name: str, home: str) -> type[Section]:
    """Return the class of a section that is called with its keys and whose values may be set."""
    found = _section(home)

    class Keys(found, metaclass=_OfKeys):  # type: ignore[misc, valid-type]
        model_config = ConfigDict(frozen=False, validate_assignment=True)
        section: ClassVar[type[Section]] = found

        @also(AssertionError)
        def __init__(self, strict: bool = False, **data: Any) -> None:
            super().__init__(**_todays(found, data if strict else _without_auto(data)))
            if getattr(self, "overlap_comm", True) is None:
                self.__dict__["overlap_comm"] = self.stage == 3

    Keys.__name__ = Keys.__qualname__ = name
    Keys.__doc__ = found.__doc__
    return Keys


def _read(path: str, param_dict: Mapping[str, Any]) -> Any:
    """Return the checked section of a configuration, with all its old spellings."""
    from hadal.config import load_config

    given = {path: param_dict[path]} if path in param_dict else {}
    config = load_config({"train_batch_size": 1, **given}, allow_unbuilt=True)
    return getattr(config, path)


def _reader(path: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda param_dict: _read(path, param_dict)


for _name, _home in _OF_KEYS.items():
    globals()[_name] = _of_keys(_name, _home)
for _name, _path in _OF_CONFIGURATIONS.items():
    globals()[_name] = _reader(_path)


def parse_autoep_config(param_dict: Mapping[str, Any]) -> Any:
    """Return the checked section `expert_parallel` from its keys."""
    return globals()["AutoEPConfig"](**param_dict)


get_aio_config = _reader("aio")
get_bfloat16_config = _reader("bf16")
get_checkpoint_config = _reader("checkpoint")
get_data_efficiency_config = _reader("data_efficiency")
get_expert_parallel_config = _reader("expert_parallel")
get_float16_config = _reader("fp16")
get_hybrid_engine_config = _reader("hybrid_engine")
get_pipeline_config = _reader("pipeline")
get_tensor_parallel_config = _reader("tensor_parallel")
get_zero_config = _reader("zero_optimization")


class DeepSpeedCommsConfig:
    """The section `comms_logger` of a configuration, if it has one."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = _read("comms_logger", ds_config)


# ---- helpers of configurations -------------------------------------------------------------------


def get_scalar_param(
    param_dict: Mapping[str, Any], param_name: str, param_default_value: Any
) -> Any:
    """Return a key's value, or the default."""
    return param_dict.get(param_name, param_default_value)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return a key's default.

    Raises:
        ConfigError: there is no such key, or it has no default.
    """
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise ConfigError(f"{config.__name__} has no key {field_name!r} with a default")
    return field.get_default(call_default_factory=True, validated_data={})


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's keys and values: an `object_pairs_hook`.

    Raises:
        ConfigError: a key occurs twice.
    """
    names = [name for name, _ in ordered_pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"duplicate keys in DeepSpeed config: {twice}; keep one of each")
    return dict(ordered_pairs)
