"""Next steps that messages of runs, vLLM here and training name: each is taken, and works. What only a device or vLLM
can do is stood in for, as each test says."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from advice import advises
from safetensors.torch import save_file

from mopd_dataplane import Store, prompts
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.models.chat_template import thought_ids
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.models.vllm_local import answering
from mopd_dataplane.records import Teacher
from mopd_dataplane.rollout.engines import vllm as vllm_engine
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.tools.replies import reply_form
from mopd_dataplane.run import follow
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.score import check_precision, score
from mopd_dataplane.run.token_log_copy import StoredLog
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.score import vllm_states
from mopd_dataplane.train import advantage, heads, ranks, student
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.spec import HeadFile
from mopd_dataplane.train.teacher_parts import judged_tokens

JOB: dict[str, Any] = {
    "name": "j", "student": {"config": {"model_type": "qwen3"}}, "domains": {"d": {"source": "x.jsonl"}},
    "teachers": {"t": {"source": "models/t"}}, "routing": {"d": "t"}, "objectives": {"o": {"policy_gradient": {}}},
    "stages": [{"name": "s", "objective": "o", "plan": {"batch_samples": 4}}],
}  # fmt: skip


def run_of(store: Store, **changes: Any) -> Run:
    job = check_job(JOB | {"store": store.uri} | changes, where="job")
    return Run(job, store, Policies(job, open_work(store, "")), Progress(quiet=True))


def test_a_job_that_nodes_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(follow, "_opened", lambda job, progress: SimpleNamespace(job=job))
    monkeypatch.setattr(follow, "_join_stage", lambda run, stage: joined.append(stage.name))

    def job(uri: str) -> Job:
        return check_job(JOB | {"store": uri}, where="job")

    with advises(" is an object store; give a folder that all nodes share"):
        follow.join_training(job("s3://bucket/run"), Progress(quiet=True))
    follow.join_training(job(str(tmp_path)), Progress(quiet=True))
    assert joined == ["s"]


def test_weights_that_are_behind_a_url(tmp_path: Path) -> None:
    remote = {"t": {"url": "http://127.0.0.1:8000/v1"}}
    score = {"score": {"engine": "vllm", "reads": "prompt_logprobs"}}
    store = Store.create(tmp_path / "store")
    run = run_of(store, teachers=remote, **score)
    with advises(" only, and they are needed here; give "):
        run.policies.teacher("t", run.job.stages[0])
    run = run_of(store, teachers={"t": {"source": str(tmp_path)}}, **score)
    assert run.policies.teacher("t", run.job.stages[0]) == tmp_path


def test_signals_of_another_precision(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    store.add_teacher(
        Teacher(name="t", source="models/t", weights_digest="w", tokenizer_digest="k", vocab_size=9, hidden_size=8,
                dtype="float32", head_file="", head_digest="", quantisation="int8")
    )  # fmt: skip
    plain = run_of(store)
    with advises("; go back to that, or give the new teacher another name"):
        check_precision(plain, plain.job.stages[0])
    back = run_of(store, teachers={"t": {"source": "models/t", "quantisation": "int8"}})
    check_precision(back, back.job.stages[0])
    other = run_of(store, teachers={"u": {"source": "models/t"}}, routing={"d": "u"})
    check_precision(other, other.job.stages[0])


def test_a_log_that_another_node_took(s3: str, tmp_path: Path) -> None:
    files = Store.create(s3).location.files
    assert files is not None
    mine, other = StoredLog(files, "wal/s/engine-0"), StoredLog(files, "wal/s/engine-0")
    other.claim(1)
    with advises("another node has just taken the log "):
        mine.claim(1)
    mine.claim(mine.fetch(tmp_path) + 1)


def test_datasets_and_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def silent(*names: Any, **options: Any) -> Any:
        raise ConnectionError("no route to host")

    with monkeypatch.context() as away:
        away.setattr(datasets, "load_dataset", silent)
        with advises("; run the same again"):
            prompts._dataset_rows("someone/something")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"question": "2 + 2"}\n')
    assert prompts._dataset_rows(str(tmp_path / "rows")) == [{"question": "2 + 2"}]
    monkeypatch.setattr(prompts, "_FREE_BYTES", 0)
    monkeypatch.setattr(prompts, "_RATIO", 1)
    rows = pa.table({"prompt": ["a" * 100_000] * 20})
    pq.write_table(rows, tmp_path / "packed.parquet")
    with advises("that: look at the file, or give it as .jsonl"):
        prompts._rows(str(tmp_path / "packed.parquet"))
    (tmp_path / "plain.jsonl").write_text('{"prompt": "aaa"}\n' * 20)
    assert len(prompts._rows(str(tmp_path / "plain.jsonl"))) == 20


def test_replies_that_a_chat_template_does_not_write() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    chat = reply_form(tokenizer, prompt_template="{prompt}", reply_template="\n{reply}\n", role="tool")
    with advises("; set student.prompt_template and the domain's reply_template as text"):
        reply_form(tokenizer, prompt_template="chat", reply_template="", role="tool")
    assert chat is not None


class Died(Exception):
    """What vLLM raises."""


def test_an_engine_of_vllm_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself is stood in for: its answers, and whether it dropped its cache."""

    def ask(*, dies: bool) -> str:
        with answering():
            if dies:
                raise Died
            return "answer"

    with advises("; every logged token is kept: run again to continue with a new engine"):
        ask(dies=True)
    assert ask(dies=False) == "answer"
    logprobs = np.array([np.nan], np.float32)

    def step(engine: Any) -> StepOutput:
        zero = np.zeros(1, np.int32)
        return StepOutput(zero, zero, zero, logprobs, zero)

    monkeypatch.setattr(vllm_engine.VllmEngine.__bases__[0], "step", step)
    engine = object.__new__(vllm_engine.VllmEngine)
    engine.policy_version = 3
    with advises(" gives non-finite logits in slot "):
        engine.step()
    logprobs = np.array([-1.0], np.float32)
    assert engine.step().logprobs.tolist() == [-1.0]
    engine._asleep, keeps = False, True
    engine._engine = SimpleNamespace(
        collective_rpc=lambda *arguments, **options: None, reset_prefix_cache=lambda: not keeps
    )
    with advises("vLLM did not drop its cached prefixes; run again to continue with a new engine"):
        engine._reload(Path())
    keeps = False
    engine._reload(Path())


