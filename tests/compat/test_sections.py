"""DeepSpeed's configuration classes over Hadal's sections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hadal.compat import sections
from hadal.compat.install import alias
from hadal.compat.sections import _OF_KEYS, DeepSpeedConfigModel


def found(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(alias(f"deepspeed.{module}"), leaf)


def test_a_class_takes_the_keys_of_its_section() -> None:
    config = found("runtime.zero.config.DeepSpeedZeroConfig")
    zero = config(stage=3, offload_param={"device": "cpu"}, reduce_bucket_size="auto")
    assert (zero.stage, zero.offload_param.device) == (3, "cpu")
    assert zero.reduce_bucket_size == config().reduce_bucket_size
    zero.stage = 2
    assert zero.stage == 2
    for wrong in ({"stage": 7}, {"stge": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            config(**wrong)
    fp16 = found("runtime.precision_config.DeepSpeedFP16Config")(enabled=True, loss_scale=128)
    assert (fp16.enabled, fp16.loss_scale, type(fp16).__name__) == (
        True,
        128,
        "DeepSpeedFP16Config",
    )


def test_a_configuration_s_sections_are_instances_of_the_classes() -> None:
    given = {
        "stage": 3,
        "stage3_max_reuse_distance": 7,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {},
    }
    of_keys = found("runtime.zero.config.DeepSpeedZeroConfig")
    zero = found("runtime.config.DeepSpeedConfig")(
        {"train_batch_size": 1, "zero_optimization": given}
    ).zero_config
    for section in (zero, of_keys(**given)):
        assert isinstance(section, of_keys)
        for name, value in (
            ("zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", section.offload_optimizer),
            ("zenflow.zenflow_config.ZenFlowConfig", section.zenflow),
        ):
            assert isinstance(value, found(f"runtime.{name}"))
        assert section.max_reuse_distance == 7 and not section.gather_16bit_weights_on_model_save
        assert not hasattr(section, "nope")
    assert not isinstance(zero.offload_optimizer, of_keys)
    assert not isinstance(of_keys(), type("Mine", (of_keys,), {}))


@pytest.mark.parametrize("name", sorted(_OF_KEYS))
def test_every_class_has_its_defaults(name: str) -> None:
    made = getattr(sections, name)()
    assert made == type(made)(strict=True)


def test_functions_read_a_section_of_a_whole_configuration() -> None:
    zero = found("runtime.zero.config.get_zero_config")
    assert zero({}).stage == 0 and zero({"zero_optimization": {"stage": 2}}).stage == 2
    assert zero({"zero_optimization": True}).stage == 1
    assert found("runtime.precision_config.get_bfloat16_config")(
        {"bf16": {"enabled": True}}
    ).enabled
    aio = found("runtime.swap_tensor.aio_config.get_aio_config")({"aio": {"queue_depth": 16}})
    assert aio.queue_depth == 16
    profiler = found("profiling.config.DeepSpeedFlopsProfilerConfig")
    assert profiler({"flops_profiler": {"profile_step": 4}}).profile_step == 4
    experts = found("module_inject.auto_ep_config.parse_autoep_config")({"autoep_size": 2})
    assert experts.autoep_size == 2
    assert type(experts) is found("module_inject.auto_ep_presets.base.AutoEPConfig")
    comms = found("comm.config.DeepSpeedCommsConfig")
    assert not comms({}).comms_logger_enabled
    assert comms({"comms_logger": {"enabled": True}}).comms_logger.enabled


def test_a_program_s_own_class_ignores_auto() -> None:
    class Mine(DeepSpeedConfigModel):
        size: int = 3

    base = found("runtime.config_utils.DeepSpeedConfigModel")
    assert base is DeepSpeedConfigModel and Mine(size="auto").size == 3
    with pytest.raises(ValueError, match="extra"):
        Mine(other=1)
    default = found("runtime.config_utils.get_config_default")
    assert default(Mine, "size") == 3
    with pytest.raises(ValueError, match="'other'"):
        default(Mine, "other")


def test_duplicate_keys_are_an_error() -> None:
    hook = found("runtime.config_utils.dict_raise_error_on_duplicate_keys")
    assert json.loads('{"a": {"b": 1}, "c": 2}', object_pairs_hook=hook) == {"a": {"b": 1}, "c": 2}
    with pytest.raises(ValueError, match="'a'"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=hook)
