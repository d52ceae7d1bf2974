"""Reads the `sparse_attention` section of an engine or a configuration into a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config import load_config
from hadal.config.reading import read
from hadal.config.sparse_attention import SparseAttention
from hadal.errors import UsageError
from hadal.plugins.sparse_attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

CLASSES: Mapping[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}
"""The class of each mode."""


def get_sparse_attention_config(source: Any) -> dict[str, Any] | None:
    """Return the section's mode and the keys that act in it, in a new dict; None without one.

    Args:
        source: an engine, a configuration (a dict, a path, JSON text or a checked one), or an
            object with an attribute `sparse_attention`, such as a model's `config`.

    Raises:
        ConfigError: the configuration has faults.
    """
    section = _section_of(source)
    if section is None:
        return None
    if isinstance(section, SparseAttention):
        return section.of_the_mode()
    return _checked(dict(section)).of_the_mode()


def from_config(source: Any, num_heads: int) -> SparsityConfig:
    """Return the pattern that the `sparse_attention` section of a configuration describes.

    Args:
        source: see `get_sparse_attention_config`.
        num_heads: number of attention heads of the model.

    Raises:
        ConfigError: the configuration has faults.
        UsageError: it has no such section.
    """
    values = get_sparse_attention_config(source)
    if values is None:
        raise UsageError(
            'the configuration has no section "sparse_attention"; add one, such as'
            ' {"sparse_attention": {"mode": "fixed"}}'
        )
    mode = values.pop("mode")
    return CLASSES[mode](num_heads, **values)


def _section_of(source: Any) -> Any:
    if isinstance(source, Mapping):
        if "sparse_attention" in source or "mode" not in source:
            return source.get("sparse_attention")
        return source
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return read(source)[1].get("sparse_attention")
    # An engine holds its configuration, which has the attribute.
    held = getattr(source, "config", source)
    return getattr(held, "sparse_attention", None)


def _checked(section: dict[str, Any]) -> SparseAttention:
    """Return a section given as a dict, validated like a whole file."""
    whole = load_config({"train_batch_size": 1, "sparse_attention": section}, world_size=1)
    assert whole.sparse_attention is not None
    return whole.sparse_attention
