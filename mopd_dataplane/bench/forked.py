"""Processes that are forked from one that has imported their modules: each starts in milliseconds instead of seconds.

The process that forks only imports. It has opened no dataset, so Lance has no threads yet, which would not survive.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from mopd_dataplane.base.processes import PARENT, end_with_parent


def fork_server(module: str) -> ForkServerContext:
    """Return a context whose processes start with this module imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:lance is not fork-safe")))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
    return context


def start(context: ForkServerContext, work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start work(*arguments) in a process of its own, which ends with this one."""
    process = context.Process(target=_run, args=(work, *arguments), daemon=True)
    process.start()
    return process


def _run(work: Callable[..., None], *arguments: Any) -> None:
    os.environ[PARENT] = str(os.getppid())  # the process that forks, which ends with the one that measures
    end_with_parent()
    work(*arguments)
