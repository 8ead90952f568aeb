"""Ends a run whose answers have collapsed, before it trains on them: far shorter, or drawn with far less entropy."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import stage_samples
from mopd_dataplane.run.steps.spikes import LOWER, command_with, where_to_look

FEWEST = 3
"""Earlier iterations that must be there for a comparison."""
MEASURED = 256
"""Answers of an iteration whose log-probs are read."""
LEAST_ENTROPY = 0.01
"""Median entropy in nat a token below which entropies are not compared: such a policy is nearly certain anyway."""


class Answers(NamedTuple):
    """The answers of an iteration that its own policy gave, in the mean."""

    length: float
    """Tokens of an answer."""
    entropy: float
    """-log p of a drawn token in nat: an unbiased estimate of the entropy of the distribution it was drawn from."""


def check_answer_collapse(run: Run, stage: Stage, iteration: int) -> None:
    """Compare an iteration's answers with the medians of the iterations before it. Raises EngineError if they have
    collapsed by `train.collapse_factor`."""
    factor = stage.train.collapse_factor
    if not factor or stage.data != "rollout":
        return
    recorded = _recorded(run, stage)
    answers = [recorded.get(earlier) or _measure(run, stage, earlier) for earlier in range(iteration + 1)]
    earlier, now = [one for one in answers[:-1] if one is not None], answers[-1]
    figure = "" if now is None else collapse(now, earlier, factor)
    if not figure:
        return
    uri, rate = run.store.uri, f"{LOWER * stage.train.learning_rate:g}"
    back = f"mopd rewind {shlex.quote(uri)} --to {stage.name}@{iteration - 1}"
    _, samples = stage_samples(run.store, stage, iteration, ["uid", "policy"])
    uids = samples.filter(pc.equal(samples["policy"], stage.name))["uid"].to_pylist()
    raise EngineError(
        f"stage {stage.name!r} iteration {iteration}: {figure} of the {len(earlier)} iterations before, more than "
        f"train.collapse_factor = {factor:g} times as much; nothing was trained on them. "
        f"{where_to_look(uri, uids, of='the iteration')}. To go back by an iteration: {back}, and then on "
        f"with a tenth of the learning rate: {command_with(stage, 'learning_rate', rate)}. To train on them all the "
        f"same: {command_with(stage, 'collapse_factor', '0')}"
    )


def collapse(now: Answers, earlier: Sequence[Answers], factor: float) -> str:
    """Describe what has collapsed beside earlier iterations; empty if nothing has.

    >>> collapse(Answers(2, 1.5), [Answers(9, 2), Answers(10, 2), Answers(12, 2)], 4)
    'answers have 2 tokens in the mean, and 10 is the median'
    """
    if len(earlier) < FEWEST:
        return ""
    length = statistics.median(one.length for one in earlier)
    entropy = statistics.median(one.entropy for one in earlier)
    if factor * now.length < length:
        return f"answers have {now.length:.3g} tokens in the mean, and {length:.3g} is the median"
    if factor * now.entropy < entropy and entropy >= LEAST_ENTROPY:
        return f"tokens are drawn with an entropy of {now.entropy:.3g} nat, and {entropy:.3g} is the median"
    return ""


def _recorded(run: Run, stage: Stage) -> dict[int, Answers]:
    """Read what was measured before, by iteration."""
    rule = f"kind = 'answers' AND stage = '{stage.name}'"
    rows = run.store.table("events", ["iteration", "detail"], filter=rule).to_pylist()
    return {row["iteration"]: Answers(**json.loads(row["detail"])) for row in rows}


def _measure(run: Run, stage: Stage, iteration: int) -> Answers | None:
    """Measure and record the answers of an iteration; None if its own policy gave none."""
    rows, samples = stage_samples(run.store, stage, iteration, ["policy", "response_len"])
    is_own = pc.equal(samples["policy"], stage.name).to_numpy()
    if not is_own.any():
        return None
    lengths = samples["response_len"].to_numpy()[is_own]
    chosen = np.sort(rows[is_own])[:: -(-int(is_own.sum()) // MEASURED)]
    payload = run.store.read_tokens(chosen, columns=["logprobs", "loss_mask"])
    drawn = [
        np.asarray(logprobs.values)[np.asarray(mask.values) > 0]
        for logprobs, mask in zip(payload["logprobs"], payload["loss_mask"], strict=True)
        if logprobs.is_valid
    ]
    entropy = float(-np.concatenate(drawn).mean(dtype=np.float64)) if drawn else 0.0
    answers = Answers(float(lengths.mean()), entropy)
    name = f"answers/{stage.name}/{iteration}"
    run.events.add(name, stage.name, "answers", iteration, answers.length, answers._asdict())
    return answers
