"""Profiler for direct use by programs, `FlopsProfiler` and `get_model_profile`, and its timer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

from hadal.device import Stamp, current_device, is_in_backward, synchronize
from hadal.errors import UsageError, expect_one_of
from hadal.plugins.profiling.counting import Counter
from hadal.plugins.profiling.profile import (
    Profile,
    ReportLayout,
    Tree,
    aggregated,
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    standalone_report,
    tree_of,
    write_report,
)


class ModuleTimes:
    """Timer of a model's modules between `start` and `stop`. Nothing waits for the device.

    Its hooks exist only in between, so training pays nothing otherwise. Recomputation in
    backward is not timed, nor are modules inside a compiled graph.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, records: bool = False) -> None:
        """Create a timer; `records` adds a named span for each forward to torch profiles."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._device = device
        self._records = records
        self._running: list[tuple[int, Stamp, Any]] = []
        self._spans: dict[str, list[tuple[Stamp, Stamp]]] = {}
        self._hooks = ExitStack()

    def start(self) -> None:
        """Start timing."""
        for handle in (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ):
            self._hooks.callback(handle.remove)

    def stop(self) -> None:
        """Stop timing."""
        self._hooks.close()
        self._running.clear()

    def seconds(self) -> Mapping[str, float]:
        """Return the total seconds of each module's forwards, by its name.

        The device must have finished them; see `hadal.device.synchronize`.
        """
        return {
            name: sum(stop.seconds_since(start) for start, stop in spans)
            for name, spans in self._spans.items()
        }

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or is_in_backward():
            return
        if id(module) in self._names:
            record = None
            if self._records:
                record = record_function(self._names[id(module)] or type(module).__name__)
                record.__enter__()
            self._running.append((id(module), Stamp(self._device), record))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or is_in_backward():
            return
        if self._running and self._running[-1][0] == id(module):
            _, start, record = self._running.pop()
            stop = Stamp(self._device)
            self._spans.setdefault(self._names[id(module)], []).append((start, stop))
            if record is not None:
                record.__exit__(None, None, None)


_profilers: WeakSet[FlopsProfiler] = WeakSet()


class FlopsProfiler:
    """Counter of the operations of a model's forward, which also times its modules.

    Between `start_profile` and `stop_profile` every forward is counted; the results stay until
    `end_profile`. Matrix products, convolutions and attention are counted exactly, wherever they
    are called; norms, activation functions, softmax and pooling as a few operations per element.

    Args:
        model: the module whose forwards are counted.
        ds_engine: the engine that trains it. Its own profile, once there is one, is printed
            instead of the one counted here.
        recompute_fwd_factor: the fraction of the forward that backward repeats, in addition to
            its own cost of two forwards.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter = Counter()
        self._times: ModuleTimes | None = None
        self._tree: Tree | None = None
        self.profile: Profile | None = None
        """The engine's profile of one update, once there is one."""
        _profilers.add(self)

    # ---- start and stop ------------------------------------------------------------------------

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Start counting. `ignore_list` is accepted and has no effect, as in DeepSpeed."""
        self._counter.stop()
        if self._times is not None:
            self._times.stop()
        self._counter, self._times, self._tree = Counter(), None, None
        self.started = True
        self._times = ModuleTimes(self.model, _device_of(self.model))
        self._times.start()
        self._counter.start()

    def stop_profile(self) -> None:
        """Stop counting. The results stay readable."""
        if self.started and self._counter.is_counting:
            self._counter.stop()
            assert self._times is not None  # they are started together
            self._times.stop()

    def end_profile(self) -> None:
        """Stop counting, and drop the results."""
        self.stop_profile()
        self.started = False
        self._counter, self._times, self._tree = Counter(), None, None

    # ---- results -------------------------------------------------------------------------------

    @property
    def tree(self) -> Tree:
        """The modules with their counts so far.

        Raises:
            UsageError: nothing was counted, or it was dropped.
        """
        if self.profile is not None and not self.started:
            return self.profile.tree
        if not self.started or self._times is None:
            raise UsageError("the profiler holds no results; call start_profile() first")
        self.stop_profile()
        if self._tree is None:
            device = _device_of(self.model)
            if device.type != "cpu":
                synchronize(device)
            counts = self._counter.forward_of(self.model)
            self._tree = tree_of(self.model, counts, self._times.seconds())
        return self._tree

    @property
    def flops(self) -> int:
        """Operations of the forward."""
        return self.tree.forward.flops

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward."""
        return self.tree.forward.macs

    @property
    def params(self) -> int:
        """Elements of the model's parameters."""
        return self.tree.parameters

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the operations of the forward."""
        return number_to_string(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-accumulates of the forward."""
        return macs_to_string(self.macs) if as_string else self.macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the forward."""
        seconds = self.tree.seconds or 0.0
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the elements of the model's parameters."""
        return params_to_string(self.params) if as_string else self.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the report, or write it and create its directory. Does nothing if not started."""
        layout = ReportLayout(module_depth, top_modules, detailed)
        if self.profile is not None and not self.started:
            write_report(self.profile, layout, output_file)
            return
        if not self.started:
            return
        text = standalone_report(self.tree, layout, profile_step) + "\n"
        if output_file is None:
            sys.stdout.write(text)
            return
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(output_file).write_text(text, encoding="utf-8")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the largest modules at each depth. Does nothing if not started."""
        if self.started or self.profile is not None:
            sys.stdout.write(aggregated(self.tree, ReportLayout(module_depth, top_modules)) + "\n")


