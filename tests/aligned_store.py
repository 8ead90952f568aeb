"""A store whose teacher has a tokenizer of its own: samples in characters, the teacher's tokens in longer pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mopd_dataplane import Prompt, Sample, Signal, Store, Teacher, create_store
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.records import sample_uid
from mopd_dataplane.score.own_tokens import OwnTokenizer, credit
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.store.read.decode import keep_tokenizer

TEACHER = "other"
DIGESTS = {"student": "5" * 16, "teacher": "7" * 16}
PIECES = ["the", " b", "ing", "on "]
ANSWERS = ("the big thing\non the bus", "b", "", "ingot" * 60)
"""Answers of the samples, the last of which is longer than a page shows."""
PROMPT = "say: "


def tokenizers() -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Of the student, one token a character, and of the teacher, with PIECES."""
    return character_tokenizer(), character_tokenizer(PIECES)


def aligned_store(root: Path) -> Store:
    """A store with the samples of ANSWERS, each with its end, and a teacher's log-probs and alignments of them."""
    student, teacher = tokenizers()
    store = create_store(str(root))
    keep_tokenizer(store, DIGESTS["student"], json.loads(student.backend_tokenizer.to_str()))
    keep_tokenizer(store, DIGESTS["teacher"], json.loads(teacher.backend_tokenizer.to_str()), of_teacher=True)
    store.add_prompts([Prompt(prompt_id="p", domain="words", text=PROMPT, answer="")])
    rng = np.random.default_rng(0)
    samples = []
    for number, answer in enumerate(ANSWERS):
        ids = [*student.encode(PROMPT + answer, add_special_tokens=False), student.eos_token_id]
        length = len(ids) - len(PROMPT)
        samples.append(Sample(
            uid=sample_uid(0, "student", "p", number, 0), prompt_id="p", group_id="p", group_index=number, iteration=0,
            domain="words", stage="student", writer="engine-0", writer_seq=number, policy="student", temperature=1.0,
            top_p=1.0, top_k=0, prompt_len=len(PROMPT), tokens=np.array(ids, np.int32),
            logprobs=-rng.gamma(2.0, 0.5, length).astype(np.float32), loss_mask=np.ones(length, np.uint8),
            version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), finish_reason="stop",
            tokenizer=DIGESTS["student"],
        ))  # fmt: skip
    store.commit_samples(samples)
    store.add_teacher(Teacher(
        name=TEACHER, source="models/other", weights_digest="2" * 64, tokenizer_digest=DIGESTS["teacher"],
        vocab_size=len(teacher), hidden_size=8, dtype="float32", head_file="", head_digest="",
    ))  # fmt: skip
    logprobs, alignments = [], []
    own = OwnTokenizer(student, teacher, name=TEACHER)
    for row, sample in enumerate(samples):
        read = own.retokenize(scorable(sample, row), ())
        teacher_logprobs = -rng.gamma(2.0, 0.5, len(read.alignment.teacher)).astype(np.float32)
        values = credit(read.alignment, teacher_logprobs, sample.logprobs)
        logprobs.append(Signal(uid=sample.uid, sample_row=row, kind="logprob", logprob=values))
        alignments.append(read.signal())
    store.commit_signals(TEACHER, ALIGNMENT, alignments)
    store.commit_signals(TEACHER, "logprob", logprobs)
    return store


def scorable(sample: Sample, row: int) -> Scorable:
    """A sample as a teacher takes it."""
    return Scorable(
        uid=sample.uid, sample_row=row, prompt_id=sample.prompt_id, prompt_len=sample.prompt_len, tokens=sample.tokens,
        loss_mask=sample.loss_mask, logprobs=sample.logprobs,
    )  # fmt: skip


def texts(tokens: list[int]) -> list[str]:
    """The text of each of the teacher's tokens."""
    tokenizer = tokenizers()[1]
    return [str(tokenizer.decode([token])) for token in tokens]


class Vocabulary:
    """The student's tokenizer, for an import of exported ids."""

    digest = DIGESTS["student"]
    size = 101
    end = None
    template = "{prompt}"

    def file(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(tokenizers()[0].backend_tokenizer.to_str())
        return described

    def prompt(self, text: Any) -> list[int]:
        raise AssertionError("an export has ids")

    response = prompt
