"""The `sparse_attention` section: each key changes the layout that models get."""

from __future__ import annotations

import json
import random

import pytest
import torch

from hadal.compat.configuration import DeepSpeedConfig
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.sparse_attention import from_config, get_sparse_attention_config


def layout_of(tokens=256, heads=4, seed=0, **keys):
    random.seed(seed)
    source = {"train_batch_size": 1, "sparse_attention": keys}
    return from_config(source, heads).make_layout(tokens)


# The mode, the key, its value, and what the layout then has that it has not otherwise.
EFFECTS = [
    ("fixed", "block", 32, lambda new, old: new.shape[1] == old.shape[1] // 2),
    ("fixed", "num_local_blocks", 8, lambda new, old: new[0, 0, 6] > old[0, 0, 6]),
    ("fixed", "num_global_blocks", 2, lambda new, old: new[0, 0, 6] > old[0, 0, 6]),
    ("fixed", "attention", "unidirectional", lambda new, old: new.equal(new.tril())),
    ("fixed", "horizontal_global_attention", True, lambda new, old: new[0, 3].all()),
    ("bigbird", "num_random_blocks", 2, lambda new, old: new.sum() > old.sum()),
    ("variable", "num_random_blocks", 2, lambda new, old: new.sum() > old.sum()),
    ("variable", "local_window_blocks", [2, 3], lambda new, old: new[0, 0, 2] < old[0, 0, 2]),
    ("variable", "global_block_indices", [5], lambda new, old: new[0, :, 5].all()),
    ("bslongformer", "global_block_indices", [5], lambda new, old: new[0, 5].all()),
    ("bslongformer", "num_sliding_window_blocks", 5, lambda new, old: new[0, 8, 6] > old[0, 8, 6]),
    ("bigbird", "num_global_blocks", 2, lambda new, old: new[0, 1].all()),
    ("bigbird", "attention", "unidirectional", lambda new, old: new.equal(new.tril())),
]


@pytest.mark.claims(
    "sparse_attention",
    "sparse_attention.mode",
    "sparse_attention.block",
    "sparse_attention.num_local_blocks",
    "sparse_attention.num_global_blocks",
    "sparse_attention.attention",
    "sparse_attention.horizontal_global_attention",
    "sparse_attention.num_random_blocks",
    "sparse_attention.local_window_blocks",
    "sparse_attention.global_block_indices",
    "sparse_attention.num_sliding_window_blocks",
)
@pytest.mark.parametrize(("mode", "key", "value", "shows"), EFFECTS)
def test_a_key_changes_the_layout(mode, key, value, shows):
    old, new = layout_of(mode=mode), layout_of(mode=mode, **{key: value})
    assert shows(new, old)
    assert not old.equal(new)


@pytest.mark.claims(
    "sparse_attention.different_layout_per_head",
    "sparse_attention.num_different_global_patterns",
    "sparse_attention.global_block_end_indices",
)
def test_keys_that_need_others():
    shared = layout_of(mode="bigbird", num_random_blocks=2)
    own = layout_of(mode="bigbird", num_random_blocks=2, different_layout_per_head=True)
    assert shared[0].equal(shared[1])
    assert not own[0].equal(own[1])
    patterns = layout_of(different_layout_per_head=True, num_different_global_patterns=4)
    assert [int(head[8, :4].argmax()) for head in patterns] == [3, 2, 1, 0]
    ranges = layout_of(
        mode="variable", global_block_indices=[5, 9], global_block_end_indices=[7, 10]
    )
    assert ranges[0].all(0).nonzero().flatten().tolist() == [5, 6, 9]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("dense", "block"),
        (
            "fixed",
            "block different_layout_per_head num_local_blocks num_global_blocks attention"
            " horizontal_global_attention num_different_global_patterns",
        ),
        (
            "variable",
            "block different_layout_per_head num_random_blocks local_window_blocks"
            " global_block_indices global_block_end_indices attention horizontal_global_attention",
        ),
        (
            "bigbird",
            "block different_layout_per_head num_random_blocks num_sliding_window_blocks"
            " num_global_blocks",
        ),
        (
            "bslongformer",
            "block different_layout_per_head num_sliding_window_blocks global_block_indices"
            " global_block_end_indices",
        ),
        ("local_sliding_window", "block num_sliding_window_blocks attention"),
    ],
)
def test_a_program_finds_the_mode_and_the_keys_of_that_mode(mode, names):
    source = {"train_batch_size": 1, "sparse_attention": {"mode": mode}}
    config = DeepSpeedConfig(source)
    found = config.sparse_attention
    assert list(found) == ["mode", *names.split()]
    del found["mode"]  # as programs do
    assert get_sparse_attention_config(DeepSpeedConfig(source)) == {"mode": mode, **found}


def test_the_section_is_read_from_any_source(tmp_path):
    source = {"train_batch_size": 1, "sparse_attention": {"mode": "bigbird", "block": 8}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**source, "train_batch_size": "auto"}))  # as a trainer fills it in

    class Engine:
        config = load_config(source)

    class Module:
        sparse_attention = source["sparse_attention"]

    for holder in (source, source["sparse_attention"], path, str(path), Engine(), Module()):
        pattern = from_config(holder, 2)
        assert (type(pattern).__name__, pattern.block) == ("BigBirdSparsityConfig", 8)
        assert pattern.num_random_blocks == 0
    assert get_sparse_attention_config({"train_batch_size": 1}) is None
    with pytest.raises(UsageError, match='no section "sparse_attention"; add one'):
        from_config({"train_batch_size": 1}, 2)
    with pytest.raises(ConfigError, match=r"sparse_attention\.blok .*did you mean"):
        from_config({"mode": "fixed", "blok": 8}, 2)


def test_keys_of_other_modes_are_reported():
    source = {"mode": "bslongformer", "num_local_blocks": 8, "num_random_blocks": 2}
    (note,) = load_config({"train_batch_size": 1, "sparse_attention": source}).notes
    assert "sparse_attention.num_local_blocks" in note
    assert "sparse_attention.num_random_blocks" in note
    assert 'has no effect with mode "bslongformer"' in note


def test_the_mode_of_a_window_alone():
    one_way = layout_of(mode="local_sliding_window", attention="unidirectional")
    both = layout_of(mode="local_sliding_window")
    assert torch.equal(both.tril(), one_way)
