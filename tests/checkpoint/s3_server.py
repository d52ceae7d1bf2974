"""An S3 server on a free port of this machine, with faults: moto's, in a process of its own.

Run as a program, it prints its port; every so many requests fail in one way or another.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

FAULTS = ("none", "throttle", "drop", "stall", "etag")
LATE = {"late PUT": ("PUT",), "late DELETE": ("DELETE", "POST")}
"""The faults by which the `every`-th request of these methods for an object is delayed: it takes
effect after the request that repeats it, and after others."""
STALL_S = 4.0


class Faulty:
    """A WSGI application that fails at each `every`-th request; one ETag is wrong."""

    def __init__(self, inner: Callable[..., Iterable[bytes]], fault: str, every: int) -> None:
        self.inner, self.fault, self.every = inner, fault, every
        self.count = itertools.count(1)
        self.confusions = 1
        self.requests: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        is_due = next(self.count) % self.every == 0
        if is_due and self.fault == "throttle":
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>slower</Message></Error>"]
        if is_due and self.fault == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if self._is_late(environ) or (is_due and self.fault == "stall"):
            time.sleep(STALL_S)

        def changed(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            kept = [(name, value) for name, value in headers if name.lower() != "etag"]
            return start(status, [*kept, ("ETag", '"wrong"')], *more)

        is_part = "partNumber" in environ.get("QUERY_STRING", "")
        wrong = self.fault == "etag" and is_part and self.confusions > 0
        self.confusions -= wrong
        return self.inner(environ, changed if wrong else start)

    def _is_late(self, environ: dict[str, Any]) -> bool:
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        if method not in LATE.get(self.fault, ()) or (method == "POST" and query != "delete"):
            return False
        self.requests[environ["PATH_INFO"]] += 1
        return self.requests[environ["PATH_INFO"]] == self.every


def serve(fault: str, every: int) -> None:
    """Serve until the process is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Faulty(app, fault, every), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
