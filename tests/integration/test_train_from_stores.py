"""A stage trains on samples of other stores where they are: no payload is copied, and signals of the same teacher are
taken from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from viewing import BEARER, client_of, get

from mopd_dataplane import open_store, plan_ahead
from mopd_dataplane.errors import InputError, MismatchError, MopdError, UnknownNameError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job, load_job
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.query.show import read_sample
from mopd_dataplane.run.pipeline import rollout_stage, run_job, score_stage
from mopd_dataplane.run.preflight import preflight
from mopd_dataplane.run.steps.answer_again import answer_again
from mopd_dataplane.run.steps.plan import plan_stage
from mopd_dataplane.run.steps.reward import reward_stage
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.maintain.delete_samples import choose, remove

PROMPTS, NEW = 6, 6
PLAN = {"pack_tokens": 64, "batch_samples": 4}
DIES = """
import os, signal, sys
from mopd_dataplane.base import fault_points
point, count = sys.argv[2], int(sys.argv[3])
seen = 0
def observe(name):
    global seen
    seen += name == point
    if seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(observe)
import json
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.pipeline import rollout_stage, score_stage
job = check_job(json.loads(open(sys.argv[1]).read()), where="job")
rollout_stage(job, job.stages[0])
score_stage(job, job.stages[0])
"""


def raw_job(folder: Path, name: str, stages: list[dict[str, Any]], *, seed: int = 5, **more: Any) -> dict[str, Any]:
    prompts = folder / "sums.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{n} + {n} = ", "answer": str(2 * n)}) + "\n" for n in range(30)))
    config = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    return {
        "name": name, "store": str(folder / name), "seed": seed,
        "student": {"tokenizer": "characters", "config": config},
        "domains": {"sums": {"source": str(prompts), "train": 20, "reward": "exact"}},
        "teachers": {"wise": {"source": str(folder / "teacher")}}, "routing": {"sums": "wise"},
        "engine": {"slots": 8}, "score": {"probe": 0}, "eval": {"every": 0},
        "objectives": {"exact": {"divergence": {"kind": "reverse", "signal": "hidden"}},
                       "grpo": {"policy_gradient": {"teacher_coef": 0.0, "reward_coef": 1.0}}},
        "stages": stages, **more,
    }  # fmt: skip


def rollouts(**more: Any) -> dict[str, Any]:
    rollout = {"prompts_per_iteration": PROMPTS, "max_new_tokens": NEW}
    return {"name": "student", "objective": "exact", "iterations": 1, "rollout": rollout, "plan": PLAN, **more}


def from_stores(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"name": "again", "objective": "exact", "data": {"from": list(entries)}, "plan": PLAN, **more}


def job_of(raw: dict[str, Any]) -> Job:
    return check_job(raw, where="job.toml")


def prepare(raw: dict[str, Any]) -> Store:
    """The store of a job's last stage with samples, signals and a plan; nothing is trained."""
    job = job_of(raw)
    stage = job.stages[-1]
    rollout_stage(job, stage)
    score_stage(job, stage)
    plan_stage(job, stage)
    return open_store(job.store)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores of one seed whose answers differ, `a` and `b`, with a teacher's hidden states; only read."""
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in ((9, "teacher"), (10, "other")):
        make_student(job_of(raw_job(folder, "x", [rollouts()])).student, folder / name, seed=seed)
    longer = {"prompts_per_iteration": PROMPTS, "max_new_tokens": NEW + 2}
    prepare(raw_job(folder, "a", [rollouts()]))
    prepare(raw_job(folder, "b", [rollouts(rollout=longer)]))
    for name in ("a", "b"):
        job = job_of(raw_job(folder, name, [rollouts()] if name == "a" else [rollouts(rollout=longer)]))
        reward_stage(job, job.stages[0])
    return folder


@pytest.fixture
def home(ground: Path, tmp_path: Path) -> Path:
    """Copies of `a` and `b`, and a teacher, for a test of its own."""
    for name in ("a", "b", "teacher", "other"):
        shutil.copytree(ground / name, tmp_path / name)
    return tmp_path


def linked_store(folder: Path, *entries: Any, name: str = "c", **more: Any) -> Store:
    return prepare(raw_job(folder, name, [from_stores(*entries)], **more))


