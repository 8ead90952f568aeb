"""Next steps that messages about teachers, rewards and the discriminator name: each is taken, and works."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import torch
from advice import advises
from model_server import ModelServer, serve_model
from peft import LoraConfig, PeftModel, get_peft_model

from mopd_dataplane import Store
from mopd_dataplane.bench.train_memory import check_whole_model
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import check_job
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.vllm_adapters import check_for_scoring
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.server_identity import check_teacher_server
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.score import scorer, vllm_logprobs
from mopd_dataplane.score.discriminator import WEIGHTS, Discriminator, Pair
from mopd_dataplane.score.reward import Unscorable, resolve_reward
from mopd_dataplane.score.scorer import Scorable, model_input, score_samples
from mopd_dataplane.score.signal_kinds import StudentTopk, signal_kind
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec
from mopd_dataplane.score.timed_reward import TimedReward
from mopd_dataplane.score.vllm_states import predicting

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT = Prompt(prompt_id="p", domain="d", text="abcd")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random models, a longer one, and an adapter on the first."""
    root = tmp_path_factory.mktemp("teachers")
    configs = {"one": CONFIG, "two": CONFIG, "long": CONFIG | {"max_position_embeddings": 512}}
    model_dirs = {
        name: make_student(sections.Student(config=config), root / name, seed=seed)
        for seed, (name, config) in enumerate(configs.items())
    }
    model = get_peft_model(hf.load_model(model_dirs["one"]), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = str(model_dirs["one"])
    model.save_pretrained(root / "adapter")
    return model_dirs | {"adapter": root / "adapter"}


def pool_of(
    folders: dict[str, Path], *names: str, settings: dict[str, Any] | None = None, **options: Any
) -> TeacherPool:
    specs = {
        name: TeacherSpec(folders[name], sections.Teacher(**({"source": str(folders[name])} | (settings or {}))))
        for name in names
    }
    return TeacherPool(specs, student_tokenizer=hf.load_tokenizer(folders["one"]), **options)


def sample(length: int = 12) -> Scorable:
    mask = np.ones(length - 4, np.uint8)
    return Scorable(
        uid="0" * 32, sample_row=0, prompt_id="p", prompt_len=4, tokens=np.arange(5, 5 + length, dtype=np.int32) % 90,
        loss_mask=mask, logprobs=-np.ones(length - 4, np.float32), temperature=1.0,
    )  # fmt: skip


def score(pool: TeacherPool, name: str, *samples: Scorable) -> int:
    with closing(pool):
        return len(list(score_samples(pool, name, ("logprob",), list(samples), sections.Score(batch_tokens=64))))


def test_quantisation_of_teachers(folders: dict[str, Path]) -> None:
    int8 = {"quantisation": "int8"}
    with advises(' is an adapter, whose base is not quantised: set quantisation = "none"'):
        pool_of(folders, "adapter", settings=int8)
    assert score(pool_of(folders, "adapter"), "adapter", sample()) == 1
    with advises("apply; set score.engine = ") as refused:
        pool_of(folders, "one", settings=int8, engine="vllm", reads="prompt_logprobs")
    assert "hf" in str(refused.value)
    pool_of(folders, "one", settings=int8, engine="hf")
    pool_of(folders, "one", engine="vllm", reads="prompt_logprobs")


def test_ends_of_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    with advises('base: set end = "own", or merge it (train.lora.merge = "end" of its stage'):
        pool_of(folders, "adapter", settings={"end": "map"})
    pool_of(folders, "adapter", settings={"end": "own"})
    merged = PeftModel.from_pretrained(hf.load_model(folders["one"]), folders["adapter"]).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    hf.load_tokenizer(folders["one"]).save_pretrained(tmp_path / "merged")
    pool = pool_of(folders | {"adapter": tmp_path / "merged"}, "adapter", settings={"end": "map"})
    assert score(pool, "adapter", sample()) == 1


def test_blends_in_memory(folders: dict[str, Path]) -> None:
    specs = {name: TeacherSpec(folders[name], sections.Teacher(source=str(folders[name]))) for name in ("one", "two")}
    specs["both"] = TeacherSpec(None, sections.Teacher(blend={"one": 0.5, "two": 0.5}))

    def pool(most: int) -> TeacherPool:
        return TeacherPool(specs, student_tokenizer=hf.load_tokenizer(folders["one"]), max_resident=most)

    with advises("memory at once; set it to at least ") as refused:
        score(pool(1), "both", sample())
    assert str(refused.value).endswith("at least 2")
    assert score(pool(2), "both", sample()) == 1


def test_a_text_past_the_context_of_a_teacher(folders: dict[str, Path]) -> None:
    with advises("longer context, or set teachers."):
        score(pool_of(folders, "one"), "one", sample(80))
    assert score(pool_of(folders, "one"), "one", sample(64)) == 1
    assert score(pool_of(folders, "long"), "long", sample(80)) == 1
    assert score(pool_of(folders, "one", settings={"beyond_context": True}), "one", sample(80)) == 1


def test_a_teacher_of_other_weights_gets_another_name(folders: dict[str, Path], tmp_path: Path) -> None:
    with closing(pool_of(folders, "one")) as pool:
        pool.register("one", tmp_path)
    with (
        closing(pool_of(folders | {"one": folders["two"]}, "one")) as pool,
        advises("signals of both cannot share a name: give the new teacher another name"),
    ):
        pool.register("one", tmp_path)
    with closing(pool_of(folders, "two")) as pool:
        assert pool.register("two", tmp_path).name == "two"


def test_a_teacher_whose_weights_are_at_a_server(folders: dict[str, Path], tmp_path: Path) -> None:
    url = {"source": "", "url": "http://127.0.0.1:8000/v1"}
    specs = {"far": TeacherSpec(None, sections.Teacher(**url))}
    tokenizer = hf.load_tokenizer(folders["one"])
    with (
        closing(TeacherPool(specs, student_tokenizer=tokenizer)) as pool,
        advises('.source, or set score.engine = "vllm" and score.reads = "prompt_logprobs"'),
    ):
        pool.register("far", tmp_path)
    with closing(TeacherPool(specs, student_tokenizer=tokenizer, engine="vllm", reads="prompt_logprobs")) as pool:
        assert pool.record_without_head("far", "http://x", "0" * 64).name == "far"
    with closing(pool_of(folders, "one")) as pool:
        assert pool.register("one", tmp_path).name == "one"
        assert pool.model("one") is not None
        with advises(" does not give log-probs from a server; give teachers."):
            pool.server_reader("one")


def test_replies_of_vllm() -> None:
    """What the engine returned is refused, and the next answer, as it should be, is taken."""
    ids, places = [np.arange(4)], [np.array([1, 2])]
    with advises(" tokens; run again to continue"):
        predicting([torch.zeros(3, 2)], ids, places)
    assert predicting([torch.zeros(4, 2)], ids, places).shape == (2, 2)
    with advises(" likeliest; run again"):
        vllm_logprobs.sequence_logprobs(np.arange(2), [{7: (1, -0.5)}], 1)
    assert vllm_logprobs.sequence_logprobs(np.arange(2), [{1: (1, -0.5)}], 1).token_logprobs.tolist() == [-0.5]


def test_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with advises("give its domain source 'reasoning-gym', or another reward"):
        resolve_reward("reasoning-gym")(PROMPT, "ab")
    entry = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0]
    data = json.dumps({"dataset": "chain_sum", "entry": entry}, default=str)
    prompt = Prompt(prompt_id="p0", domain="sums", text=entry["question"], answer=entry["answer"], verifier_data=data)
    assert resolve_reward("reasoning-gym")(prompt, prompt.answer).correct
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def reward(name: str, body: str) -> Any:
        """A function as it is when the same command is run again, in a new process: another module here."""
        (tmp_path / f"advised_{name}.py").write_text(f"import os\ndef length(prompt, response):\n    {body}\n")
        return resolve_reward(f"advised_{name}:length")

    with advises(", or let it return None for an "):
        reward("raising", "raise ValueError('none of my cases')")(PROMPT, "ab")
    assert isinstance(reward("silent", "return None")(PROMPT, "ab"), Unscorable)
    sound = reward("sound", "return float(len(response))")
    assert sound(PROMPT, "ab").reward == 2.0
    with advises("; mend it, then run the same command again: what is rewarded stays"):
        TimedReward(reward("dying", "os._exit(7)"), 20.0)(PROMPT, "ab")
    mended = TimedReward(sound, 20.0)
    assert mended(PROMPT, "ab").reward == 2.0
    mended.close()


