"""Runs the `mopd` command as `python -m mopd_dataplane`."""

from mopd_dataplane.cli import main

main()
