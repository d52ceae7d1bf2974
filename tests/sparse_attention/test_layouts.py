"""Layouts, exactly as DeepSpeed 0.19.6 made them, and their properties."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.errors import HadalError, ModelError
from hadal.plugins.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from hadal.plugins.sparse_attention.layouts import CLASSES

CASES = json.loads(Path(__file__).with_name("layouts.json").read_text())
GOOD = [case for case in CASES if "error" not in case]
BAD = [case for case in CASES if "error" in case]


def name_of(case):
    given = ",".join(f"{key}={value}" for key, value in case["params"].items())
    return f"{case['mode']}-{case['seq_len']}-{case['seed']}-{given}"


def made(case):
    config = CLASSES[case["mode"]](case["num_heads"], block=case["block"], **case["params"])
    random.seed(case["seed"])
    return config.make_layout(case["seq_len"])


def written(layout):
    return " ".join("".join(map(str, row)) for row in layout.tolist())


@pytest.mark.parametrize("case", GOOD, ids=name_of)
def test_a_layout_is_exactly_deepspeeds(case):
    layout = made(case)
    expected = case.get("per_head") or [case["all_heads"]] * case["num_heads"]
    assert [written(head) for head in layout] == expected
    assert layout.dtype is torch.int64
    assert int(layout.sum()) == case["nnz"]


@pytest.mark.parametrize("case", BAD, ids=name_of)
def test_mismatches_are_refused_as_in_deepspeed(case):
    # DeepSpeed's error of an empty list is an accident of its loop.
    kind = {"NotImplementedError": NotImplementedError}.get(case["error"], ValueError)
    with pytest.raises(kind) as caught:
        made(case)
    assert isinstance(caught.value, HadalError)
    assert isinstance(caught.value, ValueError), "a wrong value is not a missing feature"


def test_there_are_as_many_cases_as_there_were():
    assert (len(GOOD), len(BAD)) == (59, 19)


def test_messages_name_the_number_and_the_remedy():
    with pytest.raises(ModelError, match=r"65 tokens.* block 16; pad it to 80 .*truncate it to 64"):
        FixedSparsityConfig(4).make_layout(65)
    with pytest.raises(ModelError, match=r"num_sliding_window_blocks is 3, .* only 2 blocks"):
        BigBirdSparsityConfig(4).make_layout(32)
    with pytest.raises(NotImplementedError, match="SparsityConfig has no layout; use one of its"):
        SparsityConfig(4).make_layout(64)
    with pytest.raises(ModelError, match="num_heads is 0"):
        DenseSparsityConfig(0)
    with pytest.raises(ModelError, match="global blocks 2 to 2"):
        BSLongformerSparsityConfig(4, global_block_indices=[2], global_block_end_indices=[2])


def test_a_subclass_makes_a_layout_of_its_own():
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[0] = torch.eye(layout.shape[1], dtype=torch.int64)
            return self.check_and_propagate_first_head_layout(layout)

    assert Diagonal(3).make_layout(64).equal(torch.eye(4, dtype=torch.int64).expand(3, 4, 4))


# ---- properties ----------------------------------------------------------------------------------

heads = st.integers(1, 4)
blocks = st.integers(3, 20)
words = st.sampled_from(["unidirectional", "bidirectional"])


@given(heads, blocks, st.integers(1, 4), st.integers(1, 3), words, st.booleans(), st.data())
def test_fixed(number, count, windows, chosen, attention, own, data):
    patterns = data.draw(st.integers(1, windows)) if own else 1
    config = FixedSparsityConfig(
        number,
        different_layout_per_head=own,
        num_local_blocks=windows * chosen,
        num_global_blocks=chosen,
        attention=attention,
        num_different_global_patterns=patterns,
    )
    layout = config.make_layout(count * 16).bool()
    assert layout.diagonal(dim1=1, dim2=2).all()
    # A window is represented to every later one, and to every earlier one if that is allowed.
    whole = count // config.num_local_blocks * config.num_local_blocks
    for head in range(number):
        seen = layout[head, -1, :whole].view(-1, config.num_local_blocks)
        assert (seen.sum(1) >= chosen).all()
        assert (
            attention == "unidirectional" or layout[head, 0, :whole].sum() >= seen.sum() / windows
        )
    assert own or layout.equal(layout[:1].expand_as(layout))


@given(blocks, st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), words, st.booleans())
def test_bigbird(count, drawn, reach, first, attention, own):
    is_causal = attention == "unidirectional"
    window = min(2 * reach + 1, count - 1 + count % 2)
    arguments = {"num_sliding_window_blocks": window, "num_global_blocks": first}
    config = BigBirdSparsityConfig(
        2,
        16,
        own,
        num_random_blocks=min(drawn, is_causal or drawn),
        **arguments,
        attention=attention,
    )
    layout = config.make_layout(count * 16).bool()
    others = BSLongformerSparsityConfig(
        2, num_sliding_window_blocks=window, global_block_indices=range(first), attention=attention
    ).make_layout(count * 16)
    assert (layout & others.bool()).equal(others.bool())  # bigbird is that, and random blocks
    extra = (layout & ~others.bool()).sum(-1)
    assert extra.max() <= config.num_random_blocks
    assert not is_causal or layout.equal(layout.tril())
    assert config.is_random == (config.num_random_blocks > 0)


@given(blocks, st.lists(st.integers(1, 6), min_size=1, max_size=4), words)
def test_windows_of_given_sizes_cover_the_sequence(count, sizes, attention):
    config = VariableSparsityConfig(
        1, local_window_blocks=sizes, global_block_indices=[], attention=attention
    )
    (layout,) = config.make_layout(count * 16)
    whole = layout | layout.T
    edges = [0]
    while edges[-1] < count:
        edges.append(min(count, edges[-1] + sizes[min(len(edges) - 1, len(sizes) - 1)]))
    expected = torch.block_diag(
        *[torch.ones(end - start, end - start) for start, end in itertools.pairwise(edges)]
    )
    assert whole.equal(expected.long())


@given(blocks, st.integers(0, 4), words)
def test_a_sliding_window(count, reach, attention):
    window = min(2 * reach + 1, count - 1 + count % 2)
    config = LocalSlidingWindowSparsityConfig(2, 16, window, attention)
    layout = config.make_layout(count * 16)
    ones = torch.ones(2, count, count, dtype=torch.int64)
    reach = window // 2
    assert layout.equal(ones.tril(0 if attention == "unidirectional" else reach).triu(-reach))


def test_random_blocks_follow_pythons_generator_and_can_have_their_own():
    first, second = BigBirdSparsityConfig(2), BigBirdSparsityConfig(2)
    random.seed(3)
    expected = first.make_layout(256)
    second.draws = random.Random(3)
    assert second.make_layout(256).equal(expected)
    assert not first.make_layout(256).equal(expected)