def test_the_discriminator(folders: dict[str, Path], tmp_path: Path) -> None:
    pairs = [Pair(np.arange(5, 9), np.arange(6, 10))] * 4

    def critic(**settings: Any) -> Discriminator:
        return Discriminator(folders["one"], sections.Discriminator(batch_pairs=4, **settings), seed=0)

    diverging = critic(learning_rate=1e30)
    with advises("intact: lower discriminator.learning_rate and run again"):
        diverging.update(pairs, epochs=3)
    sound = critic(learning_rate=1e-3)
    sound.update(pairs, epochs=3)
    sound.save(tmp_path / "v1")
    shutil.copytree(folders["one"], tmp_path / "v2")
    with advises("; delete it and what came after it, then "):
        critic().load(tmp_path / "v2")
    shutil.rmtree(tmp_path / "v2")
    again = critic()
    again.load(tmp_path / "v1")
    again.update(pairs, epochs=1)
    again.save(tmp_path / "v2")
    assert (tmp_path / "v2" / WEIGHTS).is_file()


class Text:
    """Log-probs of a text, as a server gives them; no server is asked here."""

    vocab_size = 98


def test_what_log_probs_of_text_do_not_tell_is_read_from_states(folders: dict[str, Path]) -> None:
    reads = sections.Score(engine="vllm", reads="prompt_logprobs", batch_tokens=64)
    item = model_input(sample(), None)
    warm = model_input(replace(sample(), temperature=0.7), None)
    reader: Any = Text()
    with advises("teacher's own top-k only; set score.reads = "):
        list(scorer._score_from_prompt_logprobs(reader, "one", [signal_kind("hidden", ())], [item], reads))
    with advises("identical models; set score.reads = "):
        list(scorer._score_from_prompt_logprobs(reader, "one", [signal_kind("logprob", ())], [warm], reads))
    chosen = reads.model_copy(update={"topk_source": "student"})
    with advises("teacher's own top-k only; set score.reads = ") as refused:
        list(scorer._score_from_prompt_logprobs(reader, "one", [signal_kind("topk", ())], [item], chosen))
    assert str(refused.value).endswith('"states", or "sglang" for teachers behind SGLang servers')
    with closing(pool_of(folders, "one")) as pool:
        samples = [sample(), replace(sample(), uid="1" * 32, temperature=0.7)]
        signals = list(score_samples(pool, "one", ("logprob", "hidden"), samples, sections.Score(batch_tokens=64)))
    assert len(signals) == 4


