"""Builds the wheel of this folder (PEP 517), and refuses where DeepSpeed itself is installed.

It needs nothing but Python, so that `pip install ./compat/deepspeed-stub` asks no index.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_MARK = "_led_to_hadal.py"
_VERSION = re.search(r'version = "([^"]+)"', (_HERE / "pyproject.toml").read_text())[1]
_INFO = f"deepspeed-{_VERSION}.dist-info"
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {_VERSION}
Summary: Hadal under the name of DeepSpeed: leads `import deepspeed` to hadal.compat
License: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: hadal-train
"""
_COMMANDS = {
    "deepspeed": "run",
    "ds": "run",
    "deepspeed.pt": "run",
    "ds_report": "report",
    "dsr": "report",
    "ds_ssh": "ssh",
    "ds_bench": "bench",
    "ds_elastic": "elastic",
    "ds_io": "io",
    "ds_nvme_tune": "io",
}
_ENTRY_POINTS = "[console_scripts]\n" + "".join(
    f"{name} = hadal.cli.deepspeed:{does}\n" for name, does in _COMMANDS.items()
)
_WHEEL = "Wheel-Version: 1.0\nGenerator: hadal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None
) -> str:
    """Write the wheel, and return its name."""
    _refuse_to_replace_deepspeed()
    files = {
        f"deepspeed/{name}": (_HERE / "deepspeed" / name).read_text()
        for name in ("__init__.py", _MARK)
    }
    files |= {f"{_INFO}/METADATA": _METADATA, f"{_INFO}/WHEEL": _WHEEL}
    files[f"{_INFO}/entry_points.txt"] = _ENTRY_POINTS
    files[f"{_INFO}/RECORD"] = _record(files)
    name = f"deepspeed-{_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name


def _refuse_to_replace_deepspeed() -> None:
    """Raise where DeepSpeed is installed: pip would remove it for a distribution of its name."""
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        found = Path(place, "deepspeed")
        if (found / "__init__.py").exists() and not (found / _MARK).exists():
            raise RuntimeError(
                f"DeepSpeed itself is installed in {found}, and this would take its place; run"
                " `pip uninstall deepspeed` first, or take another environment"
            )


def _record(files: dict[str, str]) -> str:
    lines = [f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items()]
    return "".join(lines) + f"{_INFO}/RECORD,,\n"


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.decode().rstrip('=')}"
