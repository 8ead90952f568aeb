"""Differences between two versions of a job, key by key, with the class of each key; values put back by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.load import section_in
from mopd_dataplane.job.parse import parts_of
from mopd_dataplane.job.section import ChangeClass, Section

_WITHOUT_EFFECT = {"objectives": {"__all__": {"plan", "train"}}}
"""Defaults of an objective, which the stages that name it hold already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A key that has two values."""

    key: str
    """As in --set; a part with a dot in it is quoted."""
    before: Any
    """Value as JSON types; None also for a table that is new."""
    after: Any
    """Value as JSON types; None also for a table that is gone."""
    change_class: ChangeClass
    fixed_because: str = ""
    """Reason of a fixed key."""

    @property
    def parts(self) -> list[str]:
        """The key, part by part."""
        return parts_of(self.key)


def differences(before: Job, after: Job) -> list[Difference]:
    """Keys whose values differ, in the order of the job file. A stage that only one of the two has is left out."""
    dumps = [job.model_dump(mode="json", exclude=_WITHOUT_EFFECT) for job in (before, after)]
    for dump in dumps:
        dump["stages"] = {stage["name"]: stage for stage in dump["stages"]}
    common = dumps[0]["stages"].keys() & dumps[1]["stages"].keys()
    for dump in dumps:
        dump["stages"] = {name: stage for name, stage in dump["stages"].items() if name in common}
    return list(_differences(Job, [], dumps[0], dumps[1]))


def _differences(section: type[Section], path: list[str], before: Any, after: Any) -> Iterator[Difference]:
    for name, field in section.model_fields.items():
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        inner, is_named = section_in(field.annotation)
        if inner is not None and is_named:
            for key in sorted(old.keys() | new.keys()):
                yield from _of_table(inner, [*path, name, key], old.get(key), new.get(key))
        elif inner is not None:
            yield from _of_table(inner, [*path, name], old, new)
        else:
            change_class = section.change_class(name)
            yield Difference(
                key=_dotted([*path, name]), before=old, after=new, change_class=change_class,
                fixed_because=section.fixed_because if change_class == ChangeClass.FIXED else "",
            )  # fmt: skip


def _of_table(section: type[Section], path: list[str], before: Any, after: Any) -> Iterator[Difference]:
    """Differences inside a table that both jobs have; else the table itself, which may come and go."""
    if before is not None and after is not None:
        yield from _differences(section, path, before, after)
    elif before != after:
        yield Difference(key=_dotted(path), before=before, after=after, change_class=ChangeClass.FROM_HERE)


def concerns(difference: Difference, stage: Stage, job: Job) -> bool:
    """Whether a stage of a job depends on a key: keys of other stages, and of teachers, domains and objectives that it
    does not use, change nothing for it."""
    table, name = (*difference.parts, "")[:2]
    if table == "stages":
        return name == stage.name
    if table == "objectives":
        return name == stage.objective
    if table == "domains":
        return name in job.domains_of(stage)
    if table == "routing":
        return not stage.routing
    if table == "teachers":
        scorers = [teacher for teacher in job.scorers_of(stage) if teacher in job.teachers]
        return any(name in (teacher, *job.members_of(teacher)) for teacher in scorers)
    return True


def put(dump: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of a dumped job; None takes the key away, which leaves its default."""
    *path, last = parts_of(key)
    node: Any = dump
    for part in path:
        node = next(item for item in node if item["name"] == part) if isinstance(node, list) else node[part]
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value


def _dotted(path: list[str]) -> str:
    return ".".join(f'"{part}"' if "." in part else part for part in path)
