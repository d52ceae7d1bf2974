"""Threads that look for something again and again, until the program ends."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from hadal.device import device_thread

_LAST_LOOK_S = 2.0


def start_polling(
    name: str, is_over: threading.Event, poll: Callable[..., None], *given: Any
) -> Callable[[], None]:
    """Start a daemon thread that calls `poll(*given)`, which returns once `is_over` is set.

    Returns:
        A function that ends the thread. It also runs at exit: a thread that queries a store while
        the interpreter shuts down would abort the process.
    """
    thread = device_thread(poll, *given, name=name, daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        thread.join(_LAST_LOOK_S)
        atexit.unregister(stop)

    atexit.register(stop)
    return stop
