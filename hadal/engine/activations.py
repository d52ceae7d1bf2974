"""The activations and operations of one forward and backward, without values.

The model runs with fake tensors: their shapes and lifetimes are those of a real micro-step, so
that activations are what autograd really saves, of any model. They say that they are on a CPU,
where attention takes the same few tensors as the fused kernels of accelerators.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import Ranks
from hadal.engine.mistakes import mixed_dtypes
from hadal.engine.precision import Casting
from hadal.errors import ModelError
from hadal.listener import Forward, Listener
from hadal.plugins.pipeline.later_weights import Later, LaterWeights, root_of
from hadal.zero.grouping import Unit, repeated_blocks

_HOST = torch.device("cpu")
_VALUES_NEEDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_OF_ONE_DTYPE = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_GROUPED = torch.ops.aten._grouped_mm.default
_DROPOUT = inspect.signature(nn.functional.dropout)
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}
LossOf = Callable[[Any], Tensor]


class Held(NamedTuple):
    """Bytes of activations and temporary tensors."""

    total: int = 0
    logits: int = 0
    """Those of tensors over the vocabulary among them: logits, and the loss's own."""


class BlockMemory(NamedTuple):
    """The bytes that the use of one repeated block leaves behind for backward."""

    name: str
    kind: str
    """The name of its class."""
    kept: int
    """Bytes kept until backward, its output included."""
    recomputed: int
    """The same if it is recomputed in backward: its output, which the next block saves."""


class Exchange(NamedTuple):
    """A kind of collective among the ranks of one model."""

    part: str
    """Its purpose."""
    kind: str
    """all_reduce, all_gather, reduce_scatter or all_to_all"""
    ranks: tuple[int, ...]
    dtype: torch.dtype


class Products(NamedTuple):
    """Products of one kind: matrix products, convolutions or attention."""

    calls: int = 0
    nbytes: int = 0
    """Bytes read and written."""
    flops: int = 0