def test_a_student_with_more_tokens_than_the_teacher_at_a_server(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student's second token is one that the teacher does not have."""

    def ids(student: StudentTopk, samples: Any, k: int) -> torch.Tensor:
        return torch.tensor([[7, 1000]])[:, :k].expand(sum(int(one.loss_mask.sum()) for one in samples), k)

    monkeypatch.setattr(StudentTopk, "ids", ids)
    student = StudentTopk(lambda version: folders["one"])
    settings = sections.Score(engine="vllm", reads="sglang", topk=2, topk_source="student")

    def kinds(**changed: Any) -> list[str]:
        url = {"url": server.url}
        with closing(pool_of(folders, "one", settings=url, engine="vllm", reads="sglang")) as pool:
            new = settings.model_copy(update=changed)
            return [one.kind for one in score_samples(pool, "one", ("topk",), [sample()], new, student=student)]

    with serve_model(folders["one"]) as server:
        with advises("lower score.topk, or set score.topk_source = "):
            kinds()
        assert kinds(topk=1) == ["topk"]
        assert kinds(topk_source="teacher") == ["topk"]


def test_what_is_read_of_teachers_in_vllm(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"engine": "vllm", "reads": "prompt_logprobs"}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(TeacherPool, "reader", lambda pool, name: Text())  # vLLM's is not started for this
        with advises(" runs in vLLM, and its transformers model is needed; set score.engine = 'hf'"):
            pool_of(folders, "one", **text).model("one")
    with closing(pool_of(folders, "one", engine="hf")) as pool:
        assert pool.model("one") is not None
    pool = pool_of(folders, "one", **text)
    with serve_model(folders["one"]) as server:
        with advises('; set score.reads = "states", or end = "own"'):
            pool._vllm_reader(folders["one"], "float32", {}, server.url, (1, 2))
        pool._vllm_reader(folders["one"], "float32", {}, server.url, ()).close()
        pool = pool_of(folders, "one", engine="vllm", reads="echo")
        with advises("; give its teachers.*.url, or set score.reads = "):
            pool._vllm_reader(folders["one"], "float32", {})
        pool._vllm_reader(folders["one"], "float32", {}, server.url).close()
    assert score(pool_of(folders, "one", settings={"end": "map"}), "one", sample()) == 1


def test_adapters_that_vllm_reads(folders: dict[str, Path], tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000/v1"
    with advises(' is by default; set score.reads = "states", or take out url'):
        check_for_scoring(folders["adapter"], url=url, reads="prompt_logprobs")
    check_for_scoring(folders["adapter"], url=url, reads="states")
    check_for_scoring(folders["adapter"], url="", reads="prompt_logprobs")
    model = get_peft_model(hf.load_model(folders["one"]), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    model.peft_config["default"].base_model_name_or_path = str(folders["one"])
    model.save_pretrained(tmp_path / "head")
    with advises('set score.reads = "states", or give its merged form'):
        pool_of(folders | {"head": tmp_path / "head"}, "head", engine="vllm", reads="prompt_logprobs")
    pool_of(folders | {"head": tmp_path / "head"}, "head", engine="vllm", reads="states")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    hf.load_tokenizer(folders["one"]).save_pretrained(tmp_path / "merged")
    pool_of(folders | {"head": tmp_path / "merged"}, "head", engine="vllm", reads="prompt_logprobs")


def test_the_benchmark_of_memory_takes_whole_models(folders: dict[str, Path], tmp_path: Path) -> None:
    with advises(" is an adapter; give the folder of a whole model: its base, or its merged form"):
        check_whole_model(folders["adapter"])
    check_whole_model(folders["one"])
    merged = PeftModel.from_pretrained(hf.load_model(folders["one"]), folders["adapter"]).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    check_whole_model(tmp_path / "merged")


def test_a_server_with_the_model_that_the_store_knows(folders: dict[str, Path], tmp_path: Path) -> None:
    def run_of(name: str, url: str) -> Run:
        job = check_job(
            {
                "name": "j", "store": str(tmp_path / "store"), "student": {"path": str(folders["one"])},
                "domains": {"d": {"source": "x.jsonl"}},
                "teachers": {name: {"source": str(folders["one"]), "url": url}},
                "routing": {"d": name}, "objectives": {"o": {"policy_gradient": {}}},
                "score": {"engine": "vllm", "reads": "prompt_logprobs"},
                "stages": [{"name": "s", "objective": "o", "plan": {"batch_samples": 4}}],
            },
            where="job",
        )  # fmt: skip
        store = Store.create(tmp_path / "store")
        return Run(job, store, Policies(job, open_work(store, "")), Progress(quiet=True))

    def check(name: str, server: ModelServer) -> None:
        run = run_of(name, server.url)
        settings = {"url": server.url}
        with closing(pool_of(folders | {name: folders["one"]}, name, settings=settings, engine="vllm",
                             reads="prompt_logprobs")) as pool:  # fmt: skip
            check_teacher_server(run, run.job.stages[0], pool, name)

    with serve_model(folders["one"]) as server:
        check("t", server)
        server.exchange_weights(folders["two"])
        with advises(" nat: serve that model again, or give the new "):
            check("t", server)
        check("new", server)
        server.exchange_weights(folders["one"])
        check("t", server)
