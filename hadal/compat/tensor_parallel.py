"""Names of `deepspeed.module_inject` that programs use besides `tensor_parallel.autotp_size`."""

from __future__ import annotations

from dataclasses import dataclass

from hadal.comm import get_rank
from hadal.errors import NotBuiltYetError, UsageError
from hadal.plugins.tensor_parallel.cut import shard_sizes
from hadal.plugins.tensor_parallel.rules import PRESETS, LayerRule, preset


def set_autotp_mode(training: bool = False) -> None:
    """Accept the mode in which layers are cut; it is training.

    Raises:
        NotBuiltYetError: it is inference.
    """
    if not training:
        raise NotBuiltYetError(
            "set_autotp_mode(training=False): tensor parallelism for inference is not built yet;"
            " pass training=True"
        )


def is_autotp_training_mode() -> bool:
    """Return True: layers are cut for training."""
    return True


class AutoTPPresets:
    """The rules of families of models, keyed by name."""

    @staticmethod
    def get_preset(model_type: str) -> tuple[LayerRule, ...]:
        """Return the rules of a family.

        Raises:
            UsageError: there is none of that name.
        """
        if model_type not in PRESETS:
            known = ", ".join(PRESETS)
            raise UsageError(f"{model_type!r} is no preset; expected one of {known}")
        return preset(model_type)


@dataclass
class _Shards:
    """Settings that programs set once for all calls of `get_shard_size`."""

    heads: int | None = None
    grain: int = 1


_shards = _Shards()


def set_num_kv_heads(num: int | None) -> None:
    """Set the key-value heads between which attentions are cut."""
    _shards.heads = num


def set_tp_grain_size(num: int) -> None:
    """Set the rows of which slices of other layers are multiples."""
    _shards.grain = num


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """Return how many of `total_size` rows each of `mp_size` ranks has."""
    return shard_sizes(
        total_size, mp_size, heads=_shards.heads, grain=_shards.grain, name=name or ""
    )


def get_shard_size(
    total_size: int, mp_size: int, name: str | None = None, rank: int | None = None
) -> int:
    """Return how many rows a rank has; this one, if none is given."""
    mine = get_rank() if rank is None else rank
    return get_shard_size_list(total_size, mp_size, name)[mine]
