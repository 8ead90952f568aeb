"""The command that serves batches: `mopd load serve`."""

import socket as sockets
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from mopd_dataplane.cli.jobs import Keys, Overrides, choose_stage, load
from mopd_dataplane.cli.output import note
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import EngineError, InputError, require_known
from mopd_dataplane.fields import SIGNAL_KINDS

LOOK_S = 0.5
"""Pause between looks whether the loader still runs."""


def serve(
    target: Annotated[str, Argument(metavar="JOB|STORE", help="Job file, or a folder with a job.toml; else a store.")],
    stage: Annotated[
        str | None, Option("--stage", metavar="NAME", help="Stage whose plan is served; needed for a store.")
    ] = None,
    signal: Annotated[
        list[str] | None,
        Option(
            "--signal",
            metavar="KIND",
            help="For a store: signal that packs carry: logprob, topk or hidden; repeatable.",
        ),
    ] = None,
    rewards: Annotated[
        bool, Option("--rewards", help="For a store: packs carry outcome rewards and advantages.")
    ] = False,
    slots: Annotated[int, Option("--slots", min=2, help="For a store: fewest packs kept ready for each rank.")] = 4,
    socket: Annotated[
        Path | None, Option("--socket", metavar="FILE", help="Unix socket to listen on; default: a private one.")
    ] = None,
    set_: Keys = None,
) -> None:
    """Serve batches to the trainers of this node until interrupted; prints the socket.

    Without this command the first rank of a node starts a loader, which ends with its trainers. For a job, the stage's
    objective decides what packs carry; for a store, the options do.
    """
    from mopd_dataplane.load.launch import start_server
    from mopd_dataplane.load.spec import LoadSpec
    from mopd_dataplane.load.stream import socket_of

    if target.endswith(".toml") or (Path(target) / "job.toml").exists():
        job = load(target, Overrides(set_))
        chosen = choose_stage(job, stage, sampled=False)
        uri = job.store
        sources = {"topk_source": chosen.score.topk_source, "verifier": chosen.verifier}
        spec = LoadSpec.for_stage(chosen.name, job.load, job.objective(chosen), **sources)
    elif stage is None:
        raise InputError(f"{target} is a store: name the stage to serve with --stage NAME")
    else:
        for kind in signal or ():
            _check_signal(target, kind)
        uri, spec = target, LoadSpec(stage=stage, signals=tuple(signal or ()), rewards=rewards, slots=slots)
    path = socket or socket_of(uri, spec)
    with start_server(uri, path, spec) as loader, sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as anchor:
        anchor.connect(str(path))  # a loader ends with its last connection: this one asks for nothing and stays
        print(path, flush=True)
        note(f"serving stage {spec.stage!r} of {uri}; Ctrl-C ends it")
        while loader.process.poll() is None:
            time.sleep(LOOK_S)
        raise EngineError(f"the loader ended with exit code {loader.process.returncode}; see its messages above")


def _check_signal(uri: str, kind: str) -> None:
    """Raise UnknownNameError for a kind of signal that the store does not have and nobody could add: the loader would
    wait for it."""
    from mopd_dataplane.store.dataset import Store

    store = Store.open(uri)
    there = {name.rpartition("/")[2] for name in store.names() if name.startswith("signals/")}
    stages = (store.read_json("job.json") or {}).get("stages", [])
    named = {name for stage in stages for name in stage.get("score", {}).get("signals", {})}
    known = sorted({*SIGNAL_KINDS, *there, *named, *entry_points(group="mopd.signals").names})
    require_known(kind, known, "--signal")


def add_to(app: Typer) -> None:
    group = Typer(no_args_is_help=True, rich_markup_mode="rich")
    register(
        group, serve, "mopd load serve jobs/quickstart --stage student",
        "mopd load serve runs/quickstart --stage student --signal logprob",
    )  # fmt: skip
    app.add_typer(group, name="load", rich_help_panel="Jobs", help="Batches for trainers.")
