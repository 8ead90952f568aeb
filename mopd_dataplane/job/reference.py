"""Every key of a job file with its type, default, unit, meaning and an example: docs/job.md, `mopd help`, JSON Schema.

`python -m mopd_dataplane.job.reference docs/job.md` writes the page (or `make docs`). All of it is read from the
sections, which are what a job file is checked against.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.job.examples import EXAMPLES, UNITS, UNITS_BY_ENDING
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.load import section_in
from mopd_dataplane.job.read import STAGE_TABLES, Extends
from mopd_dataplane.job.section import Section

NAME = "NAME"
"""Stands for a name of the job's own in a path: `domains.NAME.train`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of a job file."""

    path: str
    """As in `--set`: `train.learning_rate`, `domains.NAME.source`."""
    type: str
    default: str
    """In TOML; empty when the key must be given."""
    unit: str
    doc: str
    example: str
    """A value in TOML; empty for a table."""
    change: str
    """What a new value does to a run that has begun: a ChangeClass."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a job file."""

    path: str
    """Empty for the keys that stand above all tables."""
    doc: str
    keys: tuple[Key, ...]

    @property
    def header(self) -> str:
        """Header line of the table in a file."""
        return "[[stages]]" if self.path == "stages.NAME" else f"[{self.path}]"


@cache
def tables() -> tuple[Table, ...]:
    """Every table of a job file, in the order of the flow."""
    return (_table("", Job, "Keys above all tables."), *_below("", Job))


def find(path: str) -> Table | Key:
    """A table or a key by its path; the name of a domain, teacher, objective or stage may stand for NAME.

    Raises UnknownNameError with the nearest path.
    """
    asked_key = path.strip().strip("[]")
    for table in tables():
        if _same(asked_key, table.path):
            return table
        for key in table.keys:
            if _same(asked_key, key.path):
                return key
    paths = [item for table in tables() for item in (table.path, *(key.path for key in table.keys)) if item]
    ends = [item for item in paths if item.rpartition(".")[2] == asked_key]
    if len(ends) == 1:
        return find(ends[0])
    if ends:
        raise UnknownNameError(
            f"{asked_key!r} is the name of {len(ends)} keys: {', '.join(ends)}; write one of these in full"
        )
    hint = nearest(asked_key, paths).partition("; ")[2]
    raise UnknownNameError(f"no key or table {path!r} in a job file; {hint or 'list the tables with: mopd help'}")


def _same(pattern_path: str, path: str) -> bool:
    parts, names = path.split("."), pattern_path.split(".")
    return len(parts) == len(names) and all(part in (NAME, name) for part, name in zip(parts, names, strict=True))


def _below(path: str, section: type[Section]) -> Iterator[Table]:
    """Tables inside a section, those of a stage that only repeat the job's left out."""
    for name, field in section.model_fields.items():
        name = field.alias or name
        inner, named = section_in(field.annotation, is_value=False)
        if inner is None or (section is Stage and name in STAGE_TABLES):
            continue
        here = f"{path}.{name}".lstrip(".") + (f".{NAME}" if named else "")
        yield _table(here, inner, field.description or "")
        yield from _below(here, inner)
        if inner is Stage:
            for default in STAGE_TABLES:
                default_table, description = _stage_default(default)
                yield _table(default, default_table, description)
                yield from _below(default, default_table)


def _stage_default(name: str) -> tuple[type[Section], str]:
    """Section of one of STAGE_TABLES, and its meaning above the stages."""
    section: Any = Stage.model_fields[name].annotation
    return section, f"{section.__doc__} Defaults of every stage."


def _table(path: str, section: type[Section], doc: str) -> Table:
    properties = section.model_json_schema()["properties"]
    keys = []
    for field_name, field in section.model_fields.items():
        name = field.alias or field_name
        inner, _ = section_in(field.annotation)
        if inner is not None and path == "":
            continue
        where = f"{path}.{name}".lstrip(".")
        absent = field.is_required() or inner is not None
        default = "" if absent else _toml(field.get_default(call_default_factory=True))
        kind = "table" if inner is not None else _type(properties[name])
        keys.append(
            Key(
                path=where,
                type=kind,
                default=default,
                unit=UNITS.get(where) or next((u for end, u in UNITS_BY_ENDING.items() if name.endswith(end)), ""),
                doc=" ".join((field.description or "").split()),
                example=EXAMPLES.get(where) or _another(kind, default),
                change=section.change_class(field_name).value,
            )
        )
    return Table(path=path, doc=" ".join((doc or section.__doc__ or "").split()), keys=tuple(keys))


