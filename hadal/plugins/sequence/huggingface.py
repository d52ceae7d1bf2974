"""Splits sequences in transformers models, which still call their own attention by name.

Ranks exchange heads for positions (Ulysses); if there are more ranks than heads, keys and values
are passed around a ring.

The function registered under that name stays, and is called for every module of other models. The
modules of a registered model are recorded one by one, so a reference model keeps its own attention.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hadal.comm.functions import all_gather_into_tensor, labelled
from hadal.device import has_values, on_device, read_on_host
from hadal.errors import SequenceError
from hadal.plugins.sequence.attention import gather_sequence, share_heads, to_sequence
from hadal.plugins.sequence.groups import SequenceGroups, initialize_sequence_parallel
from hadal.plugins.sequence.ring import ring_attention

Attention = Callable[..., tuple[Tensor, Tensor | None]]

# They describe a rank's own slice, but the local attention sees whole sequences.
_PACKED_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Masks encode these, and masks of slices are not those of whole sequences.
_LAYERS = ("chunked_attention", "linear_attention", "mamba", "recurrent", "conv")

_attached: WeakKeyDictionary[nn.Module, UlyssesSPAttentionHF] = WeakKeyDictionary()
_by_path: dict[str, UlyssesSPAttentionHF] = {}


class UlyssesSPAttentionHF(nn.Module):
    """Attention of transformers over sequences that are split over ranks.

    `register_with_transformers` creates one. Heads are taken from the tensors, so layers may
    differ.

    Args:
        attn: the attention function to call with whole sequences and this rank's heads.
        batch_size: rows of a batch; not needed.
        attn_head_count: heads of queries.
        attn_head_size: their size; not needed.
        kv_head_count: heads of keys and values.
        num_hidden_layers: not needed.
        process_group: the ranks that share each sequence.
        seq_length_is_variable: lengths may differ between batches.
        local_seq_length: otherwise the length of each rank's slice.
        global_seq_length: otherwise the length of whole sequences.
        disable_in_eval: in evaluation each rank attends to its own batch.

    Raises:
        SequenceError: the heads cannot be distributed, or the length does not divide.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        attn: Attention,
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: dist.ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.disable_in_eval = disable_in_eval
        self._takes_head_range = getattr(attn, "takes_head_range", False)
        if attn_head_count >= self.world_size:
            share_heads(attn_head_count, kv_head_count, self.world_size)
        else:
            self._check_ring(attn_head_count)
        self._length = None if seq_length_is_variable else local_seq_length
        if self._length is None and not seq_length_is_variable and global_seq_length is not None:
            self._length = global_seq_length // self.world_size
        self._cache = PositionsCache(process_group)
        self._of_call: Tensor | None = None

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGroups | None:
        """Let a model attend to sequences that are split over ranks. All ranks must call it.

        Args:
            model_name_or_path: the model; or its name, for models that are loaded from there later.
            core_attn_implementation: the attention that the model uses ("sdpa",
                "flash_attention_2", ...); None accepts any.
            sequence_parallel_size: how many consecutive ranks share each sequence.
            micro_batch_size: rows of a batch; not needed.
            seq_length: the length of whole sequences; checked if it is not variable.
            seq_length_is_variable: lengths may differ between batches.
            disable_in_eval: in evaluation each rank attends to its own batch.
            max_length: accepted but not needed.

        Returns:
            The groups, for `initialize(mpu=...)`; None if the size is 1.

        Raises:
            SequenceError: the model's attention differs or cannot be distributed, or heads, length
                or
                ranks do not fit.
        """
        if sequence_parallel_size == 1:
            return None
        groups = initialize_sequence_parallel(sequence_parallel_size)
        if not seq_length_is_variable:
            _check_length(seq_length, sequence_parallel_size)
        attach(
            model_name_or_path,
            groups.get_sequence_parallel_group(),
            core_attn_implementation,
            seq_length=None if seq_length_is_variable else seq_length,
            disable_in_eval=disable_in_eval,
        )
        return groups

    def is_active(self, module: nn.Module) -> bool:
        """Return True if a module's batch is a slice of the sequence."""
        return module.training or not self.disable_in_eval

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention of this rank's positions, [batch, length / ranks, heads, size].

        Args:
            module: the attention module.
            query: [batch, heads, length / ranks, size]; also `key` and `value`.
            key: with as many heads or fewer.
            value: as `key`.
            attention_mask: that of this rank's slice; the whole sequence's comes from positions.
            args: further arguments of the attention function; also `kwargs`.

        Raises:
            SequenceError: positions are missing, or this attention cannot be distributed.
        """
        _check_call(module, query, key, attention_mask, kwargs, self._length)
        given = kwargs.get("position_ids")
        mine = self._of_call if given is None else given
        if mine is None:
            raise SequenceError(
                f"{type(module).__name__} got no position_ids, without which a rank does not know"
                " where its slice of the sequence begins; pass position_ids [batch, length / ranks]"
                " to the model"
            )
        positions = self._cache.of(mine)
        if query.shape[1] < self.world_size:
            self._check_ring(query.shape[1])
            return _in_a_ring(module, (query, key, value), self.process_group, positions, kwargs)
        heads = share_heads(query.shape[1], key.shape[1], self.world_size)
        rank = dist.get_rank(self.process_group)
        tensors = [one.transpose(1, 2) for one in (query, key, value)]
        local = gather_sequence(tensors, heads, self.process_group)
        local = [one.transpose(1, 2) for one in local]
        rest = {name: value for name, value in kwargs.items() if name not in _PACKED_KWARGS}
        if given is not None:
            rest["position_ids"] = positions.whole
        if self._takes_head_range:
            rest["head_range"] = heads.queries[rank].start, query.shape[1]
        with _grouped(module, heads.local_group(rank) or 1):
            output, weights = _attend(self.attn, module, local, positions.documents, args, rest)
        found = to_sequence(output, heads.queries, self.process_group)
        return found, weights

    def _check_ring(self, heads: int) -> None:
        if self._takes_head_range:
            raise SequenceError(
                f"attention over a pattern ({getattr(self.attn, '__name__', 'hadal_sparse')}) needs"
                f" a head on each of the {self.world_size} ranks of a sequence, but there are"
                f" {heads}: ring attention does not support patterns; set"
                f" sequence_parallel_size to {heads} or less, or attn_implementation to 'sdpa'"
            )

    def take_positions(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Before the model's forward, store its positions, or number those of this rank's slice."""
        if not self.is_active(module):
            return None
        self._cache.forget()
        given = kwargs.get("position_ids")
        if given is not None:
            self._of_call = given
            return None
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            return None
        length, rank = tokens.shape[1], dist.get_rank(self.process_group)
        numbers = torch.arange(rank * length, (rank + 1) * length, device=tokens.device)
        self._of_call = numbers.expand(tokens.shape[0], -1)
        parameters = inspect.signature(type(module).forward).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if not (takes_any or "position_ids" in parameters):
            return None
        return args, {**kwargs, "position_ids": self._of_call}


