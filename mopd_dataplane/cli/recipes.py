"""The command that lists job files: what each shows and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mopd_dataplane.cli.output import note, print_json, print_rows
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import JobFileError

PANEL = "Jobs"
FULL_SCALE = "full.toml"
"""Beside a recipe's job.toml: the same recipe with its published settings, for GPUs."""


def recipes(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of job folders.")] = Path("jobs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """List the recipes of a folder: what each shows, and the paper or code it follows.

    Run one with `mopd run FOLDER/NAME`; NAME/full.toml, where there is one, holds its published settings for GPUs.
    """
    found = [_describe(file) for file in sorted(folder.glob("*/job.toml"))]
    if not found:
        raise JobFileError(f"no job files under {folder}; give the folder that holds NAME/job.toml")
    if as_json:
        print_json(found)
        return
    print_rows(("recipe", "shows", "follows"), ((item["name"], item["shows"], item["source"]) for item in found))
    note(f"run one with: mopd run {folder}/NAME")


def _describe(file: Path) -> dict[str, Any]:
    from mopd_dataplane.job.job import load_job

    job = load_job(file)
    full = file.with_name(FULL_SCALE)
    return {
        "name": file.parent.name,
        "shows": job.shows,
        "source": job.source,
        "stages": [stage.name for stage in job.stages],
        "teachers": list(job.teachers),
        "store": job.store,
        "job": str(file),
        "full_scale": str(full) if full.is_file() else None,
    }


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    register(app, recipes, "mopd recipes", "mopd recipes jobs --json", panel=PANEL)
