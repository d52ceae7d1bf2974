"""`compile`: requests for graph passes, and only these, are refused as not built yet."""

import pytest

from hadal.config import load_config

from .faults import BASE, only_fault

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
def test_a_pass_is_refused_where_it_is_on_and_dormant_where_it_is_off(name):
    section = {name: OTHER_VALUES[name]}
    path, message = only_fault({**BASE, "compile": {"deepcompile": True, **section}})
    assert path == "compile.deepcompile"
    assert "not built yet; leave it out or set false" in message
    config = load_config({**BASE, "compile": section})
    assert not config.compile.is_on
