"""A package of somebody else, installed as pip does, and used from a job file; it passes the contract suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import ENVIRONMENT, command

PLUGIN = Path(__file__).parents[1] / "plugin"
JOB = """
name = "other"
store = "{store}"
seed = 7

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 256

[domains.words]
source = "letters"
args = {{ alphabet = "xyz" }}
train = 24
environment = "hints"
environment_args = {{ most = 2 }}
reward = "exact"

[engine]
kind = "{engine}"
slots = 8
options = {{ mark = "{mark}" }}

[rollout]
max_prompt_tokens = 16
max_new_tokens = 8

[teachers.first]
source = "student"

[routing]
words = "first"

[score]
device = "cpu"
signals = {signals}

[plan]
pack_tokens = 128
batch_samples = 12

[train]
track = "lines"

[objectives.certain.terms.{term}]
weight = 0.5
base = 2.0
[objectives.certain.terms.{margin}]
weight = 0.25

[[stages]]
name = "student"
objective = "certain"
iterations = 2
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the plug-in is installed in."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "mopd_example_plugin.py"):
        (source / file).write_bytes((PLUGIN / file).read_bytes())
    install = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(source)], check=True, timeout=120, capture_output=True)
    return target


def mopd(installed: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=300, check=False,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(installed)},
    )  # fmt: skip


def python_path(installed: Path) -> str:
    return os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "term", "margin", "signals"),
    [
        ("marking", "entropy-bonus", "margin-loss", "{}"),
        (
            "mopd_example_plugin:Marking", '"mopd_example_plugin:EntropyBonus"', '"mopd_example_plugin:MarginLoss"',
            '{ margin = "mopd_example_plugin:Margin" }',
        ),
    ],
    ids=["by entry point", "by module"],
)  # fmt: skip
def test_a_job_uses_another_packages_engine_signal_terms_and_prompts(
    engine: str, term: str, margin: str, signals: str, installed: Path, tmp_path: Path
) -> None:
    mark, store, job = tmp_path / "mark", tmp_path / "store", tmp_path / "job.toml"
    job.write_text(JOB.format(store=store, engine=engine, term=term, margin=margin, signals=signals, mark=mark))
    done = mopd(installed, "run", job)
    assert done.returncode == 0, done.stderr[-3000:]
    assert mark.read_text().split() == ["0", "1"], "both iterations sampled with the plug-in's engine"
    steps = rows(installed, store, "select * from steps order by step")
    assert len(steps) == 4
    for step in steps:
        extra = json.loads(step["extra"])
        assert extra["bonus_entropy"] > 0
        assert extra["margin"] > 0
        assert step["loss"] == pytest.approx(-0.5 * extra["bonus_entropy"] + 0.25 * extra["margin_loss"], rel=1e-5)
    scored = rows(installed, store, "select kind, count(*) as n from scores group by kind order by kind")
    assert scored == [{"kind": "logprob", "n": 48}, {"kind": "margin", "n": 48}]
    stored = rows(installed, store, 'select uid, "values" from signals_first_margin')
    assert len(stored) == 48
    assert all(min(row["values"]) >= 0 for row in stored)
    # Without the package: the payload's form follows from its kind's name.
    assert subprocess.run(command("store", "verify", store), env=ENVIRONMENT, check=False, timeout=120).returncode == 0
    tracked = (store / "checkpoints" / "student" / "lines").read_text().splitlines()
    assert tracked == [f"student {step['step']} {step['loss']!r}" for step in steps]
    prompts = rows(installed, store, "select text, answer from prompts")
    assert {prompt["text"][:6] for prompt in prompts} == {prompt["answer"][::-1] for prompt in prompts}
    assert set("".join(prompt["answer"] for prompt in prompts)) == set("xyz")


