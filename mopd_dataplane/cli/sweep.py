"""The command that runs a job at every combination of some settings and seeds, and compares what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, Typer

from mopd_dataplane.cli.jobs import PANEL, AsJson, JobFile, packages
from mopd_dataplane.cli.output import note, print_grid, print_json
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import InputError

if TYPE_CHECKING:
    from mopd_dataplane.job.sweep import SweepRun
    from mopd_dataplane.query.sweep import SweepMeasures


def sweep(
    job: JobFile,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE,VALUE…", help="Values of one key of the job file; repeatable."),
    ] = None,
    seeds: Annotated[str, Option("--seeds", metavar="SEED,SEED…", help="Seeds of every arm.")] = "0",
    folder: Annotated[
        Path | None, Option("--folder", metavar="DIR", help="Folder of the stores; default: runs/NAME-sweep.")
    ] = None,
    processes: Annotated[int, Option("--jobs", min=1, metavar="N", help="Runs at the same time.")] = 1,
    report: Annotated[bool, Option("--report", help="Run nothing; write the report of what has run.")] = False,
    stage: Annotated[
        str | None,
        Option(
            "--stage",
            metavar="NAME",
            help="Run this stage and those that it needs, and report about it; default: all stages, and the last.",
        ),
    ] = None,
    shared: Annotated[
        Path | None,
        Option(
            "--shared",
            metavar="DIR",
            help="Folder of the stores in which common stages are run; several sweeps of a job may have the same. "
            "Default: FOLDER/shared.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a job at every combination of settings and seeds, and compare the arms.

    Every run has a store of its own, FOLDER/ARM/seed-N, and a log beside it. The first stages of the job that all arms
    have with the same settings are run once for each seed, and the runs start as forks of that store. Safe to kill at
    any moment and to repeat: finished runs are not run again, an interrupted one continues. At the end, one HTML page
    has the curves of accuracy and reverse KL against answers, tokens and seconds; the table pairs every arm with the
    first, prompt by prompt.
    """
    from mopd_dataplane.base.extras import require
    from mopd_dataplane.job.load import load_job
    from mopd_dataplane.job.sweep import plan_sweep
    from mopd_dataplane.query.sweep_report import sweep_grid, write_sweep_report

    loaded = load_job(job)
    stage_name = loaded.stage(stage).name if stage else loaded.stages[-1].name
    folder = folder or Path("runs") / f"{loaded.name}-sweep"
    runs = plan_sweep(job, settings or [], _seeds(seeds), folder, stage=stage)
    if not report:
        require(packages(loaded))
        from mopd_dataplane.run.sweep import run_sweep

        if shared is None and len({run.arm for run in runs}) > 1:
            shared = folder / "shared"
        run_sweep(job, runs, shared=shared, processes=processes, say=note)
    measures = _measure(loaded.name, runs, stage_name)
    page = write_sweep_report(measures, folder / "report.html")
    if as_json:
        print_json({"measures": measures, "report": str(page)})
        return
    grid = sweep_grid(measures)
    print_grid(grid)
    note(f"{grid.caption}\nreport: {page}")


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0:
        raise InputError(
            f"--seeds takes whole numbers from 0 on with commas between them, found {text!r}; for example 0,1,2"
        )
    return seeds


def _measure(name: str, runs: list[SweepRun], stage: str) -> SweepMeasures:
    from mopd_dataplane.query.sweep import measure_sweep

    arms: dict[str, dict[int, Path]] = {}
    for run in runs:
        arms.setdefault(run.arm, {})[run.seed] = run.store
    return measure_sweep(name, arms, stage)


def add_to(app: Typer) -> None:
    """Register the command."""
    learning_rates = "mopd sweep jobs/quickstart --set stages.student.train.learning_rate=1e-4,3e-4,1e-3 --seeds 0,1,2"
    register(app, sweep, learning_rates, f"{learning_rates} --report", panel=PANEL)
