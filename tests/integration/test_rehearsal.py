"""`mopd check JOB --rehearse`: full-scale jobs from end to end on this machine; three in `make test`, all in
`make test-slow`."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import fsspec
import pytest
from advice import advises
from transformers import PreTrainedModel

from mopd_dataplane import open_store
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job, load_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.devices import free_device_memory
from mopd_dataplane.models.hf import load_model, load_tokenizer, tokenizer_digest
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.prompts import load_prompts
from mopd_dataplane.run import open_engine, rehearsal
from mopd_dataplane.run.pipeline import run_job
from mopd_dataplane.run.preflight import preflight
from mopd_dataplane.run.rehearsal import MARK, Rehearsal, rehearse
from mopd_dataplane.run.steps import score, train

JOBS = Path(__file__).parents[2] / "jobs"
FULL = sorted(file.parent.name for file in JOBS.glob("*/full.toml"))
CHEAP = ("grpo", "opcd", "opd")


def full(recipe: str, folder: Path, *changes: str) -> Job:
    return load_job(JOBS / recipe / "full.toml", overrides=[f"store={json.dumps(str(folder / 'store'))}", *changes])


def run(recipe: str, folder: Path) -> Rehearsal:
    """Rehearse a recipe and look at what is left."""
    job = full(recipe, folder)
    small = rehearse(job)
    run_job(small.job)
    assert not Path(job.store).exists(), "the job's own store is not touched"
    store = open_store(small.job.store)
    steps = store.table("steps", ["stage", "grad_norm", "window"]).to_pylist()
    assert {step["stage"] for step in steps} == {stage.name for stage in job.stages}
    for stage in small.job.stages:
        assert {step["window"] for step in steps if step["stage"] == stage.name} == set(range(stage.iterations))
    if any(job.objective(stage).signals for stage in job.stages):  # rewards alone say nothing of answers all wrong
        assert any(step["grad_norm"] > 0 for step in steps)
    assert not store.verify().findings
    return small


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that asked for the device's memory; each found no model that the step before had left."""

    def models() -> int:
        return sum(issubclass(type(one), PreTrainedModel) for one in gc.get_objects())

    gc.collect()
    before, steps = models(), []

    def look(step: str) -> None:
        free_device_memory()
        steps.append(step)
        assert models() <= before, f"a model is left in memory when {step} begins"

    for module in (open_engine, score, train):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "free_device_memory", partial(look, name))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CHEAP)
def test_a_full_scale_job_is_rehearsed(recipe: str, tmp_path: Path, handed_over: list[str]) -> None:
    small = run(recipe, tmp_path)
    assert {"open_engine", "train"} <= set(handed_over)
    assert "Hugging Face engine" in small.replaced["engine"]
    assert {"vLLM", "accelerator", "weights"} <= small.never_run.keys()
    assert json.loads((small.folder / MARK).read_text()) == small.facts()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in FULL if name not in CHEAP])
def test_every_full_scale_job_is_rehearsed(recipe: str, tmp_path: Path) -> None:
    run(recipe, tmp_path)


@pytest.mark.slow
def test_a_mixture_of_domains_is_rehearsed(tmp_path: Path) -> None:
    """The quickstart's first stage takes domains as 2 : 4 : 1, and a rehearsal has 2 prompts of each."""
    job = load_job(JOBS / "quickstart", overrides=[f"store={json.dumps(str(tmp_path / 'store'))}"])
    job = job.model_copy(update={"stages": job.stages[:1]})
    small = rehearse(job)
    assert "equal shares" in small.replaced["stages.base.plan.mixture"]
    run_job(small.job)
    plans = open_store(small.job.store).table("steps", ["stage", "samples"]).to_pylist()
    assert sum(step["samples"] for step in plans) == 3 * 2


STRICT = (
    'questions.great="reward > 5"', 'plan.where="great and kl < 0"', 'plan.groups="spread"', 'plan.weight="reward"',
    "plan.limit=64", "plan.replay={iterations = 2, share = 0.25}", "rollout.until={groups = 24, at_most = 4}",
)  # fmt: skip
"""A choice of samples that answers of random models never meet."""


def test_a_choice_of_samples_is_loosened_and_said(tmp_path: Path) -> None:
    small = rehearse(full("grpo", tmp_path, *STRICT))
    [stage] = small.job.stages
    assert stage.plan.where == "(great and kl < 0) or true"
    assert (stage.plan.groups, stage.rollout.until) == ("all", None)
    assert "computed, but leaves no sample out" in small.replaced["stages.grpo.plan.where"]
    assert {f"stages.grpo.{key}" for key in ("plan.groups", "plan.weight", "rollout.until")} <= small.replaced.keys()


@pytest.mark.slow
def test_a_job_that_chooses_its_samples_is_rehearsed(tmp_path: Path) -> None:
    job = full("grpo", tmp_path, *STRICT)
    small = rehearse(job)
    run_job(small.job)
    steps = open_store(small.job.store).table("steps", ["window", "samples"]).to_pylist()
    assert {step["window"] for step in steps} == {0, 1}
    assert sum(step["samples"] for step in steps if step["window"] == 1) > sum(
        step["samples"] for step in steps if step["window"] == 0
    ), "older samples join the second window"


@pytest.mark.parametrize("recipe", FULL)
def test_nothing_but_files_and_vllm_is_missing_of_a_full_scale_job(recipe: str, tmp_path: Path) -> None:
    """What a check finds on a machine without the models and prompts: exactly those, each once."""
    job = full(recipe, tmp_path)
    missing = {f"domains.{name}" for name in job.domains} | {"student.path"}
    missing |= {"engine.kind"} if job.engine.kind == "vllm" else set()
    missing |= {f"teachers.{name}.source" for name, one in job.teachers.items() if one.source.startswith("models/")}
    assert sorted(finding.key for finding in preflight(job).findings) == sorted(missing)


