"""Rollout, score and train at once, each in a process of its own that follows the store.

    mopd rollout JOB --follow    samples every iteration with the newest published policy
    mopd score JOB --follow      judges samples as they become visible
    mopd train JOB --follow      plans windows as signals become visible, trains, publishes

They meet in the store only. A producer that is ahead is held back between iterations, never inside one; a trainer that
is ahead waits. Each ends by recording that it has ended, and each can be killed and started again.
"""

from __future__ import annotations

import time

from mopd_dataplane.jobfile import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.generate import rollout
from mopd_dataplane.run.judge import reward, score
from mopd_dataplane.run.learn import Training

POLL_S = 0.5


def rollout_follow(run: Run, stage: Stage) -> None:
    """Every iteration of a stage, each sampled by the newest policy there is when it begins."""
    for generation in range(stage.iterations):
        _hold_back(run, stage)
        rollout(run, stage, generation, version=run.policies.latest(stage))
    _record_end(run, stage, "rollout")


def score_follow(run: Run, stage: Stage) -> None:
    """Judge and verify samples as they become visible, until the rollouts have ended."""
    while True:
        last_round = _has_ended(run, stage, "rollout")
        scored = score(run, stage)["signals"]
        rewarded = reward(run, stage)["rewards"]
        if last_round:
            break
        if not scored and not rewarded:
            time.sleep(POLL_S)
    _record_end(run, stage, "score")


def train_follow(run: Run, stage: Stage) -> None:
    """Plan and train windows as they become possible, until everything scored is trained on."""
    with Training(run, stage) as training:
        while True:
            window = training.next_window
            decision = _decide(run, stage, window)
            for reason, rows in decision.dropped.items():
                _record_drop(run, stage, window, reason, rows)
            if decision.window is None:
                run.progress.say(f"{stage.name:<16} wait     {decision.wait}")
                time.sleep(POLL_S)
                continue
            run.store.add_plan(decision.window)
            if not len(decision.window.sample_rows):
                break
            training.train(decision.window)
