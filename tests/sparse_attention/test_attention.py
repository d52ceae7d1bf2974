"""The attention by every path, against the written-out softmax."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hadal.errors import ModelError
from hadal.plugins.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    attention,
    flex,
)
from hadal.plugins.sparse_attention.attention import BlockLayout, sparse_attention
from hadal.plugins.sparse_attention.flex import Scores
from hadal.plugins.sparse_attention.masks import Masks, PairMask, key_mask, pair_mask, parts_of

GOLDEN = json.loads(Path(__file__).with_name("values.json").read_text())


@pytest.fixture(params=["two parts", "gathering", "dense"])
def path(request, monkeypatch):
    """Each way to compute it on this machine."""
    monkeypatch.setattr(attention, "_SHORT", 1 << 40 if request.param == "dense" else 0)
    monkeypatch.setattr(attention, "_FULL", math.inf)
    if request.param == "gathering":
        monkeypatch.setattr(attention, "has_fused_attention", lambda device: False)
    # Small parts and chunks, so that small cases have several of them.
    monkeypatch.setattr("hadal.plugins.sparse_attention.masks._TILE", 32)
    monkeypatch.setattr("hadal.plugins.sparse_attention.masks._FEWEST", 8)
    monkeypatch.setattr(attention, "gathered_numel", lambda device: 512)
    return request.param


# ---- values of DeepSpeed -------------------------------------------------------------------------

FIXED = {"block": 16, "num_local_blocks": 2}
PATTERNS = {
    "fixed_l2": FixedSparsityConfig(4, **FIXED),
    "fixed_l2_uni": FixedSparsityConfig(4, **FIXED, attention="unidirectional"),
    "fixed_l2_heads": FixedSparsityConfig(
        4, **FIXED, different_layout_per_head=True, num_different_global_patterns=2
    ),
    "dense": DenseSparsityConfig(4),
    "longformer": BSLongformerSparsityConfig(4, 16, num_sliding_window_blocks=1),
}


def golden_inputs():
    b, h, i, d = (
        torch.arange(n, dtype=torch.float64).view([n if k == j else 1 for k in range(4)])
        for j, n in enumerate((2, 4, 64, 8))
    )
    return [torch.sin(0.7 * b + 1.3 * h + 0.11 * i * (d + 1) + o) for o in range(4)]


def golden_masks(name):
    i = torch.arange(64, dtype=torch.float64)
    late = torch.stack([i >= 50, i >= 60])
    ahead = i[:, None] - i
    if "padding add" in name:
        return {"key_padding_mask": torch.zeros(2, 64).double().masked_fill(late, -1e4)}, {}
    if "padding mul" in name:
        return {"key_padding_mask": (~late).double()}, {"key_padding_mask_mode": "mul"}
    if "attn_mask mul" in name:
        return {"attn_mask": torch.ones(64, 64).double().tril()}, {}
    if "attn_mask add" in name:
        return {"attn_mask": 0.01 * ahead}, {"attn_mask_mode": "add"}
    if "rpe" in name:
        h = torch.arange(4.0).double().view(1, 4, 1, 1)
        return {"rpe": torch.cos(0.05 * ahead + h + torch.arange(2.0).view(2, 1, 1, 1))}, {}
    return {}, {}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_and_gradients_are_deepspeeds(name, path):
    *operands, gradient = golden_inputs()
    operands = [each.requires_grad_() for each in operands]
    masks, modes = golden_masks(name)
    config = PATTERNS[name.split("+")[0]]
    # DeepSpeed's unidirectional patterns are so by blocks only.
    module = SparseSelfAttention(config, max_seq_length=64, causal=False, **modes)
    out = module(*operands, **masks)
    out.backward(gradient)
    wanted = GOLDEN[name]

    def close(found, expected):
        torch.testing.assert_close(
            found.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-7
        )

    close(out[1, 2, 37], wanted["out_b1_h2_i37"])
    close(out.sum(), wanted["out_sum"])
    close(out.abs().sum(), wanted["out_abs_sum"])
    for letter, each in zip("qkv", operands, strict=True):
        close(each.grad[1, 2, 37], wanted[f"d{letter}"])
        close(each.grad.abs().sum(), wanted[f"d{letter}_abs_sum"])


# ---- any layout, length and masks ----------------------------------------------------------------


def written_out(query, key, value, layout, masks, softcap=None, sinks=None):
    """The softmax with everything in full; rows without keys give 0."""
    length, block = query.shape[2], layout.block
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    allowed = layout.layout.repeat_interleave(block, 1).repeat_interleave(block, 2)
    allowed = allowed[:, :length, :length]
    if masks.is_causal:
        allowed = allowed.tril()
    if masks.keys is not None:
        scores = scores + masks.keys[:, None, None]
    for one in masks.pairs:
        scores = scores + one.added(one.values, scores.dtype)
    scores = scores.masked_fill(~allowed, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ value
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ value


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 1 << 30))
    block, count = draw(st.sampled_from([1, 4, 5])), draw(st.integers(1, 14))
    return {
        "seed": seed,
        "block": block,
        "length": max(1, block * count - draw(st.integers(0, block - 1))),
        "density": draw(st.sampled_from([0.1, 0.3, 0.6, 0.9])),
        "shape": draw(st.sampled_from([(1, 1), (2, 3), (3, 2)])),
        "own": draw(st.booleans()),
        "shared_columns": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "keys": draw(st.sampled_from(["none", "add", "mul"])),
        "pairs": draw(st.sampled_from(["none", "add", "mul", "trained"])),
        "softcap": draw(st.sampled_from([None, None, 0.7])),
        "sinks": draw(st.booleans()),
    }


def made(case):
    generator = torch.Generator().manual_seed(case["seed"])
    batch, heads = case["shape"]
    length = case["length"]

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = -(-length // case["block"])
    layout = torch.rand(heads if case["own"] else 1, count, count, generator=generator)
    layout = layout < case["density"]
    if case["shared_columns"]:
        layout |= torch.rand(1, 1, count, generator=generator) < 0.4
    operands = [drawn(batch, heads, length, 3).requires_grad_() for _ in range(3)]
    keys = None
    if case["keys"] != "none":
        given = (drawn(batch, length) > -0.5).double()
        keys = key_mask(given, case["keys"], operands[0])
    pairs = []
    if case["pairs"] != "none":
        values = drawn(batch, 1, length, length)
        values = (values > -1).double() if case["pairs"] == "mul" else values
        values.requires_grad_(case["pairs"] == "trained")
        pairs = [pair_mask(values, "mul" if case["pairs"] == "mul" else "add", operands[0])]
    return operands, BlockLayout(layout, case["block"]), Masks(keys, pairs, case["causal"])


@settings(max_examples=60)
@given(cases())
def test_any_layout_equals_the_written_out_softmax(case):
    operands, layout, masks = made(case)
    leaves = [*operands, *(one.values for one in masks.pairs if one.values.requires_grad)]
    more = {"softcap": case["softcap"]}
    if case["sinks"]:
        more["sinks"] = torch.randn(case["shape"][1], dtype=torch.float64).requires_grad_()
        leaves.append(more["sinks"])
    expected = written_out(*operands, layout, masks, **more)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, gradient, materialize_grads=True)
    for short in (0, 1 << 40):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(attention, "_SHORT", short)
            patched.setattr(attention, "_FULL", math.inf)
            patched.setattr("hadal.plugins.sparse_attention.masks._TILE", 16)
            patched.setattr("hadal.plugins.sparse_attention.masks._FEWEST", 8)
            patched.setattr(attention, "gathered_numel", lambda device: 64)
            found = sparse_attention(*operands, layout, masks, **more)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            grads = torch.autograd.grad(found, leaves, gradient, materialize_grads=True)
            torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-9)


@given(cases(), st.booleans())
def test_the_parts_are_exactly_the_layout(case, splits):
    _, layout, _ = made(case)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hadal.plugins.sparse_attention.masks._TILE", 16)
        patched.setattr("hadal.plugins.sparse_attention.masks._FEWEST", 8)
        causal = case["causal"]
        parts = parts_of(layout.layout, layout.block, is_causal=causal, splits=splits)
    heads, count, _ = layout.layout.shape
    found = torch.zeros(heads * count, heads * count, dtype=torch.int64)
    for part in parts:
        rows = torch.cat([group.rows.flatten() for group in part])
        assert len(rows) == len(rows.unique())
        for group in part:
            for some, others in zip(group.rows, group.columns, strict=True):
                found[some[:, None], others[None, :]] += 1
                if group.ends_on_diagonal:
                    assert some.tolist() == [others[-1]]
                elif causal:
                    assert others.max() < some.min()
    lower = layout.layout.tril() if causal else layout.layout
    assert found.equal(torch.block_diag(*lower.long()))


@pytest.mark.slow_cells("gathering")
def test_gradcheck(path):
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn(1, 2, 8, 2, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    ]
    layout = BlockLayout(torch.tensor([[[1, 0], [1, 1]]]), 4)
    for masks in (Masks(), Masks(is_causal=True)):
        assert torch.autograd.gradcheck(
            lambda *given, masks=masks: sparse_attention(*given, layout, masks), operands
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype, path):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, 96, 16, generator=generator).to(dtype) for _ in range(3)]
    operands = [each.requires_grad_() for each in operands]
    layout = BlockLayout(FixedSparsityConfig(2).make_layout(96), 16)
    exact = [each.detach().double().requires_grad_() for each in operands]
    expected = written_out(*exact, layout, Masks())
    found = sparse_attention(*operands, layout)
    assert found.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    assert (found - expected).abs().max() < tolerance
    found.sum().backward()
    expected.sum().backward()
    for each, other in zip(operands, exact, strict=True):
        assert (each.grad - other.grad).abs().max() < 3 * tolerance


def test_under_autocast_it_is_computed_in_that_dtype(path):
    module = SparseSelfAttention(max_seq_length=64)
    query, key, value = operands_of()
    mask = torch.zeros(2, 64).masked_fill(torch.arange(64) > 50, -torch.inf)
    expected = module(query, key, value, key_padding_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(query, key, value.bfloat16(), key_padding_mask=mask)
    assert found.dtype is torch.bfloat16
    assert (found - expected).abs().max() < 0.03


# ---- the future is not seen ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        FixedSparsityConfig(2, 8, num_global_blocks=2, attention="unidirectional"),
        VariableSparsityConfig(2, 8, num_random_blocks=2, attention="unidirectional"),
        BigBirdSparsityConfig(2, 8, attention="unidirectional"),
        LocalSlidingWindowSparsityConfig(2, 8),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_unidirectional_pattern_sees_no_later_token(config, path):
    module = SparseSelfAttention(config, max_seq_length=64)
    operands = [torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3)]
    out = module(*operands)
    for row in (0, 7, 8, 37, 62):
        grads = torch.autograd.grad(out[:, :, row].sum(), operands, retain_graph=True)
        assert all((each[:, :, row + 1 :] == 0).all() for each in grads)
        assert grads[2][:, :, row].abs().sum() > 0


# ---- the module ----------------------------------------------------------------------------------


def operands_of(length=64, heads=4, batch=2, width=8):
    return [torch.randn(batch, heads, length, width) for _ in range(3)]


def test_modules_of_one_length_keep_their_own_patterns():
    operands = operands_of()
    first = SparseSelfAttention(FixedSparsityConfig(4), max_seq_length=64)
    second = SparseSelfAttention(BSLongformerSparsityConfig(4), max_seq_length=64)
    alone = first(*operands)
    assert not second(*operands).allclose(alone)
    assert first(*operands).equal(alone)
    assert SparseSelfAttention()(*operands).equal(alone)  # the default pattern


def test_a_random_layout_survives_a_checkpoint():
    config = BigBirdSparsityConfig(4, num_random_blocks=2)
    first = SparseSelfAttention(config, max_seq_length=256)
    second = SparseSelfAttention(config, max_seq_length=256)
    operands = operands_of(192)
    expected = first(*operands)
    assert not second(*operands).allclose(expected)
    state = first.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        "master_layout": torch.Size([4, 16, 16])
    }
    second.load_state_dict(state)
    assert second(*operands).equal(expected)
    assert first(*operands).equal(expected)
    with pytest.raises(ModelError, match=r"272 tokens is longer than max_seq_length 256.*raise"):
        first(*operands_of(272))


def test_a_deterministic_pattern_takes_any_length():
    module = SparseSelfAttention(FixedSparsityConfig(4), max_seq_length=64)
    for length in (176, 37, 1):
        operands = operands_of(length)
        padded = -(-length // 16) * 16
        layout = BlockLayout(FixedSparsityConfig(4).make_layout(padded), 16)
        torch.testing.assert_close(module(*operands), written_out(*operands, layout, Masks()))


def test_a_sequence_shorter_than_a_window_sees_the_first_blocks_of_a_longer_one():
    module = SparseSelfAttention(BSLongformerSparsityConfig(4), max_seq_length=64)
    operands = operands_of(20)
    dense = torch.nn.functional.scaled_dot_product_attention(*operands)
    torch.testing.assert_close(module(*operands), dense)


def test_the_default_device_of_a_program_does_not_matter(path):
    config = FixedSparsityConfig(4, attention="unidirectional")
    operands = [each.requires_grad_() for each in operands_of(176)]
    expected = SparseSelfAttention(config, max_seq_length=176)(*operands)
    with torch.device("meta"):
        module = SparseSelfAttention(config, max_seq_length=176)
        found = module(*operands)
        found.sum().backward()
    assert found.equal(expected)


def test_a_class_of_ones_own_has_a_layout_with_views():
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len):
            return torch.eye(self.blocks_of(seq_len)).bool().expand(self.num_heads, -1, -1)

    module = SparseSelfAttention(Diagonal(4), max_seq_length=128)
    query, key, value = operands_of()
    found = module(query, key.transpose(-1, -2), value)
    torch.testing.assert_close(
        found[:, :, :16], module(*(x[:, :, :16] for x in (query, key, value)))
    )


def test_ranks_that_share_the_heads():
    config = FixedSparsityConfig(4, different_layout_per_head=True, num_different_global_patterns=4)
    operands = operands_of(128)
    whole = SparseSelfAttention(config, max_seq_length=128)(*operands)
    for first in (0, 2):
        part = SparseSelfAttention(config, max_seq_length=128, head_offset=first)
        found = part(*(each[:, first : first + 2] for each in operands))
        torch.testing.assert_close(found, whole[:, first : first + 2])
    with pytest.raises(ModelError, match=r"3 heads from head_offset 2 .* num_heads=5"):
        part(*(each[:, :3] for each in operands))


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 64), (2, 1, 64, 64), (2, 4, 64, 64)])
def test_masks_of_every_shape(shape):
    module = SparseSelfAttention(max_seq_length=64)
    mask, operands = (torch.rand(shape) > 0.3).float(), operands_of()
    full = mask if len(shape) == 2 else mask[:, None] if len(shape) == 3 else mask
    layout = BlockLayout(FixedSparsityConfig(4).make_layout(64), 16)
    expected = written_out(
        *operands, layout, Masks(pairs=[PairMask(full.expand(2, 4, 64, 64), multiplies=True)])
    )
    torch.testing.assert_close(module(*operands, attn_mask=mask), expected)
    torch.testing.assert_close(module(*operands, attn_mask=mask.bool()), expected)


def test_rows_without_keys_give_zero_and_a_short_key_mask_masks_the_rest():
    module = SparseSelfAttention(max_seq_length=64, key_padding_mask_mode="mul")
    operands = [each.requires_grad_() for each in operands_of()]
    nothing = module(*operands, key_padding_mask=torch.zeros(2, 64))
    assert nothing.equal(torch.zeros_like(nothing))
    nothing.sum().backward()
    assert all(each.grad.isfinite().all() for each in operands)
    mask = torch.ones(2, 64)
    mask[:, 50:] = 0
    expected = module(*operands, key_padding_mask=mask)
    assert module(*operands, key_padding_mask=mask[:, :50]).equal(expected)
    assert module(*operands, key_padding_mask=mask[:, None, None]).equal(expected)


class Wrong(SparsityConfig):
    def make_layout(self, seq_len):
        return torch.ones(2, 3, 3)


def test_bad_input_is_refused_with_its_name():
    module = SparseSelfAttention(max_seq_length=64)
    query, key, value = operands_of()
    with pytest.raises(NotImplementedError, match="SparseSelfAttention is for self-attention"):
        module(query, key[:, :, :48], value[:, :, :48])
    with pytest.raises(ModelError, match=r"attn_mask has shape \(64, 32\); expected \[64, 64\]"):
        module(query, key, value, attn_mask=torch.ones(64, 32))
    with pytest.raises(ModelError, match=r"key_padding_mask has 80 columns for 64 keys"):
        module(query, key, value, key_padding_mask=torch.ones(2, 80))
    with pytest.raises(ModelError, match=r"key_padding_mask has shape \(3, 64\)"):
        module(query, key, value, key_padding_mask=torch.ones(3, 64))
    with pytest.raises(NotImplementedError, match="attn_mask_mode is 'x'; expected one of"):
        SparseSelfAttention(attn_mask_mode="x")(query, key, value, attn_mask=torch.ones(64, 64))
    with pytest.raises(NotImplementedError, match="key_padding_mask_mode is 'times'"):
        SparseSelfAttention(key_padding_mask_mode="times")
    with pytest.raises(NotImplementedError, match=r"query \(2, 64, 8\).*\[batch, heads, length"):
        module(query[:, 0], key[:, 0], value[:, 0])
    with pytest.raises(ModelError, match=r"torch.float16.*expected one floating dtype"):
        module(query, key.half(), value)
    with pytest.raises(ModelError, match=r"torch.int64.*expected one floating dtype"):
        module(query.long(), key.long(), value.long())
    with pytest.raises(ModelError, match=r"sparsity_config is a dict; .*from_config"):
        SparseSelfAttention({"mode": "fixed"})
    with pytest.raises(ModelError, match="num_heads is '4'; expected 1 or more"):
        FixedSparsityConfig(num_heads="4")
    with pytest.raises(ModelError, match=r"Wrong.make_layout\(64\) .* \(2, 3, 3\); expected"):
        SparseSelfAttention(Wrong(num_heads=2), max_seq_length=64)
    own = FixedSparsityConfig(2, different_layout_per_head=True, num_different_global_patterns=2)
    with pytest.raises(ModelError, match=r"4 heads from head_offset 0 on.*num_heads=4"):
        SparseSelfAttention(own, max_seq_length=128)(*operands_of(128))
    layout = BlockLayout(DenseSparsityConfig(4).make_layout(32), 16)
    with pytest.raises(ModelError, match=r"layout is for 32 tokens .* sequence has 64"):
        sparse_attention(query, key, value, layout)
    with pytest.raises(ModelError, match=r"layout has shape \(4, 4\)"):
        BlockLayout(torch.ones(4, 4), 16)


# Of torch itself, where a graph ends with a tensor that needs a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_runs_it_outside_of_the_graph():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = SparseSelfAttention(max_seq_length=64)

        def forward(self, values):
            return self.attention(values * 2, values, values) + 1

    model, values = Model(), torch.randn(1, 4, 64, 8, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(values), model(values))
    compiled(values).sum().backward()
    torch._dynamo.reset()


# ---- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.itemsize)
        return found


@pytest.mark.parametrize(
    "config",
    [
        FixedSparsityConfig(2),
        BigBirdSparsityConfig(2),
        FixedSparsityConfig(2, attention="unidirectional"),
    ],
)
def test_no_tensor_has_a_row_and_a_column_for_each_token(config):
    module = SparseSelfAttention(config, max_seq_length=2048)
    operands = [torch.randn(1, 2, 2048, 32, requires_grad=True) for _ in range(3)]
    keys = torch.zeros(1, 2048)
    with Largest() as largest:
        module(*operands, key_padding_mask=keys).sum().backward()
    assert largest.numel <= 4 * 2 * 2048 * 32


def test_an_accelerator_gathers_more_at_a_time():
    layout = BlockLayout(FixedSparsityConfig(16).make_layout(4096), 16)
    counts = {}
    for kind in ("cpu", "meta"):
        (part,) = layout.chunks(
            torch.Size((2, 16, 4096, 64)), torch.device(kind), is_causal=False, splits=False
        )
        assert {group.rows.device.type for group in part} == {kind}
        counts[kind] = len(part)
    assert counts == {"cpu": 293, "meta": 3}


# ---- FlexAttention -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 48, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_block_mask_is_the_layout(block, causal):
    generator = torch.Generator().manual_seed(block)
    count = 768 // block
    layout = BlockLayout(torch.rand(2, count, count, generator=generator) < 0.4, block)
    mask = flex.block_mask_of(layout, torch.device("cpu"), is_causal=causal)
    tokens = layout.layout.repeat_interleave(block, 1).repeat_interleave(block, 2)
    tokens = tokens.tril() if causal else tokens
    squares = tokens.view(2, 6, 128, 6, 128)
    some, whole = squares.any(4).any(2), squares.all(4).all(2)
    assert mask.to_dense()[0].bool().equal(some)
    full = torch.zeros_like(some)
    for head in range(2):
        for row in range(6):
            number = int(mask.full_kv_num_blocks[0, head, row])
            full[head, row, mask.full_kv_indices[0, head, row, :number].long()] = True
    assert full.equal(whole)
    places = torch.arange(768)
    for head in range(2):
        found = mask.mask_mod(None, head, places[:, None], places[None, :])
        assert found.equal(tokens[head])
    assert flex.block_mask_of(layout, torch.device("cpu"), is_causal=causal) is mask


# The kernel is compiled on accelerators; here its reference is run, which says that it is slow.
@pytest.mark.fast_cells("True-False")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention_computes_the_same(causal, masked, monkeypatch):
    from torch.nn.attention import flex_attention as kernels

    monkeypatch.setattr(flex, "_compiled", lambda *kind: kernels.flex_attention)
    operands = operands_of(256, heads=2)
    layout = BlockLayout(BigBirdSparsityConfig(2, num_random_blocks=2).make_layout(256), 16)
    keys = torch.zeros(2, 256).masked_fill(torch.rand(2, 256) < 0.3, -torch.inf)
    pairs = [
        PairMask(torch.randn(1, 2, 256, 256), multiplies=False),
        PairMask((torch.rand(2, 1, 256, 256) < 0.8).float(), multiplies=True),
    ]
    masks = Masks(keys, pairs, causal) if masked else Masks(is_causal=causal)
    for softcap, sinks in ((None, None), (0.7, torch.tensor([0.3, -1.0]))):
        scores = Scores(1 / math.sqrt(8), softcap, sinks)
        found = flex.flex(*operands, layout, masks, scores)
        expected = written_out(*operands, layout, masks, softcap, sinks)
        torch.testing.assert_close(found, expected)


@pytest.fixture
def compilations(monkeypatch):
    """Counts compilations, whose results are run by torch's reference."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    flex._compiled.cache_clear()
    yield counter
    flex._compiled.cache_clear()
    torch._dynamo.reset()


