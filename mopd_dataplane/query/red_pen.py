"""The head of a report: what teachers correct in the student's answers, for some versions of the policy."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MopdError
from mopd_dataplane.query.corrections import (
    MIN_NATS,
    SCORED,
    Pick,
    marked_answer,
    most_corrected,
    picks,
    rows_to_read,
)
from mopd_dataplane.query.text import one_line, visible

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

MOST_VERSIONS, MOST_TEACHERS, MOST_LINES = 6, 4, 5
"""What a report shows of a run; the viewer shows all."""
PROMPT_CHARACTERS = 400
WORD_CHARACTERS = 24
WIDTH, HEIGHT, MARGIN = 360, 150, 8
"""Size and border of the curve, in units of its drawing."""


def red_pen(store: Store, snapshot: Snapshot, decoder: Decoder | Numbers) -> dict[str, Any] | None:
    """Answers with corrections of the newest stage with scored answers, by version: `versions`, from the first to the
    newest; `curves`, the reverse KL of each teacher; and `lists`, what each teacher corrected most in the newest
    iteration. None where no teacher has scored an answer."""

    def ask(sql: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = store.sql(sql, snapshot=snapshot).to_pylist()
        return rows

    stages = ask(f"select stage from ({SCORED}) group by stage order by max(sample_row) desc limit 1")
    if not stages:
        return None
    stage = stages[0]["stage"]
    rows = picks(ask, SCORED, stage)
    teachers = list(dict.fromkeys(row.teacher for row in rows))[:MOST_TEACHERS]
    rows = [row for row in rows if row.teacher in teachers]
    iterations = sorted({row.iteration for row in rows})
    last = len(iterations) - 1
    shown = [iterations[at] for at in sorted({round(last * n / (MOST_VERSIONS - 1)) for n in range(MOST_VERSIONS)})]
    newest = rows_to_read(ask, SCORED, stage, iterations[-1])
    prompts = _prompts(store, snapshot, rows)
    highest = max(max(row.kl for row in rows), 1e-6)
    return {
        "stage": stage, "min_nats": MIN_NATS, "width": WIDTH, "height": HEIGHT, "highest": highest,
        "pens": {teacher: pen for pen, teacher in enumerate(teachers)},
        "versions": [
            {
                "iteration": iteration, "version": min(row.version for row in rows if row.iteration == iteration),
                "x": _x(iteration, iterations),
                "answers": [
                    _answer(store, snapshot, decoder, row, prompts)
                    for row in rows if row.iteration == iteration
                ],
            }
            for iteration in shown
        ],
        "curves": {teacher: _points([row for row in rows if row.teacher == teacher], iterations, highest)
                   for teacher in teachers},
        "newest": iterations[-1],
        "lists": [_list(store, snapshot, decoder, teacher, newest[teacher]) for teacher in teachers
                  if teacher in newest],
    }  # fmt: skip


def _prompts(store: Store, snapshot: Snapshot, rows: list[Pick]) -> dict[str, str]:
    ids = ", ".join(sorted({literal(row.prompt_id) for row in rows}))
    table = store.table("prompts", ["prompt_id", "text"], f"prompt_id IN ({ids})", snapshot)
    return {row["prompt_id"]: row["text"].strip()[-PROMPT_CHARACTERS:] for row in table.to_pylist()}


def _answer(
    store: Store, snapshot: Snapshot, decoder: Decoder | Numbers, row: Pick, prompts: dict[str, str]
) -> dict[str, Any]:
    about = asdict(row) | {"prompt": visible(prompts.get(row.prompt_id, "")), "error": "", "tokens": [], "note": ""}
    try:
        marked = marked_answer(store, snapshot, decoder, row.teacher, row.sample_row)
    except (MopdError, OSError) as error:
        return about | {"error": str(error)}
    fixes = {fix["at"]: fix for fix in marked["fixes"]}
    tokens = [
        {"text": word(piece) if at in fixes else piece, "fix": _fix(fixes[at]) if at in fixes else None}
        for at, piece in enumerate(marked["pieces"], marked["start"])
    ]
    return about | {"tokens": tokens, "before": marked["before"], "after": marked["after"], "note": marked["note"]}


def _fix(fix: dict[str, Any]) -> dict[str, Any]:
    """`word` above a token, its `size` in the size of the token's letters, and the distance in nats."""
    text = f"−{fix['nats']:.1f}" if fix["word"] is None else word(fix["word"])
    return {"word": text, "size": 0.58 + 0.07 * min(fix["nats"], 8.0), "nats": fix["nats"]}


def _list(
    store: Store, snapshot: Snapshot, decoder: Decoder | Numbers, teacher: str, sample_rows: list[int]
) -> dict[str, Any]:
    try:
        words = most_corrected(store, snapshot, decoder, teacher, sample_rows)
    except (MopdError, OSError) as error:
        return {"teacher": teacher, "lines": [], "looked_at": 0, "error": str(error)}
    lines = [
        line | {"token": word(line["token"]), "word": "?" if line["word"] is None else word(line["word"])}
        for line in words["lines"][:MOST_LINES]
    ]
    return {"teacher": teacher, "lines": lines, "looked_at": words["looked_at"], "error": ""}


def word(text: str) -> str:
    """A token on one line, cut where it is long; spaces are drawn.

    >>> word("  "), word(""), word("two")
    ('␣␣', '∅', 'two')
    """
    return one_line(text, limit=WORD_CHARACTERS) if text.strip(" ") else "␣" * len(text) or "∅"


def _x(iteration: int, iterations: list[int]) -> float:
    span = max(1, iterations[-1] - iterations[0])
    return round(MARGIN + (WIDTH - 2 * MARGIN) * (iteration - iterations[0]) / span, 1)


def _points(rows: list[Pick], iterations: list[int], highest: float) -> str:
    """Points of a polyline, reverse KL from 0 at the bottom to the highest at the top."""
    height = HEIGHT - 2 * MARGIN
    return " ".join(
        f"{_x(row.iteration, iterations)},{HEIGHT - MARGIN - height * max(row.kl, 0.0) / highest:.1f}" for row in rows
    )
