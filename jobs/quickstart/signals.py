"""Sampled token, top-k or full vocabulary: what each signal's gradient is worth, on a finished quickstart.

    python jobs/quickstart/signals.py [--store runs/quickstart] [--samples 2048] [--batch 64] [--forms baselines]
                                      [--mixed DOMAIN …] [--out FILE]

Takes the first answers of the stage `student`, written by the base, and the specialists that scored them. Every form of
the loss gives a gradient of all weights of the base for each batch. Against the full vocabulary's mean gradient G:

    bias    |mean gradient of the form - G| / |G|, and how much of that chance explains: the standard error of the mean
    noise   sqrt(mean over batches of |gradient - the form's own mean|^2) / |G|; of this, what full vocabulary has comes
            from the choice of samples, the rest from the form
    cosine  between the form's mean gradient and G
    apart   noise of the form's difference to the full vocabulary's gradient of the same batch

Prints a Markdown table with the bytes a token takes in the store, and the time of one forward and backward pass; --out
writes the same to a JSON file, with commit, settings, sampler and host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mopd_kernels import Head, chosen_logprobs, divergence, token_logprob, topk_divergence, topk_logprobs
from mopd_kernels.ops.topk_buckets import TopkMode
from torch import Tensor
from transformers import PreTrainedModel

from mopd_dataplane import open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.hf import hidden_states, lm_head, load_model
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.store.dataset import Store

JOB = Path(__file__).parent
STAGES = ("base", "speller", "sorter", "walker", "student")
"""What the figures depend on."""


@dataclass(frozen=True)
class Batch:
    """Answers of one domain, padded on the right: trained positions, and what the teacher says there."""

    ids: Tensor
    """[B, W] int64"""
    predictors: Tensor
    """[M] places of the states that predict trained tokens in the flattened rows"""
    targets: Tensor
    """[M] int64"""
    teacher: Tensor
    """[M, D] teacher's states"""
    head: Head
    """The teacher's."""


Loss = Callable[[Tensor, Head, Batch], Tensor]
"""(student states [M, D], student head, batch) -> loss of each token [M]"""


def full(hidden: Tensor, head: Head, batch: Batch) -> Tensor:
    """Exact reverse KL."""
    return divergence(hidden, head, batch.teacher, batch.head)


def sampled(baseline: str = "none", clip: float = 0.0) -> Loss:
    """Score function of the sampled token: the advantage is teacher minus student, minus a baseline.

    baseline: `batch` for the batch's mean, `kl` for the exact expectation at the position, which is minus the reverse
    KL, `entropy` for the difference of both entropies. None of them depends on the sampled token but the batch's mean.
    """

    def loss(hidden: Tensor, head: Head, batch: Batch) -> Tensor:
        own, entropy = token_logprob(hidden, head, batch.targets, return_entropy=True)
        scored, teacher_entropy = token_logprob(batch.teacher, batch.head, batch.targets, return_entropy=True)
        gap = (scored - own).detach()
        if clip:
            gap = gap.clamp(-clip, clip)
        if baseline == "batch":
            gap = gap - gap.mean()
        elif baseline == "kl":
            gap = gap + divergence(hidden.detach(), head, batch.teacher, batch.head)
        elif baseline == "entropy":
            gap = gap - (entropy - teacher_entropy).detach()
        return -gap.detach() * own

    return loss


def topk(k: int, mode: TopkMode, support: str) -> Loss:
    """Reverse KL from the k likeliest tokens of the teacher or the student."""

    def loss(hidden: Tensor, head: Head, batch: Batch) -> Tensor:
        if support == "teacher":
            ids, logprobs = topk_logprobs(batch.teacher, batch.head, k)
        else:
            ids = topk_logprobs(hidden.detach(), head, k)[0]
            logprobs = chosen_logprobs(batch.teacher, batch.head, ids)[0]
        return topk_divergence(hidden, head, ids, logprobs, mode=mode)

    return loss


