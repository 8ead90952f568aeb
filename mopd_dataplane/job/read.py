"""From job files to one plain table: the file, what it extends, overrides, and the defaults of its stages.

Nothing is checked here beyond what merging needs; `job.py` says what a job may hold.
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from mopd_dataplane.base.file_urls import PathOrUrl, folder_of, is_url, local_path, read_file, suffix_of
from mopd_dataplane.base.sealed_json import SEAL, unseal
from mopd_dataplane.errors import JobFileError, require_known
from mopd_dataplane.job.parse import problems_text
from mopd_dataplane.job.recipes import STORE_JOB, job_file, with_own_data
from mopd_dataplane.job.section import Section

MARK = "store.json"
"""File that marks a folder as a store."""
MAX_BYTES = 1 << 20
MAX_DEPTH = 8
"""Longest chain of jobs that extend one another."""
STAGE_TABLES = ("rollout", "score", "plan", "train")
"""Tables at the top level of a job that are defaults of every stage."""

Raw = dict[str, Any]


class Extends(Section):
    """Another job whose tables this one takes over, with some of its stages and domains."""

    job: str
    """Its file or folder, relative to this file, or the name of a recipe."""
    stages: list[str] = Field(default_factory=list)
    """Stages of it that come before this job's own."""
    domains: list[str] | None = None
    """Domains of it that are wanted; default: all."""


def read_job(path: PathOrUrl, overrides: list[str]) -> tuple[Raw, str]:
    """A job file with everything it extends and the overrides applied: (its table, the file's name for messages).

    path: a .toml file, a folder with a job.toml, a URL of either, the name of a recipe, a store in a folder, or its
    job.json.
    Raises JobFileError, DamagedError for a job.json that is not as it was written.
    """
    file = job_file(path)
    raw = _in_own_store(_with_parents(file, ()), file)
    for override in overrides:
        apply_override(raw, override)
    return raw, file


def _in_own_store(raw: Raw, file: str) -> Raw:
    """The job of a store that was moved since, with the folder in which it lies now."""
    if is_url(file) or Path(file).name != STORE_JOB or not Path(file).with_name(MARK).exists():
        return raw
    folder = Path(file).parent
    return raw if Path(str(raw.get("store"))).resolve() == folder.resolve() else {**raw, "store": str(folder)}


def with_stage_defaults(raw: Raw, where: str) -> Raw:
    """Move STAGE_TABLES into every stage: the job's keys, then those of the stage's objective, then its own."""
    stages = _stages(raw, where)
    merged = []
    for stage in stages:
        objective = child(raw.get("objectives"), str(stage.get("objective")))
        layers = (raw, {key: child(objective, key) for key in ("plan", "train")}, stage)
        layers_of_key = {key: [layer[key] for layer in layers if layer.get(key) is not None] for key in STAGE_TABLES}
        merged.append({**stage, **{key: _layered(tables) for key, tables in layers_of_key.items() if tables}})
    rest = {key: value for key, value in raw.items() if key not in STAGE_TABLES}
    return {**rest, "stages": merged}


def child(node: Any, key: int | str) -> Any:
    """Value under a key or an index; None when there is none."""
    if isinstance(node, dict):
        return node.get(key)
    return node[key] if isinstance(node, list) and isinstance(key, int) and key < len(node) else None


def _with_parents(file: str, children: tuple[str, ...]) -> Raw:
    """A job file over the job it extends: tables merge key by key, its stages follow the ones it inherits."""
    raw = with_own_data(_parse(file), file)
    if "extends" not in raw:
        return raw
    extends_table = raw.pop("extends")
    example = 'it takes job, stages and domains: extends = { job = "../quickstart", stages = ["base"] }'
    if not isinstance(extends_table, dict):
        raise JobFileError(f"{file}: extends is {extends_table!r:.80}, a table is needed; {example}")
    try:
        extends = Extends.model_validate(extends_table)
    except ValidationError as error:
        raise JobFileError(f"{file}: extends: {problems_text(error)}; {example}") from None
    lineage = (*children, _identity(file))
    parent_file = job_file(extends.job, beside=folder_of(file))
    if _identity(parent_file) in lineage or len(lineage) > MAX_DEPTH:
        raise JobFileError(f"{file}: extends {extends.job!r}, which leads back here; extend a job that stands alone")
    parent = _with_parents(parent_file, lineage)
    every, routing = (_table(parent, key, parent_file) for key in ("domains", "routing"))
    # A stage without domains has all of its own job's, not also those that the child adds.
    parent_parts = {
        str(stage.get("name")): {**stage, "domains": stage.get("domains") or list(every)}
        for stage in _stages(parent, parent_file)
    }
    inherited = _named(parent_parts, extends.stages, f"{file}: extends.stages: {extends.job} has no stage")
    taken = every if extends.domains is None else extends.domains
    domains = _named(every, taken, f"{file}: extends.domains: {extends.job} has no domain")
    inherited_rules = {key: value for key, value in routing.items() if key.partition("/")[0] in domains}
    merged: Raw = _merged({**parent, "domains": domains, "routing": inherited_rules}, raw)
    return {**merged, "stages": [*inherited.values(), *_stages(raw, file)]}


def _table(raw: Raw, key: str, where: str) -> Raw:
    table = raw.get(key, {})
    if not isinstance(table, dict):
        raise JobFileError(f"{where}: `{key}` is {table!r:.80}, a table is needed; write [{key}]")
    return table


def _named(parts: Raw, names: Iterable[str], refusal: str) -> Raw:
    for name in names:
        require_known(name, parts, refusal, JobFileError)
    return {name: parts[name] for name in names}


def _identity(file: str) -> str:
    """A name that two ways to the same file share."""
    return file if is_url(file) else str(local_path(file).resolve())


def _parse(file: str) -> Raw:
    content = read_file(file, MAX_BYTES)
    if len(content) > MAX_BYTES:
        raise JobFileError(f"{file}: more than {MAX_BYTES:,} bytes, which is the most a job file has")
    is_json = suffix_of(file) == ".json"
    try:
        text = content.decode()
        parsed = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "TOML"
        raise JobFileError(f"{file}: not valid {kind}: {error}") from None
    if not isinstance(parsed, dict):
        raise JobFileError(f"{file}: holds a {type(parsed).__name__}, a job is a table of keys")
    return unseal(text, file) if SEAL in parsed else parsed


def _stages(raw: Raw, where: str) -> list[Raw]:
    stages = raw.get("stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise JobFileError(f"{where}: `stages` must be an array of tables; write [[stages]]")
    return stages


def _merged(below: Any, above: Any) -> Any:
    """Two tables key by key, the upper one winning; anything else is replaced whole."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _layered(tables: list[Any]) -> Any:
    """The keys of all tables, the later ones winning; something that is no table stands, for the check to name."""
    wrong = [table for table in tables if not isinstance(table, dict)]
    return wrong[0] if wrong else {key: value for table in tables for key, value in table.items()}


def apply_override(raw: Raw, override: str) -> None:
    """Set one key of a job's table, `KEY=VALUE` in TOML syntax. Raises JobFileError."""
    key, separator, text = override.partition("=")
    if not separator:
        raise JobFileError(f"--set takes KEY=VALUE, found {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    node: Any = raw
    for part in path:
        if isinstance(node, list):
            named = {str(item.get("name")): item for item in node}
            require_known(part, named, f"--set {key}: no stage", JobFileError)
            node = named[part]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise JobFileError(f"--set {key}: {part!r} is a value, not a table")
    if isinstance(node, list):
        raise JobFileError(f"--set {key}: name a stage and one of its keys, as in stages.student.{last}=…")
    node[last] = value
