"""Times of each module's forward, by events on the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

from hadal.device import Stamp, is_in_backward


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
