"""`python -m hadal.cli`.

Tests: tests/cli/test_cli.py
"""

import sys

from hadal.cli.main import main

sys.exit(main())
