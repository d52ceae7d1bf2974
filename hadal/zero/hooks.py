"""Hooks on parameters for gradients and on units for weights."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hadal.device import (
    backward_watched,
    call_outside_graphs,
    captures_graphs,
    frames_compiled,
    keep_eager,
    modules_running,
    transform_running,
    unwatched,
)
from hadal.errors import UsageError
from hadal.zero.bucket import Bucket
from hadal.zero.gathering import Gathering
from hadal.zero.gradients import Gradients
from hadal.zero.grouping import Unit
from hadal.zero.parameters import QUESTIONS, fills
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.views import is_any_under_way


def _is_compiler_there() -> bool:
    return "torch._dynamo" in sys.modules


class _Own:
    """A hook of one model; deep copies and pickles of the model do not contain it.

    It stays out of compiled graphs, because a graph must not trace moves of memory. The compiler
    takes about a second to import, so it is used only once it has been imported.
    """

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act
        self.__qualname__ = act.__qualname__  # as functions have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiler_there():
            shield_hooks()
            return torch.compiler.disable(self._act)(*args, **kwargs)
        return self._act(*args, **kwargs)

    def call_shielded(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook; replaces `__call__` once the compiler is imported (`shield_hooks`)."""
        return self._act(*args, **kwargs)

    def __reduce__(self) -> Any:  # for deep copies too
        return _left_behind, ()


