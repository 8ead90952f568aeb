"""Ask a store many questions, each with `mopd query` in a forked process that ends as a command does: what the
interpreter and the libraries do at the end is part of the answer.

    python questions.py STORE < JSON array of SQL      prints a JSON array of exit codes; a signal is negative
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import duckdb  # noqa: F401  imported once, for all children
import lance  # noqa: F401
import pyarrow.dataset  # noqa: F401

from mopd_dataplane.cli import main
from mopd_dataplane.store import dataset  # noqa: F401

DEADLINE_S = 120.0
HUNG = 999
AT_ONCE = 3


def ask(store: str, question: str, number: int) -> int | None:
    """Fork; the process id in the parent, None in the child, whose arguments are now those of the command."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.argv = ["mopd", "query", store, question, *(["--json"] if number % 2 else [])]
    return None


def ending(child: int) -> int:
    """Exit code of a child, minus the number of the signal that ended it; HUNG when it had to be killed."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return HUNG


def import_what_a_command_needs() -> None:
    """Ask a store that is not there: nothing of Lance has run when the first child is forked."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(SystemExit):
        sys.argv = ["mopd", "query", f"{store}/nowhere", "select 1"]
        main()


store = sys.argv[1]
import_what_a_command_needs()
statements: list[str] = json.load(sys.stdin)
running: list[int] = []
codes: list[int] = []
for number, question in enumerate(statements):
    process = ask(store, question, number)
    if process is None:
        main()  # raises SystemExit: the child ends here
        raise AssertionError
    running.append(process)
    if len(running) == AT_ONCE:
        codes.append(ending(running.pop(0)))
print(json.dumps(codes + list(map(ending, running))))
