"""The command line, one file per kind of command, listed in the order of the flow.

    app.py      the command tree and how it ends: exit codes, errors, Ctrl-C
    jobs.py     run, rollout, score, reward, plan, train
    forks.py    fork, rewind
    sweep.py    a job at every combination of settings and seeds
    answers.py  query, show, report, compare, schema
    view.py       a store in a browser, or as files
    evaluate.py   teachers on the same answers, lm-eval's tasks for a policy
    stores.py     store info, verify, compact, copy, delete, upgrade
    interchange.py  import, export
    load.py       load serve
    recipes.py    the recipes, a copy of one, and what a key of a job file means
    bench.py      bench plan, load, write, wal, queue, view
    long_sample.py  bench long-sample
    register.py   how a function becomes a command
    rows.py       rows of a query in the width there is
    output.py     tables, JSON, CSV and errors on a terminal
    reference.py  docs/cli.md from the command tree

Nothing here imports torch or lance before a command runs.
"""

import sys


def main() -> None:
    """Run the command of this process. Ctrl-C while the commands are being imported ends it without a traceback too."""
    try:
        from mopd_dataplane.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
