"""A job file as a Job, or an error that names the file, the line, the key, what is allowed and the nearest match."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import ValidationError

from mopd_dataplane.base.file_urls import PathOrUrl, is_file, read_file, suffix_of
from mopd_dataplane.errors import JobFileError, nearest
from mopd_dataplane.job.check import check_references
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.parse import line_of, problem_text
from mopd_dataplane.job.read import STAGE_TABLES, child, read_job, with_stage_defaults
from mopd_dataplane.job.section import Section


def load_job(path: PathOrUrl, *, overrides: list[str] | None = None) -> Job:
    """Read and check a job file, the `job.toml` of a job folder (paths or URLs), or the `job.json` that a store keeps.

    overrides: `key.path=value` in TOML syntax, stages by their names, as in `stages.student.objective="full-vocab"`.
    Raises JobFileError.
    """
    raw, where = read_job(path, overrides or [])
    return check_job(raw, where=where)


def check_job(raw: dict[str, Any], *, where: str) -> Job:
    """Build a Job from parsed TOML; `where` names the file in messages. Raises JobFileError."""
    whole = with_stage_defaults(raw, where)
    try:
        job = Job.model_validate(whole)
    except ValidationError as error:
        raise JobFileError(_explain(error, raw, whole, where)) from None
    check_references(job, where)
    return job


_MOST_PROBLEMS = 20
_RENAMED = {
    ("Stage", "overlap"): "concurrent",
    ("DivergenceTerm", "overlap"): "topk_agreement",
    ("Score", "topk_support"): "topk_source",
}
"""(section, key of version 0.1) -> key."""


def _explain(error: ValidationError, raw: dict[str, Any], whole: dict[str, Any], where: str) -> str:
    """One line per problem: the key as written in the file, what is wrong, and the nearest valid key.

    raw: the job as read; whole: with the stages' defaults in every stage, where one mistake shows up many times.
    """
    text = read_file(where).decode() if suffix_of(where) == ".toml" and is_file(where) else ""
    lines: dict[str, None] = {}
    for problem in error.errors():
        parts, section = _locate(problem["loc"], whole)
        parts = _as_written(parts, raw)
        line = line_of(text, parts)
        at, path = f"{where}, line {line}" if line else where, ".".join(parts)
        if problem["type"] == "extra_forbidden" and section is not None:
            lines[f"{at}: unknown key `{path}`: {_hint(section, parts[-1])}"] = None
        elif problem["type"] == "missing":
            table = parts[-1] if parts[0] == "stages" and parts[-1] in STAGE_TABLES else ""
            hint = f": write it there, or [{table}] for all stages; mopd help {table} lists its keys" if table else ""
            lines[f"{at}: missing key `{path}`{hint}"] = None
        else:
            lines[f"{at}: `{path}`: {problem_text(problem)}"] = None
    shown_lines = list(lines)[:_MOST_PROBLEMS]
    if len(lines) > len(shown_lines):
        shown_lines.append(f"{where}: and {len(lines) - len(shown_lines):,} more")
    return "\n".join(shown_lines)


def _hint(section: type[Section], key: str) -> str:
    new = _RENAMED.get((section.__name__, key))
    return f"it is called `{new}` now" if new else nearest(key, section.model_fields)


def _as_written(parts: list[str], raw: dict[str, Any]) -> list[str]:
    """The path of a stage's key at the place it was given: in the stage, with its objective, or as a default of all."""
    if len(parts) < 4 or parts[0] != "stages" or parts[2] not in STAGE_TABLES:
        return parts
    _, name, table, key, *rest = parts
    stage: Any = next((stage for stage in raw["stages"] if stage.get("name") == name), {})
    objective = str(stage.get("objective"))
    for section, holder in (
        (["stages", name], stage),
        (["objectives", objective], child(raw.get("objectives"), objective)),
        ([], raw),
    ):
        table_of_key = child(holder, table)
        if isinstance(table_of_key, dict) and key in table_of_key:
            return [*section, table, key, *rest]
    return parts


def _locate(location: tuple[int | str, ...], raw: dict[str, Any]) -> tuple[list[str], type[Section] | None]:
    """The path with stage names in place of indices, and the section the last key would belong to."""
    parts: list[str] = []
    node: Any = raw
    section: type[Section] | None = Job
    for depth, key in enumerate(location):
        node = child(node, key)
        parts.append(str(node.get("name", key) if isinstance(key, int) and isinstance(node, dict) else key))
        # No field: a name inside dict[Name, Section] or an index inside tuple[Section, ...].
        if depth < len(location) - 1 and section is not None and (field := section.model_fields.get(str(key))):
            section, _ = section_in(field.annotation)
    return parts, section


def section_in(annotation: Any, *, is_value: bool = True) -> tuple[type[Section] | None, bool]:
    """The section that an annotation holds, and whether under names of the job's own.

    A key that may also be something else than a table holds none, since it is one value; without is_value, its table.
    """
    stack, named = [annotation], False
    while stack:
        kind = stack.pop()
        if is_value and typing.get_origin(kind) in (typing.Union, types.UnionType) and len(_but_none(kind)) > 1:
            return None, False
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, Section):
            return kind, named
        named = named or typing.get_origin(kind) in (dict, tuple)
        stack.extend(typing.get_args(kind))
    return None, False


def _but_none(union: Any) -> list[Any]:
    return [kind for kind in typing.get_args(union) if kind is not type(None)]