def _another(kind: str, default: str) -> str:
    """A value of a switch or of a choice among words that is not the default; empty for other types."""
    values = ["false", "true"] if kind == "bool" else kind.split(" | ") if kind.startswith('"') else []
    return next((value for value in values if value != default), "")


def _type(schema: dict[str, Any]) -> str:
    """The type of a JSON Schema in the words of TOML."""
    if "$ref" in schema:
        return "table"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return " | ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        inner = schema.get("items") or schema.get("prefixItems", [{}])[0]
        count = schema.get("maxItems")
        return f"{count} × {_type(inner)}" if count else f"array of {_type(inner)}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"table of {_type(inner)}" if isinstance(inner, dict) else "table"
    bounds = [("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")]
    limits = ", ".join(f"{sign} {schema[bound]:g}" for bound, sign in bounds if bound in schema)
    return " ".join(filter(None, [{"number": "float", "boolean": "bool"}.get(kind, kind), limits]))


def _toml(value: Any) -> str:
    """A default as it would stand in the file; empty for a key that is absent by default."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{}" if not value else "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors: what a file may hold, before defaults and what it extends are put in.

    Nothing is required, since another job may bring it; unknown keys are refused as they are when the job is read.
    """
    schema = Job.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
    properties = schema["properties"]
    for name in STAGE_TABLES:
        section, description = _stage_default(name)
        properties[name] = {"$ref": f"#/$defs/{section.__name__}", "description": description}
    properties["extends"] = Extends.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mopd job"}


_HEAD = """# The job file

One TOML file is one whole run. Look up every key of such a file here: its type, default, meaning and an example. The
smallest job distils a teacher into a student on prompts of your own:

```toml
name = "mine"
store = "runs/mine"
student.path = "models/student"
teachers.expert.source = "models/expert"
domains.math = { source = "prompts.jsonl", reward = "exact" }
routing.math = "expert"
plan = { batch_samples = 32 }
objectives.opd.divergence.kind = "reverse"
stages = [{ name = "student", objective = "opd" }]
```

To print the entry of a key on a terminal, or to copy a recipe with a JSON Schema that lets an editor complete and check
its keys:

```sh run
mopd help train.schedule
mopd init opd mine
```

`make docs` writes this page from the sections that a file is checked against.

- A key that is left out has its default. An unknown key is refused, with the nearest one there is.
- `[rollout]`, `[score]`, `[plan]` and `[train]` are defaults of every stage; a stage overrides single keys of them.
  Between the two stand the `plan` and `train` keys of the stage's objective.
- `extends = { job = "quickstart", stages = ["base"], domains = ["spell_backward"] }` takes over another job's tables,
  and the stages and domains it lists. `job` is a file or folder, relative to this file, or the name of a recipe.
- Every other path is relative to the folder that `mopd` is started in: `store`, `work`, `student.path`,
  `domains.NAME.source`, `teachers.NAME.source`, `load.cache_dir`.
- `mopd run JOB --set train.learning_rate=3e-4` overrides one key; `--set stages.NAME.iterations=4` one of a stage.
- The last column says what a new value does to a run that has begun ([changing a run](change.md)): **free** holds at
  once; **from here on** holds from the next iteration on, and only with `mopd run JOB --from-here` or a yes on a
  terminal; **fixed** is refused.
"""


def page() -> str:
    """docs/job.md."""
    return "\n".join([_HEAD, *map(_section, tables())]).rstrip() + "\n"


def _section(table: Table) -> str:
    lines = [f"## {table.header if table.path else 'The top of the file'}", "", table.doc, ""]
    lines += ["| key | type | default | meaning | example | change |", "|---|---|---|---|---|---|"]
    for key in table.keys:
        name = key.path.removeprefix(table.path).lstrip(".")
        meaning = f"{key.doc} *{key.unit}*" if key.unit else key.doc
        default = f"`{key.default}`" if key.default else "–"
        cells = [f"`{name}`", key.type, default, meaning, key.example and f"`{name} = {key.example}`", key.change]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
