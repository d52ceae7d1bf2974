"""DeepSpeed's layers for very long sequences, in chunks: values and gradients of whole ones."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.toys import engine_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hadal.compat.fpdt import FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss
from hadal.device import current_device
from hadal.errors import SequenceError
from hadal.plugins.sequence.attention import apply_rotary_pos_emb

BATCH, LENGTH, HIDDEN, SIZE, CHUNK, WORDS = 2, 24, 16, 4, 8, 30


def dealt(values: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return this rank's part of [length, ...]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arguments = Namespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    order = torch.arange(len(values))[None]
    batch = order, order, order, None, order
    return values[FPDT_InputConstruct(*batch, arguments, size, rank).generate()[0][0]]


def in_order(parts: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return [length, ...] of all ranks' parts, one after another."""
    size = dist.get_world_size()
    return parts.unflatten(0, (size, -1, chunk // size)).transpose(0, 1).flatten(0, 2)


def of_all_ranks(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return in_order(torch.cat(parts))


def summed(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- the order of tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_get_their_part_of_each_chunk(ranks: int) -> None:
    arguments = Namespace(ds_sequence_parallel_fpdt_chunk_size=CHUNK)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    batch = tokens, tokens + 1, tokens.float(), None, tokens % LENGTH
    found = [
        FPDT_InputConstruct(*batch, arguments, ranks, rank).generate() for rank in range(ranks)
    ]
    for place, whole in enumerate(batch):
        if whole is None:
            assert all(one[place] is None for one in found)
            continue
        parts = [one[place] for one in found]
        # The loss mask is whole on each rank, in the order of the ranks' losses.
        joined = parts[0] if place == 2 else torch.cat(parts, 1)
        chunks = joined.unflatten(1, (ranks, -1, CHUNK // ranks)).transpose(1, 2)
        assert torch.equal(chunks.flatten(1), whole)
    assert found[0][0].shape == (BATCH, LENGTH // ranks)
    bare = FPDT_InputConstruct(tokens, None, None, None, None, arguments, ranks, 0).generate()
    assert bare[1:] == (None, None, None, None)
    for length, chunk in ((LENGTH, 7), (LENGTH, 6)):
        arguments.ds_sequence_parallel_fpdt_chunk_size = chunk
        with pytest.raises(SequenceError, match=f"{length} tokens cannot.* chunks of {chunk} "):
            FPDT_InputConstruct(*batch, arguments, 4, 0)


# ---- layers of each position ---------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """The most bytes of a tensor that operations make."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self.nbytes = max(self.nbytes, one.nbytes)
        return result


def gradients_of(loss: Tensor, given: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, given, allow_unused=True))


@pytest.mark.parametrize("adds", [True, False])
def test_a_feed_forward_part_is_that_of_the_whole(adds: bool) -> None:
    torch.manual_seed(0)
    inner = 8 * LENGTH
    shapes = (LENGTH, BATCH, HIDDEN), (inner, HIDDEN), (inner,), (HIDDEN, inner), (HIDDEN,)
    given = [torch.randn(*shape).requires_grad_() for shape in shapes]
    x, w1, b1, w2, b2 = given
    scale = torch.randn_like(x)
    with _Largest() as largest:
        found, bias = FPDT_FFN.apply(x, w1, b1, w2, b2, adds, 7)
        gradients = gradients_of((found * scale).sum(), given)
    hidden = F.gelu(F.linear(x, w1, b1), approximate="tanh")
    expected = F.linear(hidden, w2, b2 if adds else None)
    assert bias is (None if adds else b2)
    assert largest.nbytes <= max(hidden.nbytes / 3, w1.nbytes)
    same([found, *gradients], [expected, *gradients_of((expected * scale).sum(), given)])
    with pytest.raises(SequenceError, match=r"\(16, 384\).*expected .* GELU. Use .*TiledMLP"):
        FPDT_FFN.apply(x, w1, b1, torch.cat([w2, w2], 1), b2, adds, 7)


@on_ranks(2)
def test_losses_and_their_gradients_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    words, group = 40 * LENGTH, dist.group.WORLD
    assert group is not None
    hidden, weight = torch.randn(LENGTH, BATCH, HIDDEN), torch.randn(words, HIDDEN)
    labels, scale = torch.randint(words, (LENGTH, BATCH)), torch.randn(LENGTH, BATCH)
    labels[3, 1] = -100
    part, mine = dealt(hidden).requires_grad_(), weight.clone().requires_grad_()
    with _Largest() as largest:
        losses = FPDT_LogitsLoss.apply(part, dealt(labels).t(), mine, dist.get_rank(), 2, group, 3)
        of_part, of_mine = torch.autograd.grad((in_order(losses) * scale).sum(), [part, mine])
    whole = hidden.requires_grad_(), weight.requires_grad_()
    logits = F.linear(*whole)
    assert largest.nbytes <= max(logits.nbytes / 6, weight.nbytes)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = expected.view(LENGTH, BATCH)
    same([in_order(losses)], [expected])
    found = [of_all_ranks(of_part), summed(of_mine)]
    same(found, gradients_of((expected * scale).sum(), [*whole]))


# ---- attention -----------------------------------------------------------------------------------


def config_of(heads: int, key_heads: int, dropout: float = 0.0) -> Namespace:
    return Namespace(
        hidden_size=HIDDEN,
        kv_channels=SIZE,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        attention_dropout=dropout,
    )


def weights_of(heads: int, key_heads: int, has_bias: bool) -> list[nn.Parameter | None]:
    rows = (heads + 2 * key_heads) * SIZE
    shapes = (rows, HIDDEN), (rows,), (HIDDEN, heads * SIZE), (HIDDEN,)
    made = [nn.Parameter(torch.randn(*shape) / 4) for shape in shapes]
    return [one if has_bias or one.dim() == 2 else None for one in made]


def whole_attention(x: Tensor, weights: list[Any], counts: list[int], angles: Any) -> Tensor:
    """Return the output of the whole sequence [length, batch, hidden], without the last bias."""
    parts = F.linear(x, *weights[:2]).transpose(0, 1).unflatten(-1, (-1, SIZE)).split(counts, 2)
    query, key, value = parts
    if angles:
        turns = [one.transpose(0, 1) for one in angles]
        query, key = (apply_rotary_pos_emb(one, *turns) for one in (query, key))
    heads = [one.transpose(1, 2) for one in (query, key, value)]
    found = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return F.linear(found.transpose(1, 2).flatten(2).transpose(0, 1), weights[2])


def angles_of(size: int) -> list[Tensor]:
    angles = torch.outer(torch.arange(LENGTH) + 1.0, torch.rand(size // 2)).repeat(1, 2)
    return [one[:, None, None] for one in (angles.cos(), angles.sin())]


def chunked_attention(
    counts: list[int], weights: list[nn.Parameter | None], **others: Any
) -> FPDT_Attention:
    """Return the layer as Megatron-DeepSpeed makes it."""
    made: Any = FPDT_Attention
    found: FPDT_Attention = made(
        config_of(*counts[:2]),
        *weights,
        sequence_process_group=dist.group.WORLD,
        gather_idx=1,
        chunk_size=CHUNK,
        **{"return_bias": True, "enable_offloading": True} | others,
    )
    return found.to(current_device())


def check_attention(heads: int, key_heads: int, has_bias: bool, turned: int) -> None:
    """Compare values and gradients with those of the whole sequence, on any device."""
    torch.manual_seed(0)
    counts, device = [heads, key_heads, key_heads], current_device()
    weights = weights_of(heads, key_heads, has_bias)
    x, scale = torch.randn(LENGTH, BATCH, HIDDEN), torch.randn(LENGTH, BATCH, HIDDEN)
    angles = angles_of(turned) if turned else None
    expected = whole_attention(x.requires_grad_(), weights, counts, angles)
    trained = [one for one in weights[:3] if one is not None]
    known = gradients_of((expected * scale).sum(), [x, *trained])
    attention = chunked_attention(counts, weights)
    part = dealt(x.detach()).to(device).requires_grad_()
    turns = None if angles is None else [one.to(device) for one in angles]
    # As Megatron-DeepSpeed calls it.
    output, bias = attention(
        part, None, inference_params=None, rotary_pos_emb=turns, cpu_offloading=True
    )
    assert bias is attention.qkv_dense_bias
    (output * dealt(scale).to(device)).sum().backward()
    names = ["qkv_linear_weight", "qkv_linear_bias", "qkv_dense_weight"]
    given = dict(attention.named_parameters())
    gradients = [summed(given[name].grad) for name in names if name in given]
    assert part.grad is not None
    found = [of_all_ranks(output), of_all_ranks(part.grad), *gradients]
    same([one.cpu() for one in found], [expected, *known])


CASES = [(4, 4, True, 2), (4, 2, True, 4), (4, 1, False, 0), (3, 3, True, 0)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("heads", "key_heads", "has_bias", "turned"), CASES)
@on_ranks("world")
def test_attention_is_that_of_the_whole(
    heads: int, key_heads: int, has_bias: bool, turned: int
) -> None:
    check_attention(heads, key_heads, has_bias, turned)


@on_ranks(1)
def test_attention_under_autocast_and_recomputed() -> None:
    torch.manual_seed(0)
    weights, counts = weights_of(4, 2, True), [4, 2, 2]
    attention = chunked_attention(counts, weights, return_bias=False)
    x, scale = torch.randn(LENGTH, BATCH, HIDDEN), torch.randn(LENGTH, BATCH, HIDDEN)
    found = []
    for function in (attention, lambda *given: checkpoint(attention, *given, use_reentrant=False)):
        with torch.autocast("cpu", torch.bfloat16):
            output, bias = function(x.requires_grad_(), None, None, None)
        assert output.dtype == torch.bfloat16 and bias is None
        given = [x, *(one for one in weights if one is not None)]
        found.append(gradients_of((output * scale).sum(), given))
    expected = gradients_of((whole_attention(x, weights, counts, None) * scale).sum(), given[:-1])
    torch.testing.assert_close(found[0][:-1], expected, rtol=0.1, atol=0.5)
    assert all(map(torch.equal, *found))


class _Model(nn.Module):
    """Each layer once, as Megatron-DeepSpeed calls them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = chunked_attention([4, 2, 2], weights_of(4, 2, True))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found, bias = self.attention(x, None, None, None)
        x = x + found + bias
        weights = self.up.weight, self.up.bias, self.down.weight, self.down.bias
        found, _ = FPDT_FFN.apply(x, *weights, True, CHUNK // 2)
        group = dist.group.WORLD
        assert group is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        losses = FPDT_LogitsLoss.apply(x + found, labels, self.head.weight, rank, size, group, 3)
        return losses.mean()


@on_ranks(2)
def test_updates_of_sharded_weights_are_those_of_whole_ones() -> None:
    found = []
    for stage in (0, 3):
        engine = engine_of(stage, _Model())
        torch.manual_seed(1)
        x, labels = torch.randn(LENGTH, BATCH, HIDDEN), torch.randint(WORDS, (LENGTH, BATCH))
        for _ in range(2):
            loss = engine(dealt(x), dealt(labels).t())
            engine.backward(loss)
            engine.step()
        with torch.no_grad():
            state = [*engine.state_dict().values(), engine(dealt(x), dealt(labels).t())]
        found.append([loss.detach(), *state])
        engine.destroy()
    same(*found)


@on_ranks(2)
def test_what_chunks_cannot_compute_is_refused() -> None:
    weights = weights_of(4, 4, True)
    with pytest.raises(SequenceError, match=r"attention_dropout is 0.1.*--attention-dropout 0"):
        FPDT_Attention(config_of(4, 4, 0.1), *weights, dist.group.WORLD)  # type: ignore[arg-type]
    attention = chunked_attention([4, 4, 4], weights)
    x = torch.randn(CHUNK // 2, BATCH, HIDDEN)
    with pytest.raises(SequenceError, match=r"attention_mask .* expected None.*flash-attn-v2"):
        attention(x, torch.ones(1), None, None)
    with pytest.raises(SequenceError, match=r"10 tokens cannot.* chunks of 8 .* over 2 ranks"):
        attention(torch.cat([x, x[:1]]), None, None, None)
