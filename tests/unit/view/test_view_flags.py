"""Flags, labels and statistics of tokens in the viewer: each marks what it says and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from mopd_dataplane import Sample, Signal, create_store
from mopd_dataplane.records import Teacher, sample_uid
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.view import labels
from mopd_dataplane.view.sample import describe, stats_of
from mopd_dataplane.view.shown import Shown

VOCABULARY = 1000
SAID = {
    "plain": lambda noise, said: np.minimum(said + noise.normal(0, 0.3, len(said)), -1e-3),
    "zeros": lambda noise, said: np.zeros(len(said)),
    "uniform": lambda noise, said: np.full(len(said), -np.log(VOCABULARY)),
    "constant": lambda noise, said: np.full(len(said), -1.25),
}
FLAGS = {
    "plain": set(),
    "zeros": {"zero_teacher", "constant_teacher"},
    "uniform": {"uniform_teacher", "constant_teacher"},
    "constant": {"constant_teacher"},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """One sample for each way a teacher can speak, one that loops, and one whose trainer is far from its sampler."""
    store = create_store(str(tmp_path_factory.mktemp("flags") / "s"))
    noise = np.random.default_rng(0)
    names = [*SAID, "loops", "far"]
    samples = [_sample(name, number, noise) for number, name in enumerate(names)]
    store.commit_samples(samples)
    store.add_teacher(
        Teacher(
            name="t", source="s", weights_digest="w", tokenizer_digest="tok", vocab_size=VOCABULARY, hidden_size=8,
            dtype="fp32", head_file="heads/t.safetensors", head_digest="h",
        )
    )  # fmt: skip
    store.commit_signals(
        "t", "logprob", [_signal(n, s, row, noise) for row, (n, s) in enumerate(zip(names, samples, strict=True))]
    )
    stats = []
    for row, sample in enumerate(samples):
        count = sample.loss_tokens
        gap = 0.4 if names[row] == "far" else 0.01
        stats.append(TokenStats(sample_row=row, stage="student", teacher="t",
                                values={"teacher_entropy": np.full(count, 0.5)}))  # fmt: skip
        for step, size in ((3, gap), (9, 5.0)):
            values = {"logprob_gap": np.full(count, -size), "student_entropy": np.full(count, 1.5)}
            stats.append(TokenStats(sample_row=row, stage="student", step=step, policy_version=1, values=values))
    write_token_stats(store, stats)
    return Shown(store)


def _sample(name: str, number: int, noise: np.random.Generator) -> Sample:
    response = np.tile([5, 6, 7], 10) if name == "loops" else noise.integers(0, VOCABULARY, 30)
    mask = np.ones(30, np.uint8)
    mask[4] = 0
    return Sample(
        uid=sample_uid(0, "student", name, 0, 0), prompt_id=name, group_id=f"{name}#0", group_index=0, iteration=0,
        domain="d", stage="student", writer="w", writer_seq=number, policy="student", temperature=1.0, top_p=1.0,
        top_k=0, prompt_len=2, tokens=np.concatenate([[1, 2], response]).astype(np.int32),
        logprobs=(-noise.exponential(0.5, 30) * mask).astype(np.float32), loss_mask=mask,
        version_starts=np.array([0], np.int32), versions=np.array([1], np.int32), finish_reason="stop",
        tokenizer="tok",
    )  # fmt: skip


def _signal(name: str, sample: Sample, row: int, noise: np.random.Generator) -> Signal:
    mask = sample.loss_mask.astype(bool)
    values = SAID.get(name, SAID["plain"])(noise, sample.logprobs[mask]).astype(np.float32)
    logprob = np.zeros(len(mask), np.float32)
    logprob[mask] = values
    gap = float(np.mean(sample.logprobs[mask] - values))
    return Signal(uid=sample.uid, sample_row=row, kind="logprob", logprob=logprob, mean_reverse_kl=gap,
                  logprob_std=float(values.std()))  # fmt: skip


def uid_of(shown: Shown, name: str) -> str:
    return shown.index().rows("select uid from rollouts where prompt_id = ?", [name])[0]["uid"]


@pytest.mark.parametrize("flag", ["zero_teacher", "uniform_teacher", "constant_teacher", "repetitive", "far_trainer"])
def test_a_flag_marks_what_it_says_and_nothing_else(shown: Shown, flag: str) -> None:
    index = shown.index()
    assert flag in shown.describe()["flags"]
    prompt_ids = {row["prompt_id"] for row in index.rows(f"select prompt_id from rollouts where {flag}")}
    expected = {name for name, flags in FLAGS.items() if flag in flags}
    expected |= {"loops"} if flag == "repetitive" else set()
    expected |= {"far"} if flag == "far_trainer" else set()
    assert prompt_ids == expected


def test_the_gap_is_that_of_the_first_step_that_trained_the_sample(shown: Shown) -> None:
    rows = shown.index().rows("select prompt_id, gap, student_entropy, teacher_entropy from rollouts")
    for row in rows:
        assert row["gap"] == pytest.approx(0.4 if row["prompt_id"] == "far" else 0.01, rel=1e-3)
        assert (row["student_entropy"], row["teacher_entropy"]) == (pytest.approx(1.5), pytest.approx(0.5))


def test_the_statement_of_a_flag_runs_as_it_stands(shown: Shown) -> None:
    sql = shown.index().page("constant_teacher and not zero_teacher", "-gap", 0, 50)["sql"]
    names = {row["prompt_id"] for row in shown.store.sql(sql).to_pylist()}
    assert names == {"uniform", "constant"}


def test_a_store_of_before_still_opens(shown: Shown) -> None:
    """Snapshots from before statistics name no such table; the columns are not there, everything else is."""
    from mopd_dataplane.view.index import Index

    snapshot = shown.store.snapshot()
    older = type(snapshot)(
        uri=snapshot.uri, versions={k: v for k, v in snapshot.versions.items() if k != "token_stats"}
    )
    index = Index(shown.store, older, shown.labelled)
    assert "gap" not in index.columns
    assert index.total == len(SAID) + 2
    assert index.page("", "", 0, 50)["total"] == len(SAID) + 2


def test_each_pass_over_a_sample_has_its_statistics(shown: Shown) -> None:
    index = shown.index()
    view = describe(shown.store, index.row(uid_of(shown, "far")), index.snapshot, shown.decoder, {})
    titles = [one["title"] for one in view["stats"].values()]
    assert titles == [
        "teacher entropy, scored by t", "trainer − sampler log-prob, step 3", "student entropy, step 3",
        "trainer − sampler log-prob, step 9", "student entropy, step 9",
    ]  # fmt: skip
    mask = np.ones(30, np.uint8)
    assert stats_of(shown.store, uid_of(shown, "far"), mask, index.snapshot) == {}, "a count that does not fit is left"


def test_a_label_filters_as_soon_as_it_is_written(shown: Shown) -> None:
    index = shown.index()
    uid = uid_of(shown, "loops")
    where = "uid in (select uid from labelled where label = 'it''s odd')"
    assert index.page(where, "", 0, 50)["total"] == 0
    labels.write(shown.store, index.row, shown.labelled, {"uid": uid, "label": "it's odd", "note": ""})
    page = index.page(where, "", 0, 50)
    assert [row[page["columns"].index("uid")] for row in page["rows"]] == [uid]
    assert shown.store.sql(page["sql"]).num_rows == 1, "the statement runs as it stands in `mopd query`"
    labels.write(shown.store, index.row, shown.labelled, {"uid": uid, "label": "it's odd", "note": "", "removed": True})
    assert index.page(where, "", 0, 50)["total"] == 0


def test_scores_of_few_samples_are_looked_up_and_those_of_many_read_alike(shown: Shown) -> None:
    rows = np.array([4, 0, 2])
    few = shown.store.signal_rows("t", "logprob", rows)
    many = shown.store.signal_rows("t", "logprob", np.tile(rows, 40))
    assert few.to_pylist() == many.slice(0, 3).to_pylist()
    assert shown.store.read_signal("t", "logprob", rows, verify=True)[1].shape == (30,)
