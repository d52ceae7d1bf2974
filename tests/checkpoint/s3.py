"""An S3 server for tests, and the environment in which s3fs finds it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hadal import comm
from hadal.checkpoint import remote
from hadal.checkpoint.files import location_of

NEEDED = ("s3fs", "moto", "flask_cors")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needed = pytest.mark.skipif(bool(MISSING), reason=f"needs the packages {', '.join(MISSING)}")


@contextmanager
def server(fault: str, every: int = 9) -> Iterator[str]:
    """Run a server; yield its address."""
    program = str(Path(__file__).with_name("s3_server.py"))
    command = [sys.executable, "-W", "ignore", program, fault, str(every)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def point_at(address: str, read_timeout_s: float) -> None:
    """Let s3fs find the server as users do, by the environment."""
    import fsspec
    import s3fs

    os.environ.update(
        AWS_ENDPOINT_URL=address,
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",
        AWS_DEFAULT_REGION="us-east-1",
    )
    fsspec.config.conf["s3"] = {"config_kwargs": {"read_timeout": read_timeout_s}}
    s3fs.S3FileSystem.clear_instance_cache()


def make_bucket(bucket: str) -> None:
    """Make a bucket."""
    remote._Requests(location_of(f"s3://{bucket}")).filesystem.mkdir(bucket)


def use(address: str, bucket: str) -> str:
    """Let s3fs find the server; return a URL in a new bucket."""
    point_at(address, 1)
    if comm.get_rank() == 0:
        make_bucket(bucket)
    if comm.is_initialized():
        comm.barrier()
    return f"s3://{bucket}/run"
