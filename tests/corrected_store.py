"""A store of random answers that three teachers scored, each with another kind of signal, and what they think."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mopd_dataplane import Prompt, Sample, Signal, Store, Teacher, create_store
from mopd_dataplane.query.corrections import MIN_NATS
from mopd_dataplane.records import sample_uid

VOCABULARY, WIDTH, LENGTH, ITERATIONS, PROMPTS, TOP = 11, 6, 7, 3, 5, 4
KINDS = {"full": "hidden", "short": "topk", "bare": "logprob"}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """The definition, in the plainest form."""
    return logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))


class Scored:
    """The store, its samples and rows, and each teacher's predictions."""

    def __init__(self, root: Path) -> None:
        noise = np.random.default_rng(4)
        self.store: Store = create_store(str(root))
        prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"question {i}", split="train") for i in range(20)]
        self.store.add_prompts(prompts)
        self.samples: list[Sample] = []
        for iteration in range(ITERATIONS):
            # only p3 is asked in every iteration
            for i in [3, *(4 + PROMPTS * iteration + n for n in range(PROMPTS))]:
                self.samples.append(bare_sample(f"p{i}", iteration, noise))
        self.rows = [int(row) for row in self.store.commit_samples(self.samples).rows]
        self.predicted: dict[str, list[np.ndarray]] = {}
        """For each teacher and sample, [M, V] log-probs at the trained tokens."""
        for name in KINDS:
            self._score(name, noise)

    def _score(self, name: str, noise: np.random.Generator) -> None:
        head = noise.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        file = self.store.path(f"heads/{name}.safetensors")
        file.parent.mkdir(exist_ok=True)
        save_file({"weight": head}, file)
        self.store.add_teacher(Teacher(
            name=name, source="random", weights_digest="1" * 64, tokenizer_digest="t", vocab_size=VOCABULARY,
            hidden_size=WIDTH, dtype="float32", head_file=f"heads/{name}.safetensors",
            head_digest=hashlib.sha256(file.read_bytes()).hexdigest(),
        ))  # fmt: skip
        signals: dict[str, list[Signal]] = {"logprob": [], "hidden": [], "topk": []}
        self.predicted[name] = []
        for sample, row in zip(self.samples, self.rows, strict=True):
            trained = sample.loss_mask.astype(bool)
            states = (1.5 * noise.normal(size=(trained.sum(), WIDTH))).astype(np.float32)
            predicted = _log_softmax(states @ head.T)
            self.predicted[name].append(predicted)
            logprob = np.zeros(LENGTH, np.float32)
            logprob[trained] = predicted[np.arange(trained.sum()), sample.tokens[2:][trained]]
            assert sample.logprobs is not None
            kl = float((sample.logprobs - logprob)[trained].mean())
            likeliest = np.argsort(-predicted, 1)[:, :TOP].astype(np.int32)
            values = np.take_along_axis(predicted, likeliest, 1).astype(np.float32)
            own: dict[str, dict[str, Any]] = {
                "logprob": {"logprob": logprob}, "topk": {"topk_ids": likeliest, "topk_logprobs": values},
                "hidden": {"codec": "fp32", "hidden": states.view(np.uint8).reshape(len(states), -1)},
            }  # fmt: skip
            for kind in {"logprob", KINDS[name]}:
                mean = {"mean_reverse_kl": kl} if kind == "logprob" else {}
                signals[kind].append(Signal(uid=sample.uid, sample_row=row, kind=kind, **own[kind], **mean))
        for kind, batch in signals.items():
            if batch:
                self.store.commit_signals(name, kind, batch)

    def ask(self, sql: str) -> list[dict[str, Any]]:
        return self.store.sql(sql).to_pylist()

    def reference(self, name: str, at: int) -> list[tuple[int, float, int | None]]:
        """Position, nats and the teacher's word of each correction of a sample, by the definition."""
        sample, result = self.samples[at], []
        assert sample.logprobs is not None
        ordinal = 0
        for position, token in enumerate(sample.tokens[2:].tolist()):
            if not sample.loss_mask[position]:
                continue
            predicted = self.predicted[name][at][ordinal]
            ordinal += 1
            nats = float(sample.logprobs[position] - predicted[token])
            word = int(predicted.argmax())
            if nats >= MIN_NATS and (word != token or KINDS[name] == "logprob"):
                result.append((position, nats, None if KINDS[name] == "logprob" else word))
        return result


def bare_sample(prompt: str, iteration: int, noise: np.random.Generator, *, length: int = LENGTH) -> Sample:
    """A sample of random tokens, which nobody has scored or rewarded."""
    mask = np.ones(length, np.uint8)
    mask[2] = 0  # a token of a tool
    return Sample(
        uid=sample_uid(0, "student", prompt, 0, iteration), prompt_id=prompt, group_id=f"{prompt}#{iteration}",
        group_index=0, iteration=iteration, domain="d", stage="student", writer="w", writer_seq=0, policy="student",
        temperature=1.0, top_p=1.0, top_k=0, prompt_len=2,
        tokens=noise.integers(0, VOCABULARY, 2 + length).astype(np.int32),
        logprobs=(-noise.exponential(0.5, length)).astype(np.float32) * mask, loss_mask=mask,
        version_starts=np.zeros(1, np.int32), versions=np.array([iteration], np.int32), finish_reason="stop",
        tokenizer="t",
    )  # fmt: skip
