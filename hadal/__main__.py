"""`python -m hadal`: the `hadal` command, for shells without its directory on the path."""

from __future__ import annotations

import sys

from hadal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
