"""The first page: what each teacher corrects in the student's answers, version by version."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MopdError, UnknownNameError, nearest
from mopd_dataplane.query.corrections import MIN_NATS, Pick, marked_answer, most_corrected, picks, rows_to_read
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.rollouts.conditions import TABLE
from mopd_dataplane.view.prompt import prompt_text

if TYPE_CHECKING:
    from mopd_dataplane.view.index import Index
    from mopd_dataplane.view.shown import Shown

PROMPT_CHARACTERS = 400
"""Characters of the end of a prompt that the page shows."""


def overview(shown: Shown, stage: str = "") -> dict[str, Any]:
    """Stages with scored answers; of one of them, by default the newest, the iterations, and for each teacher its
    reverse KL by iteration. Raises UnknownNameError for a stage without scored answers."""
    stages = shown.remembered("redpen/stages", _stages)
    stage = stage or (stages[-1] if stages else "")
    if not stages:
        return {"stages": [], "stage": "", "iterations": [], "teachers": [], "min_nats": MIN_NATS}
    if stage not in stages:
        raise UnknownNameError(f"no answer of stage {stage!r:.80} is scored: {nearest(stage, stages)}")
    rows = _picks(shown, stage)
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        point = {"iteration": row.iteration, "kl": row.kl, "kl_ci": row.kl_ci, "answers": row.answers}
        curves.setdefault(row.teacher, []).append(point)
    versions = {row.iteration: row.version for row in rows}
    return {
        "stages": stages, "stage": stage, "min_nats": MIN_NATS,
        "iterations": [{"iteration": at, "version": versions[at]} for at in sorted(versions)],
        "teachers": [{"name": name, "curve": curve} for name, curve in curves.items()],
    }  # fmt: skip


def corrected_answers(shown: Shown, stage: str, iteration: int) -> list[dict[str, Any]]:
    """For each teacher, the answer that shows its corrections in an iteration: prompt, text and what it corrected.

    An answer that cannot be read has an `error` instead of its text.
    """
    return list(shown.remembered(f"redpen/{stage}/{iteration}/answers", lambda index: [
        _answer(shown, index, row) for row in _picks(shown, stage) if row.iteration == iteration
    ]))  # fmt: skip


def _answer(shown: Shown, index: Index, row: Pick) -> dict[str, Any]:
    prompt = str(prompt_text(shown.store, row.prompt_id, index.snapshot).get("text", "")).strip()
    cut = "…" if len(prompt) > PROMPT_CHARACTERS else ""
    about = asdict(row) | {"prompt": cut + visible(prompt[-PROMPT_CHARACTERS:])}
    try:
        return about | marked_answer(shown.store, index.snapshot, shown.decoder, row.teacher, row.sample_row)
    except (MopdError, OSError) as error:
        return about | {"error": str(error)}


def corrected_words(shown: Shown, stage: str, iteration: int) -> list[dict[str, Any]]:
    """For each teacher, what it corrected most in an iteration, as query.corrections.most_corrected describes it."""
    return list(shown.remembered(f"redpen/{stage}/{iteration}/words", lambda index: _words(
        shown, index, stage, iteration
    )))  # fmt: skip


def _words(shown: Shown, index: Index, stage: str, iteration: int) -> list[dict[str, Any]]:
    totals = {row.teacher: row.answers for row in _picks(shown, stage) if row.iteration == iteration}
    result = []
    for teacher, rows in rows_to_read(index.rows, _scored(index), stage, iteration).items() if totals else ():
        about: dict[str, Any] = {"teacher": teacher, "answers": totals.get(teacher, len(rows))}
        try:
            result.append(about | most_corrected(shown.store, index.snapshot, shown.decoder, teacher, rows))
        except (MopdError, OSError) as error:
            result.append(about | {"lines": [], "looked_at": 0, "fixes": 0, "note": "", "error": str(error)})
    return result


def _picks(shown: Shown, stage: str) -> list[Pick]:
    return list(shown.remembered(f"redpen/{stage}/picks", lambda index: (
        picks(index.rows, _scored(index), stage) if _teachers(index) else []
    )))  # fmt: skip


def _stages(index: Index) -> list[str]:
    """Stages with scored answers, in the order of their first sample."""
    if not _teachers(index):
        return []
    rows = index.rows(f"select stage from ({_scored(index)}) group by stage order by min(sample_row)")
    return [row["stage"] for row in rows]


def _teachers(index: Index) -> list[str]:
    return [name for name in index.teachers if f"kl_{name}" in index.columns]


def _scored(index: Index) -> str:
    """The columns of query.corrections.SCORED, of the table of rollouts."""
    return " union all ".join(
        f"""select stage, iteration, policy_version_first as version, domain, prompt_id, uid, sample_row, response_len,
                   {literal(name)} as teacher, "kl_{name}" as kl
            from {TABLE} where "kl_{name}" is not null and policy <> 'reference'"""
        for name in _teachers(index)
    )
