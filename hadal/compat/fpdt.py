"""DeepSpeed's layers for sequences of millions of tokens (FPDT), computed a chunk at a time.

A sequence is split into chunks, and each chunk over the ranks: an exchange of heads for positions
gives every rank one whole chunk of some heads, so all ranks compute equally much. The queries of a
chunk attend to the keys of its own and of each earlier one, whose results are merged as in a ring.
Keys and values wait in host memory, and so do the inputs, from which backward computes the queries
again. Of everything else, the memory of one chunk is in use at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hadal.device import Event, Upload, is_host_memory
from hadal.errors import SequenceError
from hadal.offload.crossing import Crossing, crossing_of
from hadal.plugins.sequence import attention, ring
from hadal.plugins.sequence.cross_entropy import linear_cross_entropy, over_sequence
from hadal.plugins.sequence.tiles import recomputed

Bias = Tensor | None


def _check_length(length: int, chunk: int, ranks: int) -> None:
    if length % chunk or chunk % ranks:
        raise SequenceError(
            f"a sequence of {length} tokens cannot be split into chunks of {chunk} tokens, each"
            f" over {ranks} ranks; choose a chunk size (--ds-sequence-parallel-fpdt-chunk-size)"
            f" that divides the length and is a multiple of {ranks}"
        )


class FPDT_InputConstruct:
    """A batch distributed over ranks: each gets its slice of every chunk.

    Args:
        tokens: [batch, length], as the next arguments but `attention_mask`, which may be None.
        labels: the targets.
        loss_mask: the weights of losses.
        attention_mask: returned as it is.
        position_ids: the positions of tokens.
        args: has the chunk size `ds_sequence_parallel_fpdt_chunk_size`, of all ranks together.
        sp_size: the number of ranks that share a sequence.
        sp_rank: this rank's index among them.

    Raises:
        SequenceError: the length is not a multiple of the chunk size, or that of `sp_size`.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        length, chunk = tokens.shape[1], args.ds_sequence_parallel_fpdt_chunk_size
        _check_length(length, chunk, sp_size)
        places = torch.arange(length, device=tokens.device)
        self._places, self._rank = places.view(-1, sp_size, chunk // sp_size), sp_rank
        self._batch = tokens, labels, loss_mask, attention_mask, position_ids

    def generate(self) -> tuple[Tensor | None, ...]:
        """Return this rank's tokens, labels, loss mask, attention mask and positions.

        The loss mask is that of all ranks, one after another, as `FPDT_LogitsLoss` returns losses.
        """
        mine, order = self._places[:, self._rank].flatten(), self._places.transpose(0, 1).flatten()
        tokens, labels, loss_mask, attention_mask, position_ids = self._batch
        dealt = ((tokens, mine), (labels, mine), (loss_mask, order), (position_ids, mine))
        *others, positions = (None if one is None else one[:, places] for one, places in dealt)
        return *others, attention_mask, positions


class FPDT_FFN:
    """Feed-forward layers with GELU (its tanh form), a chunk of positions at a time."""

    @staticmethod
    def apply(
        x: Tensor, w1: Tensor, b1: Bias, w2: Tensor, b2: Bias, add_bias: bool, chunk_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [length, batch, hidden], and the bias that the caller has to add.

        Args:
            x: [length, batch, hidden].
            w1: [inner, hidden], and its bias `b1` [inner].
            b1: see `w1`.
            w2: [hidden, inner], and its bias `b2` [hidden].
            b2: see `w2`.
            add_bias: add `b2` here, and return None instead of it.
            chunk_size: the number of positions whose inner values exist at a time.

        Raises:
            SequenceError: the weights do not fit, as those of gated layers (SwiGLU).
        """
        if w1.shape != w2.shape[::-1]:
            raise SequenceError(
                f"FPDT_FFN got weights of shapes {tuple(w1.shape)} and {tuple(w2.shape)}; expected"
                " [inner, hidden] and [hidden, inner] of layers with GELU. Use"
                " hadal.sequence.TiledMLP for other activations"
            )

        def fed_forward(some: Tensor) -> Tensor:
            inner = functional.gelu(functional.linear(some, w1, b1), approximate="tanh")
            return functional.linear(inner, w2, b2 if add_bias else None)

        found = [recomputed(fed_forward, some) for some in x.split(chunk_size)]
        return torch.cat(found), None if add_bias else b2


class FPDT_LogitsLoss:
    """Logits and their cross entropy, a chunk of positions at a time."""

    @staticmethod
    def apply(
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: dist.ProcessGroup,
        num_chunk: int,
    ) -> Tensor:
        """Return the losses [length, batch] of all ranks' positions, one rank after another.

        Args:
            lm_output: [length / ranks, batch, hidden]; its gradient is that of these positions.
            labels: [batch, length / ranks]; -100 for positions that do not count.
            logit_weights: [vocabulary, hidden].
            rank: not needed, as `spg_size`; `spg` has both.
            spg_size: see `rank`.
            spg: the ranks that share each sequence.
            num_chunk: the number of chunks of this rank's positions.
        """
        rows = -(-lm_output.shape[0] // num_chunk) * lm_output.shape[1]
        losses = linear_cross_entropy(
            lm_output, logit_weights, labels.t(), reduction="none", rows=rows
        )
        return over_sequence(losses, spg)


# ---- attention -----------------------------------------------------------------------------------


class FPDT_Attention(nn.Module):
    """Causal attention with its projections, computed a chunk of the sequence at a time.

    Args:
        config: has `kv_channels` (the size of heads), `num_attention_heads`, `num_key_value_heads`
            and `attention_dropout`, which must be 0.
        first_weight: [heads and twice the key heads, times their size; hidden], for query, key and
            value, in this order.
        first_bias: its bias.
        second_weight: [hidden, heads times their size], for the output.
        second_bias: its bias.
        sequence_process_group: the ranks that share each sequence.
        gather_idx: accepted but not needed, as `scatter_idx`.
        scatter_idx: see `gather_idx`.
        return_bias: return `second_bias` instead of adding it.
        chunk_size: positions of a chunk, over all ranks.
        enable_offloading: keep keys, values and inputs in host memory until backward.

    Raises:
        SequenceError: there is dropout, or, in forward, the length is not a multiple of the chunk
            size, or a mask is given.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        config: Any,
        first_weight: nn.Parameter,
        first_bias: nn.Parameter | None,
        second_weight: nn.Parameter,
        second_bias: nn.Parameter | None,
        sequence_process_group: dist.ProcessGroup,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise SequenceError(
                f"FPDT_Attention: attention_dropout is {config.attention_dropout}, but chunks are"
                " computed without; set it to 0 (--attention-dropout 0)"
            )
        self.config, self.spg = config, sequence_process_group
        self._heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self.return_bias, self.chunk_size = return_bias, chunk_size
        self.enable_offloading = enable_offloading

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: Tensor | None,
        inference_params: Any,
        rotary_pos_emb: Sequence[Tensor] | None,
        cpu_offloading: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [length / ranks, batch, hidden], and the bias that has to be added.

        Args:
            layernorm_output: [length / ranks, batch, hidden], this rank's slice of every chunk.
            attention_mask: None; the attention is causal.
            inference_params: None.
            rotary_pos_emb: cosine and sine [length, 1, 1, size] for the whole sequence, or None.
            cpu_offloading: false keeps all on the device, as `enable_offloading` does.
        """
        if attention_mask is not None or inference_params is not None:
            raise SequenceError(
                "FPDT_Attention got an attention_mask or inference_params; expected None for both:"
                " the attention is causal, for training. Megatron passes no mask if"
                " --use-flash-attn-v2 is given"
            )
        x, ranks = layernorm_output, dist.get_world_size(self.spg)
        _check_length(x.shape[0] * ranks, self.chunk_size, ranks)
        kind, queries, keys = x.device.type, *self._heads
        leaves = self.enable_offloading and cpu_offloading and not is_host_memory(x.device)
        layout = _Layout(
            self.chunk_size,
            self.config.kv_channels,
            [queries, keys, keys],
            attention.share_heads(queries, keys, ranks),
            self.spg,
            [one.transpose(0, 1) for one in rotary_pos_emb or ()],
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype,
            crossing_of(x.device, pins=True) if leaves else None,
        )
        arguments = x, self.qkv_linear_weight, self.qkv_linear_bias, layout
        found: Tensor = _ChunkedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
        added = None if self.return_bias else self.qkv_dense_bias
        output = functional.linear(found.flatten(2), self.qkv_dense_weight, added)
        return output, self.qkv_dense_bias if self.return_bias else None


_CAUSAL = ring.Pattern()


class _Layout(NamedTuple):
    """The chunks of a call, and how each is computed."""

    length: int
    """Positions of a chunk."""
    size: int
    """Elements of a head."""
    counts: list[int]
    """Heads of queries, keys and values."""
    heads: attention.Heads
    group: dist.ProcessGroup
    angles: list[Tensor]
    """Cosine and sine [1, length, 1, size] of rotary embeddings; empty without them."""
    dtype: torch.dtype
    """That of computation: autocast is in force in forward only."""
    crossing: Crossing | None
    """The way to host memory; None: all stays on the device."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.size**-0.5  # type: ignore[no-any-return]

    def rows(self, number: int) -> range:
        """Return the positions of a chunk."""
        return range(number * self.length, (number + 1) * self.length)

    def projected(
        self, number: int, x: Tensor, weight: Tensor, bias: Bias = None
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's queries [batch, this rank's heads, length, size], keys and values."""
        added = None if bias is None else bias.to(self.dtype)
        values = functional.linear(x.to(self.dtype), weight.to(self.dtype), added)
        parts = values.transpose(0, 1).unflatten(-1, (-1, self.size)).split(self.counts, dim=2)
        query, key, value = attention.gather_sequence(list(parts), self.heads, self.group)
        if self.angles:
            angles = [one.narrow(1, number * self.length, self.length) for one in self.angles]
            query, key = (attention.apply_rotary_pos_emb(one, *angles) for one in (query, key))
        return query.transpose(1, 2), torch.stack([key, value]).transpose(2, 3)


class _Chunks:
    """Tensors by the number of their chunk, in host memory if there is a way to it."""

    def __init__(self, crossing: Crossing | None, kept: Iterable[Tensor] = ()) -> None:
        self._crossing = crossing
        self.kept, self._events = dict(enumerate(kept)), dict[int, Event]()

    def put(self, number: int, values: Tensor) -> None:
        if self._crossing is None:
            self.kept[number] = values
            return
        values = values.contiguous()
        if number not in self.kept:
            # From torch's pool, which waits for copies of memory that is freed.
            self.kept[number] = torch.empty_like(values, device="cpu", pin_memory=True)
        self._events[number] = self._crossing.land(values, self.kept[number])

    def take(self, numbers: Iterable[int]) -> Iterator[Tensor]:
        """Yield chunks on the device; while one is used, the next is copied."""
        coming: Iterator[Any] = chain(map(self._begin, numbers), (None,))
        for one, _ in pairwise(coming):
            yield one.wait() if isinstance(one, Upload) else one

    def _begin(self, number: int) -> Tensor | Upload:
        values = self.kept[number]
        if self._crossing is None:
            return values
        out = torch.empty_like(values, device=self._crossing.device)
        return self._crossing.bring(values, out, after=self._events.get(number))

    def finish(self) -> list[Tensor]:
        """Return all chunks as they are kept, once the device has passed their copies."""
        for event in self._events.values():
            event.wait_on_device()
        return list(self.kept.values())


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Bias, layout: _Layout) -> Tensor:
        heads, group = layout.heads.queries, layout.group
        shape = *values.shape[:2], layout.counts[0], layout.size
        output = values.new_empty(shape, dtype=layout.dtype)
        length = layout.length // dist.get_world_size(group)
        inputs, pairs, sums = _Chunks(layout.crossing), _Chunks(layout.crossing), []
        for number, x in enumerate(values.split(length)):
            query, own = layout.projected(number, x, weight, bias)
            result, rows = ring.empty_result(query), layout.rows(number)
            for column, held in enumerate(chain(pairs.take(range(number)), [own])):
                operands, columns = ring.operands_of(query, held), layout.rows(column)
                part = ring.attend(operands, rows, columns, _CAUSAL, layout.scale)
                assert part is not None  # a chunk attends to all earlier ones
                result = ring.merge(result, part)
            inputs.put(number, x)
            pairs.put(number, own)
            sums.append(result.lse)
            found = attention.to_sequence(result.out.to(layout.dtype).transpose(1, 2), heads, group)
            output[number * length :][:length] = found.transpose(0, 1)
        ctx.layout, ctx.dtype = layout, values.dtype
        ctx.save_for_backward(weight, bias, output, *sums, *inputs.finish(), *pairs.finish())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        layout: _Layout = ctx.layout
        weight, bias, output, *rest = ctx.saved_tensors
        count = len(rest) // 3
        sums, *others = (rest[start : start + count] for start in (0, count, 2 * count))
        inputs, pairs = (_Chunks(layout.crossing, kept) for kept in others)
        of_pairs, wide = _Chunks(layout.crossing), sums[0].dtype
        # The gradients of all chunks are summed in these leaves, in fp32.
        given = [one.detach().to(wide) for one in (weight, bias) if one is not None]
        leaves: list[Any] = [one.requires_grad_() for one in given]
        of_values = gradient.new_empty(*gradient.shape[:2], weight.shape[1], dtype=ctx.dtype)
        for number, x in zip(range(count)[::-1], inputs.take(range(count)[::-1]), strict=True):
            with torch.enable_grad():
                leaf: Any = x.detach().requires_grad_()
                query, own = layout.projected(number, leaf, *leaves)
            both = [one.chunk(count)[number].transpose(0, 1) for one in (output, gradient)]
            parts = attention.to_heads(both, [layout.heads.queries] * 2, layout.group)
            out, of_out = (one.transpose(1, 2) for one in parts)
            known = ring.PartialResult(out, sums[number])
            of_query, columns = torch.zeros_like(query, dtype=wide), range(number + 1)
            earlier = of_pairs.take(columns if of_pairs.kept else ())
            for column, held in zip(columns, pairs.take(columns), strict=True):
                operands = ring.operands_of(query.detach(), held)
                spans = layout.rows(number), layout.rows(column)
                found = ring.gradients(of_out, operands, known, *spans, _CAUSAL, layout.scale)
                assert found is not None
                of_query += found[0]
                total = torch.stack([ring.ungrouped(one, held.shape[2]) for one in found[1:]])
                total += next(earlier, 0)
                if column < number:
                    of_pairs.put(column, total)
            # All later chunks have added to the last total, that of the chunk's own keys.
            torch.autograd.backward([query, own], [of_query.to(query.dtype), total.to(own.dtype)])
            of_values.chunk(count)[number].copy_(leaf.grad)
        of_weights = [one.grad.to(weight.dtype) for one in leaves]
        return of_values, of_weights[0], None if bias is None else of_weights[1], None