def payload_of(store: Store) -> dict[str, tuple[list[int], bytes]]:
    """Prompt and iteration -> tokens and hidden states, for every sample."""
    samples = store.samples(["uid", "prompt_id", "iteration", "stage"])
    rows = np.arange(len(samples))
    tokens = store.read_tokens(rows, ["tokens"], verify=True)["tokens"].to_pylist()
    states = [states.tobytes() for states in store.read_signal("wise", "hidden", rows, verify=True)]
    stages = [stage.rpartition("/")[0] for stage in samples["stage"].to_pylist()]
    names = zip(stages, samples["prompt_id"].to_pylist(), strict=True)
    return dict(zip(names, zip(tokens, states, strict=True), strict=True))


@pytest.mark.slow
def test_samples_are_trained_on_where_they_are(home: Path) -> None:
    before = {name: sorted(str(path) for path in (home / name).rglob("*")) for name in ("a", "b")}
    store = linked_store(home, str(home / "a"), str(home / "b"))
    assert {name: sorted(str(path) for path in (home / name).rglob("*")) for name in ("a", "b")} == before
    assert len(store.plan("again", 0).sample_rows) == 2 * PROMPTS
    assert store.dataset("tokens").count_rows() == 0, "payload was copied"
    assert "signals/wise/hidden" not in store.names(), "signals were computed again"
    assert not is_own(store.samples(["payload_row"])["payload_row"].to_numpy()).any()
    mine = payload_of(store)
    for name in ("a", "b"):
        theirs = payload_of(open_store(str(home / name)))
        assert {key[1]: value for key, value in mine.items() if key[0] == name} == {
            key[1]: value for key, value in theirs.items()
        }
    assert store.verify().ok


@pytest.mark.slow
def test_it_trains_what_the_same_samples_train_in_their_own_store(home: Path) -> None:
    prepare(raw_job(home, "own", [rollouts()]))
    jobs = [
        job_of(raw_job(home, "c", [from_stores(str(home / "a"))])),
        job_of(raw_job(home, "own", [rollouts(), from_stores({"stage": "student"})])),
    ]
    policies, steps = [], []
    for job in jobs:
        run_job(job, only="again")
        policies.append((Path(job.store) / "policies" / "again" / "v1" / "model.safetensors").read_bytes())
        steps.append(open_store(job.store).sql("select loss, grad_norm, samples from steps order by step").to_pylist())
    assert policies[0] == policies[1]
    assert steps[0] == steps[1]
    assert sum(step["samples"] for step in steps[0]) == PROMPTS


@pytest.mark.slow
def test_a_store_on_s3_and_one_in_a_folder_train_what_two_folders_train(home: Path, s3: str) -> None:
    for _ in copy_samples(open_store(str(home / "a")), s3, "true"):
        pass
    policies = []
    for name, first in (("c", str(home / "a")), ("remote", s3)):
        job = job_of(raw_job(home, name, [from_stores(first, str(home / "b"))]))
        run_job(job)
        store = open_store(job.store)
        assert len(store.plan("again", 0).sample_rows) == 2 * PROMPTS
        assert store.dataset("tokens").count_rows() == 0
        assert store.verify().ok
        policies.append((home / name / "policies" / "again" / "v1" / "model.safetensors").read_bytes())
    assert policies[0] == policies[1]


def test_the_same_sample_in_two_stores_counts_once(home: Path) -> None:
    shutil.copytree(home / "a", home / "a-again")
    store = linked_store(home, str(home / "a"), str(home / "a-again"))
    assert len(store.samples(["uid"])) == PROMPTS
    by_store = store.sql("select store, count(*) as n from links group by 1").to_pylist()
    assert by_store == [{"store": str(home / "a"), "n": PROMPTS}]


