"""Next steps that messages about teachers, rewards and the discriminator name: each is taken, and works."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import torch
from advice import advises
from peft import LoraConfig, PeftModel, get_peft_model

from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Prompt
from mopd_dataplane.score.discriminator import WEIGHTS, Discriminator, Pair
from mopd_dataplane.score import vllm_logprobs
from mopd_dataplane.score.reward import Unscorable, resolve_reward
from mopd_dataplane.score.scorer import Scorable, score_samples
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
    made = {
        name: make_student(sections.Student(config=config), root / name, seed=seed)
        for seed, (name, config) in enumerate(configs.items())
    }
    model = get_peft_model(hf.load_model(made["one"]), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = str(made["one"])
    model.save_pretrained(root / "adapter")
    return made | {"adapter": root / "adapter"}


def pool_of(folders: dict[str, Path], *names: str, settings: dict[str, Any] | None = None, **options: Any) -> TeacherPool:
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
    with closing(pool_of(folders | {"one": folders["two"]}, "one")) as pool, advises(
        "signals of both cannot share a name: give the new teacher another name"
    ):
        pool.register("one", tmp_path)
    with closing(pool_of(folders, "two")) as pool:
        assert pool.register("two", tmp_path).name == "two"


def test_a_teacher_whose_weights_are_at_a_server(folders: dict[str, Path], tmp_path: Path) -> None:
    url = {"source": "", "url": "http://127.0.0.1:8000/v1"}
    specs = {"far": TeacherSpec(None, sections.Teacher(**url))}
    tokenizer = hf.load_tokenizer(folders["one"])
    with closing(TeacherPool(specs, student_tokenizer=tokenizer)) as pool, advises(
        '.source, or set score.engine = "vllm" and score.reads = "prompt_logprobs"'
    ):
        pool.register("far", tmp_path)
    with closing(TeacherPool(specs, student_tokenizer=tokenizer, engine="vllm", reads="prompt_logprobs")) as pool:
        assert pool.record_of_remote("far", "0" * 64).name == "far"
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
        vllm_logprobs._said(np.arange(2), [{7: (1, -0.5)}], 1)
    assert vllm_logprobs._said(np.arange(2), [{1: (1, -0.5)}], 1).own.tolist() == [-0.5]


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
