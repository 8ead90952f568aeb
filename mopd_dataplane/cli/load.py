"""The command that serves batches: `mopd load serve`."""

import socket as sockets
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer

from mopd_dataplane.cli.jobs import Keys, Overrides, choose_stage, load
from mopd_dataplane.cli.output import note
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import EngineError, InputError, UnknownNameError, require_known
from mopd_dataplane.fields import ALIGNMENT, PACK_KINDS

POLL_INTERVAL_S = 0.5
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
        chosen = choose_stage(job, stage)
        uri = job.store
        sources = {"topk_source": chosen.score.topk_source, "verifier": chosen.verifier}
        spec = LoadSpec.for_stage(chosen.name, job.load, job.objective(chosen), **sources)
    elif stage is None:
        raise InputError(f"{target} is a store: name the stage to serve with --stage NAME")
    else:
        _check_names(target, stage, signal or [])
        uri, spec = target, LoadSpec(stage=stage, signals=tuple(signal or ()), rewards=rewards, slots=slots)
    path = socket or socket_of(uri, spec)
    with start_server(uri, path, spec) as loader, sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as anchor:
        anchor.connect(str(path))  # a loader ends with its last connection: this one asks for nothing and stays
        print(path, flush=True)
        note(f"serving stage {spec.stage!r} of {uri}; Ctrl-C ends it")
        while loader.process.poll() is None:
            time.sleep(POLL_INTERVAL_S)
        raise EngineError(f"the loader ended with exit code {loader.process.returncode}; see its messages above")


def _check_names(uri: str, stage: str, signals: list[str]) -> None:
    """Raise UnknownNameError for a stage, or a kind of signal, that the store does not have and that the job which made
    it will not add: the loader would wait for it."""
    from mopd_dataplane.store.dataset import Store

    store = Store.open(uri)
    there = {name.rpartition("/")[2] for name in store.names() if name.startswith("signals/")} - {ALIGNMENT}
    job = store.read_json("job.json") or {}
    stages = {str(one["name"]): one for one in job.get("stages", [])}
    named = {name for one in stages.values() for name in one.get("score", {}).get("signals", {})}
    for kind in signals:
        require_known(
            kind, sorted({*PACK_KINDS, *there, *named, *entry_points(group="mopd.signals").names}), "--signal"
        )
    if stage not in stages:
        in_tables = "select stage from samples union select stage from plans"
        require_known(stage, sorted({*stages, *store.sql(in_tables)["stage"].to_pylist()}), f"{uri}: no stage")
    coming = _signals_of(job, stage)
    for kind in signals:
        if kind not in there | coming:
            raise UnknownNameError(
                f"--signal {kind}: {uri} has no table signals/TEACHER/{kind}, and stage {stage!r} of its job writes "
                f"none; the store has {', '.join(sorted(there)) or 'none'}; score them first (mopd score), or leave it "
                "out"
            )


def _signals_of(remembered: dict[str, Any], stage: str) -> set[str]:
    """Kinds of signals that a stage of the job that a store remembers computes; of a job that this version cannot read
    every kind."""
    from pydantic import ValidationError

    from mopd_dataplane.job.job import Job

    if stage not in [one["name"] for one in remembered.get("stages", [])]:
        return set()
    try:
        job = Job.model_validate(remembered)
    except ValidationError:
        return set(PACK_KINDS)
    own = job.stage(stage)
    return {*job.objective(own).signals, *own.score.signals}


def add_to(app: Typer) -> None:
    group = Typer(no_args_is_help=True, rich_markup_mode="rich")
    register(
        group, serve, "mopd load serve jobs/quickstart --stage student",
        "mopd load serve runs/quickstart --stage student --signal logprob",
    )  # fmt: skip
    app.add_typer(group, name="load", rich_help_panel="Jobs", help="Batches for trainers.")