@dataclass(slots=True)
class Segment:
    """The part of a micro-step from the beginning of one unit's use to that of the next."""

    unit: str
    """The unit's name; empty before the first."""
    until: int = 0
    """The number of the segment before which the use ends."""
    products: dict[str, Products] = field(default_factory=dict)
    """Counts by kind: matrices, convolution, attention."""
    moved: int = 0
    """Bytes that all other operations read and write."""
    kernels: int = 0
    """All other operations on values."""
    exchanges: dict[Exchange, list[int]] = field(default_factory=dict)
    """The bytes of each message."""
    arrived: list[str] = field(default_factory=list)
    """Parameters whose gradients are complete, by full name, in their order."""
    peaks: list[Held] = field(default_factory=lambda: [Held()])
    """The most bytes up to each arrival, with the gradient that arrives, and after the last one."""

    @property
    def flops(self) -> int:
        """The floating-point operations of all products."""
        return sum(products.flops for products in self.products.values())

    @property
    def peak(self) -> Held:
        """The most bytes."""
        return max(self.peaks)


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One forward and backward."""

    forward: list[Segment]
    backward: list[Segment]
    kept: int
    """The bytes that are held when backward begins."""
    inputs_of_recomputed: int
    """The bytes of the inputs that modules keep which are recomputed."""
    blocks: list[BlockMemory]
    """Each use of a repeated block."""
    later_from: int = sys.maxsize
    """The segment of backward from which on deferred gradients of weights are computed."""
    later: int = 0
    """The bytes that are kept for them meanwhile."""

    @property
    def peak(self) -> int:
        """The most bytes of activations and temporary tensors."""
        return max(segment.peak.total for segment in (*self.forward, *self.backward))


class Features(NamedTuple):
    """Features of an engine that change the forward of its model."""

    recomputed: Collection[str] = ()
    """The modules that are recomputed in backward, by full name."""
    sequence: Ranks | None = None
    """The ranks that share each sequence."""
    groups: Mapping[Any, str] = {}
    """The purposes of groups of ranks, by their names or ranks; others are of experts."""
    fuses: bool = False
    """True if the device has fused kernels, as accelerators do."""
    defers: bool = False
    """True if linear layers compute the gradients of their weights after all of a backward."""


def trace(
    model: nn.Module,
    units: Sequence[Unit],
    batch: Any,
    casting: Casting,
    dtypes: Mapping[nn.Parameter, torch.dtype],
    features: Features,
    loss_of: LossOf | None = None,
    *,
    with_values: bool = False,
) -> MicroStep:
    """Run one micro-step of a copy of the model.

    Args:
        model: the model, which may be on meta; it is not changed.
        units: its units.
        batch: what a program passes to the model: a mapping of keyword arguments, a sequence of
            arguments, one tensor, or a `Forward` with both. Only shapes and dtypes are used, unless
            `with_values`.
        casting: the casts of the forward.
        dtypes: the dtypes that the parameters are computed in.
        features: what changes the forward.
        loss_of: returns the loss from the model's output; the default is `loss`, or the first
            tensor of the output.
        with_values: compute for real, on the CPU; for models whose shapes depend on values.

    Raises:
        ModelError: the model cannot run without values, or raised an error; or it has no loss.
    """
    mode = None if with_values else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # wherever the caller asks
        stack.enter_context(torch.enable_grad())
        stack.callback(_FAKE_LOG.setLevel, _FAKE_LOG.level)
        _FAKE_LOG.setLevel(logging.CRITICAL)  # what fails is told below
        stack.enter_context(mode or nullcontext())
        stack.enter_context(_FusedDropout() if features.fuses else nullcontext())
        running = copied(model, _HOST, with_values=with_values)
        inner = dict(running.named_modules())
        for name, parameter in model.named_parameters():
            own = running.get_parameter(name)
            own.data = own.data.to(dtypes.get(parameter, parameter.dtype))
            for hook in (parameter._backward_hooks or {}).values():
                own.register_hook(hook)  # sums over tensor-parallel ranks
        copies = {id(m): inner[name] for name, m in model.named_modules()}
        recorder = _Recorder(units, copies, features.groups)
        recorder.watch(running)
        inputs: list[int] = []
        for name in features.recomputed:
            _note_inputs(inner[name], inputs)
        later = LaterWeights(running) if features.defers else None
        args, kwargs = _arguments(batch, with_values=with_values)
        given = Forward(args, kwargs, updates=0, micro_step=0, is_training=model.training)
        for listener in _listeners(running, features):
            given = listener.before_forward(given) or given
        args, kwargs = given.args, given.kwargs
        try:
            recorder.add(tensors_in((args, kwargs)))
            stack.enter_context(recorder)
            output = casting.run(running, _HOST, args, kwargs)
            loss = _loss(output) if loss_of is None else loss_of(output)
            del output
            held = recorder.now.total
            recorder.turn()
            loss.backward()
            if later is not None:
                del loss
                recorder.run_later(later.take())
        except Exception as error:  # code of the model may raise any error
            mixed = mixed_dtypes(str(error), args, kwargs, running)
            told = f" {_told(error, batch)}" if mixed is None else f": {mixed}"
            raise ModelError(f"{type(model).__name__}{told}") from error
    return MicroStep(
        recorder.forward,
        recorder.segments,
        held,
        sum(inputs),
        recorder.blocks,
        recorder.later_from,
        recorder.later,
    )


class _FusedDropout(TorchFunctionMode):
    """Dropout as accelerators compute it, which keep a byte per element for backward."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.dropout:
            return function(*args, **kwargs)
        given = _DROPOUT.bind(*args, **kwargs)
        given.apply_defaults()
        values, p, trains, _ = given.args
        return torch.native_dropout(values, p, trains)[0] if trains and 0 < p < 1 else values


def _listeners(model: nn.Module, features: Features) -> Iterator[Listener]:
    """Yield those of an engine's listeners that change its forward."""
    recomputed, sequence = features.recomputed, features.sequence
    if sequence is not None and hasattr(getattr(model, "config", None), "_attn_implementation"):
        from hadal.plugins.sequence.training import SequenceSlices  # for this alone

        yield SequenceSlices(model, sequence.group)
    if recomputed:
        from hadal.plugins.activation_checkpointing import (  # for this alone
            Recomputation,
            RecomputedModules,
        )

        modules = {name: model.get_submodule(name) for name in recomputed}
        listener = RecomputedModules(model, modules, Recomputation())
        listener.on_attach(None)
        yield listener