Forms = dict[str, tuple[Loss, Callable[[int, int], int]]]
"""Name -> (loss, bytes a token takes in the store, from hidden width and vocabulary)."""
FORMS: Forms = {
    "full vocabulary, hidden states in bf16": (full, lambda width, _: 2 * width),
    "sampled token": (sampled(), lambda *_: 4),
    "top-64 of the teacher, tail": (topk(64, "tail", "teacher"), lambda *_: 64 * 8),
    "top-16 of the teacher, tail": (topk(16, "tail", "teacher"), lambda *_: 16 * 8),
    "top-16 of the student, renormalised": (topk(16, "renormalised", "student"), lambda *_: 16 * 8),
    "top-4 of the teacher, tail": (topk(4, "tail", "teacher"), lambda *_: 4 * 8),
    "top-4 of the teacher, corrected": (topk(4, "corrected", "teacher"), lambda *_: 4 * 8),
    "top-4 of the teacher, truncated": (topk(4, "truncated_biased", "teacher"), lambda *_: 4 * 8),
}
BASELINES: Forms = {
    "exact, no sampling": (full, lambda width, _: 2 * width),
    "log-ratio": (sampled(), lambda *_: 4),
    "minus the batch mean": (sampled("batch"), lambda *_: 4),
    "plus the exact KL at the position": (sampled("kl"), lambda *_: 8),
    "minus the difference of the two entropies": (sampled("entropy"), lambda *_: 8),
    "log-ratio clipped at ±1": (sampled(clip=1.0), lambda *_: 4),
}


@dataclass
class Moments:
    """Mean and spread of a form's gradient over batches."""

    total: Tensor | float = 0.0
    squares: float = 0.0
    batches: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, gradient: Tensor, seconds: float) -> None:
        """Count one batch."""
        self.total = self.total + gradient
        self.squares += float(gradient @ gradient)
        self.batches += 1
        self.seconds.append(seconds)

    @property
    def mean(self) -> Tensor:
        """The mean gradient."""
        return torch.as_tensor(self.total) / self.batches

    @property
    def spread(self) -> float:
        """Root of the mean squared distance to the mean."""
        mean = self.mean
        return float(max(0.0, self.squares / self.batches - float(mean @ mean)) ** 0.5)


def batches(store: Store, samples: int, size: int, mixed: Sequence[str]) -> Iterator[list[Batch]]:
    """The stage's first answers, `size` at a time, of one domain; or of equal parts of the domains in `mixed`."""
    job = load_job(JOB)
    table = store.samples(["stage", "iteration", "domain", "prompt_len"])
    rows = np.flatnonzero((table["stage"].to_numpy() == "student") & (table["iteration"].to_numpy() == 0))[:samples]
    domains, prompts = table["domain"].to_numpy()[rows], table["prompt_len"].to_numpy()[rows]
    for together in [list(mixed)] if mixed else [[domain] for domain in job.domains]:
        part = size // len(together)
        own = {domain: np.flatnonzero(domains == domain) for domain in together}
        teachers = {domain: teacher_of(Path(store.uri), job, domain) for domain in together}
        for start in range(0, min(map(len, own.values())) - part + 1, part):
            chosen = {domain: places[start : start + part] for domain, places in own.items()}
            yield [read(store, rows[at], prompts[at], teachers[domain]) for domain, at in chosen.items()]


def teacher_of(root: Path, job: Job, domain: str) -> PreTrainedModel:
    """The specialist that scores a domain."""
    stage = job.stage(job.routing[domain])
    return load_model(root / "policies" / stage.name / f"v{stage.iterations}")


