"""`comms_logger`: timing of collectives."""

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Spelled

Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
OPERATIONS: tuple[str, ...] = get_args(Operation)
# The names of functions, of which several do one kind of thing.
_FUNCTIONS = {
    "all_reduce": "all_reduce_coalesced inference_all_reduce",
    "all_gather": "all_gather_into_tensor all_gather_single all_gather_coalesced all_gather_base"
    " all_gather_object allgather_fn",
    "reduce_scatter": "reduce_scatter_tensor reduce_scatter_single reduce_scatter_base"
    " reduce_scatter_fn",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast_object_list",
    "gather": "gather_object",
    "scatter": "scatter_object_list",
    "send": "isend",
    "recv": "irecv",
    "barrier": "monitored_barrier",
}
KIND_OF: dict[str, str] = {
    name: kind for kind, names in _FUNCTIONS.items() for name in names.split()
}
"""Maps a function name to the kind of operation it performs."""
Operations: TypeAlias = tuple[Annotated[Operation, BeforeValidator(Spelled(KIND_OF))], ...]


class CommsLogging(Section):
    """Records the count, size and speed of messages between ranks.

    Recording never waits for a collective. `hadal.comm.log_summary()` prints the log. A process has
    one log; the newest engine that enables it sets the kinds that it records.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Record collectives.")
    verbose: Boolean = key(False, "Log each collective once its end is known.")
    prof_all: Boolean = key(True, "Record all kinds; false records only prof_ops.")
    debug: Boolean = key(
        False,
        "Distinguish calls by their purpose (such as the gather of a given bucket) or by the "
        "calling function.",
    )
    prof_ops: Operations = key(
        (),
        "Kinds to record when prof_all is false: all_reduce, all_gather, reduce_scatter, "
        "all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier. Names of torch's "
        "functions are accepted for their kind.",
    )
