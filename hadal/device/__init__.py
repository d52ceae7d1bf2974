"""One face for cuda, xpu, npu and cpu: nothing outside this folder names a kind of device."""

from hadal.device.accelerator import (
    accelerator_kind,
    choose_kind,
    collective_backend,
    current_device,
    device_identity,
    rank_device,
    widest_float,
)
from hadal.device.autograd import (
    at_end_of_backward,
    backward_watched,
    graph_task,
    is_in_backward,
    is_in_node,
    unwatched,
    will_collect,
)
from hadal.device.compiler import spared_import
from hadal.device.generator import random_state, set_random_state
from hadal.device.kernels import (
    AdagradRule,
    AdamRule,
    SgdRule,
    fused_adagrad_,
    fused_adam_,
    fused_sgd_,
    has_fused_kernels,
)
from hadal.device.memory import (
    MemoryThere,
    MemoryUse,
    give_back_freed_memory,
    host_empty,
    is_host_memory,
    keep_freed_memory,
    memory_in_use,
    memory_use,
    page_locked,
    peak_memory,
    reset_peak_memory,
    same_bytes,
    total_memory,
    unforked_memory,
)
from hadal.device.places import look_at, number_of_users
from hadal.device.reading import Reading, read_on_host, start_reading
from hadal.device.stamps import Stamp
from hadal.device.streams import Event, SideStream
from hadal.device.waits import synchronize, waiting_for, watch_waits

__all__ = [
    "AdagradRule",
    "AdamRule",
    "Event",
    "MemoryThere",
    "MemoryUse",
    "Reading",
    "SgdRule",
    "SideStream",
    "Stamp",
    "accelerator_kind",
    "at_end_of_backward",
    "backward_watched",
    "choose_kind",
    "collective_backend",
    "current_device",
    "device_identity",
    "fused_adagrad_",
    "fused_adam_",
    "fused_sgd_",
    "give_back_freed_memory",
    "graph_task",
    "has_fused_kernels",
    "host_empty",
    "is_host_memory",
    "is_in_backward",
    "is_in_node",
    "keep_freed_memory",
    "look_at",
    "memory_in_use",
    "memory_use",
    "number_of_users",
    "page_locked",
    "peak_memory",
    "random_state",
    "rank_device",
    "read_on_host",
    "reset_peak_memory",
    "same_bytes",
    "set_random_state",
    "spared_import",
    "start_reading",
    "synchronize",
    "total_memory",
    "unforked_memory",
    "unwatched",
    "waiting_for",
    "watch_waits",
    "widest_float",
    "will_collect",
]
