"""Health of the signals of a finished job: rows, report, and a job that refuses unhealthy ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from advice import assert_advised

from mopd_dataplane import open_store
from mopd_dataplane.query.measures import measure
from mopd_dataplane.query.report import write_report


@pytest.mark.slow
def test_every_pass_leaves_one_row_for_each_teacher(finished_job: Path, tmp_path: Path) -> None:
    store = open_store(str(finished_job / "store"))
    measures = measure(store)
    rows = measures.signal_health
    assert [(row["iteration"], row["teacher"], row["domain"], row["policy_version"]) for row in rows] == [
        (iteration, name, name, iteration) for iteration in (0, 1) for name in ("sums", "words")
    ]
    scored = store.sql(
        "select iteration, teacher, count(*) samples, sum(loss_tokens) tokens, "
        "sum((mean_logprob - mean_reverse_kl) * loss_tokens) / sum(loss_tokens) logprob, "
        "sum(mean_logprob * loss_tokens) / sum(loss_tokens) student "
        "from samples join scores using (uid) where stage = 'student' and kind = 'logprob' group by all order by all"
    ).to_pylist()
    for row, other in zip(rows, scored, strict=True):
        assert (row["samples"], row["tokens"]) == (other["samples"], other["tokens"])
        assert row["mean_logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert row["student_logprob"] == pytest.approx(other["student"], abs=1e-4)
    probes = {(row["reader"], row["domain"]): row for row in measures.signal_probes}
    assert set(probes) == {(reader, domain) for reader in ("", "sums", "words") for domain in ("sums", "words")}
    for domain in ("sums", "words"):  # a specialist finds its own domain's answers likelier than its start does
        assert probes[domain, domain]["reference"] > probes["", domain]["reference"]
    page = write_report(store, tmp_path / "report.html").read_text()
    assert "Health of the signals" in page
    assert "own text" in page


@pytest.mark.slow
def test_a_job_may_refuse_unhealthy_signals(
    finished_job: Path, write_job: Callable[..., Path], mopd: Callable, tmp_path: Path
) -> None:
    """A few steps make no teacher: its greedy text is near a guess, and `own` says so."""
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    job, refuse = write_job(tmp_path), 'stages.student.score.on_unhealthy="refuse"'
    done = mopd("score", job, "--stage", "student", "--set", refuse, check=False)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "teacher 'sums' on domain 'sums', check own: mean log-prob of its own greedy text" in said
    assert 'set stages.student.score.on_unhealthy = "warn"' in said
    assert_advised(". Nothing was trained on these signals; mend the teacher under a new name, or set ", said)
    mopd("score", job, "--stage", "student", "--set", 'stages.student.score.on_unhealthy="warn"')
    rows = json.loads(mopd("teachers", job, "--stage", "student", "--samples", "4", "--json").stdout)
    assert all(("own" in row["failed"]) == (row["teacher"] == row["domain"]) for row in rows)
