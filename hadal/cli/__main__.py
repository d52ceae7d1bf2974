"""`python -m hadal.cli`."""

import sys

from hadal.cli.main import main

sys.exit(main())
