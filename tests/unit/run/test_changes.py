"""Each key of a job changes in the middle of a stage: what its class promises is what happens."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from advice import advises

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.changes import differences, put
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.read import STAGE_TABLES
from mopd_dataplane.job.reference import Key, tables
from mopd_dataplane.job.section import ChangeClass
from mopd_dataplane.run.changes import in_force, job_at, last_change, next_change, refuse_changes, remember_job
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import STAGE_DONE
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.store.commit.changes import read_changes
from mopd_dataplane.store.dataset import Store

JOB: dict[str, Any] = {
    "name": "small", "store": "unused", "student": {"config": {"model_type": "qwen3"}},
    "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum"}},
    "teachers": {"expert": {"source": "models/expert"}, "base": {"source": "models/base"}},
    "routing": {"sums": "expert"},
    "plan": {"batch_samples": 8}, "rollout": {"group_size": 2},
    "objectives": {
        "all": {
            "policy_gradient": {"reference": "base", "reward_coef": 1.0},
            "divergence": {}, "cross_entropy": {}, "entropy": {},
        }
    },
    "stages": [
        {"name": "first", "data": "reference"},
        {"name": "student", "objective": "all", "iterations": 3, "discriminator": {}},
    ],
}  # fmt: skip
BEGUN = 1
"""Windows of the stage `student` that are trained."""
KEYS = [key for table in tables() for key in table.keys if key.type != "table"]
NAMES = {"domains": "sums", "teachers": "expert", "objectives": "all", "stages": "student"}
VALUES: dict[str, Any] = {
    "stages.NAME.start": "first", "stages.NAME.data": "stored", "stages.NAME.iterations": 2,
    "objectives.NAME.policy_gradient.reward_coef": 0.5, "objectives.NAME.policy_gradient.reference": "expert",
}  # fmt: skip
"""Values that fit JOB, where the example of a key does not."""
SOURCES = {f"stages.NAME.data.from.NAME.{name}" for name in ("store", "where", "stage")}
NO_VALUE = {"stages.NAME.name", "objectives.NAME.terms", *SOURCES}
"""Another name is another stage; terms of other packages are not here; sources are part of the key `data`."""
UNTIL = {"stages.student.rollout.until": {"groups": 8}, "stages.student.plan.groups": "spread"}
BESIDE: dict[str, dict[str, Any]] = {
    **{f"engine.{name}": {"engine.kind": "vllm"} for name in ("noise", "url", "options", "keep")},
    "engine.reload": {"engine.kind": "vllm", "engine.url": "http://127.0.0.1:8000/v1"},
    "score.reads": {"stages.student.score.engine": "vllm"},
    "score.options": {"stages.student.score.engine": "vllm"},
    "scale.context_parallel": {"scale.ranks": 2},
    "rollout.record": {"stages.student.rollout.top_k": 64},
    **{f"rollout.until.{name}": UNTIL for name in ("groups", "at_most")},
    **{
        f"plan.replay.{name}": {"stages.student.plan.replay": {"iterations": 2, "share": 0.5}}
        for name in ("iterations", "share")
    },
    "objectives.NAME.policy_gradient.early_weight": {"objectives.all.policy_gradient.reward_coef": 0.0},
    "teachers.NAME.follows": {"teachers.expert.source": "student"},
    "teachers.NAME.average": {"teachers.expert.source": "student", "teachers.expert.follows": 1},
    "objectives.NAME.policy_gradient.own_token": {"objectives.all.policy_gradient.discount": 0.9},
}
"""What stands in the job beside a key, before and after, for its value to be accepted."""
INSTEAD = {
    "student.path": "student.config", "student.gguf": "student.config", "teachers.NAME.blend": "teachers.expert.source",
    "plan.batch_tokens": "stages.student.plan.batch_samples",
}  # fmt: skip
"""Keys that a key takes the place of."""
WHOLE_TABLES: dict[str, Any] = {
    "objectives.all.entropy": None,
    "stages.student.plan.replay": {"iterations": 2, "share": 0.5},
    "stages.student.discriminator": None,
    "teachers.another": {"source": "models/another"},
}


def begun_run(folder: Path, job: Job, *, trained: int = BEGUN) -> Run:
    """A run whose stage `student` has published policies."""
    store = Store.create(str(folder))
    for version in range(1, trained + 1):
        store.path(f"policies/student/v{version}").mkdir(parents=True)
    return Run(job, store, Policies(job, open_work(store, "")), Progress(quiet=True))


def with_job(run: Run, job: Job) -> Run:
    return Run(job, run.store, Policies(job, run.work), run.progress)


@pytest.fixture(scope="module")
def job() -> Job:
    return check_job(JOB, where="test")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, job: Job) -> Run:
    return begun_run(tmp_path_factory.mktemp("begun") / "store", job)


def path_of(key: Key) -> str:
    """The key in JOB, of the stage `student` where it is a default of all stages."""
    parts = key.path.split(".")
    parts = ["stages", "student", *parts] if parts[0] in STAGE_TABLES else parts
    return ".".join(NAMES[parts[0]] if part == "NAME" else part for part in parts)


def versions(job: Job, key: Key) -> tuple[str, Job, Job]:
    """A key, and the job before and after it changes; not checked as a whole, since examples do not fit together."""
    path, dump = path_of(key), job.model_dump(mode="json")
    for beside, value in BESIDE.get(key.path, {}).items():
        put(dump, beside, value)
    before = Job.model_validate(dump)
    assert key.path in VALUES or key.example, f"{key.path} needs an example in job/examples.py, or a value in VALUES"
    put(dump, path, VALUES[key.path] if key.path in VALUES else tomllib.loads(f"value = {key.example}")["value"])
    if key.path in INSTEAD:
        put(dump, INSTEAD[key.path], None)
    return path, before, Job.model_validate(dump)


@pytest.mark.parametrize("key", [key for key in KEYS if key.path not in NO_VALUE], ids=lambda key: key.path)
def test_a_key_changes_as_its_class_promises(begun: Run, job: Job, key: Key) -> None:
    path, old, new = versions(job, key)
    run = with_job(begun, new)
    assert [one.change_class for one in differences(old, new) if one.key == path] == [key.change]
    before = read_changes(begun.store)
    if key.change == ChangeClass.FIXED:
        refusal = r"(?s)was made with .* this key is fixed: .{20,}; go back to that value, or give another store"
        with pytest.raises(MismatchError, match=refusal):
            remember_job(run, old, lambda text: True)
        assert read_changes(begun.store) == before
        return
    if key.change == ChangeClass.FROM_HERE:
        with pytest.raises(MismatchError, match=r"(?s)has trained:\n.*student: .*go back .*--from-here"):
            remember_job(run, old, refuse_changes)
        assert read_changes(begun.store) == before, "a change that is not accepted leaves no trace"
    questions: list[str] = []
    recorded = remember_job(run, old, lambda text: not questions.append(text))
    assert bool(questions) == (key.change == ChangeClass.FROM_HERE)
    added = recorded[len(before) :]
    assert [(row.stage, row.iteration, row.change_class) for row in added if row.key == path] == [
        ("student", BEGUN, key.change)
    ]
    assert job_at(new, added, "student", BEGUN) == new
    if key.change == ChangeClass.FROM_HERE:
        assert job_at(new, added, "student", BEGUN - 1) == old
        assert path in in_force(added, "student", BEGUN)
        assert in_force(added, "student", BEGUN - 1) == {}


@pytest.mark.parametrize(("path", "value"), WHOLE_TABLES.items())
def test_a_table_may_come_and_go(begun: Run, job: Job, path: str, value: Any) -> None:
    dump = job.model_dump(mode="json")
    put(dump, path, value)
    if path.startswith("teachers."):
        dump["routing"] = {"sums": "another"}
    new = Job.model_validate(dump)
    count = len(read_changes(begun.store))
    added = remember_job(with_job(begun, new), job, lambda text: True)[count:]
    assert path in [row.key for row in added]
    assert job_at(new, added, "student", BEGUN - 1) == job
    assert job_at(new, added, "student", BEGUN) == new


def edited(job: Job, **values: Any) -> Job:
    """The job with keys of its stage `student` set; `__` stands for a dot."""
    dump = job.model_dump(mode="json")
    for key, value in values.items():
        put(dump, f"stages.student.{key.replace('__', '.')}", value)
    return Job.model_validate(dump)


def test_more_iterations_under_a_constant_rate_need_no_question(tmp_path: Path, job: Job) -> None:
    run = begun_run(tmp_path, job)
    (row,) = remember_job(with_job(run, edited(job, iterations=6)), job, refuse_changes)
    assert (row.key, row.iteration, row.before, row.after) == ("stages.student.iterations", BEGUN, "3", "6")


def test_fewer_iterations_and_a_rate_that_ends_are_asked_for(tmp_path: Path, job: Job) -> None:
    run = begun_run(tmp_path, job)
    with advises("go back to those values, accept the change for what is still to come") as refused:
        remember_job(with_job(run, edited(job, iterations=2)), job, refuse_changes)
    assert "iterations: 3 → 2 (from iteration 1 on)" in str(refused.value)
    assert remember_job(with_job(run, job), job, refuse_changes) == ()
    other = begun_run(tmp_path / "other", job, trained=0)
    assert remember_job(with_job(other, edited(job, iterations=2)), job, refuse_changes) == ()
    [accepted] = remember_job(with_job(run, edited(job, iterations=2)), job, lambda text: True)
    assert accepted.after == "2"
    ending = edited(job, train__schedule="linear")
    with pytest.raises(MismatchError, match=r"iterations: 3 → 6 \(from iteration 1 on\)"):
        remember_job(with_job(run, edited(ending, iterations=6)), ending, refuse_changes)


def test_what_has_not_begun_may_change_and_is_no_change(tmp_path: Path, job: Job) -> None:
    run = begun_run(tmp_path, job, trained=0)
    new = edited(job, iterations=9, train__learning_rate=1.0, rollout__temperature=0.5)
    assert remember_job(with_job(run, new), job, refuse_changes) == ()


def test_a_stage_that_others_stand_on_gets_no_more_iterations(tmp_path: Path, job: Job) -> None:
    dump = job.model_dump(mode="json")
    later = {**dump["stages"][1], "name": "later", "start": "student", "discriminator": None}
    job = Job.model_validate({**dump, "stages": [*dump["stages"], later]})
    run = begun_run(tmp_path, job)
    run.store.path("policies/later/v1").mkdir(parents=True)
    with advises(", which more iterations would replace; go back to ") as refused:
        remember_job(with_job(run, edited(job, iterations=6)), job, lambda text: True)
    assert "stage 'later' has begun with the last policy of 'student'" in str(refused.value)
    assert "go back to 1, or give another store" in str(refused.value)
    assert len(remember_job(with_job(run, edited(job, iterations=1)), job, lambda text: True)) == 1
    other = begun_run(tmp_path / "other", job, trained=0)
    assert remember_job(with_job(other, edited(job, iterations=6)), job, refuse_changes) == ()


def test_a_concurrent_stage_takes_free_keys_only(tmp_path: Path, job: Job) -> None:
    job = edited(job, concurrent=True, discriminator=None)
    run = begun_run(tmp_path, job)
    assert len(remember_job(with_job(run, edited(job, train__checkpoint_steps=3)), job, refuse_changes)) == 1
    with advises("change; go back to that value, or give another store (--store runs/NAME)") as refused:
        remember_job(with_job(run, edited(job, train__learning_rate=1.0)), job, lambda text: True)
    assert "only free keys may" in str(refused.value)
    remember_job(with_job(run, job), job, refuse_changes)
    other = begun_run(tmp_path / "other", job, trained=0)
    assert remember_job(with_job(other, edited(job, train__learning_rate=1.0)), job, refuse_changes) == ()


def test_a_change_is_recorded_once_after_a_kill_before_the_job_was_written(tmp_path: Path, job: Job) -> None:
    run, new = begun_run(tmp_path, job), edited(job, train__learning_rate=1.0)
    first = remember_job(with_job(run, new), job, lambda text: True)
    assert remember_job(with_job(run, new), job, refuse_changes) == first


def test_each_window_goes_by_the_changes_before_it(tmp_path: Path, job: Job) -> None:
    run = begun_run(tmp_path, job)
    second, third = edited(job, train__learning_rate=0.5), edited(job, train__learning_rate=0.25, train__epochs=2)
    remember_job(with_job(run, second), job, lambda text: True)
    run.store.path("policies/student/v2").mkdir()
    changes = remember_job(with_job(run, third), second, lambda text: True)
    rates = [job_at(third, changes, "student", window).stage("student").train.learning_rate for window in range(4)]
    assert rates == [job.stage("student").train.learning_rate, 0.5, 0.25, 0.25]
    assert [next_change(changes, "student", window) for window in range(3)] == [1, 2, None]
    assert [last_change(changes, "student", window) for window in range(4)] == [0, 1, 2, 2]
    assert in_force(changes, "student", 2) == {
        "stages.student.train.learning_rate": 0.25,
        "stages.student.train.epochs": 2,
    }
    assert job_at(third, changes, "first", 0) is third


def test_a_finished_stage_is_open_again_with_more_iterations(tmp_path: Path, job: Job) -> None:
    run = begun_run(tmp_path, job, trained=3)
    run.store.add_event("done/student", "student", STAGE_DONE, -1, 3.0, {})  # as older versions name it
    assert run.is_done(job.stage("student"))
    longer = edited(job, iterations=4)
    assert not with_job(run, longer).is_done(longer.stage("student"))


def test_a_command_line_is_recorded_without_secrets(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/mopd", "run", "job.toml", "--store", "s3://me:password@host/x"])
    (row,) = remember_job(with_job(begun_run(tmp_path, job), edited(job, iterations=6)), job, refuse_changes)
    assert row.command == "mopd run job.toml --store s3://***@host/x"


def test_a_value_is_put_back_under_a_name_with_a_dot(job: Job) -> None:
    dump = job.model_dump(mode="json")
    dump["teachers"]["expert.v2"] = {"source": "models/a"}
    before = Job.model_validate(dump)
    dump["teachers"]["expert.v2"]["prompt_template"] = "{prompt}!"
    (difference,) = differences(before, Job.model_validate(dump))
    assert difference.parts == ["teachers", "expert.v2", "prompt_template"]
    put(dump, difference.key, json.loads('""'))
    assert Job.model_validate(dump) == before
