"""`zero_to_fp32.py` and `zero_to_torch.py`, which DeepSpeed users expect next to checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

from hadal.checkpoint.files import replace_file
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError

_TEXT = '''\
#!/usr/bin/env python
"""Write the {what} of a checkpoint in this folder: ./{name} . OUTPUT_FOLDER{more}"""

import sys

from hadal.cli.zero_to_fp32 import {main}

sys.exit({main}())
'''
SCRIPTS = {
    "zero_to_fp32.py": _TEXT.format(
        what="fp32 weights", name="zero_to_fp32.py", more="", main="main"
    ),
    "zero_to_torch.py": _TEXT.format(
        what="weights", name="zero_to_torch.py", more=" --dtype bf16", main="main_torch"
    ),
}
_log = logging.getLogger(__name__)


def place_scripts(save_dir: Location) -> None:
    """Write the scripts that are missing from a directory of checkpoints; log a warning on failure.

    None are written to a URL, where they cannot run. They are not part of a checkpoint: nothing is
    read from them, and no checksum covers them.
    """
    if not isinstance(save_dir, Path):
        return
    for name, text in SCRIPTS.items():
        path = save_dir / name
        try:
            if not path.exists():
                replace_file(path, text)
                path.chmod(path.stat().st_mode | 0o100)
        except (CheckpointError, OSError) as error:
            _log.warning("%s was not written: %s", path, error)