def attach(
    model: Any,
    group: dist.ProcessGroup,
    implementation: str | None = None,
    *,
    seq_length: int | None = None,
    disable_in_eval: bool = False,
) -> UlyssesSPAttentionHF:
    """Let the attention modules of a model exchange heads; a second call replaces the first.

    Raises:
        SequenceError: the model's attention cannot be distributed.
    """
    config = _config_of(model)
    used = config._attn_implementation
    name = used if implementation is None else implementation
    if isinstance(model, nn.Module) and used != name:
        raise SequenceError(
            f"{type(model).__name__} uses the attention {used!r}, but {name!r} was requested; load"
            f" the model with attn_implementation={name!r}"
        )
    _check_attention(name, config)
    heads = config.num_attention_heads
    attention = UlyssesSPAttentionHF(
        _dispatched(name),
        1,
        heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        getattr(config, "num_key_value_heads", None) or heads,
        config.num_hidden_layers,
        group,
        seq_length_is_variable=seq_length is None,
        global_seq_length=seq_length,
        disable_in_eval=disable_in_eval,
    )
    if not isinstance(model, nn.Module):
        _by_path[str(model)] = attention
        return attention
    has_hook = any(hook is _take_positions for hook in model._forward_pre_hooks.values())
    for module in model.modules():
        _attached[module] = attention
    if not has_hook:
        model.register_forward_pre_hook(_take_positions, with_kwargs=True)
    return attention


def attach_copies(memo: Mapping[int, Any]) -> None:
    """Let copies of modules exchange heads as the modules do.

    Args:
        memo: that of `copy.deepcopy`: copies by the `id` of what they are copies of.
    """
    for module, attention in [*_attached.items()]:
        if id(module) in memo:
            _attached[memo[id(module)]] = attention


def is_attached(model: nn.Module) -> bool:
    """Return True if a model's attention exchanges heads."""
    return model in _attached


