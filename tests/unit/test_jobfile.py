"""A job file: defaults, overrides, and what is refused before any work starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job, load_job

ROOT = Path(__file__).parents[2]
JOB = """
name = "small"
store = "runs/small"

[student]
tokenizer = "characters"
config = { model_type = "qwen3" }

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
train = 10

[domains.words]
source = "reasoning-gym"
dataset = "spell_backward"
train = 10

[teachers]
summer = { source = "stage:base" }

[routing]
sums = "summer"
words = "summer"

[train]
learning_rate = 1e-3
grad_clip = 0.5

[objectives.sampled]
policy_gradient = {}
plan = { pack_tokens = 128, drop_last = true }
train = { learning_rate = 3e-4, warmup_steps = 7 }

[objectives.exact]
divergence = {}

[[stages]]
name = "base"
data = "reference"
plan = { batch_samples = 4 }

[[stages]]
name = "student"
start = "base"
objective = "sampled"
plan = { batch_samples = 4, pack_tokens = 96 }
train = { warmup_steps = 9 }
"""


def job(*overrides: str, text: str = JOB, folder: Path | None = None) -> Job:
    raw = tomllib.loads(text)
    return check_job(raw, where="job.toml") if not overrides else load_text(text, overrides, folder)


def load_text(text: str, overrides: tuple[str, ...], folder: Path | None) -> Job:
    assert folder is not None
    (folder / "job.toml").write_text(text)
    return load_job(folder, overrides=list(overrides))


def test_a_stage_takes_the_jobs_tables_then_its_objectives_then_its_own() -> None:
    base, student = job().stages
    assert (base.train.learning_rate, base.train.grad_clip, base.train.warmup_steps) == (1e-3, 0.5, 0)
    assert (base.plan.drop_last, student.plan.drop_last, student.plan.pack_tokens) == (False, True, 96)
    assert (student.train.learning_rate, student.train.grad_clip, student.train.warmup_steps) == (3e-4, 0.5, 9)


def test_one_key_changes_the_objective_and_what_belongs_to_it(tmp_path: Path) -> None:
    student = job('stages.student.objective="exact"', folder=tmp_path).stage("student")
    assert (student.objective, student.train.learning_rate, student.train.warmup_steps) == ("exact", 1e-3, 9)
    assert not student.plan.drop_last


def test_overrides_reach_tables_and_stages_by_name(tmp_path: Path) -> None:
    changed = job("seed=3", "train.grad_clip=2.0", "stages.student.iterations=5", 'store="elsewhere"', folder=tmp_path)
    assert (changed.seed, changed.store, changed.stage("student").iterations) == (3, "elsewhere", 5)
    assert [stage.train.grad_clip for stage in changed.stages] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "base"\ndata', 'name = "base"\ndat', ["unknown key `stages.base.dat`", "data"]),
        ("grad_clip = 0.5", "grad_clp = 0.5", ["unknown key `train.grad_clp`", "did you mean 'grad_clip'"]),
        ("warmup_steps = 7", "warmup = 7", ["unknown key `objectives.sampled.train.warmup`", "warmup_steps"]),
        ("learning_rate = 1e-3", 'learning_rate = "fast"', ["learning_rate", "number", "'fast'"]),
        ("train = { warmup_steps = 9 }", "train = 9", ["stages.student.train"]),
        ("train = { warmup_steps = 9 }", "train = 0", ["stages.student.train"]),
        ("train = { learning_rate = 3e-4, warmup_steps = 7 }", "train = 7", ["objectives.sampled.train"]),
        ('objective = "sampled"', "objective = [1]", ["stages.student.objective"]),
        ("divergence = {}", "divergence = {}\nplan = { pack_token = 1 }", ["objectives.exact.plan", "'pack_tokens'"]),
        ("[objectives.exact]\ndivergence = {}", "[objectives]\nexact = 5", ["objectives.exact"]),
        ('source = "stage:base"', 'source = "stage:bse"', ["teachers.summer.source", "did you mean 'base'"]),
        ('sums = "summer"', 'sums = "sumer"', ["routing of 'sums'", "did you mean 'summer'"]),
        ('words = "summer"', 'wrds = "summer"', ["unknown domain 'wrds'", "did you mean 'words'"]),
        ('words = "summer"\n', "", ["no teacher for domain 'words'"]),
        ('objective = "sampled"', 'objective = "smpled"', ["stages.student.objective", "did you mean 'sampled'"]),
        ('start = "base"', 'start = "bsae"', ["stages.student.start", "did you mean 'base'"]),
        ('name = "student"', 'name = "base"', ["two stages share a name"]),
        ("policy_gradient = {}", "", ["objectives.sampled", "policy_gradient, divergence, cross_entropy"]),
        ('"reference"\nplan = { batch_samples = 4 }\n', '"reference"\n', ["missing key `stages.base.plan`: write it"]),
        ('"sampled"\nplan = {', '"sampled"\nplan = { mixture = { sums = 1 },', ["domain 'words' has no weight"]),
        (
            '"sampled"\nplan = {',
            '"sampled"\nplan = { mixture = { sums = 1, words = [[0, 1], [9, 2]], wrds = 1 },',
            ["no domain 'wrds'", "did you mean 'words'"],
        ),
        (
            '"sampled"\nplan = {',
            '"sampled"\nplan = { mixture = { sums = [[9, 1], [3, 2]], words = 1 },',
            ["rising steps"],
        ),
        (
            "[teachers]",
            "[retain]\nhidden_passes = 1\n[teachers]",
            ["hidden_passes = 1", "over its data 2 times"],
        ),
        ("[teachers]", "[retain]\nhidden_versions = 1\n[teachers]", ["retain.hidden_versions = 1", "set it above 1"]),
        ("policy_gradient = {}", "policy_gradient = {}\nteacher_weights = { sumer = 2 }", ["did you mean 'summer'"]),
        (
            '"sampled"\nplan = {',
            '"sampled"\nrollout = { group_size = 4 }\nplan = { strict_batches = false,',
            ["group_size = 4", "strict_batches = true"],
        ),
        ("[teachers]", "[engine]\nkeep = false\n[teachers]", ['keep: only for kind = "vllm"', "leave it out"]),
        ("[teachers]", '[engine]\nnoise = "seeded"\n[teachers]', ['noise: only for kind = "vllm"']),
        ("[teachers]", '[engine]\nurl = "http://h/v1"\n[teachers]', ['url: only for kind = "vllm"', '"hf"']),
        (
            "[teachers]",
            '[engine]\nkind = "vllm"\nurl = "http://h/v1"\nkeep = false\n[teachers]',
            ["options, dtype and keep apply to a vLLM that the job starts"],
        ),
        (
            "[teachers]",
            '[score]\nreads = "prompt_logprobs"\noptions = { seed = 1 }\n[teachers]',
            ['reads, options: only for engine = "vllm"'],
        ),
        (
            "[teachers]",
            '[score]\nengine = "vllm"\nreads = "extract_hidden_states"\n'
            '[teachers]\nserved = { source = "student", url = "http://h/v1" }',
            ["teacher 'served' has a url", 'set reads = "states"'],
        ),
        (
            '[teachers]\nsummer = { source = "stage:base" }',
            '[teachers]\nsummer = { url = "http://h/v1" }',
            ["teacher 'summer' has only a url", 'score.engine = "vllm" and score.reads = "prompt_logprobs"'],
        ),
        (
            "[teachers]",
            '[teachers]\nfar = { url = "http://h/v1" }\nboth = { blend = { far = 0.5, summer = 0.5 } }',
            ["teachers.both.blend: 'far' has only a url", "give teachers.far.source"],
        ),
        (
            "[teachers]",
            '[teachers]\nfar = { url = "http://h/v1", quantisation = "int8" }',
            ["teachers.far", "quantisation and revision are for weights that are here"],
        ),
        ("[teachers]", '[teachers]\nfar = { dtype = "float32" }', ["teachers.far", "exactly one of source, blend"]),
        ("grad_clip = 0.5", "master_weights = true", ["float32 need no copy", 'set student.dtype = "bfloat16"']),
        ("grad_clip = 0.5", "master_weights = true\noffload = true", ["leave one of the two out"]),
        ("grad_clip = 0.5", "master_weights = true\nlora = { r = 2 }", ["adapter", "leave master_weights out"]),
        (
            "policy_gradient = {}",
            "policy_gradient = { reward_coef = 1.0 }",
            ["stages.student", "reward_coef = 1", "rollout.group_size = 1", "set rollout.group_size to 2 or more"],
        ),
        (
            "policy_gradient = {}",
            "policy_gradient = { teacher_coef = 0.0 }",
            ["'sampled' are 0 or cancel (policy_gradient 1 of coefficients 0)", "a teacher_coef"],
        ),
        ("policy_gradient = {}", "divergence = { weight = 0 }", ["'sampled' are 0 or cancel (divergence 0)"]),
        (
            "policy_gradient = {}",
            "policy_gradient = {}\nteacher_weights = { summer = [[0, 0], [9, 0]] }",
            ["teacher_weights is 0 for every teacher of the stage (summer)"],
        ),
        ("batch_samples = 4", "batch_samples = 4, batch_tokens = 9", ["exactly one of batch_samples, batch_tokens"]),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(old: str, new: str, words: list[str]) -> None:
    assert old in JOB
    text = JOB.replace('data = "reference"', 'data = "reference"\niterations = 2') if "retain" in new else JOB
    with pytest.raises(JobFileError) as refused:
        job(text=text.replace(old, new, 1))
    for word in ("job.toml", *words):
        assert word in str(refused.value)


def test_a_teacher_from_a_later_stage_is_refused() -> None:
    text = JOB.replace('"stage:base"', '"stage:student"')
    with pytest.raises(JobFileError, match="comes from stage 'student', which runs later"):
        job(text=text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train", "takes KEY=VALUE"),
        ("stages.studnt.iterations=2", "did you mean 'student'"),
        ("stages.iterations=2", "name a stage"),
        ("seed.x=2", "'seed' is a value"),
    ],
)
def test_a_mistaken_override_is_named(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=words):
        job(override, text="seed = 1\n" + JOB, folder=tmp_path)


def test_no_file_and_no_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="no job file"):
        load_job(tmp_path)
    (tmp_path / "job.toml").write_text("name = ")
    with pytest.raises(JobFileError, match="not valid TOML"):
        load_job(tmp_path)


@pytest.mark.parametrize("folder", sorted(file.parent.name for file in (ROOT / "jobs").glob("*/job.toml")))
def test_every_job_of_the_repository_is_valid(folder: str) -> None:
    loaded: Any = load_job(ROOT / "jobs" / folder)
    assert loaded.name == folder


CHILD = """
name = "child"
store = "runs/child"
extends = { job = "../parent", stages = ["base"] }