def test_samples_of_two_stores_come_in_windows(home: Path) -> None:
    stage = {"window_samples": PROMPTS // 2, "iterations": 4}
    job = job_of(raw_job(home, "c", [from_stores(str(home / "a"), str(home / "b"), **stage)]))
    for step in (rollout_stage, score_stage, plan_ahead):
        step(job, job.stages[0])
    store = open_store(job.store)
    windows = [store.plan("again", window) for window in store.plans("again")]
    assert [len(plan.sample_rows) for plan in windows if plan is not None] == [PROMPTS // 2] * 4
    rows = np.concatenate([plan.sample_rows for plan in windows if plan is not None])
    assert sorted(store.take_samples(rows, ["uid"])["uid"].to_pylist()) == sorted(
        store.samples(["uid"])["uid"].to_pylist()
    )


def test_a_condition_and_a_stage_choose(home: Path) -> None:
    source = open_store(str(home / "b"))
    likely = source.sql("select uid from rollouts where kl < (select median(kl) from rollouts)")["uid"].to_pylist()
    assert 0 < len(likely) < PROMPTS
    entry = {"store": str(home / "b"), "where": "likely", "stage": "student"}
    store = linked_store(home, entry, questions={"likely": "kl < (select median(kl) from rollouts)"})
    assert sorted(store.samples(["uid"])["uid"].to_pylist()) == sorted(likely)


def test_missing_signals_are_computed_and_stored_here(home: Path) -> None:
    raw = raw_job(home, "c", [from_stores(str(home / "a"))])
    raw["teachers"]["wise"]["source"] = str(home / "other")
    store = prepare(raw)
    assert store.dataset("tokens").count_rows() == 0
    assert store.dataset("signals/wise/hidden").count_rows() == PROMPTS
    assert is_own(store.table("scores", ["payload_row"])["payload_row"].to_numpy()).all()
    assert store.verify().ok


def test_rewards_come_along(home: Path) -> None:
    expected = open_store(str(home / "a")).sql("select prompt_id, reward from rollouts order by 1").to_pylist()
    assert all(row["reward"] is not None for row in expected)
    store = prepare(raw_job(home, "c", [from_stores(str(home / "a"), objective="grpo")]))
    assert store.sql("select prompt_id, reward from rollouts order by 1").to_pylist() == expected


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("link.samples", 2),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in (
            ("link.samples", 1), ("link.signals", 1), ("link.signals", 3), ("link.linked", 1),
        )),
    ],
)  # fmt: skip
def test_a_killed_run_continues_and_links_everything_once(home: Path, point: str, count: int) -> None:
    raw = raw_job(home, "c", [from_stores(str(home / "a"), str(home / "b"))])
    file = home / "job.json"
    file.write_text(json.dumps(raw))
    command = [sys.executable, "-c", DIES, str(file), point, str(count)]
    died = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    store = prepare(raw)
    whole = linked_store(home, str(home / "a"), str(home / "b"), name="whole")
    assert store.plan("again", 0).sample_rows.tolist() == whole.plan("again", 0).sample_rows.tolist()
    for table in ("samples", "links", "scores", "rewards"):
        assert len(store.table(table)) == len(whole.table(table))
    assert store.verify().ok


def test_a_sample_of_another_store_is_shown_here(home: Path) -> None:
    store = linked_store(home, str(home / "a"), str(home / "b"))
    for uid in store.samples(["uid"])["uid"].to_pylist():
        view = read_sample(store, uid)
        assert view.uid == uid


def test_the_viewer_opens_samples_of_other_stores(home: Path) -> None:
    store = linked_store(home, str(home / "a"), str(home / "b"))
    page = client_of(store, **BEARER)
    for uid in store.samples(["uid"])["uid"].to_pylist():
        about = get(page, "sample", uid=uid)
        assert about["uid"] == uid
        assert get(page, "life", uid=uid)[0]["kind"] == "sampled"
    assert [teacher["name"] for teacher in get(page, "home")["teachers"]] == ["wise"]
    everything = page.get("/api/search", params={"kind": "text", "q": "."})
    assert everything.status_code == 200, everything.text


@pytest.mark.slow
def test_the_prompts_of_chosen_samples_are_answered_once_more(home: Path, mopd: Callable[..., Any]) -> None:
    advises("give --tasks or --where, one of the two")
    store = open_store(str(home / "a"))
    job = load_job(home / "a")
    before = {name: store.dataset(name).version for name in store.names()}
    where = "kl < (select median(kl) from rollouts)"
    chosen = store.sql(f"select prompt_id, reward from rollouts where {where}").to_pylist()
    [row] = json.loads(mopd("eval", home / "a", "--where", where, "--json").stdout)
    assert (row["domain"], row["prompts"]) == ("sums", len({sample["prompt_id"] for sample in chosen}))
    assert row["reward_then"] == pytest.approx(np.mean([sample["reward"] for sample in chosen]))
    assert row["reward_now"] is not None
    [again] = answer_again(job, job.stages[0], where)
    assert again == row, "answers at temperature 0 are the same"
    [first] = answer_again(job, job.stages[0], where, limit=1)
    assert first["prompts"] == 1
    assert {name: store.dataset(name).version for name in store.names()} == before
    with pytest.raises(InputError, match="no sample of a domain of the job meets"):
        answer_again(job, job.stages[0], "response_len > 1000")
    refused = mopd("eval", home / "a", check=False)
    assert refused.returncode == 2
    assert "give --tasks or --where, one of the two" in " ".join(refused.stderr.split())


