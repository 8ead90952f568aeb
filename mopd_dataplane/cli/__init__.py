"""The command line, one file per kind of command, listed in the order of the flow.

    app.py      the command tree and how it ends: exit codes, errors, Ctrl-C
    jobs.py     run, rollout, score, reward, plan, train
    answers.py  query, show, report
    stores.py   store info, verify, compact
    bench.py    bench plan, load, write, wal
    output.py   tables, JSON, CSV and errors on a terminal
    reference.py  docs/cli.md from the command tree

Nothing here imports torch or lance before a command runs.
"""

from __future__ import annotations

from mopd_dataplane.cli.app import main

__all__ = ["main"]
