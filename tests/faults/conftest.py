"""Modules beside the tests, which fault rows import as scripts do, can be imported by tests too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
