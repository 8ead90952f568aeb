"""`python -m mopd_dataplane` is `mopd`."""

from __future__ import annotations

from mopd_dataplane.cli import main

main()