class _Entry(_Own):
    """A hook before code that may be compiled; it does nothing inside a compiled graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call_outside_graphs(self._act)


keep_eager(_Entry.__call__.__code__)


@functools.cache
def shield_hooks() -> None:
    """Keep all hooks out of compiled graphs from now on; call it before compiling.

    The call is replaced in the class. If each hook shielded itself, the compiler would trace that
    far into each one and keep a version of the call for it, up to a limit beyond which it compiles
    nothing.
    """
    setattr(_Own, "__call__", torch.compiler.disable(_Own.call_shielded))  # noqa: B010 - a method


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _left_behind() -> Callable[..., None]:
    return _nothing


class Hooks:
    """All hooks of one model. They are registered around units, so that a unit can be compiled."""

    def __init__(self, model: nn.Module, runtime: ZeroRuntime) -> None:
        self._model = model
        self._runtime = runtime
        self._handles: list[RemovableHandle] = []
        self._model_handles: list[RemovableHandle] = []
        # The parameters of each unit: a module's own, and those registered as read by it.
        self._refreshed: dict[tuple[nn.Module, bool], list[nn.Parameter]] = {}
        self._waiting: set[tuple[nn.Module, bool]] = set()
        self._forward = ExitStack()
        self._depth = 0
        self._call: FrameType | None = None
        self._frames_seen = -1
        self._exception_before: BaseException | None = None
        if _is_compiler_there():
            shield_hooks()
        self.watch_gradients(runtime.gradients)
        self.watch_units(runtime.gathering.uses.units)

    def watch_gradients(self, many: Iterable[Gradients]) -> None:
        """Collect the gradients of these buckets as they arrive."""
        for gradients in many:
            for index, parameter in enumerate(gradients.bucket.parameters):
                self._handles.append(self._watch_gradient(gradients.bucket, index, parameter))

    def watch_units(self, units: Iterable[Unit]) -> None:
        """Gather the weights of these units when they are used."""
        is_root_new = False
        for unit in units:
            self._watch_unit(unit)
            is_root_new = is_root_new or unit.module is self._model
        # Registered after the units' hooks, so that the model's own run first and last.
        if self._runtime.gathering.uses.units and (is_root_new or not self._model_handles):
            for handle in self._model_handles:
                handle.remove()
            self._model_handles = [
                self._model.register_forward_pre_hook(_Own(self._begin), prepend=True),
                self._model.register_forward_hook(_Own(self._end), always_call=True),
            ]

    def watch_refreshes(self, units: Iterable[Unit]) -> None:
        """Make these units wait for weights that the last update is still refreshing.

        Reads of parameters wait anyway, except those by kernels that torch does not know, and by
        compiled code. If that is a module with several units, it waits for all of them.
        """
        for unit in units:
            place = unit.module, unit.is_external
            self._refreshed[place] = [member.parameter for member in unit.members]
            late = [
                bucket
                for bucket in self._buckets_of(self._refreshed[place])
                if bucket.refreshes_late
            ]
            if isinstance(unit.module, torch.jit.ScriptModule):  # takes no hooks
                for bucket in late:
                    bucket.refresh_in_step()
            elif late:
                self._watch_refresh(place)
        if self._waiting:
            for module in self._model.modules():
                if any(True for _ in module.children()):
                    self._watch_refresh((module, False))

    def _watch_refresh(self, place: tuple[nn.Module, bool]) -> None:
        def before(is_compiled: bool) -> None:
            if is_any_under_way():
                read = place[0].parameters() if is_compiled else self._refreshed.get(place, ())
                for bucket in self._buckets_of(read):
                    bucket.wait_refresh()

        is_script = isinstance(place[0], torch.jit.ScriptModule)
        if place not in self._waiting and not is_script:
            self._waiting.add(place)
            handle = place[0].register_forward_pre_hook(_Entry(before), prepend=True)
            self._handles.append(handle)

    def _buckets_of(self, parameters: Iterable[nn.Parameter]) -> Iterable[Bucket]:
        bucket_of = self._runtime.bucket_of
        return dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in [*self._handles, *self._model_handles]:
            handle.remove()
        self._handles.clear()
        self._model_handles.clear()

    def end_interrupted(self) -> None:
        """End a forward that a `BaseException` (Ctrl-C) interrupted; torch calls no hook then."""
        if self._depth:
            self._depth = 1
            self._end()

    def end_left_over(self) -> None:
        """End an interrupted forward of the bare model, which no hook could end at the time."""
        if self._depth and not _is_running(self._call):
            self._depth = 0
            self._close(KeyboardInterrupt())

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Run a backward in which every read of a parameter finds its values."""
        survey = self._runtime.survey
        # Only the loss is the root of the whole graph: a gradient may arrive in a nested backward.
        with loss.register_hook(lambda _: _unseen(survey)):
            if not self._runtime.gathering.uses.units:
                loss.backward(retain_graph=retain_graph)
                return
            with self.reading():
                backward_watched(loss, retain_graph)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run a block in which every read of a parameter finds its values, announced or not.

        Forward and backward run inside it. If all weights are whole, it does nothing.
        """
        gathering = self._runtime.gathering
        if not gathering.uses.units:
            yield
            return
        watcher = ReadWatcher(_Own(gathering.on_read), gathering.on_view)
        with saving(gathering), watcher if gathering.kept_views.are_watched else nullcontext():
            yield

    def _watch_gradient(
        self, bucket: Bucket, index: int, parameter: nn.Parameter
    ) -> RemovableHandle:
        # Weak references, because Python's collector cannot look behind a hook that autograd holds.
        # The parameter refers to both (`access.register`), so they live as long as it does.
        known, held = weakref.ref(self._runtime), weakref.ref(bucket)

        def collect(_: Tensor) -> None:
            runtime, bucket = known(), held()
            if runtime is not None and bucket is not None:
                _unseen(lambda: runtime.on_gradient(bucket, index))

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(collect)
        return handle

    def _watch_unit(self, unit: Unit) -> None:
        gathering = self._runtime.gathering
        before_backward_of = self._runtime.before_backward_of

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            gathering.before_use(unit)
            if torch.is_grad_enabled():
                _on_gradient_of((args, kwargs), lambda: gathering.after_backward_of(unit))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                _on_gradient_of(output, lambda: before_backward_of(unit))
            gathering.after_use(unit)

        def before_state(*_: Any) -> None:
            if not gathering.gives_empty_state:
                gathering.check_readable(unit)

        def after_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            freed = {id(p) for bucket in gathering.freed(unit) for p in bucket.parameters}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in freed and f"{prefix}{name}" in state:
                    state[f"{prefix}{name}"] = parameter.new_empty(0)

        module = unit.module
        check = _Own(lambda *_: gathering.check_readable(unit))
        self._handles += [
            module.register_forward_pre_hook(_Own(before), prepend=True, with_kwargs=True),
            # Registered last: the user's own hooks may still read the weights.
            module.register_forward_hook(_Own(after), with_kwargs=True, always_call=True),
            module.register_state_dict_pre_hook(_Own(before_state)),
            module.register_state_dict_post_hook(_Own(after_state)),
            module.register_load_state_dict_pre_hook(check),
        ]

    def _begin(self, *_: Any) -> None:
        self.end_left_over()
        self._refuse_transform()
        if self._frames_seen != frames_compiled():
            self._refuse_captures()
        self._depth += 1
        if self._depth == 1:
            # The frame of the module call that the current hook belongs to
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
                frame = frame.f_back
            self._call = frame
            self._exception_before = sys.exc_info()[1]
            self._runtime.gathering.begin_forward()
            self._forward.enter_context(self.reading())

    def _refuse_transform(self) -> None:
        kind = transform_running()
        if kind is not None and self._depth == 0:
            raise UsageError(
                f"rank {self._runtime.ranks.rank}: the model was called in a transform of"
                f" torch.func ({kind}) at stage 3, where forward gathers weights from other ranks,"
                " which no transform can contain. Use torch.autograd.grad(..., create_graph=True)"
                " or torch.autograd.functional (jacobian, hessian), or stage 2;"
                " torch.func.functional_call alone works"
            )

    def _refuse_captures(self) -> None:
        names = {one: name for name, one in self._model.named_modules()}
        for module in (*names, *modules_running()):
            if captures_graphs(module):
                raise UsageError(
                    f"rank {self._runtime.ranks.rank}: {names.get(module) or 'the model'} is"
                    " compiled for CUDA graphs (by torch.compile's mode or options), which read"
                    " weights at fixed addresses, but sharded and offloaded weights are in new"
                    " memory at each use; compile it with the default mode or"
                    ' mode="max-autotune-no-cudagraphs", or use ZeRO stage 0, 1 or 2'
                )
        self._frames_seen = frames_compiled()

    def _end(self, *_: Any) -> None:
        if not self._depth:
            # torch calls this even if a hook of the user raised before `_begin`.
            return
        self._depth -= 1
        if self._depth == 0:
            # A hook that is always called is not informed if the forward raised.
            error = sys.exc_info()[1]
            self._close(None if error is self._exception_before else error)

    def _close(self, raised: BaseException | None) -> None:
        self._call = None
        self._forward.close()
        self._runtime.gathering.end_forward(raised)


def _is_running(wanted: FrameType | None) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None or wanted is None


def saving(gathering: Gathering) -> AbstractContextManager[None]:
    """Return a context in which gathered weights may be freed although autograd saved views."""
    if not gathering.uses.units:
        return nullcontext()

    def pack(tensor: Tensor) -> Any:
        bucket = gathering.uses.bucket_at(tensor)
        return tensor if bucket is None else _Saved(bucket, tensor)

    def unpack(saved: Any) -> Any:
        if not isinstance(saved, _Saved):
            return saved
        gathering.begin_use(saved.bucket)
        return saved.tensor()

    context: AbstractContextManager[None] = saved_tensors_hooks(_Own(pack), _Own(unpack))
    return context


class _Saved:
    """A view of a bucket that autograd saved; the bucket may be freed until backward.

    The view is recreated when it is needed, so that it does not count as one the user kept.
    """

    __slots__ = ("_offset", "_size", "_stride", "_tensor", "bucket")

    def __init__(self, bucket: Bucket, tensor: Tensor) -> None:
        self.bucket = bucket
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        is_plain = tensor.dtype == bucket.full.dtype and not (tensor.is_conj() or tensor.is_neg())
        self._tensor = None if is_plain else tensor

    def tensor(self) -> Tensor:
        """Return the tensor, once the bucket is gathered."""
        if self._tensor is not None:
            return self._tensor
        return self.bucket.full.as_strided(self._size, self._stride, self._offset)


class ReadWatcher(TorchFunctionMode):
    """A function mode that looks at the arguments of every operation before it runs.

    Parameters are passed to `on_read`. Plain tensors, which may be views of parameters, are passed
    to `on_view`, if given; a parameter that is filled with new values is passed to `on_fill`.
    """

    def __init__(
        self,
        on_read: Callable[[nn.Parameter], None],
        on_view: Callable[[Tensor], None] | None = None,
        on_fill: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_read = on_read
        self._on_view = on_view
        self._on_fill = on_fill

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._on_fill is not None and fills(func):
            values = [*args, *kwargs.values()]
            if isinstance(values[0], nn.Parameter):
                self._look(values[1:])
                self._on_fill(values[0])
                return func(*args, **kwargs)
        if func not in QUESTIONS:
            self._look(args)
        self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Any) -> None:
        for value in values:
            if type(value) is Tensor:
                # Not while a graph is compiled: looking at every tensor would split the graph.
                if self._on_view is not None and not torch.compiler.is_compiling():
                    self._on_view(value)
            elif isinstance(value, Tensor):
                # A graph is traced with gathered weights, and is valid only for those: before the
                # compiler runs one it compares strides, and those of a freed weight are zero.
                is_there = torch.compiler.is_compiling() and 0 not in value.stride()
                if isinstance(value, nn.Parameter) and not is_there:
                    self._on_read(value)
            elif type(value) in (list, tuple):
                self._look(value)


def _unseen(act: Callable[[], None]) -> None:
    """Call `act` outside function modes, which must not see the mechanism's own operations."""
    with unwatched():
        act()


