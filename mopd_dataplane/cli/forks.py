"""Commands that go on from an earlier point of a run: in a store of its own, or in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from mopd_dataplane.cli.jobs import PANEL, AsJson, Keys
from mopd_dataplane.cli.output import note, print_json, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.query.text import size

if TYPE_CHECKING:
    from mopd_dataplane.base.shared_files import SharedFiles

RunUri = Annotated[str, Argument(metavar="RUN", help="Store of a run, in a folder.")]


def fork(
    run: RunUri,
    new: Annotated[str, Argument(metavar="NEW", help="Folder of the new store; nothing may be there yet.")],
    at: Annotated[str, Option("--at", metavar="STAGE@VERSION", help="Policy version that the fork goes on from.")],
    set_: Keys = None,
    as_json: AsJson = False,
) -> None:
    """Make a store that has everything of a run up to a policy version, and goes on from there.

    Samples, signals, plans, steps, evaluations, policies and optimizer state up to the version are shared with the run
    by hard links, or copied where the file system has none: seconds, whatever their size. Afterwards neither store
    changes the other. `mopd run NEW` continues with the numbers that the run had; with --set, as if the job had been
    changed at that iteration. After a kill, the same command makes the fork anew.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.run.fork import fork as make_fork
    from mopd_dataplane.run.progress import Progress

    opened = open_store(run)
    done = make_fork(opened, new, at, settings=set_ or [], progress=Progress(stderr()))
    if as_json:
        print_json(done)
        return
    note(shared_text(done.shared))
    note(f"{done.uri} goes on from {done.point} of {run}; continue: mopd run {done.uri}")


def rewind(
    run: RunUri,
    to: Annotated[str, Option("--to", metavar="STAGE@VERSION", help="Policy version that the run goes on from.")],
    as_json: AsJson = False,
) -> None:
    """Take a run back to a policy version; what came after stays as a store beside it.

    The store beside it, RUN-was-STAGE-VERSION, has all that the run had; delete its folder to drop it. Both share files
    as forks do. Refused while a process has the run open. After a kill, the same command does the rest.
    """
    from mopd_dataplane.run.rewind import rewind as take_back

    done = take_back(run, to)
    if as_json:
        print_json(done)
    elif not done.kept_as:
        note(f"{run} is at {done.point}; nothing came after it")
    else:
        note(
            f"{run} is at {done.point} again; what came after is kept as {done.kept_as} (drop it: rm -r "
            f"{done.kept_as}); continue: mopd run {run}"
        )


def shared_text(shared: SharedFiles) -> str:
    """Files that two stores share, and those that were copied and why, in words."""
    text = f"{shared.linked:,} files ({size(shared.linked_bytes)}) are shared"
    if not shared.copied:
        return text
    return (
        f"{text}, {shared.copied:,} files ({size(shared.copied_bytes)}) were copied, because the file system takes no "
        f"hard links to them ({shared.reason})"
    )


def add_to(app: Typer) -> None:
    low = "mopd fork runs/quickstart runs/low --at student@6 --set stages.student.train.learning_rate=1e-5"
    register(app, fork, "mopd fork runs/quickstart runs/again --at student@6", low, panel=PANEL)
    register(app, rewind, "mopd rewind runs/quickstart --to student@6", panel=PANEL)
