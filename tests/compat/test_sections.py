"""DeepSpeed's configuration classes over Hadal's sections."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from pydantic import Field

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


def test_old_keys_set_those_of_today(caplog: pytest.LogCaptureFixture) -> None:
    config = found("runtime.zero.config.DeepSpeedZeroConfig")
    found("utils.logger").addHandler(caplog.handler)
    try:
        zero = config(
            cpu_offload=True,
            cpu_offload_param=False,
            cpu_offload_use_pin_memory=True,
            stage3_gather_fp16_weights_on_model_save=True,
        )
    finally:
        found("utils.logger").removeHandler(caplog.handler)
    assert zero.offload_optimizer.device == "cpu" and zero.offload_param is None
    assert zero.gather_16bit_weights_on_model_save
    assert "cpu_offload is deprecated use offload_optimizer instead" in caplog.text
    assert "cpu_offload_use_pin_memory is deprecated: " in caplog.text
    with pytest.raises(AssertionError, match="cpu_offload is an old name of offload_optimizer"):
        config(cpu_offload=True, offload_optimizer={"device": "cpu"})


class _Inner(DeepSpeedConfigModel):
    size: int = 0


class _Renamed(DeepSpeedConfigModel):
    size: int = 3
    inner: _Inner = _Inner()
    width: str = Field(
        "0", json_schema_extra={"deprecated": True, "new_param": "size", "new_param_fn": int}
    )
    depth: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.size"})
    gone: int = Field(
        0, json_schema_extra={"deprecated": True, "new_param": "size", "set_new_param": False}
    )


def test_a_deprecated_field_of_a_program_s_own_class_sets_its_successor(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found("utils.logger"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        made = _Renamed(width="5", depth=7, gone=1)
    assert (made.size, made.inner.size, made.gone) == (5, 7, 1)
    assert not hasattr(made, "width")
    assert "width is deprecated use size instead" in caplog.text
    assert _Renamed().width == "0"
    with pytest.raises(AssertionError, match="width is an old name of size"):
        _Renamed(width="5", size=5)


def test_lists_of_leaf_modules_are_lists_and_overlap_is_a_boolean() -> None:
    config = found("runtime.zero.config.DeepSpeedZeroConfig")
    zero = config(stage=3, leaf_module={"classes": "my.Class", "names": ["a"]})
    assert (zero.leaf_module.classes, zero.leaf_module.names) == (["my.Class"], ["a"])
    assert zero.model_dump()["leaf_module"]["name_suffixes"] == []
    assert found("runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig")().names == []
    log = found("comm.config.CommsLoggerConfig")
    assert log().prof_ops == [] and log(prof_ops=["all_reduce"]).prof_ops == ["all_reduce"]
    assert config(stage=3).overlap_comm is True and config(stage=1).overlap_comm is False
    assert config(stage=3, overlap_comm=False).overlap_comm is False


def test_a_whole_configuration_has_the_attributes_of_older_releases_too() -> None:
    given = {
        "train_batch_size": 2,
        "communication_data_type": "bf16",
        "comms_logger": {"enabled": True},
        "checkpoint": {"tag_validation": "Fail"},
        "fp16": {"enabled": True, "loss_scale_window": 7},
        "amp": {"enabled": False, "opt_level": "O1"},
    }
    told = found("runtime.config.DeepSpeedConfig")(given)
    assert (told.global_rank, told.world_size) == (0, 1)
    assert told.comms_config.comms_logger_enabled and told.comms_config.comms_logger.enabled
    assert told.checkpoint_tag_validation_enabled and told.checkpoint_tag_validation_fail
    assert told.checkpoint_config["tag_validation"] == "Fail" and told.aio_config["queue_depth"] > 0
    assert told.checkpoint_parallel_write_pipeline is False and told.graph_harvesting is False
    assert told.dynamic_loss_scale_args["scale_window"] == 7
    assert told.initial_dynamic_scale == 2**16
    assert told.amp_params == {"opt_level": "O1"} and not told.amp_enabled
    assert told.nebula_config.enabled is False
    assert (told.eigenvalue_enabled, told.eigenvalue_max_iter) == (False, 100)
    assert told.curriculum_params_legacy == {}
    assert (told.torch_autocast_enabled, told.torch_autocast_dtype) == (False, None)
    assert told.communication_data_type is torch.bfloat16
    assert told.seq_parallel_communication_data_type is torch.float32
    assert told.hybrid_engine.max_out_tokens == 512 and told.timers_config.synchronized
    assert told.keep_in_fp32_modules == "auto" and not told.bfloat16_immediate_grad_update
    with pytest.raises(AttributeError, match="nope"):
        told.nope  # noqa: B018 - as programs test for a key


def test_duplicate_keys_are_an_error() -> None:
    hook = found("runtime.config_utils.dict_raise_error_on_duplicate_keys")
    assert json.loads('{"a": {"b": 1}, "c": 2}', object_pairs_hook=hook) == {"a": {"b": 1}, "c": 2}
    with pytest.raises(ValueError, match="'a'"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=hook)
