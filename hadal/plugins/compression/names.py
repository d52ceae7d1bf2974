"""Names of the trained scores and fixed masks that pruning adds to a module, as in DeepSpeed."""

from __future__ import annotations

_SCORES = {
    "sparse_pruning": "sparse_mask_scores",
    "row_pruning": "row_mask_scores",
    "head_pruning": "head_pruning_scores",
    "channel_pruning": "channel_mask_scores",
}


def score_name(technique: str) -> str:
    """Return the name of a module's trained scores, as in DeepSpeed's checkpoints."""
    return _SCORES[technique]


def is_score(name: str) -> bool:
    """Return whether a parameter of this full name holds trained scores."""
    return name.rpartition(".")[2] in _SCORES.values()


def mask_name(technique: str) -> str:
    """Return the name of a module's fixed mask, as in DeepSpeed's checkpoints."""
    return f"{technique}_mask"
