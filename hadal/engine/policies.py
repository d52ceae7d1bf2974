"""The frozen values that a configuration comes to: what `assemble` hands to the rooms below."""

from __future__ import annotations

from hadal.config import Config
from hadal.zero.policy import Limits


def limits_of(config: Config) -> Limits:
    """How buckets are cut, what stays gathered, and what may be under way."""
    zero = config.zero_optimization
    return Limits(
        bucket_numel=min(
            zero.reduce_bucket_size, zero.allgather_bucket_size or zero.reduce_bucket_size
        ),
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistent_total_numel=zero.stage3_model_persistence_threshold,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
        # Reductions overlap backward unless the user wrote false: the numbers are the same.
        overlap=bool(zero.overlap_comm)
        or config.origins.get("zero_optimization.overlap_comm") != "you",
    )
