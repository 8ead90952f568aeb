"""Values of a queue become samples before they are cleared: each once, whatever is killed, cleared or used again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from transformers import PreTrainedTokenizerBase
from verl_puts import put, trajectory, value

from mopd_dataplane import Store, open_store
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.queue_mapping import MAPPINGS, QueueMapping, QueueRollouts, read_mapping
from mopd_dataplane.interchange.queue_rollouts import record_rollouts
from mopd_dataplane.models.hf import tokenizer_digest
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.records import Teacher
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import TAGS

TOKENIZER: PreTrainedTokenizerBase = character_tokenizer()


def make(store: Path, mapping: str | Mapping[str, str] = "verl") -> LoggedQueue:
    rollouts = QueueRollouts(
        mapping=read_mapping(mapping), tokenizer=tokenizer_digest(TOKENIZER), vocabulary_size=len(TOKENIZER),
        domain="sums", policy="actor",
    )  # fmt: skip
    record_rollouts(store, "train", rollouts, json.loads(TOKENIZER.backend_tokenizer.to_str()))
    return LoggedQueue(store, "train", starts_folding=False)


def rows(store: Store) -> list[dict[str, Any]]:
    return store.sql("select * from samples order by group_id, group_index, response_len").to_pylist()


def stored(store: Store) -> list[dict[str, Any]]:
    """Payload and iteration of every sample, in the order in which they came, checksums verified."""
    ids = np.concatenate([ids for ids, _ in store.scan_samples(["uid"])])
    payload, iterations = store.read_tokens(ids, verify=True), store.take_samples(ids, ["iteration"])
    return [one | more for one, more in zip(payload.to_pylist(), iterations.to_pylist(), strict=True)]


def test_a_verl_trajectory_is_a_sample_with_everything_it_says(tmp_path: Path) -> None:
    queue = make(tmp_path)
    said = trajectory(3)
    put(queue, 7, said)
    queue.fold()
    store = open_store(str(tmp_path))
    (row,) = rows(store)
    shown = {name: row[name] for name in ("group_id", "group_index", "domain", "stage", "policy", "iteration", "turns")}
    assert shown == {
        "group_id": "prompt-1", "group_index": 1, "domain": "openai/gsm8k", "stage": "train", "policy": "actor",
        "iteration": 3, "turns": 2,
    }  # fmt: skip
    assert (row["policy_version_first"], row["policy_version_last"]) == (3, 4)
    assert (row["prompt_len"], row["response_len"], row["loss_tokens"]) == (4, 6, 5)
    (sample,) = stored(store)
    assert sample["tokens"] == [*said["prompts"], *said["responses"]]
    np.testing.assert_array_equal(sample["loss_mask"], said["response_mask"])
    np.testing.assert_array_equal(sample["logprobs"], said["rollout_log_probs"])
    (reward,) = store.sql("select reward, detail from rewards").to_pylist()
    assert (reward["reward"], json.loads(reward["detail"])) == (0.0, {"acc": False})
    (prompt,) = store.prompts()
    assert (prompt.text, prompt.answer) == ("user: 3 + 1 =", "7")


def test_what_comes_later_joins_the_sample_it_was_put_beside(tmp_path: Path) -> None:
    queue = make(tmp_path)
    said = trajectory(4)
    scores = said.pop("rm_scores")
    put(queue, 7, said)
    queue.fold()
    store = open_store(str(tmp_path))
    assert store.table("rewards", ["uid"]).num_rows == 0
    put(queue, 7, {"rm_scores": scores})
    queue.fold()
    total = len(said["prompts"]) + len(said["responses"])
    put(queue, 7, {"teacher_logprobs": -np.arange(total, dtype=np.float32)[:, None] / 8, "entropys": scores})
    put(queue, 7, {"ref_log_prob": np.full(len(scores), -0.5, np.float32)})
    queue.fold()
    assert len(rows(store)) == 1
    assert store.sql("select reward from rewards").to_pylist() == [{"reward": 1.0}]
    begin, mask = len(said["prompts"]) - 1, said["response_mask"]
    (teacher,), (reference,) = (store.read_signal(name, "logprob", [0]) for name in ("teacher", "reference"))
    # Row t of verl's array is of the token t + 1.
    np.testing.assert_array_equal(teacher, -np.arange(begin, total - 1, dtype=np.float32) / 8 * mask)
    np.testing.assert_array_equal(reference, -0.5 * mask)
    unmapped = store.sql("select detail from events where kind = 'unmapped'").to_pylist()
    assert any("'entropys'" in row["detail"] for row in unmapped)


def test_a_teachers_likeliest_tokens_are_a_signal_over_trained_tokens(tmp_path: Path) -> None:
    queue = make(tmp_path, {**_table("verl"), "teacher": "data_source"})
    said = trajectory(2)
    total = len(said["prompts"]) + len(said["responses"])
    ids = np.arange(total * 3, dtype=np.int32).reshape(total, 3) % 40
    logprobs = -1 - ids.astype(np.float32) / 64
    put(queue, 1, said | {"teacher_ids": ids, "teacher_logprobs": logprobs})
    queue.fold()
    begin, mask = len(said["prompts"]) - 1, said["response_mask"].astype(bool)
    ((read_ids, read_logprobs),) = open_store(str(tmp_path)).read_signal("openai-gsm8k", "topk", [0])
    np.testing.assert_array_equal(read_ids, ids[begin : total - 1][mask])
    np.testing.assert_array_equal(read_logprobs, logprobs[begin : total - 1][mask])


def test_signals_of_a_teacher_whose_model_scores_in_the_store_are_not_recorded(tmp_path: Path) -> None:
    queue = make(tmp_path)
    store = open_store(str(tmp_path))
    model = Teacher(
        name="tutor", source="models/tutor", weights_digest="ab" * 32, tokenizer_digest=tokenizer_digest(TOKENIZER),
        vocab_size=len(TOKENIZER), hidden_size=8, dtype="float32", head_file="", head_digest="",
    )  # fmt: skip
    store.add_teacher(model)
    for number, name in enumerate(("tutor", "other")):
        total = sum(len(trajectory(number)[part]) for part in ("prompts", "responses"))
        logprobs = np.full((total, 1), -1, np.float32)
        put(queue, number, trajectory(number, teacher_logprobs=logprobs, teacher_name=name, teacher_hidden=logprobs))
    queue.fold()
    assert len(rows(store)) == 2
    assert store.sql("select teacher, kind from scores").to_pylist() == [{"teacher": "other", "kind": "logprob"}]
    reported_events = store.sql("select kind, detail from events where kind in ('unrecorded', 'unmapped')").to_pylist()
    assert not [row for row in reported_events if row["kind"] == "unrecorded" or "teacher" in row["detail"]]


def test_a_sample_outlives_its_clearing_and_the_next_one_of_its_number(tmp_path: Path) -> None:
    queue = make(tmp_path)
    for number in range(6):
        put(queue, 0, trajectory(number), "val" if number % 2 else "train")
        if number != 2:  # one is replaced without being cleared
            queue.clear([(0, name) for name in (*trajectory(number), TAGS)])
        if number == 3:
            queue.fold()
    queue.fold()
    stored_rows = rows(open_store(str(tmp_path)))
    assert sorted((row["iteration"], row["stage"]) for row in stored_rows) == [
        (number, "val" if number % 2 else "train") for number in range(6)
    ]
    assert queue.keys() == []


def test_equal_answers_are_samples_of_their_own_and_a_restored_one_is_the_same(tmp_path: Path) -> None:
    queue = make(tmp_path)
    for sample in range(2):
        put(queue, sample, trajectory(1))
    queue.pin("now")
    queue.clear([(0, name) for name in (*trajectory(1), TAGS)])
    queue.fold()
    queue.restore("now")
    queue.fold()
    assert len(rows(open_store(str(tmp_path)))) == 2


def test_what_cannot_be_a_sample_is_said_and_keeps_nothing_else_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = make(tmp_path)
    put(queue, 0, trajectory(0))
    put(queue, 1, trajectory(1, prompts=np.array([5, 9999])))
    put(queue, 2, trajectory(2, rollout_log_probs=np.ones(5, np.float32)))
    put(queue, 3, trajectory(3, response_mask=np.ones(2, np.int64)))
    put(queue, 4, trajectory(4, teacher_logprobs=np.zeros((3, 1), np.float32)))
    put(queue, 5, {"status": "running"})
    put(queue, 6, trajectory(6))
    queue.fold()
    store = open_store(str(tmp_path))
    assert [row["iteration"] for row in rows(store)] == [0, 6]
    said = capfd.readouterr().err.splitlines()
    assert [line.split(" was")[0] for line in said] == [f"sample {number} of queue 'train'" for number in (1, 2, 3, 4)]
    reasons = store.sql("select detail from events where kind = 'unrecorded'").to_pylist()
    assert len(reasons) == 4
    assert any("token id 9999" in row["detail"] for row in reasons)


def test_nemo_rls_fields_and_a_table_of_ones_own(tmp_path: Path) -> None:
    ids = np.array([5, 6, 7, 8, 9, 0, 0])
    nemo = make(tmp_path / "nemo", "nemo-rl")
    content = {
        "input_ids": ids, "input_lengths": np.array(5), "token_mask": np.array([0, 0, 1, 0, 1, 0, 0]),
        "generation_logprobs": np.array([0, 0, -0.5, 0, -0.25, 0, 0], np.float32), "total_reward": np.array([0.5]),
        "reference_policy_logprobs": np.full(7, -1, np.float32),
    }  # fmt: skip
    tagged = {TAGS: {"partition": "train", "tags": {"weight_version": 4}}}
    nemo.put([(0, name) for name in content | tagged], [value(one) for one in (content | tagged).values()])
    nemo.fold()
    store = open_store(str(tmp_path / "nemo"))
    (row,) = rows(store)
    (sample,) = stored(store)
    assert (row["prompt_len"], row["turns"], row["iteration"], row["policy_version_last"]) == (2, 2, 4, 4)
    assert (sample["tokens"], sample["loss_mask"]) == ([5, 6, 7, 8, 9], [1, 0, 1])
    assert sample["logprobs"] == [-0.5, 0, -0.25]
    assert store.read_signal("reference", "logprob", [0])[0].tolist() == [-1, 0, -1]
    own = make(tmp_path / "own", {"prompt": "ask", "response": "reply", "reward": "judge.score"})
    put(own, 0, {"ask": np.array([5]), "reply": np.array([6, 7]), "judge": {"score": 2}})
    own.fold()
    assert open_store(str(tmp_path / "own")).sql("select reward from rewards").to_pylist() == [{"reward": 2.0}]


def test_a_mapping_that_is_none_is_named() -> None:
    with pytest.raises(InputError, match="no mapping 'verll': "):
        read_mapping("verll")
    with pytest.raises(InputError, match=r"mapping\.respons: no such part of a rollout"):
        read_mapping({"respons": "x"})
    with advises("; give the name of a field as text"):
        read_mapping({"prompt": 3})  # type: ignore[dict-item]
    read_mapping({"prompt": "p", "response": "r"})
    with advises("; or give a table of field names"):
        read_mapping("roll")
    with advises(": give prompt and response, or tokens and mask"):
        read_mapping({"tokens": "x"})
    read_mapping({"tokens": "x", "mask": "y"})


WRITES = """
import sys
sys.path[:0] = sys.argv[3:]
from verl_puts import LoggedQueue, put, trajectory, TAGS
store, first = sys.argv[1], int(sys.argv[2])
queue = LoggedQueue(store, "train")
for number in range(first, first + 400):
    sample = number % 7
    put(queue, sample, trajectory(number))
    print(number, flush=True)
    if number % 3:
        queue.clear([(sample, name) for name in (*trajectory(number), TAGS)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_acknowledged_trajectory_is_a_sample_once_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    """Two writers and the processes that fold behind them are killed at random moments."""
    make(tmp_path)
    chance, acknowledged = random.Random(seed), set[int]()
    for first in range(0, 4000, 800):
        writers = []
        for start in (first, first + 400):
            command = [sys.executable, "-c", WRITES, str(tmp_path), str(start), *sys.path]
            writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for writer in writers:
            assert writer.stdout is not None
            acknowledged.add(int(writer.stdout.readline()))
        time.sleep(chance.uniform(0, 3))
        for folding in _folding(tmp_path):
            os.kill(folding, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.5))
        for writer in writers:
            writer.kill()
            assert writer.stdout is not None
            acknowledged |= {int(line) for line in writer.stdout.read().splitlines()}
            writer.wait()
    for folding in _folding(tmp_path):
        os.kill(folding, signal.SIGKILL)
    LoggedQueue(tmp_path, "train", starts_folding=False).fold()
    store = open_store(str(tmp_path))
    there = [row["iteration"] for row in rows(store)]
    assert len(acknowledged) > 50, "nothing was written before the kills"
    assert len(there) == len(set(there))
    assert acknowledged <= set(there)
    for row, sample in enumerate(stored(store)):
        said = trajectory(sample["iteration"])
        assert sample["tokens"] == [*said["prompts"], *said["responses"]], f"sample {row} has another's tokens"
    rewards = store.sql("select iteration, reward from samples join rewards using (uid)").to_pylist()
    assert {row["iteration"]: row["reward"] for row in rewards} == {number: number % 3 for number in there}
    assert len(rewards) == len(there)


def _folding(store: Path) -> list[int]:
    """Processes that fold the queue of a store."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"mopd_dataplane.store.queue" in command and str(store).encode() in command:
                pids.append(int(entry.name))
    return pids


def _table(name: str) -> dict[str, str]:
    mapping: QueueMapping = MAPPINGS[name]
    return {part: text for part, text in vars(mapping).items() if text}
