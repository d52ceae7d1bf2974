"""`compile`: passes over the compiled graph."""

from typing import ClassVar, Literal

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer


class Compile(Section):
    """Graph passes that act once the engine is compiled."""

    switch: ClassVar[str | None] = "deepcompile"

    deepcompile: Boolean = key(False, "Use the graph passes.", mark=UNBUILT)
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = key(
        None, "Passes to run; null follows the stage. autotp stands alone."
    )
    autoep_non_moe: Boolean = key(False, "Compile what surrounds expert layers.")
    free_activation: Boolean = key(False, "Free activations as soon as they were used.")
    free_activation_threshold: Integer = key(
        10_485_760, "Activations of fewer bytes are kept.", ge=0
    )
    offload_activation: Boolean = key(False, "Keep saved activations in host memory.")
    offload_activation_pin_memory: Boolean = key(True, "Page-lock that memory.")
    offload_opt_states: Boolean = key(False, "Move optimizer state away in forward and backward.")
    double_buffer: Boolean = key(True, "Reduce into two buffers in turn.")
    symmetric_memory: Boolean = key(False, "Use symmetric-memory collectives.")
    debug_log: Boolean = key(False, "Write the graphs to files.")
    offload_parameters: Boolean = key(False, "Move parameters away between uses.")
    sync_before_reduce: Boolean = key(False, "Wait for the device there, for debugging.")
    sync_after_reduce: Boolean = key(False, "Wait for the device there, for debugging.")
    sync_before_allgather: Boolean = key(False, "Wait for the device there, for debugging.")
    sync_after_allgather: Boolean = key(False, "Wait for the device there, for debugging.")
    keep_int_input_tensors: Boolean = key(True, "Keep integer inputs for profiling.")
    keep_all_input_tensors: Boolean = key(False, "Keep all inputs for profiling.")
