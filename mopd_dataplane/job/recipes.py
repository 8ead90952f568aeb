"""The recipes that come with the package: jobs that go by name wherever one works, and copies of them to edit."""

import re
from pathlib import Path
from typing import Any

from mopd_dataplane.base.file_urls import PathOrUrl, is_url, joined, local_path, suffix_of
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import JobFileError, nearest, require_known

FOLDER = Path(__file__).parents[1] / "recipes"
JOB = "job.toml"
STORE_JOB = "job.json"
"""The job that a store keeps."""
FULL_SCALE = "full.toml"
"""Beside a recipe's job.toml: the same recipe with its published settings, for GPUs."""
SCHEMA = "job.schema.json"


def recipe_names() -> list[str]:
    """Names of the recipes, in order."""
    return sorted(file.parent.name for file in FOLDER.glob(f"*/{JOB}"))


def job_file(path: PathOrUrl, *, beside: PathOrUrl = "") -> str:
    """The file that a job's path or URL means: a file, the job.toml of a folder, the job.json of a store's folder, or a
    recipe by its name.

    What lies at the path wins over a recipe of that name. beside: folder that relative paths start from.
    Raises JobFileError when there is nothing.
    """
    names = recipe_names()
    if is_url(path) or is_url(beside):
        if not is_url(path) and str(path).removeprefix("../") in names:
            return str(FOLDER / str(path).removeprefix("../") / JOB)
        location = str(path) if is_url(path) else joined(beside, str(path))
        return location if suffix_of(location) in (".toml", ".json") else joined(location, JOB)
    file = Path(beside) / local_path(path)
    if file.is_dir():
        file = file / (JOB if (file / JOB).exists() or not (file / STORE_JOB).exists() else STORE_JOB)
    if file.is_file():
        return str(file)
    if str(path) in names:
        return str(FOLDER / path / JOB)
    raise JobFileError(
        f"no job file at {file}; give a .toml file, a folder with a {JOB}, a store's folder, or the name of a recipe "
        f"({nearest(Path(path).name, names)})"
    )


def with_own_data(raw: dict[str, Any], file: str) -> dict[str, Any]:
    """A recipe's job with the prompts that lie beside it, `jobs/NAME/FILE`, by where the package has them.

    Only for a recipe that was found by its name, and where there is no such file from here on: a clone has its own.
    """
    if FOLDER not in Path(file).parents or "domains" not in raw:
        return raw
    domains = {}
    for name, domain in raw["domains"].items():
        source = str(domain.get("source", ""))
        own = FOLDER / source.removeprefix("jobs/")
        moved = source.startswith("jobs/") and not Path(source).exists() and own.is_file()
        domains[name] = {**domain, "source": str(own)} if moved else domain
    return {**raw, "domains": domains}


def copy_recipe(name: str, folder: Path, *, schema: str) -> list[Path]:
    """Write a recipe to a folder as a job of one's own; returns the files.

    schema: JSON Schema of a job file, which editors find by the `#:schema` line on top.
    Raises JobFileError when there is no such recipe, or the folder has a job already.
    """
    require_known(name, recipe_names(), "no recipe", JobFileError)
    if (folder / JOB).exists():
        raise JobFileError(f"{folder / JOB} exists already; give another folder: mopd init {name} FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobFileError(f"{str(folder)[:200]} cannot be a folder: {error.strerror}; give another one") from None
    contents = {SCHEMA: schema.encode()} | {data.name: data.read_bytes() for data in (FOLDER / name).glob("*.jsonl")}
    for file in (FOLDER / name).glob("*.toml"):
        contents[file.name] = f"#:schema ./{SCHEMA}\n{_on_its_own(file.read_text(), name, folder)}".encode()
    for written, content in contents.items():
        publish_file(folder / written, content)
    return [folder / written for written in contents]


def _on_its_own(text: str, name: str, folder: Path) -> str:
    """A recipe's text outside of the recipes' folder: it extends others by name, and commands name its new place."""
    text = re.sub(r'(extends = \{ job = ")\.\./', r"\1", text)
    return text.replace(f"jobs/{name}", str(folder))
