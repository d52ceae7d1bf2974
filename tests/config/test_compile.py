"""`compile`: keys that act, that are told to do nothing, and that are not built yet."""

import pytest

from hadal.config import load_config
from hadal.config.section import mark_of
from hadal.config.top_level import Config

from .faults import BASE, only_fault, with_zero

OTHER_VALUES = {
    "passes": ["z1"],
    "autoep_non_moe": True,
    "free_activation": True,
    "free_activation_threshold": 1,
    "offload_activation": True,
    "offload_activation_pin_memory": False,
    "offload_opt_states": True,
    "double_buffer": False,
    "symmetric_memory": True,
    "debug_log": True,
    "offload_parameters": True,
    "sync_before_reduce": True,
    "sync_after_reduce": True,
    "sync_before_allgather": True,
    "sync_after_allgather": True,
    "keep_int_input_tensors": False,
    "keep_all_input_tensors": True,
}


@pytest.mark.claims(
    "compile",
    "compile.deepcompile",
    "compile.passes",
    "compile.autoep_non_moe",
    "compile.free_activation",
    "compile.free_activation_threshold",
    "compile.offload_activation",
    "compile.offload_activation_pin_memory",
    "compile.offload_opt_states",
    "compile.double_buffer",
    "compile.symmetric_memory",
    "compile.debug_log",
    "compile.offload_parameters",
    "compile.sync_before_reduce",
    "compile.sync_after_reduce",
    "compile.sync_before_allgather",
    "compile.sync_after_allgather",
    "compile.keep_int_input_tensors",
    "compile.keep_all_input_tensors",
)
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_key_says_what_it_does_where_the_section_is_on(name):
    section = {"deepcompile": True, name: OTHER_VALUES[name]}
    path, source = f"compile.{name}", {**with_zero(stage=1), "compile": section}
    status = mark_of(type(Config().compile).model_fields[name]).status
    if status == "not built yet":
        found, message = only_fault(source)
        assert found == path and "is not built yet: " in message
    else:
        is_told = any(path in n and "has no effect" in n for n in load_config(source).notes)
        assert is_told == (status == "no effect")


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_key_is_dormant_where_the_section_is_off(name):
    config = load_config({**BASE, "compile": {name: OTHER_VALUES[name]}})
    assert not config.compile.is_on


@pytest.mark.parametrize(
    ("passes", "stage", "need"),
    [
        ("z1", 3, "zero_optimization.stage 1 or 2, got 3"),
        ("z3", 2, "zero_optimization.stage 3, got 2"),
        ("autotp", 0, "tensor_parallel.autotp_size"),
        ("autosp", 0, "sequence_parallel_size"),
    ],
)
def test_a_pass_is_refused_where_nothing_does_it(passes, stage, need):
    section = {"deepcompile": True, "passes": [passes]}
    assert only_fault({**with_zero(stage=stage), "compile": section}) == (
        "compile.passes",
        f'"{passes}" needs {need}; set that or remove it',
    )


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_states_that_are_off_the_device_anyway_are_told(ratio):
    section = {"deepcompile": True, "offload_opt_states": True}
    zero = with_zero(stage=3, offload_optimizer={"device": "cpu", "ratio": ratio})
    notes = load_config({**zero, "compile": section}).notes
    told = "compile.offload_opt_states: has no effect with zero_optimization.offload_optimizer"
    assert any(note.startswith(told) for note in notes) == (ratio == 1)
