"""How far the log-probs of a teacher with another tokenizer are from the truth, on a finished run of this job.

    python jobs/other-tokenizer/bias.py TEACHER [--store runs/other-tokenizer/student]
                                        [--policy runs/other-tokenizer/TEACHER/policies/expert/v1]
                                        [--samples 1024] [--out FILE]

Takes the first answers of the stage `of-TEACHER`, which the base wrote. The truth for a token of the student is the
teacher's log-prob of its text after the text before it, whatever tokens the teacher would write it with:

    log P(text up to the token's end) - log P(text up to its start)
    P(text up to b) = P(teacher's tokens before the one that holds b) * sum of p(v)

over all tokens v of the teacher's vocabulary whose text begins with the part of that token before b. Ways to write a
text in other tokens than the teacher's tokenizer does have no part in it; `other_ways` is the largest share that one of
their first tokens has.

Prints one JSON object. tokens: of the student. in_larger_chunks: share of them that stand in a chunk with others.
difference: mean of value - truth, nat. absolute: mean of |value - truth|. cosine: between the two policy gradients with
respect to all weights of the base, with advantage value - sampler's log-prob and truth - sampler's log-prob. gradient:
|difference of the two gradients| / |gradient of the truth|. with_distribution: share of the student's tokens for which
the teacher gives a distribution (the signal `topk`); distribution_difference and distribution_absolute: as above, of
the log-prob that the distribution has for the student's token. Answers that the teacher cannot read are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mopd_kernels import token_logprob
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mopd_dataplane import open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.hf import hidden_states, lm_head, load_model, load_tokenizer
from mopd_dataplane.models.token_bytes import TokenBytes
from mopd_dataplane.prompts import render
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.score.own_tokens import OwnTokenizer, OwnTokens, credit
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.token_projection import TokenProjection, prefixes
from mopd_dataplane.store.dataset import Store

JOB = Path(__file__).parent


class Answer(NamedTuple):
    """One answer of the base, and what the teacher says of each of its R tokens."""

    tokens: NDArray[np.int32]
    """[P + R] prompt and answer"""
    value: NDArray[np.float64]
    """[R] log-probs that scoring gives"""
    truth: NDArray[np.float64]
    """[R] the teacher's log-probs of the tokens' texts"""
    distribution: NDArray[np.float64]
    """[R] log-probs by the distributions over the student's tokens; NaN where there is none"""
    sampler: NDArray[np.float64]
    """[R] log-probs of the sampler"""
    shared: int
    """Tokens that stand in a chunk with others."""
    other_ways: float
    """Largest probability of a token that is a proper beginning of the part before a boundary."""


class Texts:
    """The text of every token of a vocabulary."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        special = set(tokenizer.all_special_ids)
        ids = [index for index in range(min(size, len(tokenizer))) if index not in special]
        texts = dict(zip(ids, TokenBytes(tokenizer)(ids), strict=True))
        self.by_id = [texts.get(index, b"") for index in range(size)]

    def beginning_with(self, part: bytes) -> NDArray[np.int64]:
        """Ids of the tokens whose text begins with a part."""
        return np.array([index for index, text in enumerate(self.by_id) if text.startswith(part)])

    def beginnings_of(self, part: bytes) -> NDArray[np.int64]:
        """Ids of the tokens whose text is a proper beginning of a part."""
        begins = (bool(text) and text != part and part.startswith(text) for text in self.by_id)
        return np.flatnonzero(np.fromiter(begins, bool))


def truths(own: OwnTokens, lengths: Sequence[int], logprobs: NDArray[np.float64], texts: Texts) -> tuple[Any, float]:
    """The teacher's log-prob of each token's text: [R]; and the largest probability of another way to begin it.

    lengths: bytes of each token of the student, 1 for the end of the answer. logprobs: [Q, V] of the teacher.
    """
    ids = own.teacher_sample.tokens[own.teacher_sample.prompt_len :]
    parts = [texts.by_id[index] or b"\0" for index in ids]  # the end of the answer counts as one byte
    ends = np.cumsum([len(part) for part in parts])
    before = np.concatenate([[0.0], np.cumsum(logprobs[np.arange(len(ids)), ids])])
    cumulative, other_ways = [0.0], 0.0
    for position in np.cumsum(lengths):
        index = int(np.searchsorted(ends, position))
        part = parts[index][: position - (ends[index] - len(parts[index]))]
        if texts.by_id[ids[index]]:
            rest = np.logaddexp.reduce(logprobs[index, texts.beginning_with(part)])
            others = texts.beginnings_of(part)
            other_ways = max(other_ways, float(np.exp(logprobs[index, others]).sum()))
        else:
            rest = logprobs[index, ids[index]]
        cumulative.append(before[index] + rest)
    return np.diff(cumulative), other_ways


def projected(own: OwnTokens, projection: TokenProjection, logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The log-prob of each token by the distribution over the student's tokens: [R]; NaN where there is none.

    logprobs: [Q, V] of the teacher.
    """
    response = own.sample.tokens[own.sample.prompt_len :]
    values = np.full(len(response), np.nan)
    for position, row, prefix in prefixes(own, projection):
        ids, probs = projection.project(torch.from_numpy(logprobs[row]).exp(), prefix)
        own_prob = probs[ids == int(response[position])].sum()
        if own_prob > 0:
            values[position] = float(own_prob.log())
    return values


