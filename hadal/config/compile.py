"""`compile`: DeepCompile's graph passes."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer


class Compile(Section):
    """Graph passes that run once the engine is compiled."""

    switch: ClassVar[str | None] = "deepcompile"
    leftovers: ClassVar[Mapping[str, str]] = {
        "enabled": "ignored, an old key: the program calls engine.compile()",
        "disable": "ignored, an old key: the program calls engine.compile()",
        "backend": "ignored, an old key: engine.compile(backend=...)",
        "kwargs": "ignored, an old key: engine.compile(compile_kwargs=...)",
    }

    deepcompile: Boolean = key(False, "Use the graph passes.", mark=UNBUILT)
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = key(
        None, "Passes to run; null follows the stage. autotp cannot be combined with others."
    )
    autoep_non_moe: Boolean = key(False, "Compile the modules around expert layers.")
    free_activation: Boolean = key(False, "Free activations as soon as they have been used.")
    free_activation_threshold: Integer = key(
        10_485_760, "Keep activations of fewer bytes than this.", ge=0
    )
    offload_activation: Boolean = key(False, "Keep saved activations in host memory.")
    offload_activation_pin_memory: Boolean = key(True, "Pin that memory.")
    offload_opt_states: Boolean = key(False, "Offload optimizer state during forward and backward.")
    double_buffer: Boolean = key(True, "Alternate between two reduction buffers.")
    symmetric_memory: Boolean = key(False, "Use symmetric-memory collectives.")
    debug_log: Boolean = key(False, "Write the graphs to files.")
    offload_parameters: Boolean = key(False, "Offload parameters between uses.")
    sync_before_reduce: Boolean = key(
        False, "Synchronize with the device before each reduction, for debugging."
    )
    sync_after_reduce: Boolean = key(
        False, "Synchronize with the device after each reduction, for debugging."
    )
    sync_before_allgather: Boolean = key(
        False, "Synchronize with the device before each all-gather, for debugging."
    )
    sync_after_allgather: Boolean = key(
        False, "Synchronize with the device after each all-gather, for debugging."
    )
    keep_int_input_tensors: Boolean = key(True, "Keep integer inputs for profiling.")
    keep_all_input_tensors: Boolean = key(False, "Keep all inputs for profiling.")