def test_flex_attention_is_compiled_once_for_layouts_of_a_shape(compilations, caplog):
    kinds = [
        (FixedSparsityConfig(2), Masks(), None),
        (BigBirdSparsityConfig(2), Masks(), None),  # of the same kind
        (FixedSparsityConfig(2, block=32), Masks(), None),
        *((FixedSparsityConfig(2), Masks(is_causal=True), softcap) for softcap in (None, 1.0)),
    ]
    for count in range(2, 12):
        for config, masks, softcap in kinds:
            layout = BlockLayout(config.make_layout(128 * count), config.block)
            operands = operands_of(128 * count, heads=2, batch=1)
            found = flex.flex(*operands, layout, masks, Scores(0.5, softcap))
            if count == 3:
                scale = 0.5 * math.sqrt(operands[0].shape[-1])
                expected = written_out(scale * operands[0], *operands[1:], layout, masks, softcap)
                torch.testing.assert_close(found, expected)
    assert compilations.frame_count == 10 * (len(kinds) - 1)
    said = [one.getMessage() for one in caplog.records if one.name == "hadal"]
    assert len(said) == 1 and "kind number 16 of inputs, (1, 2, 640, 8); pad seq" in said[0]


@torch.no_grad()
def test_flex_attention_is_compiled_in_a_module_that_is_not(compilations, monkeypatch):
    monkeypatch.setattr(attention, "has_flex_attention", lambda device: True)
    module = SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=256)
    operands = operands_of(256, heads=2)
    layout = module._layout_for(256, 2)
    torch.testing.assert_close(module(*operands), written_out(*operands, layout, Masks()))
    assert compilations.frame_count == 1


