"""Enumerations and constants that programs compare with, under the names they know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

NO_GIT = "unknown"
LAMB_OPTIMIZER = "lamb"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class ZeroParamStatus(Enum):
    """Availability of a parameter's values (`parameter.ds_status`)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """Storage of a parameter between uses (`parameter.ds_param_type`)."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroStageEnum(IntEnum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """A tier, as spelled in the configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """A kind of state that may be moved to another tier."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass
class fragment_address:
    """The position of a parameter's fragment in a flat buffer."""

    numel: int
    start: int
