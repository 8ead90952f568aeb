"""Rounds of sampling: further prompts until enough groups of an iteration have different rewards (`rollout.until`).

    every round: rollout of `prompts_per_iteration` more prompts -> their rewards -> count of informative groups

The samples of a round follow from names and seed, and whether there is one more from the rewards in the store, so an
iteration that was killed anywhere continues with the same samples.
"""

import numpy as np
import pyarrow.compute as pc

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.further_samples import Until
from mopd_dataplane.job.job import Stage
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.run.conditions import SPREAD_CONDITION
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import stage_samples
from mopd_dataplane.run.steps.reward import reward
from mopd_dataplane.run.steps.rollout import rollout
from mopd_dataplane.store.read.snapshot import newest
from mopd_dataplane.store.rollouts.conditions import Conditions


def rollout_until(run: Run, stage: Stage, until: Until, iteration: int) -> list[RolloutReport]:
    """Sample and reward an iteration until enough groups are informative. Returns the reports of every rollout.

    Raises InputError where no group is informative after the last round, and what rollout and reward raise.
    """
    reports: list[RolloutReport] = []
    informative = groups = samples = rounds = 0
    while rounds < until.at_most and informative < until.groups:
        rounds += 1
        reports += rollout(run, stage, iteration, rounds=rounds)
        reward(run, stage, iteration=iteration, rounds=rounds)
        informative, groups, samples = _count(run, stage, iteration)
    if not informative:
        raise InputError(
            f"stage {stage.name!r}: the rewards of each of the {groups:,} groups of iteration {iteration} are equal "
            f"after rollout.until.at_most = {until.at_most} rounds, so nothing can be learned from them; look at the "
            "answers with mopd view, raise rollout.group_size, or give the stage prompts that it answers now right, "
            "now wrong"
        )
    used = min(informative, until.groups)
    unused = samples - used * stage.rollout.group_size
    text = (
        f"{informative:,} of {groups:,} groups informative after {rounds} of at most {until.at_most} rounds, "
        f"{used:,} of {until.groups:,} used; {unused:,} samples stay stored and are not trained on"
    )
    run.progress.say(f"{stage.name:<16} until    {text}")
    detail = {"rounds": rounds, "groups": groups, "used": used, "unused_samples": unused}
    run.store.add_event(f"until/{stage.name}/{iteration}", stage.name, "until", iteration, informative, detail)
    return reports


def _count(run: Run, stage: Stage, iteration: int) -> tuple[int, int, int]:
    """(groups of an iteration whose rewards differ, all of its groups, its samples)."""
    rows, samples = stage_samples(run.store, stage, iteration, ["group_id"])
    with newest(run.store) as snapshot:
        differs = np.isin(rows, Conditions(run.store, snapshot).rows(SPREAD_CONDITION, "rollout.until"))
    groups = samples["group_id"]
    return pc.count_distinct(groups.filter(differs)).as_py(), pc.count_distinct(groups).as_py(), len(rows)
