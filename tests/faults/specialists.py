"""Tiny trained models: a base that knows two domains a little, a specialist of each, and samples of the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mopd_dataplane.job.sections import Student
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.readers import Scorable

MARKS = (" backward: ", " sum: ")
"""Tokens of their own that begin a prompt."""
CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "initializer_range": 0.08, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
}  # fmt: skip
DOMAINS = ("backward", "sum")
LETTERS = "abcdefgh"
BASE_STEPS, SPECIALIST_STEPS, BATCH = 120, 160, 48
MOST_NEW = 6


@dataclass(frozen=True)
class Specialists:
    """Folders of the models, and what they are asked."""

    base: Path
    teachers: dict[str, Path]
    """By domain."""
    tokenizer: PreTrainedTokenizerBase
    samples: dict[str, list[Scorable]]
    """The base's own answers, by domain."""
    references: dict[str, list[Scorable]]


def make_specialists(root: Path, seed: int, *, samples: int = 32, references: int = 16) -> Specialists:
    """Train a base and its specialists from a seed; seconds on one core."""
    rng = np.random.default_rng(seed)
    start = make_student(Student(config=CONFIG, tokens=MARKS), root / "start", seed=seed)
    tokenizer = hf.load_tokenizer(start)
    model = hf.load_model(start)
    _train(model, tokenizer, DOMAINS, BASE_STEPS, rng)
    base = root / "base"
    hf.save_policy(model, start, base)
    teachers = {}
    for domain in DOMAINS:
        specialist = hf.load_model(base)
        _train(specialist, tokenizer, (domain,), SPECIALIST_STEPS, rng)
        teachers[domain] = root / domain
        hf.save_policy(specialist, base, teachers[domain])
    model.eval()
    torch.manual_seed(seed)
    qa_pairs = {domain: [_question(domain, rng) for _ in range(samples + references)] for domain in DOMAINS}
    answered = {domain: _sample(model, tokenizer, [q for q, _ in qa_pairs[domain][:samples]]) for domain in DOMAINS}
    truth = {
        domain: [_scorable(f"{domain}-{i}", *_ids(tokenizer, *qa)) for i, qa in enumerate(qa_pairs[domain][samples:])]
        for domain in DOMAINS
    }
    return Specialists(base, teachers, tokenizer, answered, truth)


def _question(domain: str, rng: np.random.Generator) -> tuple[str, str]:
    if domain == "sum":
        first, second = rng.integers(0, 10, 2).tolist()
        return f"{MARKS[1]}{first}+{second}=", f"{first + second:02d}"
    word = "".join(rng.choice(list(LETTERS), 4))
    return f"{MARKS[0]}{word}\n", word[::-1]


def _ids(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], list[int]]:
    return tokenizer.encode(question), [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    domains: Sequence[str],
    steps: int,
    rng: np.random.Generator,
) -> None:
    """Cross entropy on answers."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        pairs = [_ids(tokenizer, *_question(domains[step % len(domains)], rng)) for _ in range(BATCH)]
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in pairs])
        start = len(pairs[0][0])
        logits = model(ids).logits[:, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[Scorable]:
    """Answers drawn at temperature 1, with the log-probs of what was drawn."""
    ids = torch.tensor([tokenizer.encode(question) for question in questions])
    start = ids.shape[1]
    drawn = []
    for _ in range(MOST_NEW):
        logprobs = model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1)
        drawn.append(logprobs.gather(1, token))
        ids = torch.cat([ids, token], 1)
    logprobs, scorables = torch.cat(drawn, 1).numpy(), []
    for row, answer in enumerate(ids[:, start:].tolist()):
        end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
        scorables.append(
            _scorable(f"{questions[row]}-{row}", ids[row, :start].tolist(), answer[:end], logprobs[row, :end])
        )
    return scorables


def _scorable(uid: str, prompt: Sequence[int], answer: Sequence[int], logprobs: np.ndarray | None = None) -> Scorable:
    tokens = np.array([*prompt, *answer], np.int32)
    return Scorable(
        uid=uid, sample_row=0, prompt_id=uid, prompt_len=len(prompt), tokens=tokens,
        loss_mask=np.ones(len(answer), np.uint8), logprobs=logprobs,
    )  # fmt: skip
