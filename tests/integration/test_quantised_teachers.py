"""A job with a quantised teacher: its effect is measured once, before the first signal, whatever stops it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import Store, open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.score import score

pytestmark = pytest.mark.quantise

ROUTED = """
[teachers.rounded]
source = "stage:sums"
quantisation = "int8"
"""


def effects(store: Store) -> list[dict[str, Any]]:
    return store.sql("select event_id, value, detail from events where kind = 'quantisation' order by 1").to_pylist()


def test_the_effect_of_rounding_is_recorded_once_and_before_any_signal(
    finished_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished_job / "store", tmp_path / "store")
    file = write_job(tmp_path, extra=ROUTED)
    file.write_text(file.read_text().replace('[routing]\nsums = "sums"', '[routing]\nsums = "rounded"'))

    def stops(*_: Any) -> int:
        raise OSError("stopped before the first signal")

    job = load_job(file)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit_signals", stops)
        with pytest.raises(OSError, match="stopped before"):
            score(open_run(job, Progress(None)), job.stage("student"))
    first = effects(open_store(str(tmp_path / "store")))
    assert [row["event_id"].rpartition("/")[2] for row in first] == ["kl", "logprob_gap", "top1_agreement"]
    assert all(np.isfinite(row["value"]) for row in first)
    assert json.loads(first[0]["detail"])["quantisation"] == "int8"
    assert 0 < first[0]["value"] < 0.1, "int8 moves a small model a little, and not by nothing"

    done = json.loads(mopd("score", file, "--stage", "student", "--json").stdout)
    store = open_store(str(tmp_path / "store"))
    assert effects(store) == first
    assert store.teachers()["rounded"].quantisation == "int8"
    said = store.sql(
        "select teacher, count(*) n, avg(mean_reverse_kl) kl from scores join samples using (uid) "
        "where kind = 'logprob' and stage = 'student' and domain = 'sums' group by 1 order by 1"
    ).to_pylist()
    assert [row["teacher"] for row in said] == ["rounded", "sums"]
    assert said[0]["n"] == said[1]["n"]
    assert said[0]["kl"] == pytest.approx(said[1]["kl"], abs=0.1)
    assert said[0]["kl"] != said[1]["kl"]
    assert done["signals"] == said[0]["n"]
    page = mopd("report", str(tmp_path / "store"), "--json").stdout
    assert json.loads(page)["rounding"][0]["teacher"] == "rounded"

    file.write_text(file.read_text().replace('"int8"', '"fp8"'))
    refused = mopd("score", file, "--stage", "student", check=False)
    assert refused.returncode == 2
    assert "add another one under a new name" in refused.stderr
