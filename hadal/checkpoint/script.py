"""`zero_to_fp32.py` beside checkpoints: users of DeepSpeed look for it there."""

from __future__ import annotations

import logging
from pathlib import Path

from hadal.checkpoint.files import replace_file
from hadal.errors import CheckpointError

SCRIPT = "zero_to_fp32.py"
_TEXT = '''\
#!/usr/bin/env python
"""Write the fp32 weights of a checkpoint in this folder: ./zero_to_fp32.py . OUTPUT_FOLDER"""

import sys

from hadal.cli.zero_to_fp32 import main

sys.exit(main())
'''
_log = logging.getLogger(__name__)


def place_script(save_dir: Path) -> None:
    """Put it into a folder of checkpoints, where none is there; what fails is told.

    It is no part of a checkpoint: nothing is read from it, and no checksum covers it.
    """
    path = save_dir / SCRIPT
    try:
        if path.exists():
            return
        replace_file(path, _TEXT)
        path.chmod(path.stat().st_mode | 0o100)
    except (CheckpointError, OSError) as error:
        _log.warning("%s is not placed: %s", path, error)
