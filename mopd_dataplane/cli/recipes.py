"""Commands for getting started: the recipes, a copy of one to edit, and the meaning of each key of a job file."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer

from mopd_dataplane.cli.output import note, print_facts, print_json, print_text, print_title
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import JobFileError

PANEL = "Jobs"
AsJson = Annotated[bool, Option("--json", help="Print one JSON value.")]


def recipes(
    folder: Annotated[
        Path | None, Argument(metavar="[FOLDER]", help="Folder of job folders; default: the package's recipes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes: what each shows, and the paper or code it follows.

    Run one by its name, `mopd run NAME`, or copy it to edit, `mopd init NAME`. NAME/full.toml, where there is one,
    holds its published settings for GPUs.
    """
    from mopd_dataplane.job.recipes import FOLDER, JOB

    entries = [_describe(file) for file in sorted((folder or FOLDER).glob(f"*/{JOB}"))]
    if not entries:
        raise JobFileError(f"no job files under {folder}; give the folder that holds NAME/{JOB}")
    if as_json:
        print_json(entries)
        return
    rows = [(item["name"], item["shows"], item["source"]) for item in entries]
    print_fitting(("recipe", "shows", "follows"), rows, tall=True)
    note(f"run one with: mopd run {f'{folder}/' if folder else ''}NAME")


def _describe(file: Path) -> dict[str, Any]:
    from mopd_dataplane.job.load import load_job
    from mopd_dataplane.job.recipes import FULL_SCALE

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


def init(
    recipe: Annotated[str, Argument(metavar="[RECIPE]", help="Recipe to start from.")] = "quickstart",
    folder: Annotated[
        Path | None, Argument(metavar="[FOLDER]", help="Folder to write; default: the recipe's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented job folder from a recipe, to be edited and run.

    Its JSON Schema is written beside the job file, so that editors complete and check keys.
    """
    from mopd_dataplane.job.recipes import copy_recipe
    from mopd_dataplane.job.reference import json_schema

    target = folder or Path(recipe)
    written = copy_recipe(recipe, target, schema=json.dumps(json_schema(), indent=1))
    if as_json:
        print_json({"folder": target, "files": written})
        return
    for file in written:
        note(f"wrote {file}")
    note(f"run it with: mopd run {target}")


def help_(
    key: Annotated[str | None, Argument(metavar="[KEY]", help="Key or table, such as train.schedule.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a key of a job file means, or list the keys of a table; without KEY, list the tables.

    `mopd COMMAND --help` explains a command.
    """
    from mopd_dataplane.job.reference import Key, find, tables

    if key is None:
        listed = [(table.header, len(table.keys), table.doc) for table in tables() if table.path]
        if as_json:
            print_json(list(tables()))
        else:
            print_fitting(("table", "keys", "what it sets"), listed)
            note("keys of one: mopd help train")
        return
    entry = find(key)
    if as_json:
        print_json(entry)
    elif isinstance(entry, Key):
        name = entry.path.rpartition(".")[2]
        facts = {"type": entry.type, "default": entry.default or "must be given", "unit": entry.unit}
        facts |= {"example": entry.example and f"{name} = {entry.example}", "change": entry.change}
        print_title(entry.path)
        print_text(entry.doc)
        print_facts({name: value for name, value in facts.items() if value})
    else:
        print_title(entry.header)
        print_text(entry.doc)
        docs = [f"{key.doc} [{key.unit}]" if key.unit else key.doc for key in entry.keys]
        rows = [
            (k.path.rpartition(".")[2], k.type, k.default, k.change, doc)
            for k, doc in zip(entry.keys, docs, strict=True)
        ]
        print_fitting(("key", "type", "default", "change", "meaning"), rows, tall=True)


def add_to(app: Typer) -> None:
    register(app, recipes, "mopd recipes", "mopd recipes jobs --json", panel=PANEL)
    register(app, init, "mopd init", "mopd init opd my-opd", panel=PANEL)
    register(app, help_, "mopd help", "mopd help train.schedule", name="help", panel=PANEL)