def detach(model: nn.Module) -> None:
    """Restore a model's own attention."""
    for module in model.modules():
        _attached.pop(module, None)


def attention_of(module: nn.Module) -> UlyssesSPAttentionHF | None:
    """Return the attention that exchanges heads for a module; None if it uses its own."""
    found = _attached.get(module)
    if found is None and _by_path:
        path = getattr(getattr(module, "config", None), "_name_or_path", None)
        found = _by_path.get(path) if path else None
    return found


def _take_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    attention = _attached.get(module)
    return None if attention is None else attention.take_positions(module, args, kwargs)


# ---- the function registered with transformers ---------------------------------------------------


def _dispatched(name: str) -> Attention:
    """Return transformers' function of a name, and make that name distinguish modules."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" in name and name not in ALL_ATTENTION_FUNCTIONS:
        lazy_import_flash_attention(name)  # a kernel of the hub; a model that is loaded has it
    known = ALL_ATTENTION_FUNCTIONS.get(name)
    if known is None:
        names = ", ".join(sorted(one for one in ALL_ATTENTION_FUNCTIONS if "|" not in one))
        raise SequenceError(
            f"{name!r} is not an attention of transformers; expected one of {names}"
        )
    own: Attention | None = getattr(known, "hadal_core", None)
    if own is not None:
        return own
    core: Attention = known

    @functools.wraps(core)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        found = attention_of(module)
        if found is None or not found.is_active(module):
            return core(module, *args, **kwargs)
        output: tuple[Tensor, Tensor | None] = found(module, *args, **kwargs)
        return output

    attention.hadal_core = core  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    return core


def _attend(
    attn: Attention,
    module: nn.Module,
    local: list[Tensor],
    documents: tuple[tuple[int, ...], ...] | None,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Call the attention with whole sequences; packed documents do not see each other."""
    window = kwargs.get("sliding_window")
    is_flash = "flash" in getattr(attn, "__name__", "")
    if is_flash or not getattr(module, "is_causal", True):
        return attn(module, *local, None, *args, **kwargs)
    kwargs.pop("position_ids", None)
    if documents is None:
        mask = _window_mask(local[0], window)
        return attn(module, *local, mask, *args, **kwargs)
    rows = []
    if len(documents) == 1:  # positions of one row are those of all
        documents *= local[0].shape[0]
    for row, lengths in enumerate(documents):
        parts = []
        for start, length, count in _equal_neighbours(lengths):
            stop = start + length * count
            few = [one[row, :, start:stop].unflatten(1, (count, length)) for one in local]
            few = [one.transpose(0, 1) for one in few]  # documents of one length are one batch
            mask = _window_mask(few[0], window)
            parts.append(attn(module, *few, mask, *args, **kwargs)[0].flatten(0, 1))
        rows.append(torch.cat(parts))
    return torch.stack(rows), None


def _in_a_ring(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    group: dist.ProcessGroup,
    positions: Positions,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attend to whole sequences with fewer heads than ranks: keys and values are passed around."""
    changes = [name for name in ("dropout", "softcap", "s_aux") if kwargs.get(name)]
    if changes:
        raise SequenceError(
            f"{type(module).__name__} attends with {changes[0]}, which is not built for more ranks"
            " than heads (ring attention); set sequence_parallel_size to its number of heads"
            f" ({tensors[0].shape[1]}) or less"
        )
    is_causal = kwargs.get("is_causal")
    found = ring_attention(
        *tensors,
        group,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        scale=kwargs.get("scaling"),
        documents=positions.numbered(),
        window=kwargs.get("sliding_window"),
    )
    return found.transpose(1, 2).contiguous(), None


def _equal_neighbours(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Return the start, the length and the number of neighbouring documents of one length.

    Padding, whose positions are often 0 throughout, is many documents of length 1.
    """
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        yield start, length, count
        start += length * count


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Return the mask of a causal window if it is shorter than the sequence."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < window))[None, None]


@contextmanager
def _grouped(module: nn.Module, group: int) -> Iterator[None]:
    """Make a module's attention repeat its key heads as often as this rank's query heads need."""
    known = getattr(module, "num_key_value_groups", None)
    if known is None or known == group:
        yield
        return
    module.num_key_value_groups = group  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = known


# ---- what cannot be distributed ------------------------------------------------------------------


def _config_of(model: Any) -> Any:
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "_attn_implementation"):
            raise SequenceError(
                f"{type(model).__name__} has no config._attn_implementation, by which models of"
                " transformers choose their attention; wrap its attention in"
                " hadal.sequence.DistributedAttention instead"
            )
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
    find = getattr(config, "get_text_config", None)
    text = config if find is None else find()
    if getattr(text, "num_attention_heads", None) is None:
        raise SequenceError(
            f"the configuration of {model if isinstance(model, str) else type(model).__name__} has"
            " no num_attention_heads, which sequence parallelism distributes over the ranks"
        )
    return text


