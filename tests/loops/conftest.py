"""Loops of other trainers: `make test-loops`."""

from __future__ import annotations

import os

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