def rows(installed: Path, store: Path, sql: str) -> list[dict[str, Any]]:
    answer = mopd(installed, "query", store, sql, "--json")
    assert answer.returncode == 0, answer.stderr
    payload = json.loads(answer.stdout)
    listed: list[dict[str, Any]] = payload["rows"] if isinstance(payload, dict) else payload
    return listed


MISTAKES = [
    ('kind = "marking"', 'kind = "markin"', "no engine 'markin': known: hf, marking, vllm; did you mean 'marking'"),
    ("terms.entropy-bonus", "terms.entropy", "no objective 'entropy': known: entropy-bonus, margin-loss"),
    ("terms.margin-loss", "terms.margin", "no objective 'margin': known: entropy-bonus, margin-loss; did you mean"),
    ("signals = {}", 'signals = { m = "marginn" }', "no signal 'marginn': known: hidden, logprob, margin, topk"),
    ("signals = {}", 'signals = { logprobs = "margin" }', "is not a field of docs/fields.md"),
    ("base = 2.0", "bass = 2.0", "bass"),
    (
        'track = "lines"',
        'track = "line"',
        "no tracker 'line': known: lines, tensorboard, wandb; did you mean",
    ),
    ('"hints"', '"hint"', "no environment 'hint': known: command, hints, verifiers; did you mean 'hints'"),
    ('source = "letters"', 'source = "mopd_example_plugin:numbers"', "has no 'numbers'"),
]
"""(text of the job, what stands there instead, what the refusal says)"""
CHECK = """
import json, sys
from typer.testing import CliRunner
from mopd_dataplane.cli.app import app

done = [CliRunner().invoke(app, ["check", job]) for job in sys.argv[1:]]
print(json.dumps([(each.exit_code, each.output) for each in done]))
"""


@pytest.mark.slow
def test_what_nobody_offers_is_named(installed: Path, tmp_path: Path) -> None:
    """In one process, which imports once."""
    text = JOB.format(
        store=tmp_path / "s", engine="marking", term="entropy-bonus", margin="margin-loss", signals="{}",
        mark=tmp_path / "m",
    )  # fmt: skip
    jobs = []
    for number, (old, new, _) in enumerate(MISTAKES):
        assert old in text
        jobs.append(tmp_path / f"{number}.toml")
        jobs[-1].write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *map(str, jobs)], capture_output=True, text=True, timeout=200, check=False,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(installed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == len(MISTAKES)
    for (_, _, said), (code, output) in zip(MISTAKES, outcomes, strict=True):
        assert code == 2, output
        assert said in output


@pytest.mark.slow
def test_the_plug_in_passes_the_contract_suites(installed: Path, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.job import sections
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.rollout.tools.environments import Conversation, make_environment
from mopd_dataplane.score.signal_kinds import signal_kind
from mopd_dataplane.testing import check_engine, check_importer, check_objective, check_signal

config = dict(model_type="qwen3", num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2)
folder = make_student(sections.Student(config=config), Path({str(tmp_path)!r}) / "tiny", seed=3)
settings = sections.Engine(kind="marking", slots=3, options={{"mark": {str(tmp_path / "mark")!r}}})
check_engine(engine_kind("marking").open(folder, 0, settings, dtype="float32", mixed_teacher=None))
check_objective(Objective(terms={{"entropy-bonus": {{"base": 10.0}}}}))
check_signal(signal_kind("margin", {{}}))
check_objective(Objective(terms={{"margin-loss": {{}}}}))
check_objective(Objective(divergence={{"kind": "hellinger"}}))
check_importer(find_plugin("mopd.importers", "pairs", FORMATS), [{{"ask": "a", "said": "b", "good": 1}}])
hints = make_environment("hints", {{"most": 1}})
asked = Prompt(prompt_id="p", domain="d", text="?", answer="abc")
heard = lambda *said: hints.reply(Conversation(prompt=asked, said=said, run=None))
assert [heard("x"), heard("abc"), heard("x", "3 letters", "y")] == ["3 letters", None, None]
print("kept")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(installed)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["kept"], done.stderr[-3000:]
