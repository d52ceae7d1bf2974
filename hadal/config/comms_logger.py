"""`comms_logger`: timing every collective."""

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
"""What a function of another name than its kind does."""
Operations: TypeAlias = tuple[Annotated[Operation, BeforeValidator(Spelled(KIND_OF))], ...]


class CommsLogger(Section):
    """Records what ranks send to each other: how often, how much, how fast. It waits for nothing,
    and `hadal.comm.log_summary()` prints it. A process has one log: the newest engine that asks for
    one says what is in it.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Record collectives.")
    verbose: Boolean = key(False, "Log each one, when its end is known.")
    prof_all: Boolean = key(True, "Record all kinds; false records prof_ops only.")
    debug: Boolean = key(
        False, "Tell calls apart by what they are for (the gather of which bucket), or who called."
    )
    prof_ops: Operations = key(
        (),
        "Kinds to record where prof_all is false: all_reduce, all_gather, reduce_scatter,"
        " all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier; or torch's name of a"
        " function, which stands for its kind.",
    )
