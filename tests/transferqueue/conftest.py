"""TransferQueue over a store: `make test-transferqueue`."""

from __future__ import annotations

import os

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