def test_a_store_that_is_gone_or_another_is_named(home: Path) -> None:
    store = linked_store(home, str(home / "a"))
    (home / "a").rename(home / "moved")
    with pytest.raises(
        UnknownNameError, match=r"refers to samples of the store .*/a without a copy of them, and that store is not"
    ):
        open_store(store.uri).read_tokens([0])
    shutil.copytree(home / "b", home / "a")
    with pytest.raises(MismatchError, match=r"another store is there now .*; move it away"):
        open_store(store.uri).read_tokens([0])
    report = open_store(store.uri).verify()
    assert not report.ok
    shutil.rmtree(home / "a")
    (home / "moved").rename(home / "a")
    assert open_store(store.uri).verify().ok


def delete(store: Store, where: str) -> None:
    deletion = choose(store, where).record(store, where)
    for _ in remove(store, deletion):
        pass
    store.deletions.close(deletion)


def test_a_sample_that_was_deleted_there_is_named(home: Path) -> None:
    raw = raw_job(home, "c", [from_stores(str(home / "a"))])
    store = prepare(raw)
    [prompt] = store.sql("select prompt_id from samples limit 1")["prompt_id"].to_pylist()
    delete(open_store(str(home / "a")), f"prompt_id = '{prompt}'")
    store = open_store(raw["store"])
    assert sorted(finding.table for finding in store.verify().findings) == ["samples", "scores", "scores"]
    job = job_of(raw)
    with pytest.raises(UnknownNameError, match=r"was deleted there .*delete the sample here too"):
        rollout_stage(job, job.stages[0])
    delete(store, f"prompt_id = '{prompt}'")
    rollout_stage(job, job.stages[0])
    plan_stage(job, job.stages[0])
    assert open_store(raw["store"]).verify().ok
    assert len(open_store(raw["store"]).plan("again", 0).sample_rows) == PROMPTS - 1


def test_states_that_were_freed_there_are_named(home: Path) -> None:
    advises("so that they are computed and stored here")
    raw = raw_job(home, "c", [from_stores(str(home / "a"))])
    prepare(raw)
    open_store(str(home / "a")).free_hidden("wise", np.arange(PROMPTS))
    job = job_of(raw)
    with pytest.raises(UnknownNameError, match=r"hidden states of 6 of 6 samples were freed .*another name"):
        rollout_stage(job, job.stages[0])
    raw["teachers"], raw["routing"] = {"wiser": raw["teachers"]["wise"]}, {"sums": "wiser"}
    store = prepare({**raw, "store": str(home / "d")})
    assert store.dataset("signals/wiser/hidden").count_rows() == PROMPTS


def test_no_sample_is_left(home: Path) -> None:
    raw = raw_job(home, "c", [from_stores({"store": str(home / "a"), "where": "response_len > 1000"})])
    job = job_of(raw)
    with pytest.raises(InputError, match=r"no sample of the stores in data\.from is left"):
        rollout_stage(job, job.stages[0])


def test_samples_of_another_tokenizer_are_refused(home: Path) -> None:
    raw = raw_job(home, "c", [from_stores(str(home / "a"))])
    raw["student"]["tokens"] = ["<one more>"]
    raw["teachers"], raw["routing"] = {}, {}
    raw["stages"][0]["objective"] = "cross-entropy"
    job = job_of(raw)
    with pytest.raises(MismatchError, match="token ids of another tokenizer"):
        rollout_stage(job, job.stages[0])


def test_a_copy_of_some_samples_has_their_payload(home: Path, tmp_path: Path) -> None:
    store = linked_store(home, str(home / "a"), str(home / "b"))
    for _ in copy_samples(store, str(tmp_path / "copy"), "true"):
        pass
    shutil.rmtree(home / "a")
    shutil.rmtree(home / "b")
    copy = open_store(str(tmp_path / "copy"))
    assert copy.verify().ok
    assert len(payload_of(copy)) == 2 * PROMPTS


def test_what_cannot_be_read_is_named_before_the_run(home: Path) -> None:
    for entry, words in (
        ({"store": str(home / "none")}, "no store at"),
        ({"store": str(home / "a"), "where": "rewrd > 0"}, "no column 'rewrd'"),
        ({"store": str(home / "a"), "stage": "studnet"}, "has no sample of stage 'studnet'"),
    ):
        job = job_of(raw_job(home, "c", [from_stores(entry)]))
        findings, _ = preflight(job)
        assert any(words in finding.problem for finding in findings), entry
        with pytest.raises(MopdError, match=words):
            run_job(job)
        assert not (home / "c" / "samples").exists()
