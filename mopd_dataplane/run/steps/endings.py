"""How answers end: the tokens with which student and teachers end one, and the share of answers that do end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.hf import load_tokenizer, stop_ids
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import stage_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOSTLY_CUT_OFF = 0.5
"""Share of cut-off answers from which a stage is warned, if it has risen by RISE."""
RISE = 0.25


def print_stop_tokens(run: Run, stage: Stage) -> None:
    """Print the tokens at which the student stops, for each teacher whose answers end with another token."""
    tokenizer = run.tokenizer
    stops = [_text(tokenizer, index) for index in stop_ids(run.policies.initial(), tokenizer)]
    names = {member for teacher in run.job.teachers_of(stage) for member in run.job.members_of(teacher)}
    for name in sorted(names):
        settings = run.job.teachers[name]
        if settings.of_this_job or settings.url or settings.tokenizer == "own":
            continue
        end = load_tokenizer(Path(run.policies.teacher(name, stage))).eos_token_id
        if end is None or end == tokenizer.eos_token_id:
            continue
        text = _text(tokenizer, end)
        if settings.end == "map":
            how = "is read at the student's end, " + _text(tokenizer, tokenizer.eos_token_id)
        elif text in stops:
            how = "is one at which the student stops too"
        else:
            how = f'is no end of the student, which may never learn to stop; see teachers.{name}.end = "map"'
        run.progress.say(
            f"{stage.name:<16} ends     the student stops at {', '.join(stops)}; the end of teacher {name!r}, {text}, "
            f"{how}"
        )


def stopped_share(run: Run, stage: Stage, iteration: int) -> float | None:
    """Share of an iteration's answers that ended by themselves, of those that ended or were cut off; recorded once."""
    _, samples = stage_samples(run.store, stage, iteration, ["finish_reason"])
    stopped = pc.sum(pc.equal(samples["finish_reason"], "stop")).as_py() or 0
    cut_off = pc.sum(pc.equal(samples["finish_reason"], "length")).as_py() or 0
    if not stopped + cut_off:
        return None
    share = float(stopped / (stopped + cut_off))
    run.store.add_event(f"stopped/{stage.name}/{iteration}", stage.name, "stopped", iteration, share, {})
    return share


def warn_if_mostly_cut_off(run: Run, stage: Stage, iteration: int, stopped: float) -> None:
    """Warn once when most answers of an iteration are cut off, and clearly more than at the beginning.

    stopped: the result of `stopped_share`.
    """
    events = run.store.table("events", ["iteration", "value"], filter=f"kind = 'stopped' AND stage = '{stage.name}'")
    first = events.sort_by("iteration")["value"][0].as_py()
    if 1 - stopped < MOSTLY_CUT_OFF or first - stopped < RISE:
        return
    warning = (
        f"{1 - stopped:.0%} of the answers of iteration {iteration} were cut off at rollout.max_new_tokens = "
        f"{stage.rollout.max_new_tokens}, {1 - first:.0%} of the first iteration's: the student forgets to stop. Often "
        'its teacher ends an answer with another token (mopd check names both; teachers.NAME.end = "map" reads one at '
        "the other), or the prompts of base and instruct models differ (student.prompt_template); else look at some "
        "long answers with mopd view"
    )
    event = f"cut_off/{stage.name}"
    if not run.has_event(event):
        run.progress.say(f"{stage.name:<16} warning  {warning}")
        run.store.add_event(event, stage.name, "warning", iteration, 1 - stopped, {"warning": warning})


def _text(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens(index))
