"""The table of per-token statistics: written once, queried, audited, freed; a store without it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import store_builders as build

from mopd_dataplane import open_store
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.store.commit.token_stats import TokenStats, free_token_stats, read_token_stats, write_token_stats
from mopd_dataplane.store.dataset import Store

SAMPLES = [build.sample(i) for i in range(6)]


@pytest.fixture
def filled(store: Store) -> Store:
    store.commit_samples(SAMPLES)
    return store


def stats(row: int, step: int = 0, teacher: str = "t") -> TokenStats:
    rng = np.random.default_rng(row)
    count = SAMPLES[row].loss_tokens
    values = {"logprob_gap": rng.normal(0, 0.01, count), "student_entropy": rng.random(count)}
    return TokenStats(sample_row=row, stage="student", teacher=teacher, step=step, policy_version=3, values=values)


def test_epochs_do_not_overwrite_each_other_and_a_repeat_changes_nothing(filled: Store) -> None:
    assert write_token_stats(filled, [stats(0), stats(1)]) == 2
    assert write_token_stats(filled, [stats(1), stats(1, step=7), stats(2)]) == 2
    rows = read_token_stats(filled, SAMPLES[1].uid)
    assert [row["step"] for row in rows] == [0, 7]
    expected = stats(1).values["logprob_gap"]
    np.testing.assert_allclose(rows[0]["logprob_gap"], expected, rtol=1e-3)
    assert rows[0]["mean_abs_gap"] == pytest.approx(np.abs(expected).mean(), rel=1e-5)
    assert rows[0]["reverse_kl"] is None, "what was not in hand is null"
    assert rows[0]["bytes"] == 2 * 2 * SAMPLES[1].loss_tokens


def test_a_difference_keeps_what_a_log_prob_would_lose() -> None:
    """Why the column is a difference: in two bytes a log-prob of -6 is good to 4e-3, more than what one looks for."""
    gap = 1e-3
    assert abs(float(np.float16(gap)) - gap) < 1e-6
    assert abs(float(np.float16(-6.0 + gap)) - (-6.0 + gap)) > 5e-4


def test_wrong_counts_and_names_are_refused(filled: Store) -> None:
    with pytest.raises(MismatchError, match="loss tokens"):
        write_token_stats(filled, [TokenStats(sample_row=0, stage="s", values={"logprob_gap": np.zeros(3)})])
    count = SAMPLES[0].loss_tokens
    with pytest.raises(MismatchError, match="logprob_gap"):
        write_token_stats(filled, [TokenStats(sample_row=0, stage="s", values={"logprob_gab": np.zeros(count)})])
    assert filled.table("token_stats").num_rows == 0


def test_infinities_become_the_largest_number(filled: Store) -> None:
    values = {"reverse_kl": np.full(SAMPLES[0].loss_tokens, np.inf)}
    write_token_stats(filled, [TokenStats(sample_row=0, stage="s", values=values)])
    assert np.isfinite(read_token_stats(filled, SAMPLES[0].uid)[0]["reverse_kl"]).all()


def test_sql_reads_them_as_floats(filled: Store) -> None:
    write_token_stats(filled, [stats(0), stats(3)])
    query = "select uid, list_avg(student_entropy) as h, student_entropy[1] as e from token_stats order by sample_row"
    rows = filled.sql(query).to_pylist()
    assert [row["uid"] for row in rows] == [SAMPLES[0].uid, SAMPLES[3].uid]
    expected = stats(0).values["student_entropy"]
    assert rows[0]["h"] == pytest.approx(expected.mean(), rel=1e-3)
    assert rows[0]["e"] == pytest.approx(expected[0], rel=1e-3)


def test_freed_lists_leave_the_disk_and_their_means_stay(filled: Store) -> None:
    write_token_stats(filled, [stats(0), stats(1)])
    write_token_stats(filled, [stats(2), stats(3)])
    before = filled.table("token_stats", ["uid", "mean_abs_gap"])
    assert free_token_stats(filled, [0]).rows == 0, "a file goes once all its rows have served"
    freed = free_token_stats(filled, [0, 1, 2])
    assert freed.rows == 2
    assert freed.bytes > 0
    assert filled.table("token_stats", ["uid", "mean_abs_gap"]).equals(before), "no row moves"
    assert read_token_stats(filled, SAMPLES[0].uid)[0]["logprob_gap"] is None
    assert read_token_stats(filled, SAMPLES[2].uid)[0]["logprob_gap"] is not None
    assert free_token_stats(filled, [0, 1]).rows == 0, "nothing is left to do"
    assert write_token_stats(filled, [stats(0)]) == 0, "the row is still there: nothing brings the lists back"
    assert filled.verify().findings == []


def test_an_audit_sees_a_changed_byte(filled: Store) -> None:
    write_token_stats(filled, [stats(0), stats(1)])
    (file,) = (filled.path("token_stats") / "data").glob("*.lance")
    entropy_bytes = stats(0).values["student_entropy"].astype(np.float16).tobytes()
    content = bytearray(file.read_bytes())
    at = content.index(entropy_bytes)
    content[at] ^= 1
    file.write_bytes(content)
    [finding] = open_store(filled.uri).verify().findings
    assert finding.table == "token_stats"
    assert "row crc32c" in finding.problem


def test_a_store_that_lacks_the_table_is_whole_and_gets_it_when_it_is_written_to(filled: Store, tmp_path: Path) -> None:
    shutil.rmtree(filled.path("token_stats"))
    shutil.rmtree(filled.path("acknowledged") / "token_stats", ignore_errors=True)
    for file in filled.path("acknowledged").glob("token_stats*"):
        file.unlink()
    store = open_store(filled.uri)
    assert "token_stats" not in store.names()
    assert "token_stats" not in store.snapshot().versions
    assert read_token_stats(store, SAMPLES[0].uid) == []
    assert store.verify().findings == []
    assert store.sql("select count(*) as n from samples").to_pylist() == [{"n": 6}]
    assert write_token_stats(store, [stats(0)]) == 1
    assert "token_stats" in open_store(filled.uri).names()