def read(store: Store, rows: np.ndarray, prompts: np.ndarray, teacher: PreTrainedModel) -> Batch:
    """Some answers of one domain, with its specialist's states."""
    tokens = [t.as_py() for t in store.read_tokens(rows, columns=["tokens"])["tokens"]]
    ids = torch.zeros(len(rows), max(map(len, tokens)), dtype=torch.int64)
    trained = torch.zeros_like(ids, dtype=torch.bool)
    for index, (sequence, prompt) in enumerate(zip(tokens, prompts, strict=True)):
        ids[index, : len(sequence)] = torch.tensor(sequence)
        trained[index, int(prompt) : len(sequence)] = True
    predictors = trained.flatten().nonzero()[:, 0] - 1
    with torch.no_grad():
        states = hidden_states(teacher, ids).flatten(0, 1)[predictors]
    return Batch(ids, predictors, ids[trained], states, lm_head(teacher))


@dataclass
class Comparison:
    """A form's gradients, and their differences to the full vocabulary's on the same batches."""

    own: Moments = field(default_factory=Moments)
    apart: Moments = field(default_factory=Moments)


def measure(
    store: Store, forms: Forms, samples: int, size: int, mixed: Sequence[str]
) -> tuple[dict[str, Comparison], int, int]:
    """Gradients of every form, the hidden width and the vocabulary."""
    student = load_model(Path(store.uri) / "policies" / "base" / "v1")
    weights = list(student.parameters())
    comparisons = {name: Comparison() for name in forms}
    for parts in batches(store, samples, size, mixed):
        exact: Tensor | None = None
        for name, (loss, _) in forms.items():
            began = time.perf_counter()
            total = torch.zeros(())
            for batch in parts:
                hidden = hidden_states(student, batch.ids).flatten(0, 1)[batch.predictors]
                total = total + loss(hidden, lm_head(student), batch).mean() / len(parts)
            gradients = torch.autograd.grad(total, weights)
            seconds = time.perf_counter() - began
            gradient = torch.cat([part.flatten() for part in gradients]).double()
            exact = gradient if exact is None else exact
            comparisons[name].own.add(gradient, seconds)
            comparisons[name].apart.add(gradient - exact, seconds)
    rows, width = lm_head(student).weight.shape
    return comparisons, width, rows


def summary(comparisons: dict[str, Comparison], forms: Forms, width: int, vocabulary: int) -> list[dict[str, Any]]:
    """One row a form; the first form is the exact one. apart: noise of the difference to exact on the same batches."""
    exact = next(iter(comparisons.values())).own
    length = float(exact.mean.norm())
    return [
        {
            "signal": name,
            "bytes": forms[name][1](width, vocabulary),
            "bias": round(float(comparison.apart.mean.norm()) / length, 4),
            "chance": round(comparison.apart.spread / comparison.apart.batches**0.5 / length, 4),
            "noise": round(comparison.own.spread / length, 3),
            "apart": round(comparison.apart.spread / length, 3),
            "cosine": round(float(comparison.own.mean @ exact.mean) / (length * float(comparison.own.mean.norm())), 4),
            "time": round(float(np.median(comparison.own.seconds) / np.median(exact.seconds)), 3),
        }
        for name, comparison in comparisons.items()
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="runs/quickstart")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--forms", choices=["signals", "baselines"], default="signals")
    parser.add_argument("--mixed", nargs="+", default=[], metavar="DOMAIN", help="batches of equal parts of these")
    parser.add_argument("--out", type=Path, help="JSON file that is written too")
    options = parser.parse_args()
    forms = BASELINES if options.forms == "baselines" else FORMS
    torch.set_num_threads(1)
    comparisons, width, vocabulary = measure(
        open_store(options.store), forms, options.samples, options.batch, options.mixed
    )
    rows = summary(comparisons, forms, width, vocabulary)
    count = next(iter(comparisons.values())).own.batches
    print(f"{count} batches of {options.batch} answers; logits would take {4 * vocabulary} bytes a token")
    print("| signal | bytes/token | bias | by chance | noise | apart | cosine | time, full = 1 |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row.values())} |")
    if options.out:
        said = {"forms": options.forms, "mixed": options.mixed, "batches": count, "answers": options.batch}
        said |= {"rows": rows, **provenance(load_job(JOB), stages=STAGES)}
        publish_file(options.out, (json.dumps(said, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