[domains.sums]
train = 20

[objectives.sampled.policy_gradient]
correction = "icepop"

[[stages]]
name = "again"
start = "base"
objective = "sampled"
plan = { batch_samples = 2 }
"""


def parent_and_child(folder: Path, child: str = CHILD) -> Path:
    for name, text in {"parent": JOB, "child": child}.items():
        (folder / name).mkdir()
        (folder / name / "job.toml").write_text(text)
    return folder / "child"


def test_a_job_takes_over_tables_and_the_stages_it_lists(tmp_path: Path) -> None:
    child_job = load_job(parent_and_child(tmp_path), overrides=["stages.base.plan.batch_samples=8"])
    assert (child_job.name, [stage.name for stage in child_job.stages]) == ("child", ["base", "again"])
    assert (child_job.domains["sums"].train, child_job.domains["sums"].dataset, child_job.domains["words"].train) == (
        20, "chain_sum", 10,
    )  # fmt: skip
    gradient = child_job.objectives["sampled"].policy_gradient
    assert gradient is not None
    assert gradient.correction == "icepop"
    assert child_job.stage("again").train.learning_rate == 3e-4, "what the parent's objective brings is inherited too"
    assert child_job.stage("base").plan.batch_samples == 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('stages = ["base"]', 'stages = ["bas"]', "no stage 'bas': .*did you mean 'base'"),
        ('stages = ["base"]', 'stages = "base"', "valid list, found 'base'; it takes job, stages and domains"),
        ('stages = ["base"]', "stages = [1]", "stages.0: .*valid string, found 1"),
        ('stages = ["base"]', "steps = 1", "steps: .*it takes job, stages and domains"),
        ('{ job = "../parent", stages = ["base"] }', '"../parent"', "extends is '../parent', a table is needed"),
        ('job = "../parent"', 'job = "../paren"', "no job file"),
        ('job = "../parent"', 'job = "../child"', "leads back here"),
        ('name = "again"', 'name = "base"', "two stages share a name: 'base'"),
    ],
)
def test_a_mistaken_extension_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=words):
        load_job(parent_and_child(tmp_path, CHILD.replace(old, new)))


@pytest.mark.parametrize("line", ["domains = 5", "domains = [1]", "routing = 7"])
def test_a_parent_without_tables_is_named_with_its_key(line: str, tmp_path: Path) -> None:
    key, _, value = line.partition(" = ")
    folder = parent_and_child(tmp_path)
    (tmp_path / "parent" / "job.toml").write_text(f'name = "parent"\nstore = "runs/parent"\n{line}\n')
    with pytest.raises(JobFileError, match=rf"parent/job.toml: `{key}` is {re.escape(value)}, a table is needed"):
        load_job(folder)


def test_a_seed_beyond_64_bits_is_refused_with_the_largest() -> None:
    assert job(text=f"seed = {2**63 - 1}\n{JOB}").seed == 2**63 - 1
    with pytest.raises(JobFileError, match=rf"`seed`.*less than or equal to {2**63 - 1}, found 1{'0' * 25}"):
        job(text=f"seed = 1{'0' * 25}\n{JOB}")


def test_a_stores_own_record_of_its_job_is_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job().model_dump_json())
    assert load_job(tmp_path / "job.json", overrides=["seed=4"]) == job().model_copy(update={"seed": 4})
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(JobFileError, match="holds a list"):
        load_job(tmp_path / "list.json")


def test_routed_answers_come_from_each_domains_teacher() -> None:
    routed = job(text=JOB.replace('words = "summer"', 'words = "poet"').replace(
        "[routing]", 'poet = { source = "stage:base" }\n[routing]')
        + 'rollout = { policy = "routed" }\n'
    )  # fmt: skip
    student = routed.stage("student")
    assert [routed.sampler_of(student, "routed", domain) for domain in ("sums", "words")] == ["summer", "poet"]
    with pytest.raises(JobFileError, match=r"no teacher 'rooted'.*'routed'"):
        job(text=JOB + 'rollout = { policy = "rooted" }\n')