def profiled(module: nn.Module) -> Tree:
    """Return the counts of a module of a model that a profiler has counted.

    Raises:
        UsageError: there is no such profiler.
    """
    for profiler in [one for one in _profilers if one.started]:
        for path, each in profiler.model.named_modules():
            if each is module:
                tree = profiler.tree
                for name in path.split(".") if path else ():
                    tree = next(child for child in tree.children if child.name == name)
                return tree
    raise UsageError(
        f"no FlopsProfiler has counted this {type(module).__name__}; call start_profile() on one of"
        " its model, run a forward, and ask before end_profile()"
    )


def get_module_flops(module: nn.Module) -> int:
    """Return the operations of a module's forward, children included, that a profiler counted."""
    return profiled(module).forward.flops


def get_module_macs(module: nn.Module) -> int:
    """Return the multiply-accumulates of a module's forward."""
    return profiled(module).forward.macs


def get_module_duration(module: nn.Module) -> float:
    """Return the seconds of a module's forward; 0 if it was not timed."""
    return profiled(module).seconds or 0.0


def get_model_profile(  # noqa: PLR0913 - the signature is DeepSpeed's
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Run a model once and count its operations. Leaves the model in evaluation mode.

    Args:
        model: the module to run.
        input_shape: the shape of one input tensor, of its first parameter's dtype and
            device.
        args: positional arguments to call it with, if there is no `input_shape`.
        kwargs: keyword arguments to call it with.
        print_profile: print the report, or write it to `output_file`.
        detailed: include the tree of all modules in the report.
        module_depth: the depths whose largest modules are listed; -1 lists all.
        top_modules: how many classes are listed at each depth.
        warm_up: forwards before the one that is counted.
        as_string: return the results as text with units.
        output_file: the file to write the report to.
        ignore_modules: accepted without effect, as in DeepSpeed.
        mode: "forward" calls the model, "generate" its `generate`.

    Returns:
        The forward's floating-point operations, multiply-accumulates, and parameters.

    Raises:
        UsageError: `model` is not a module, or there is nothing to call it with.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"get_model_profile: model must be a torch.nn.Module, got {kind}")
    expect_one_of(("forward", "generate"), "get_model_profile: mode", mode)
    given, named = _inputs(model, input_shape, args, kwargs or {})
    call: Callable[..., Any] = model if mode == "forward" else getattr(model, mode)
    profiler = FlopsProfiler(model)
    model.eval()
    for _ in range(warm_up):
        with torch.no_grad():
            call(*given, **named)
    profiler.start_profile(ignore_list=ignore_modules)
    try:
        call(*given, **named)
    except BaseException:
        profiler.end_profile()
        raise
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    tree = profiler.tree
    profiler.end_profile()
    flops, macs, numel = tree.forward.flops, tree.forward.macs, tree.parameters
    if as_string:
        return number_to_string(flops), macs_to_string(macs), params_to_string(numel)
    return flops, macs, numel


def _inputs(
    model: nn.Module, shape: tuple[int, ...] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if shape is None:
        if not len(args) and not kwargs:
            raise UsageError("get_model_profile: pass input_shape, or args and kwargs")
        return args, kwargs
    if not isinstance(shape, tuple) or not shape:
        raise UsageError(
            f"get_model_profile: input_shape must be a tuple of at least one size, got {shape!r}"
        )
    first: Tensor | None = next(model.parameters(), None)
    like = torch.empty(()) if first is None else first
    return (torch.ones(shape, dtype=like.dtype, device=like.device),), kwargs


def _device_of(model: nn.Module) -> torch.device:
    with suppress(StopIteration):
        return next(model.parameters()).device
    return current_device()
