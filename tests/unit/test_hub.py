"""Models by their Hugging Face name, from a hub cache laid out by hand; the network is never asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import TINY

from mopd_dataplane.errors import InputError, JobFileError, MismatchError, UnknownNameError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.sections import Student, Teacher
from mopd_dataplane.models import hub
from mopd_dataplane.models.hf import load_model, load_tokenizer, weights_digest
from mopd_dataplane.models.hub import commit_of, is_hub_name, model_folder
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run.context import JOB, Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

NAME = "acme/tiny-qwen"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_student(Student(config=TINY), root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture
def cache(tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub cache with two commits, as huggingface_hub writes it: blobs, snapshots of links, refs."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    repository = root / "models--acme--tiny-qwen"
    for commit, model in zip((OLD, NEW), models, strict=True):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in model.iterdir():
            blob = repository / "blobs" / f"{commit}-{file.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy2(file, blob)
            (snapshot / file.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._snapshot.cache_clear()
    yield repository
    hub._snapshot.cache_clear()


def test_a_name_is_the_folder_of_its_snapshot(cache: Path, models: list[Path]) -> None:
    assert model_folder(NAME) == cache / "snapshots" / OLD
    assert commit_of(NAME) == OLD
    assert weights_digest(model_folder(NAME)) == weights_digest(models[0])
    assert weights_digest(model_folder(NAME, NEW)) == weights_digest(models[1])


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("acme/tiny-qwen").mkdir(parents=True)
    assert not is_hub_name(NAME)
    assert model_folder(NAME) == Path(NAME)
    assert [commit_of(model) for model in (NAME, str(tmp_path))] == ["", ""]
    with pytest.raises(InputError, match="is a folder, which has no revision 'main'"):
        model_folder(NAME, "main")


@pytest.mark.usefixtures("cache")
def test_what_the_cache_lacks_is_named_when_offline() -> None:
    with pytest.raises(UnknownNameError, match=r"no model acme/other in the cache .*HF_HUB_OFFLINE.*hf download"):
        model_folder("acme/other")
    with pytest.raises(UnknownNameError, match="acme/tiny-qwen at revision cccc"):
        model_folder(NAME, "c" * 40)


@pytest.fixture
def open_job(tmp_path: Path) -> Callable[..., Run]:
    def opened(**student: str) -> Run:
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "1+1=", "answer": "2"}) + "\n")
        job = {
            "name": "hub", "store": str(tmp_path / "store"), "student": {"path": NAME, **student},
            "teachers": {"t": {"source": NAME, "revision": NEW}}, "routing": {"d": "t"},
            "domains": {"d": {"source": str(tmp_path / "prompts.jsonl"), "reward": "exact", "train": 1}},
            "objectives": {"o": {"policy_gradient": {}}},
            "stages": [{"name": "s", "data": "rollout", "objective": "o", "plan": {"batch_samples": 1}}],
        }  # fmt: skip
        return open_run(Job.model_validate_json(json.dumps(job)), Progress(quiet=True))

    return opened


def test_a_store_keeps_the_commit_that_was_found_when_it_was_made(cache: Path, open_job: Callable[..., Run]) -> None:
    run = open_job()
    assert run.job.student.revision == OLD
    (cache / "refs" / "main").write_text(NEW)
    hub._snapshot.cache_clear()
    again = open_job()
    assert again.policies.initial() == cache / "snapshots" / OLD, "main has moved; this store has not"
    assert again.policies.teacher("t", again.job.stages[0]) == cache / "snapshots" / NEW
    stored_job = again.store.read_json(JOB)
    assert stored_job is not None
    assert (stored_job["student"]["revision"], stored_job["teachers"]["t"]["revision"]) == (OLD, NEW)
    with pytest.raises(MismatchError, match=r"student\.revision"):
        open_job(revision=NEW)


@pytest.mark.usefixtures("cache")
def test_a_model_that_cannot_be_had_is_a_finding_before_a_store_is_made(
    open_job: Callable[..., Run], tmp_path: Path
) -> None:
    with pytest.raises(JobFileError, match=r"student\.path: .*acme/none"):
        open_job(path="acme/none")
    assert not (tmp_path / "store").exists()


def test_an_adapter_and_its_base_may_both_be_names(cache: Path, models: list[Path], tmp_path: Path) -> None:
    """As a teacher: a repository of an adapter, whose adapter_config.json names its base and the base's commit."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(load_model(models[1]), config)
    model.peft_config["default"].base_model_name_or_path = NAME
    model.peft_config["default"].revision = NEW
    repository = cache.parent / "models--acme--sums"
    model.save_pretrained(repository / "snapshots" / OLD)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    spec = TeacherSpec(model_folder("acme/sums"), Teacher(source="acme/sums"))
    pool = TeacherPool({"sums": spec}, student_tokenizer=load_tokenizer(models[1]))
    ids = np.arange(5, 30)
    with torch.no_grad():
        states = pool.teacher("sums").states([ids], [np.arange(1, 25)])
        logits = states @ pool.teacher("sums").head.weight.T
        merged = model.merge_and_unload()(torch.from_numpy(ids)[None]).logits[0, :24]
    torch.testing.assert_close(logits, merged, rtol=0, atol=5e-5)
    assert (load_model(models[0])(torch.from_numpy(ids)[None]).logits[0, :24] - merged).abs().max() > 0.1
    assert pool.register("sums", tmp_path).source == "acme/sums"