def copied(model: nn.Module, device: torch.device, *, with_values: bool = False) -> nn.Module:
    """Return a copy of a model on a device; an engine's hooks and shards stay behind."""
    # Groups of ranks are not copied.
    memo: dict[int, Any] = {id(group): group for group in distributed_c10d._world.pg_map}
    layers = (one for one in getattr(model, "_layer_specs", ()) if isinstance(one, nn.Module))
    for module in chain(model.modules(), *(layer.modules() for layer in layers)):
        others = [value for value in vars(module).values() if isinstance(value, Tensor)]
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *others):
            if id(tensor) in memo:
                continue
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if with_values and tensor.device.type != "meta":
                made.copy_(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
    twin = copy.deepcopy(model, memo)
    sequences = sys.modules.get("hadal.plugins.sequence.huggingface")
    if sequences is not None:
        sequences.attach_copies(memo)
    return twin


def _arguments(batch: Any, *, with_values: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def made(tensor: Tensor) -> Tensor:
        if with_values:
            return tensor.detach().to(_HOST)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST)
        return made.requires_grad_(tensor.requires_grad)

    batch = tree_map_only(Tensor, made, batch)
    if isinstance(batch, Forward):
        return batch.args, dict(batch.kwargs)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = next(iter(tensors_in(output)), None)
    if loss is None:
        raise TypeError(f"a {type(output).__name__} without a tensor is no loss; pass loss_of")
    if not loss.requires_grad:
        raise TypeError("its loss depends on no parameter that is trained")
    return loss if loss.dim() == 0 else loss.float().sum()


def _told(error: Exception, batch: Any) -> str:
    """Return what an error of a planned micro-step means."""
    if isinstance(error, _VALUES_NEEDED):
        return (
            f"cannot be planned without values: {error}; its shapes depend on values. Plan with one"
            " real micro-batch on the CPU: with_values=True (hadal plan --with-values)"
        )
    return (
        f"failed in the planned micro-step: {error!r}; the batch has {_shown(batch)}. Give one that"
        " its forward takes (hadal plan: --model MODULE:FUNCTION, which returns the model and one"
        " micro-batch)"
    )


def _shown(batch: Any) -> str:
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
    return f"tensors of shapes {', '.join(map(str, shapes))}" if shapes else "no tensor"


def _note_inputs(module: nn.Module, found: list[int]) -> None:
    """Append the bytes of the inputs of a module's first call."""

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        own = {id(p) for p in module.parameters()}
        tensors = tensors_in((args, kwargs))
        found.append(sum(t.nbytes for t in tensors if t.requires_grad and id(t) not in own))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Recorder(TorchDispatchMode):
    """Records memory and operations between uses of units.

    A use in backward begins with the gradient of the module's output, or with its recomputation,
    and ends with the last gradient of its parameters, or if none is trained, with the next use.
    """

    def __init__(
        self, units: Sequence[Unit], copies: Mapping[int, nn.Module], groups: Mapping[Any, str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = Held()
        self.blocks: list[BlockMemory] = []
        self.forward: list[Segment] = []
        self.segments = [Segment("")]
        self._known = WeakIdKeyDictionary()
        self._open: dict[str, Segment] = {}
        self._is_back = False
        self._units = units
        self._groups = groups
        self._copies = copies
        self._missing: dict[str, int] = {}
        self._vocabulary = 0
        self._begun: dict[str, int] = {}
        self.later_from, self.later = sys.maxsize, 0

    # ---- hooks -----------------------------------------------------------------------------------

    def watch(self, copied: nn.Module) -> None:
        """Watch the units and the gradients of the copy, and leave its own tensors out."""
        for tensor in (*copied.parameters(), *copied.buffers()):
            self._known[tensor.untyped_storage()] = True
        self._vocabulary = _vocabulary(copied)
        for name in repeated_blocks(copied):
            block = copied.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name))
            block.register_forward_hook(partial(self._leave, name))
        waits: dict[str, list[str]] = {}
        for unit in self._units:
            module = self._copies[id(unit.module)]
            module.register_forward_pre_hook(partial(self._begin, unit.name), prepend=True)
            module.register_forward_hook(partial(self._end, unit.name))
            for member in unit.members:
                if member.parameter.requires_grad:
                    waits.setdefault(member.name, []).append(unit.name)
        for name, parameter in copied.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    partial(self._arrive, name, waits.get(name, ()))
                )
        self._waits = waits

    def _enter(self, name: str, *_: Any) -> None:
        self._begun[name] = self.now.total

    def _leave(self, name: str, block: nn.Module, _: Any, output: Any) -> None:
        own = sum(tensor.nbytes for tensor in tensors_in(output))
        kept = self.now.total - self._begun[name]
        if not self._is_back:
            self.blocks.append(BlockMemory(name, type(block).__name__, kept, own))

    def turn(self) -> None:
        """Begin backward."""
        self._close_all()
        self.forward, self._is_back = self.segments, True
        self.segments = [Segment("", peaks=[self.now])]
        for units in self._waits.values():
            for unit in units:
                self._missing[unit] = self._missing.get(unit, 0) + 1

    def run_later(self, deferred: list[Later]) -> None:
        """Compute deferred gradients of weights, after the rest of backward."""
        kept = (tensor for one in deferred for tensor in (one.input, one.gradient))
        storages = (tensor.untyped_storage() for tensor in kept)
        self.later = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        self._close_all()
        self.later_from = len(self.segments)
        self.segments.append(Segment("", peaks=[self.now]))
        root = root_of(deferred)
        if root is not None:
            root.backward()

    def _begin(self, unit: str, *_: Any) -> None:
        if unit in self._open:
            return
        for name in [n for n in self._open if self._is_back and not self._missing.get(n)]:
            self._close(name)
        segment = Segment(unit, peaks=[self.now])
        self.segments.append(segment)
        self._open[unit] = segment

    def _end(self, unit: str, module: nn.Module, _: Any, output: Any) -> None:
        if self._is_back:
            return
        self._close(unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin, unit))

    def _arrive(self, name: str, units: Sequence[str], parameter: Tensor) -> None:
        parameter.grad = None
        segment = self.segments[-1]
        segment.arrived.append(name)
        segment.peaks.append(self.now)
        for unit in units:
            self._missing[unit] -= 1
            if not self._missing[unit] and unit in self._open:
                self._close(unit)

    def _close(self, unit: str) -> None:
        self._open.pop(unit).until = len(self.segments)

    def _close_all(self) -> None:
        for name in list(self._open):
            self._close(name)

    def __exit__(self, *raised: Any) -> None:
        self._close_all()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is _GROUPED and args[0].dtype != torch.bfloat16 and is_fake(args[0]):
            # Without values, torch knows it in bfloat16 alone.
            low = [one.to(torch.bfloat16) for one in args[:2]]
            out = operation(*low, *args[2:], **kwargs).to(args[0].dtype)
        else:
            out = operation(*args, **kwargs)
        made = tensors_in(out)
        if operation.namespace == "c10d":
            self._exchange(operation, args)
        elif operation.namespace != "prim" and not _is_view(operation):
            read = tensors_in((args, kwargs))
            if operation in _OF_ONE_DTYPE and len({leaf.dtype for leaf in read}) > 1:
                # Without values torch does not check it.
                raise RuntimeError(f"{operation.name()} expects matrices of the same dtype")
            moved = sum(tensor.nbytes for tensor in (*read, *made))
            from hadal.plugins.profiling.counting import FORMULAS  # for this alone

            formula = FORMULAS.get(operation.overloadpacket)
            segment = self.segments[-1]
            if formula is None:
                segment.moved += moved
                segment.kernels += 1
            else:
                found: Any = formula(*args, **kwargs, out_val=out)
                flops = int(getattr(found, "products", found))
                name = operation.name()
                kind = next((k for k in ("convolution", "attention") if k in name), "matrices")
                calls, nbytes, before = segment.products.get(kind, Products())
                segment.products[kind] = Products(calls + 1, nbytes + moved, before + flops)
        self.add(made)
        return out

    def _exchange(self, operation: Any, args: Sequence[Any]) -> None:
        """Count a collective: its message is the larger of what is sent and what is received."""
        kind = _COLLECTIVES.get(operation._schema.name.removeprefix("c10d::"))
        group = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
        if kind is None or group is None:
            return
        found = dist.ProcessGroup.unbox(group)
        sizes = [
            (sum(tensor.nbytes for tensor in tensors), tensors[0].dtype)
            for tensors in map(tree_leaves, args[:2])
            if tensors and isinstance(tensors[0], Tensor)
        ]
        nbytes, dtype = max(sizes, key=lambda size: size[0])
        ranks = tuple(dist.get_process_group_ranks(found))
        named = (self._groups.get(name) for name in (found.group_name, ranks))
        part = next(filter(None, named), "experts")
        key = Exchange(part, kind, ranks, dtype)
        self.segments[-1].exchanges.setdefault(key, []).append(nbytes)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of tensors that are new, until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._known:
                nbytes = storage.nbytes()
                logits = nbytes * (tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary)
                self._known[storage] = True
                self._count(nbytes, logits)
                weakref.finalize(storage, self._count, -nbytes, -logits)
        peaks = self.segments[-1].peaks
        peaks[-1] = max(peaks[-1], self.now)

    def _count(self, nbytes: int, logits: int) -> None:
        self.now = Held(self.now.total + nbytes, self.now.logits + logits)


def _vocabulary(model: nn.Module) -> int:
    """Return the last dimension of logits: the outputs of the last linear layer that has as many
    as an embedding has rows, else the most rows of one; 0 without embeddings.
    """
    rows = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    heads = [one.out_features for one in model.modules() if isinstance(one, nn.Linear)]
    return [0, *sorted(rows), *(width for width in heads if width in rows)][-1]


def _is_view(operation: Any) -> bool:
    return any(result.alias_info is not None for result in operation._schema.returns) and not (
        operation._schema.is_mutable
    )