def _on_gradient_of(value: Any, act: Callable[[], None]) -> None:
    """Call `act` each time the gradient of a tensor inside `value` is complete."""
    if isinstance(value, Tensor):
        # A leaf would keep the hook beyond this graph.
        if value.requires_grad and not value.is_leaf:
            value.register_hook(lambda _: _unseen(act))
    elif isinstance(value, dict):
        for item in value.values():
            _on_gradient_of(item, act)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _on_gradient_of(item, act)


_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")


@functools.cache
def watch_wrappers(is_kept: Callable[[nn.Parameter], bool]) -> None:
    """Refuse, from now on, torch's data-parallel wrappers for parameters that Hadal holds."""

    def refuse(parent: nn.Module, _name: str, module: nn.Module | None) -> None:
        if module is None or not type(parent).__module__.startswith(_WRAPPERS):
            return
        named = module.named_parameters()
        held = next((name for name, parameter in named if is_kept(parameter)), None)
        if held is not None:
            raise UsageError(
                f"{type(parent).__name__} was given a model whose parameters (such as {held})"
                " are sharded by hadal.zero.Init, or held by an engine: it cannot reduce their"
                " gradients. Pass the model to initialize instead. Accelerate chooses"
                " DistributedDataParallel if its configuration has `use_cpu: true`; remove it to"
                " train with the DeepSpeed plugin"
            )

    register_module_module_registration_hook(refuse)