def test_states_that_vllm_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is stood in for by the file that it writes."""
    monkeypatch.setitem(sys.modules, "mopd_dataplane.score.vllm_connector", SimpleNamespace(STATES="s"))
    reader: Any = object.__new__(vllm_states.ExtractingReader)
    reader.engine = None
    is_dead = True
    monkeypatch.setattr(vllm_states, "is_dead", lambda engine: is_dead)
    with advises("vLLM died while it wrote hidden states; run again to continue with a new engine"):
        reader._taken(tmp_path / "states")
    is_dead = False
    monkeypatch.setattr(vllm_states, "_FILE_S", -1.0)
    with advises(" s; its own output says more, run again"):
        reader._taken(tmp_path / "states")
    save_file({"s": torch.ones(3, 1, 2)}, tmp_path / "states")
    assert reader._taken(tmp_path / "states").shape == (3, 2)


def test_extrapolation_from_a_reference() -> None:
    teacher = torch.tensor([-1.0])
    batch: Any = SimpleNamespace(teacher_logprobs=teacher, reference_logprobs=None)
    term: Any = SimpleNamespace(extrapolation=1.25, reference="base")
    with advises("score the samples with it, or set extrapolation to 1"):
        advantage._target(term, batch)
    scored: Any = SimpleNamespace(teacher_logprobs=teacher, reference_logprobs=torch.tensor([-2.0]))
    assert advantage._target(term, scored).item() == pytest.approx(-0.75)
    term.extrapolation = 1.0
    assert advantage._target(term, batch).item() == -1.0


def test_thoughts_that_a_teacher_does_not_judge() -> None:
    plain, thinking = character_tokenizer(()), character_tokenizer(("<think>", "</think>"))
    with advises('set thought to the tokens of its chat template, or teacher_parts to "all"'):
        thought_ids(plain, ("<think>", "</think>"))
    ids = thought_ids(thinking, ("<think>", "</think>"))
    assert thought_ids(plain, ("[", "]")) == (plain.convert_tokens_to_ids("["), plain.convert_tokens_to_ids("]"))
    batch: Any = SimpleNamespace(
        input_ids=torch.tensor([[5, ids[0], 6, ids[1], 7]]), position_ids=torch.arange(5)[None],
        predictors=torch.arange(4),
    )  # fmt: skip
    with advises("give them as thought to ObjectiveLoss"):
        judged_tokens(batch, "outside_thought", None)
    judged = judged_tokens(batch, "outside_thought", ids)
    assert judged is not None
    assert judged.tolist() == [False, False, False, True]
    all_tokens = judged_tokens(batch, "all", None)
    assert all_tokens is None


def test_a_teacher_that_follows_the_policy(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))

    def run_with(follows: int) -> Run:
        return run_of(store, teachers={"t": {"source": "student", "follows": follows}})

    pool: Any = SimpleNamespace()
    run = run_with(2)
    with advises("can score by it; run it without them, or set follows = 0"):
        score(run, run.job.stages[0], pool=pool)
    assert score(run, run.job.stages[0]) == {"signals": 0, "loss_tokens": 0}
    run = run_with(0)
    assert score(run, run.job.stages[0], pool=pool) == {"signals": 0, "loss_tokens": 0}


def test_a_head_on_a_slow_disk(demo_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = demo_store.teachers()["chain_sum-expert"]
    file = HeadFile(path=str(demo_store.path(teacher.head_file)), digest=teacher.head_digest)
    with closing(TeacherHeads({"t": file}, torch.device("cpu"))) as slow, monkeypatch.context() as impatient:
        slow._reader.submit(time.sleep, 0.5)
        impatient.setattr(heads, "READ_S", 0.0)
        with advises(" s; check the disk, then run again"):
            slow.get("t")
    with closing(TeacherHeads({"t": file}, torch.device("cpu"))) as again:
        assert again.get("t").weight.shape[1] == 8


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator is stood in for: a machine with one."""
    chosen: list[int] = []
    monkeypatch.setattr(ranks, "resolve_device", lambda name: "cpu" if name == "cpu" else "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    with advises("give each rank one of its own ("):
        ranks._own_device("cuda", 1, 2)
    assert ranks._own_device("auto", 0, 1) == torch.device("cuda", 0)
    assert ranks._own_device("cpu", 1, 2) == torch.device("cpu")
    assert len(chosen) == 1


def test_a_rank_that_lost_its_peers() -> None:
    """What follows a real death, from the checkpoint on, is in tests/integration/test_ranks.py."""

    def exchange(*, is_gone: bool) -> int:
        with ranks.peers_lost_named(0):
            if is_gone:
                raise RuntimeError("[gloo/transport] Connection closed by peer")
            return 1

    with advises("; the last checkpoint is intact: run again to continue"):
        exchange(is_gone=True)
    assert exchange(is_gone=False) == 1


def test_a_model_without_a_list_of_layers() -> None:
    with advises(" has no list of layers; set it to false"):
        student._recompute([], "Odd")
    layer = torch.nn.Linear(2, 2)
    student._recompute([layer], "Even")
    assert layer(torch.ones(1, 2)).shape == (1, 2)
