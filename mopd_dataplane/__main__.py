"""Runs the `mopd` command as `python -m mopd_dataplane`."""

from __future__ import annotations

from mopd_dataplane.cli import main

main()