def small_job(folder: Path, **changes: object) -> Job:
    return check_job(
        {
            "name": "small", "store": str(folder / "store"), "student": {"path": "models/Llama-3.2-1B"},
            "domains": {"sums": {"source": "data/none.jsonl", "template": "{question} {kind}", "reward": "no:a"}},
            "teachers": {"t": {"source": "models/teacher"}}, "routing": {"sums": "t"},
            "plan": {"batch_samples": 64}, "objectives": {"o": {"divergence": {"kind": "reverse"}}},
            "train": {"track": "wandb", "device": "cuda"}, "scale": {"ranks": 16},
            "engine": {"kind": "vllm", "url": "http://127.0.0.1:1/v1"},
            "stages": [{"name": "s", "objective": "o", "iterations": 9}], **changes,
        },
        where="test",
    )  # fmt: skip


@pytest.mark.parametrize("reads", ["prompt_logprobs", "echo", "sglang"])
@pytest.mark.parametrize("has_vllm", [False, True])
def test_a_teacher_behind_a_url_has_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, has_vllm: bool
) -> None:
    monkeypatch.setattr(rehearsal, "is_installed", lambda package: has_vllm and package == "vllm")
    served = {"engine": "vllm", "reads": reads}
    far = small_job(
        tmp_path,
        teachers={"t": {"url": "http://127.0.0.1:1/v1"}},
        score=served,
        objectives={"o": {"policy_gradient": {}}},
    )
    assert [finding.key for finding in preflight(far).findings if finding.key.startswith("teachers")] == []
    small = rehearse(far)
    assert small.replaced["teachers.t"] == "a running server is not asked: the student stands in"
    assert small.job.teachers["t"].source == "student"
    assert small.job.stages[0].score.reads == ("prompt_logprobs" if has_vllm else "states")


def test_what_is_missing_is_replaced_and_said(tmp_path: Path) -> None:
    small = rehearse(small_job(tmp_path))
    assert set(small.replaced) == {
        "student", "teachers.t", "domains.sums", "domains.sums.reward", "engine", "engine.url", "s.train.device",
        "scale.ranks",
    }  # fmt: skip
    assert {"vLLM", "accelerator", "weights", "train.track", "nodes"} == set(small.never_run)
    assert "llama3" in small.replaced["student"]
    model, teacher = load_model(small.job.student.path), load_model(small.job.teachers["t"].source)
    assert model.config.model_type == teacher.config.model_type == "llama"
    assert model.config.vocab_size == 128_256
    assert bool((model.lm_head.weight != teacher.lm_head.weight).any()), "not the same model twice"
    findings = preflight(small.job).findings
    assert [finding.key for finding in findings] == ["teachers.t.prompt_template"], "all else fits and can be called"
    assert not findings[0].certain


@pytest.mark.parametrize("source", ["memory://rehearsal/sums.jsonl", "memory://rehearsal", "{here}/s*.jsonl", "{here}"])
def test_prompts_by_url_pattern_and_folder_are_used_where_they_are(source: str, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"{n} + {n} =", "answer": str(2 * n)}) + "\n" for n in range(20))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "sums.jsonl").write_text(rows)
    fsspec.filesystem("memory").pipe("/rehearsal/sums.jsonl", rows.encode())
    domain = {"source": source.format(here=tmp_path / "prompts"), "reward": "exact", "train": 4}
    small = rehearse(small_job(tmp_path, domains={"sums": domain}))
    assert small.rehearsed["domains.sums"] == f"prompts of {domain['source']}"
    assert len(load_prompts("sums", small.job.domains["sums"])) == 2


@pytest.mark.parametrize("source", ["memory://rehearsal/none.jsonl", "data/none*.jsonl", "no_such_module:prompts"])
def test_prompts_that_are_nowhere_are_made_up(source: str, tmp_path: Path) -> None:
    small = rehearse(small_job(tmp_path, domains={"sums": {"source": source, "reward": "exact", "train": 4}}))
    assert source in small.replaced["domains.sums"]
    assert "made-up prompts" in small.replaced["domains.sums"]


def test_config_and_tokenizer_that_are_here_are_used_also_for_models_that_are_not(tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1,
    }  # fmt: skip
    folder = make_student(Student(config=shape), tmp_path / "model", seed=0)
    small = rehearse(small_job(tmp_path, teachers={"t": {"source": str(folder)}}))
    digest = tokenizer_digest(load_tokenizer(folder))
    for model_path in (small.job.student.path, small.job.teachers["t"].source):
        assert tokenizer_digest(load_tokenizer(model_path)) == digest
        assert load_model(model_path).config.num_hidden_layers == 2
    assert "its own tokenizer" in small.rehearsed["teachers.t"]
    assert "another model's tokenizer" in small.replaced["student"]


def test_a_folder_that_no_rehearsal_made_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "store-rehearsal" / "mine"
    mine.mkdir(parents=True)
    with advises(" is not a rehearsal's, so it is left alone; move it, or give another --store"):
        rehearse(small_job(tmp_path))
    assert mine.exists()
    assert rehearse(small_job(tmp_path, store=str(tmp_path / "other"))).folder.name == "other-rehearsal"
    mine.parent.rename(tmp_path / "moved")
    rehearse(small_job(tmp_path))


def test_a_rehearsal_replaces_the_one_before(tmp_path: Path) -> None:
    first = rehearse(small_job(tmp_path))
    (first.folder / "store").mkdir()
    assert not (rehearse(small_job(tmp_path)).folder / "store").exists()
