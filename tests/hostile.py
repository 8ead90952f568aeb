"""A store in which every name and text that comes from outside is hostile: markup, control and bidi characters, and a
word of a million letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from mopd_dataplane import Prompt, Sample, Signal, Store, create_store
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.records import PlanWindow, StepMetrics, Teacher, sample_uid

MARKUP = "<img src=x onerror=alert(1)>"
NAME = f"\u202e{MARKUP}\x1b[31m\x07\u2066'\"&amp;</title><script>alert(2)</script>"
WORD = "w" * 1_000_000
VOCABULARY = [
    " ", MARKUP, "</script><script>alert(3)</script>", "\u202e", "\u2067", "\x1b[2J", "\x00", "\x9b31m", "\u0301" * 60,
    "'; drop table samples; --", "javascript:alert(4)", "{{7*7}}", "\ud7ff\ufffe", WORD, "\n", "\r",
    "&lt;b&gt;", "\ufeff",
]  # fmt: skip
TEACHER = "teacher"


def make_hostile(root: Path) -> Store:
    """Six samples of two iterations, scored, rewarded, planned, trained, evaluated; the long word is in the first."""
    store = create_store(str(root))
    policy = root / "policies" / "student" / "v1"
    policy.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({text: token_id for token_id, text in enumerate(VOCABULARY)}, unk_token=" "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(policy / "tokenizer.json"))
    write_checksums(policy)
    store.write_json("job.json", {"student": {"path": NAME}, "stages": [{"name": NAME, "start": "init"}], NAME: NAME})
    questions = [
        Prompt(prompt_id=f"{NAME}{i}", domain=NAME, text=NAME + (WORD if i == 0 else ""), answer=NAME, split="train")
        for i in range(3)
    ]
    store.add_prompts(questions)
    store.add_teacher(Teacher(
        name=TEACHER, source=NAME, weights_digest="0" * 64, tokenizer_digest="0" * 16, vocab_size=len(VOCABULARY),
        hidden_size=8, dtype=NAME, head_file="", head_digest="",
    ))  # fmt: skip
    samples = [_sample(question, i, iteration) for iteration in range(2) for i, question in enumerate(questions)]
    rows = [int(row) for row in store.commit_samples(samples).rows]
    store.commit_signals(TEACHER, "logprob", [
        Signal(uid=sample.uid, sample_row=row, kind="logprob", logprob=sample.logprobs - 1, mean_reverse_kl=1.0)
        for sample, row in zip(samples, rows, strict=True)
    ])  # fmt: skip
    store.add_rewards([
        {"uid": sample.uid, "sample_row": row, "verifier": NAME, "verifier_version": NAME, "reward": row / 6,
         "correct": False}
        for sample, row in zip(samples, rows, strict=True)
    ])  # fmt: skip
    plan = PlanWindow(
        stage=NAME, window=0, seed=0, settings={NAME: NAME}, snapshot=store.snapshot(),
        sample_rows=np.array(rows, np.int64), pack_starts=np.array([0, 3, 6], np.int64),
        pack_teachers=np.zeros(2, np.int16), step_starts=np.array([0, 1, 2], np.int64), teachers=[TEACHER],
        stats={"density": 0.5}, digest="plan",
    )  # fmt: skip
    store.add_plan(plan)
    store.add_steps([
        StepMetrics(
            stage=NAME, step=step, window=0, plan_digest="plan", policy_version=0, loss=1.0, grad_norm=0.5,
            learning_rate=1e-3, samples=3, tokens=60, loss_tokens=50, reverse_kl=0.5, staleness_mean=0.0,
            staleness_max=0, step_time_s=0.4, data_wait_s=0.002, extra={NAME: 1.0},
        )
        for step in range(2)
    ])  # fmt: skip
    store.add_event("time/0", NAME, "stage_time", 0, 1.0, {"action": NAME})
    store.add_event("odd/0", NAME, NAME, 0, 1.0, {NAME: NAME})
    store.add_evals([_answer(question) for question in questions])
    return store


def _sample(question: Prompt, index: int, iteration: int) -> Sample:
    words = [token_id for token_id, word in enumerate(VOCABULARY) if word is not WORD]
    tokens = np.array([1, 2, *words, *([VOCABULARY.index(WORD)] if index == iteration == 0 else [])], np.int32)
    count = len(tokens) - 2
    return Sample(
        uid=sample_uid(0, NAME, question.prompt_id, 0, iteration), prompt_id=question.prompt_id,
        group_id=f"{NAME}#{iteration}", group_index=0, iteration=iteration, domain=NAME, stage=NAME, writer=NAME,
        writer_seq=0, policy=NAME, temperature=1.0, top_p=1.0, top_k=0, prompt_len=2, tokens=tokens,
        logprobs=np.full(count, -0.5, np.float32), loss_mask=np.ones(count, np.uint8),
        version_starts=np.array([0], np.int32), versions=np.array([iteration], np.int32), finish_reason="stop",
        interruptions=0, resume="none", tokenizer="0" * 16,
    )  # fmt: skip


def _answer(question: Prompt) -> dict[str, Any]:
    return {
        "policy": NAME, "policy_version": 1, "prompt_id": question.prompt_id, "domain": NAME, "reward": 0.5,
        "correct": False, "reverse_kl": 0.1, "response": NAME, "response_len": 3, "finish_reason": "stop",
    }  # fmt: skip