def test_layouts_that_are_nearly_full_are_computed_whole(monkeypatch):
    count = 64
    scattered = torch.rand(1, count, count, generator=torch.Generator().manual_seed(0))
    columns = torch.zeros(1, count, count, dtype=torch.bool)
    columns[:, :, : 7 * count // 10] = True
    expected = {  # shares of all pairs, and whether they are causal
        (0.4, False): False,
        (0.6, False): True,
        (0.75, True): False,  # of half the pairs
    }
    for (share, causal), is_full in expected.items():
        assert BlockLayout(scattered < share, 16).is_full(is_causal=causal) is is_full
    assert not BlockLayout(columns, 16).is_full(is_causal=False)  # few large products
    calls = []
    whole = attention._dense
    monkeypatch.setattr(attention, "_dense", lambda *args: calls.append(1) or whole(*args))
    operands = operands_of(count * 16, heads=2, batch=1)
    for share in (0.6, 0.2):
        layout = BlockLayout(scattered < share, 16)
        found = sparse_attention(*operands, layout)
        expected = written_out(*operands, layout, Masks())
        torch.testing.assert_close(found, expected)
    assert calls == [1]
    monkeypatch.setattr(attention, "_LARGEST_MASK", 1 << 19)
    assert not BlockLayout(scattered < 0.9, 16).is_full(is_causal=False)


@pytest.mark.gpu
def test_an_accelerator_computes_the_same():
    config = BigBirdSparsityConfig(4)
    module = SparseSelfAttention(config, max_seq_length=2048)
    operands = [each.requires_grad_() for each in operands_of(2048, width=64)]
    expected = module(*operands)
    expected.sum().backward()
    device = torch.accelerator.current_accelerator()
    there = [each.detach().to(device).requires_grad_() for each in operands]
    found = module.to(device)(*there)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    found.sum().backward()
    for each, other in zip(there, operands, strict=True):
        torch.testing.assert_close(each.grad.cpu(), other.grad, rtol=1e-3, atol=1e-3)
