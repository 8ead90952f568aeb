"""Advice after memory ran out: every proposed value is allowed, smaller and free to change, until none is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documented import ROOT, blocks

from mopd_dataplane.job.changes import differences
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.memory_advice import for_rollout, for_scoring, for_training
from mopd_dataplane.job.section import ChangeClass

TEXT = next(block.text for block in blocks(ROOT / "docs" / "change.md") if block.language == "toml")
STUDENT = "stages.student"


@pytest.mark.parametrize(
    ("advise", "start", "keys"),
    [
        (lambda job: for_rollout(job.engine), ["engine.slots=8"], ["engine.slots"] * 3),
        (
            lambda job: for_scoring(job.stage("student")),
            [f"{STUDENT}.score.batch_tokens=4096"],
            [f"{STUDENT}.score.batch_tokens"] * 6,
        ),
        (
            lambda job: for_training(job.stage("student")),
            [f"{STUDENT}.train.micro_batch_packs=4", f"{STUDENT}.plan.pack_tokens=256"],
            [
                *[f"{STUDENT}.train.micro_batch_packs"] * 2,
                *[f"{STUDENT}.train.micro_batch_tokens"] * 2,
                f"{STUDENT}.train.gradient_checkpointing",
                f"{STUDENT}.train.offload",
            ],
        ),
    ],
)
def test_each_proposal_is_a_free_change_to_less_until_none_is_left(
    tmp_path: Path, advise: Callable[[Job], str], start: list[str], keys: list[str]
) -> None:
    file, settings, followed = tmp_path / "job.toml", [*start], []
    file.write_text(TEXT)
    limits = [f"{STUDENT}.rollout.max_prompt_tokens=40", f"{STUDENT}.rollout.max_new_tokens=24"]
    job = load_job(file, overrides=[*limits, *settings])
    while "--set" in (advice := advise(job)):
        setting = advice.partition("--set ")[2].split(" ")[0]
        settings.append(setting)
        changed = load_job(file, overrides=[*limits, *settings])
        [difference] = differences(job, changed)
        assert difference.change_class is ChangeClass.FREE
        if isinstance(difference.after, bool):
            assert difference.after
        else:
            assert f" is {difference.before} (" in advice or difference.before == 0
            assert difference.after > 0
            assert difference.after < difference.before or difference.before == 0
        followed.append(setting.partition("=")[0])
        job = changed
    assert followed == keys
    assert advice.endswith("is left")