def _check_attention(name: str | None, config: Any) -> None:
    if name in (None, "eager", "flex_attention"):
        raise SequenceError(
            f"the attention {name!r} cannot be distributed: its mask is that of a rank's slice;"
            " load the model with attn_implementation='sdpa' or 'flash_attention_2'"
        )
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind in _LAYERS]
    if kinds or getattr(config, "attention_chunk_size", None):
        found = kinds[0] if kinds else "chunked_attention"
        raise SequenceError(
            f"layers of {found} are not built for sequences split over ranks; train this model"
            " without sequence parallelism"
        )


def _check_length(seq_length: int | None, size: int) -> None:
    if seq_length is None or seq_length % size:
        raise SequenceError(
            f"seq_length is {seq_length}; sequences of a fixed length need one that"
            f" sequence_parallel_size ({size}) divides, or pass seq_length_is_variable=True"
        )


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
    length: int | None,
) -> None:
    where = type(module).__name__
    if query.shape[2] != key.shape[2]:
        raise SequenceError(
            f"{where} attends from {query.shape[2]} positions to {key.shape[2]}: attention to"
            " another sequence, or to cached positions, is not built for sequences split over ranks"
        )
    if length is not None and query.shape[2] != length:
        raise SequenceError(
            f"{where} got {query.shape[2]} positions on this rank, but seq_length implies"
            f" {length} on each; pass seq_length_is_variable=True if lengths differ"
        )
    if kwargs.get("position_bias") is not None:
        raise SequenceError(
            f"{where} adds a bias between positions, which is not built for sequences split over"
            " ranks; train this model without sequence parallelism"
        )
    if mask is not None and not getattr(module, "is_causal", True):
        raise SequenceError(
            f"{where} attends in both directions with a mask, which covers only a rank's"
            " slice; pass batches without padding"
        )


# ---- positions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of whole sequences."""

    whole: Tensor
    """[..., length]."""
    documents: tuple[tuple[int, ...], ...] | None
    """Lengths of the documents in each row; None if each row is one."""

    def numbered(self) -> Tensor | None:
        """Return the number of each position's document, [batch, length]; None as above."""
        if self.documents is None:
            return None
        rows = []
        for lengths in self.documents:
            numbers = torch.arange(len(lengths), device="cpu")
            rows.append(numbers.repeat_interleave(torch.tensor(lengths, device="cpu")))
        return on_device(torch.stack(rows), self.whole.device)


def gather_positions(mine: Tensor, group: dist.ProcessGroup) -> Positions:
    """Join the positions [..., length / ranks] of all ranks."""
    size = dist.get_world_size(group)
    found = mine.new_empty(size, *mine.shape)
    labelled(
        "positions of whole sequences",
        all_gather_into_tensor,
        found.flatten(0, 1) if mine.dim() > 1 else found.flatten(),
        mine.contiguous(),
        group=group,
    )
    whole = torch.cat(list(found), dim=-1)
    return Positions(whole, documents_in(whole) if whole.dim() == 2 else None)


def documents_in(positions: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the runs of consecutive positions in each row; None if all are one."""
    if not has_values(positions):
        return None  # a plan
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    on_host = read_on_host(breaks, "where packed documents begin")
    if not on_host.any():
        return None
    length = positions.shape[1]
    found = []
    for row in on_host:
        starts = [0, *(row.nonzero()[:, 0] + 1).tolist(), length]
        found.append(tuple(b - a for a, b in pairwise(starts)))
    return tuple(found)


class PositionsCache:
    """The positions of the latest forward, which all its layers use."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._mine: Tensor | None = None
        self._version = -1
        self._found: Positions | None = None

    def forget(self) -> None:
        """Drop them: another forward starts, possibly with the same tensor on only some ranks."""
        self._mine = self._found = None

    def of(self, mine: Tensor) -> Positions:
        """Return the positions of whole sequences; all ranks must make the same calls."""
        if self._found is None or self._mine is not mine or self._version != mine._version:
            self._found = gather_positions(mine, self._group)
            self._mine, self._version = mine, mine._version
        return self._found