def read(store: Store, stage: str, samples: int) -> list[Scorable]:
    """The stage's first answers."""
    table = store.samples(["stage", "iteration", "prompt_len", "prompt_id", "uid"])
    rows = np.flatnonzero((table["stage"].to_numpy() == stage) & (table["iteration"].to_numpy() == 0))[:samples]
    payload = store.read_tokens(rows, columns=["tokens", "loss_mask", "logprobs"]).to_pylist()
    answers = []
    for row, stored in zip(table.take(rows).to_pylist(), payload, strict=True):
        tokens = np.array(stored["tokens"], np.int32)
        answers.append(
            Scorable(
                uid=str(row["uid"]), sample_row=0, prompt_id=row["prompt_id"], prompt_len=row["prompt_len"],
                tokens=tokens, loss_mask=np.array(stored["loss_mask"], np.uint8),
                logprobs=np.array(stored["logprobs"], np.float32),
            )
        )  # fmt: skip
    return answers


def judge(store: Store, stage: str, samples: int, policy: Path) -> list[Answer]:
    """Answers with the values that scoring gives and with the truth."""
    student = load_tokenizer(Path(store.uri) / "policies" / "base" / "v1")
    teacher, model = load_tokenizer(policy), load_model(policy)
    reader, ours = OwnTokenizer(student, teacher, name=policy.parent.name), TokenBytes(student)
    texts = Texts(teacher, lm_head(model).weight.shape[0])
    projection = TokenProjection(reader.pieces)
    prompts = {prompt.prompt_id: prompt for prompt in store.prompts(split="train")}
    job = load_job(JOB)
    answers = []
    for sample in read(store, stage, samples):
        if reader.problem(sample):
            continue
        prompt_ids = render(prompts[sample.prompt_id].asked, teacher, template=job.student.prompt_template)
        own = reader.retokenize(sample, prompt_ids)
        ids = torch.tensor(own.teacher_sample.tokens.astype(np.int64))[None]
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].double()
        logprobs = logits.log_softmax(-1).numpy()
        chosen = logprobs[np.arange(len(logprobs)), own.teacher_sample.tokens[len(prompt_ids) :]]
        value = credit(own.alignment, chosen.astype(np.float32), sample.logprobs)
        response = sample.tokens[sample.prompt_len :].tolist()
        lengths = [1 if index in student.all_special_ids else len(ours([index])[0]) for index in response]
        truth, other_ways = truths(own, lengths, logprobs, texts)
        shared = int((np.bincount(own.alignment.student)[own.alignment.student] > 1).sum())
        assert sample.logprobs is not None
        own_answer = Answer(
            sample.tokens, value.astype(np.float64), truth, projected(own, projection, logprobs),
            sample.logprobs.astype(np.float64), shared, other_ways,
        )  # fmt: skip
        answers.append(own_answer)
    return answers


def gradient(student: PreTrainedModel, answers: Sequence[Answer], advantages: Sequence[NDArray[np.float64]]) -> Tensor:
    """The policy gradient of all weights, summed over answers."""
    total = torch.zeros(())
    for answer, advantage in zip(answers, advantages, strict=True):
        ids = torch.tensor(answer.tokens.astype(np.int64))
        states = hidden_states(student, ids[None])[0, -len(advantage) - 1 : -1]
        logprob = token_logprob(states, lm_head(student), ids[-len(advantage) :])
        assert isinstance(logprob, Tensor)
        total = total - (torch.tensor(advantage, dtype=torch.float32) * logprob).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, list(student.parameters()))]).double()


def compare(store: Store, answers: Sequence[Answer]) -> dict[str, float]:
    """Values beside truths, and their gradients."""
    student = load_model(Path(store.uri) / "policies" / "base" / "v1")
    value, truth = (np.concatenate([getattr(answer, name) for answer in answers]) for name in ("value", "truth"))
    shares: list[Tensor] = []
    for name in ("value", "truth"):
        total: Tensor | float = 0.0
        for start in range(0, len(answers), 64):
            part = answers[start : start + 64]
            total = total + gradient(student, part, [getattr(answer, name) - answer.sampler for answer in part])
        shares.append(torch.as_tensor(total))
    from_value, from_truth = shares
    distribution = np.concatenate([answer.distribution for answer in answers])
    gap = (distribution - truth)[~np.isnan(distribution)]
    return {
        "answers": len(answers),
        "tokens": len(value),
        "in_larger_chunks": round(sum(answer.shared for answer in answers) / len(value), 4),
        "difference": round(float((value - truth).mean()), 5),
        "absolute": round(float(np.abs(value - truth).mean()), 5),
        "other_ways": max(answer.other_ways for answer in answers),
        "cosine": round(float(from_value @ from_truth / (from_value.norm() * from_truth.norm())), 5),
        "gradient": round(float((from_value - from_truth).norm() / from_truth.norm()), 5),
        "with_distribution": round(len(gap) / len(value), 4),
        "distribution_difference": round(float(gap.mean()), 5),
        "distribution_absolute": round(float(np.abs(gap).mean()), 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", choices=["finer", "across"])
    parser.add_argument("--store", default="runs/other-tokenizer/student")
    parser.add_argument("--policy", type=Path, help="default: runs/other-tokenizer/TEACHER/policies/expert/v1")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="JSON file that is written too")
    options = parser.parse_args()
    policy = options.policy or Path("runs/other-tokenizer") / options.teacher / "policies" / "expert" / "v1"
    torch.set_num_threads(1)
    store = open_store(options.store)
    figures = compare(store, judge(store, f"of-{options.teacher}", options.samples, policy))
    result = {"teacher": options.teacher, **figures, **provenance(load_job(JOB))}
    print(json.dumps(result, indent=1))
    if options.out:
        publish_file(options.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
