"""Base students under instruct teachers: other end tokens over iterations, and tokens that the teacher lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mopd_dataplane import open_store

BASE_END, TURN_END = "<|endoftext|>", "<|im_end|>"
TINY = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
JOB = """
name = "{name}"
store = "{folder}/{name}"

[student]
config = {config}
tokenizer = "{folder}/{tokenizer}"

[domains.letters]
source = "{folder}/letters.jsonl"
train = 400
reward = "exact"

[rollout]
max_prompt_tokens = 16
max_new_tokens = 24
prompts_per_iteration = 64

[plan]
pack_tokens = 256
batch_samples = 32

[train]
learning_rate = 3e-3

[objectives.exact.divergence]
kind = "reverse"

[[stages]]
name = "base"
data = "reference"
iterations = 4
"""
STUDENT = """
[[stages]]
name = "student"
start = "base"
objective = "exact"
iterations = 6
train = {{ learning_rate = 1e-3 }}

[teachers.instruct]
source = "{folder}/teacher/policies/base/v4"
{teacher}

[routing]
letters = "instruct"
"""


def byte_tokenizer(end: str, *more: str) -> PreTrainedTokenizerBase:
    """A token for each byte, both ends, and further tokens; without a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (BASE_END, TURN_END, *more)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end, pad_token=BASE_END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mopd: Callable) -> Path:
    """A trained teacher that ends with TURN_END, prompts, and a tokenizer that ends with BASE_END."""
    folder = tmp_path_factory.mktemp("ends")
    byte_tokenizer(BASE_END, "<tool>").save_pretrained(folder / "base-tokenizer")
    byte_tokenizer(TURN_END).save_pretrained(folder / "instruct-tokenizer")
    words = [f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghijklmnopqrst"]
    rows = [{"question": f"{word}:", "answer": word * 2} for word in words]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder, "teacher", "instruct-tokenizer")
    mopd("run", folder / "teacher.toml")
    return folder


def write(folder: Path, name: str, tokenizer: str, teacher: str | None = None, **replaced: str) -> Path:
    """The job of a student; with `teacher` it has the second stage, under a teacher with these settings."""
    config = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY.items()) + ", vocab_size = 288}"
    text = JOB.format(name=name, folder=folder, config=config, tokenizer=tokenizer)
    text += "" if teacher is None else STUDENT.format(folder=folder, teacher=teacher)
    for old, new in replaced.items():
        text = text.replace(old, new)
    file = folder / f"{name}.toml"
    file.write_text(text)
    return file


def lengths(store: Path) -> list[float]:
    """Mean length of the student's answers by iteration."""
    sql = "select iteration, avg(response_len) as n from samples where stage = 'student' group by 1 order by 1"
    return [row["n"] for row in open_store(str(store)).sql(sql).to_pylist()]


@pytest.mark.slow
def test_with_the_ends_mapped_answers_keep_their_length_and_without_they_grow_and_the_run_says_so(
    folder: Path, mopd: Callable
) -> None:
    own = mopd("run", write(folder, "own", "base-tokenizer", 'end = "own"\nunknown_tokens = "mask"'))
    mapped = mopd("run", write(folder, "mapped", "base-tokenizer", 'end = "map"\nunknown_tokens = "mask"'))
    grown, mapped_lengths = lengths(folder / "own"), lengths(folder / "mapped")
    assert grown[-1] > 1.5 * grown[0]
    assert mapped_lengths[-1] < 1.25 * mapped_lengths[0]
    said = " ".join(own.stderr.split())
    assert f"the student stops at '{BASE_END}'" in said
    assert f"the end of teacher 'instruct', '{TURN_END}', is no end of the student" in said
    assert "were cut off at rollout.max_new_tokens = 24" in said
    told = " ".join(mapped.stderr.split())
    assert f"is read at the student's end, '{BASE_END}'" in told
    assert "were cut off" not in told


@pytest.mark.slow
def test_samples_with_a_token_that_the_teacher_lacks_are_left_out_on_record_or_refused(
    folder: Path, mopd: Callable
) -> None:
    hot = {"iterations = 4": "iterations = 1", "iterations = 6": "iterations = 1\nrollout = { temperature = 8.0 }"}
    file = write(folder, "masked", "base-tokenizer", 'unknown_tokens = "mask"', **hot)
    mopd("run", file)
    store = open_store(str(folder / "masked"))
    events = store.table("events", ["detail"], filter="kind = 'unreadable'")["detail"].to_pylist()
    assert events
    assert all("does not know token '<tool>'" in json.loads(detail)["reason"] for detail in events)
    [plan] = store.table("plans", ["stats", "sample_rows"], filter="stage = 'student'").to_pylist()
    assert json.loads(plan["stats"])["dropped_unscorable"] == len(events)
    assert len(set(plan["sample_rows"])) == 64 - len(events)
    refusing = write(folder, "refused", "base-tokenizer", "", **hot)
    refused = mopd("run", refusing, check=False)
    assert refused.returncode == 2
    assert 'teachers.instruct.unknown_tokens = "mask"' in " ".join(refused.stderr.split())
