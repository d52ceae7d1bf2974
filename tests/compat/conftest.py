"""What the tests of this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

# Helper modules beside these tests are imported by their names, in the ranks' processes too.
sys.path.insert(0, str(Path(__file__).parent))
