"""The section of DeepSpeed's compiler: `engine.compile` needs few of its keys."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from hadal.config.section import NO_EFFECT, UNBUILT, Section, key, rule
from hadal.config.values import Boolean, Integer
from hadal.errors import Fault


class Compile(Section):
    """Settings of what is done around the graphs of a compiled model.

    Gathers and reductions are scheduled outside the graphs, whether or not the section is there.
    """

    switch = "deepcompile"
    leftovers: ClassVar[Mapping[str, str]] = {
        "enabled": "ignored, an old key: the program calls engine.compile()",
        "disable": "ignored, an old key: the program calls engine.compile()",
        "backend": "ignored, an old key: engine.compile(backend=...)",
        "kwargs": "ignored, an old key: engine.compile(compile_kwargs=...)",
    }

    deepcompile: Boolean = key(False, "Apply the keys below, whether or not the model is compiled.")
    offload_opt_states: Boolean = key(
        False,
        "Keep the optimizer's state, but for masters, in pinned host memory during forward and"
        " backward, and bring it back for the update, which runs on the device.",
    )
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = key(
        None,
        "Graph passes. They are checked against the stage and the parallelism, which decide alone."
        ' "autotp" cannot be combined with others.',
    )
    autoep_non_moe: Boolean = key(
        False, "Compile the modules around expert layers; it is always done.", mark=NO_EFFECT
    )
    free_activation: Boolean = key(
        False, "Free activations as soon as they have been used; autograd does.", mark=NO_EFFECT
    )
    free_activation_threshold: Integer = key(
        10_485_760, "Keep activations of fewer bytes than this.", ge=0, mark=NO_EFFECT
    )
    offload_activation: Boolean = key(False, "Keep saved activations in host memory.", mark=UNBUILT)
    offload_activation_pin_memory: Boolean = key(True, "Pin that memory.", mark=NO_EFFECT)
    offload_parameters: Boolean = key(False, "Offload parameters between uses.", mark=UNBUILT)
    double_buffer: Boolean = key(
        True, "Alternate between two reduction buffers; it is always done.", mark=NO_EFFECT
    )
    symmetric_memory: Boolean = key(False, "Use symmetric-memory collectives.", mark=NO_EFFECT)
    debug_log: Boolean = key(
        False, "Write the graphs to files; torch does: TORCH_LOGS=graph_code.", mark=NO_EFFECT
    )
    sync_before_reduce: Boolean = key(
        False, "Synchronize with the device before each reduction, to debug.", mark=NO_EFFECT
    )
    sync_after_reduce: Boolean = key(
        False, "Synchronize with the device after each reduction, to debug.", mark=NO_EFFECT
    )
    sync_before_allgather: Boolean = key(
        False, "Synchronize with the device before each all-gather, to debug.", mark=NO_EFFECT
    )
    sync_after_allgather: Boolean = key(
        False, "Synchronize with the device after each all-gather, to debug.", mark=NO_EFFECT
    )
    keep_int_input_tensors: Boolean = key(
        True, "Keep integer inputs to profile graphs with.", mark=NO_EFFECT
    )
    keep_all_input_tensors: Boolean = key(
        False, "Keep all inputs to profile graphs with.", mark=NO_EFFECT
    )

    @rule("deepcompile", "passes")
    def _combined_passes(self) -> Iterator[Fault]:
        passes = self.passes or ()
        if self.deepcompile and "autotp" in passes and len(set(passes)) > 1:
            yield Fault("passes", '"autotp" cannot be combined with others; remove them')
