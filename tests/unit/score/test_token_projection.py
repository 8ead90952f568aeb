"""Distributions of a teacher with another tokenizer over the student's tokens: against plain sums, and in training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import topk_divergence
from mopd_kernels.ops.topk_buckets import TOPK_MODES
from own_token_samples import CONFIG, pool_of, random_samples, sample_of
from transformers import PreTrainedTokenizerBase

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import character_tokenizer, make_student
from mopd_dataplane.records import Signal
from mopd_dataplane.score.own_tokens import OwnTokenizer
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool
from mopd_dataplane.score.token_projection import TokenProjection

PIECES = ["abc", "ab", "de", " 1", "cd"]
ALL = sections.Score(topk=200, batch_tokens=64)
"""Every token of the small vocabularies of this file."""


def model_of(folder: Path, pieces: list[str], *, seed: int, sharpness: float = 1.0) -> Path:
    """A random model in whose tokenizer some pieces are tokens beside the characters."""
    tokenizer = character_tokenizer(pieces)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = CONFIG | {"tie_word_embeddings": False, "vocab_size": len(tokenizer)}
    settings = StudentSettings(config=config, tokenizer=str(folder / "tokenizer"))
    policy = make_student(settings, folder / "model", seed=seed)
    if sharpness != 1:
        model = hf.load_model(policy)
        with torch.no_grad():
            model.lm_head.weight.mul_(sharpness)
        (policy / "checksums.json").unlink(missing_ok=True)
        model.save_pretrained(policy)
    return policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student and teacher."""
    root = tmp_path_factory.mktemp("models")
    return model_of(root / "student", [], seed=1), model_of(root / "teacher", PIECES, seed=2, sharpness=40.0)


def topk_of(
    pool: TeacherPool, name: str, samples: list[Scorable], prompt: list[int], settings: sections.Score = ALL
) -> dict[str, Signal]:
    signals = score_samples(pool, name, ["topk"], samples, settings, render_prompt=lambda sample: prompt)
    return {signal.uid: signal for signal in signals}


def distribution(signal: Signal, position: int) -> dict[int, float]:
    """Token -> probability of the used slots at a position."""
    assert signal.topk_ids is not None
    assert signal.topk_logprobs is not None
    pairs = zip(signal.topk_ids[position].tolist(), signal.topk_logprobs[position].tolist(), strict=True)
    return {token: math.exp(value) for token, value in pairs if token >= 0}


def plain_sums(
    probs: list[float], texts: list[str | None], prefix: str, student: PreTrainedTokenizerBase
) -> dict[int, float]:
    """The definition: characters of the student after a prefix, by the texts of the teacher's tokens."""
    begin = [(text, p) for text, p in zip(texts, probs, strict=True) if text and text.startswith(prefix)]
    total = sum(p for _, p in begin) if prefix else 1.0
    sums: dict[str, float] = {}
    for text, p in begin:
        if len(text) > len(prefix):
            sums[text[len(prefix)]] = sums.get(text[len(prefix)], 0.0) + p / total
    return {student.convert_tokens_to_ids(character): p for character, p in sums.items()}


def test_each_distribution_is_the_sum_over_the_teachers_tokens(folders: tuple[Path, Path]) -> None:
    """Against a plain pass of the teacher in float64; a prefix of a token is a condition on what was read."""
    student, teacher = (hf.load_tokenizer(folder) for folder in folders)
    samples, prompt = random_samples(student), teacher.encode("ab 1", add_special_tokens=False)
    signals = topk_of(pool_of(folders[0], other=folders[1]), "other", samples, prompt)
    special = set(teacher.all_special_ids)
    texts = [None if z in special else teacher.decode([z]) for z in range(len(teacher))]
    model, inside = hf.load_model(folders[1]).double(), 0
    for sample in samples:
        answer = student.decode(sample.tokens[sample.prompt_len : -1])
        theirs = teacher.encode(answer, add_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *theirs]])).logits[0]
        rows = logits.softmax(-1)[len(prompt) - 1 :].tolist()
        begin = 0
        for z, probs in zip([*theirs, teacher.eos_token_id], rows, strict=True):
            text = "" if z == teacher.eos_token_id else str(texts[z])
            for j in range(max(1, len(text))):
                expected = plain_sums(probs, texts, text[:j], student)
                if not j:
                    expected[student.eos_token_id] = probs[teacher.eos_token_id]
                probabilities = distribution(signals[sample.uid], begin + j)
                assert probabilities.keys() <= expected.keys()
                for token, p in expected.items():
                    assert probabilities.get(token, 0.0) == pytest.approx(p, abs=1e-5)
                inside += j > 0
            begin += max(1, len(text))
        assert begin == len(sample.loss_mask)
    assert inside > 5


def test_a_teacher_with_the_students_tokens_keeps_its_distribution(folders: tuple[Path, Path]) -> None:
    """The same model read as itself and as a teacher with a tokenizer of its own, which is equal."""
    student = hf.load_tokenizer(folders[0])
    samples, prompt = random_samples(student), student.encode("ab 1")
    pool = pool_of(folders[0], same=folders[0])
    settings = sections.Score(topk=8, batch_tokens=64)
    own = topk_of(pool, "same", samples, prompt, settings)
    for plain in score_samples(pool, "plain", ["topk"], samples, settings):
        special = set(student.all_special_ids) - {student.eos_token_id}
        for position in range(len(plain.topk_ids if plain.topk_ids is not None else ())):
            expected = {t: p for t, p in distribution(plain, position).items() if t not in special}
            probabilities = distribution(own[plain.uid], position)
            assert expected.keys() <= probabilities.keys()
            assert [probabilities[token] for token in expected] == pytest.approx(list(expected.values()), abs=1e-6)


def test_where_a_token_of_the_student_is_longer_nothing_follows(folders: tuple[Path, Path]) -> None:
    """The student writes `abc`, which the teacher reads as three tokens: one distribution, at its beginning."""
    student, teacher = character_tokenizer(PIECES), character_tokenizer()
    own = OwnTokenizer(student, teacher, name="t")
    assert own.pieces[teacher.convert_tokens_to_ids("a")] == (student.convert_tokens_to_ids("a"),)
    other = OwnTokenizer(teacher, student, name="t")
    spelled = [teacher.decode([piece]) for piece in other.pieces[student.convert_tokens_to_ids("abc")]]
    assert spelled == ["a", "b", "c"]
    assert other.pieces[student.eos_token_id] == (teacher.eos_token_id,)
    assert other.pieces[student.pad_token_id] == ()
    projection = TokenProjection([(), (5,), (5, 6), (5, 6, 7), (8,)])
    probs = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    for prefix, expected in {
        (): {5: 0.65, 8: 0.25}, (5,): {6: 0.45 / 0.65}, (5, 6): {7: 0.15 / 0.45}, (5, 6, 7): {}
    }.items():  # fmt: skip
        ids, values = projection.project(probs, prefix)
        assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize("mode", TOPK_MODES)
def test_a_position_without_a_distribution_has_no_loss(mode: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    ids = torch.tensor([[3, 4, -1], [-1, -1, -1]])
    logprobs = torch.tensor([[-1.0, -2.0, -1e5], [-1e5] * 3], dtype=torch.float64)
    rows = topk_divergence(hidden, head, ids, logprobs, mode=mode)
    rows.sum().backward()
    assert hidden.grad is not None
    assert rows[1].item() == 0
    assert hidden.grad[1].abs().max().item() == 0
    assert hidden.grad[0].abs().max().item() > 0


def test_the_students_own_choice_and_hidden_states_are_refused(folders: tuple[Path, Path]) -> None:
    pool = pool_of(folders[0], other=folders[1])
    samples = random_samples(hf.load_tokenizer(folders[0]))
    for kinds, settings in ((["topk"], sections.Score(topk_source="student")), (["hidden"], sections.Score())):
        with pytest.raises(MismatchError, match="its only signals"):
            list(score_samples(pool, "other", kinds, samples, settings, render_prompt=lambda sample: [1]))


def greedy(folder_model: Any, ids: list[int], count: int, allowed: torch.Tensor) -> list[int]:
    for _ in range(count):
        with torch.inference_mode():
            row = folder_model(torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(allowed[row[allowed].argmax()])]
    return ids


@pytest.mark.slow
def test_a_student_learns_its_teachers_answers(folders: tuple[Path, Path]) -> None:
    """Texts that the teacher writes greedily, distributions over the student's characters: the loss falls, and the
    student's greedy answers become the teacher's."""
    torch.manual_seed(0)
    student, teacher = (hf.load_tokenizer(folder) for folder in folders)
    writer = hf.load_model(folders[1])
    ordinary = torch.tensor([z for z in range(len(teacher)) if z not in teacher.all_special_ids])
    samples, answers = [], []
    for number, prompt in enumerate(["ab 1", "de", "x", "cab", "9 1", "dd"]):
        read = teacher.encode(prompt, add_special_tokens=False)
        answers.append(str(teacher.decode(greedy(writer, read, 8, ordinary)[len(read) :])))
        tokens = student.encode(prompt + answers[-1], add_special_tokens=False)
        item = sample_of(tokens[len(prompt) :], prompt=len(prompt), uid=f"{number:032x}")
        item.tokens[: len(prompt)] = tokens[: len(prompt)]
        samples.append(item)
    signals = {}
    pool = pool_of(folders[0], other=folders[1])
    for sample in samples:
        read = teacher.encode(student.decode(sample.tokens[: sample.prompt_len]), add_special_tokens=False)
        signals |= topk_of(pool, "other", [sample], read, sections.Score(topk=16))
    model = hf.load_model(folders[0]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    characters = torch.tensor([z for z in range(len(student)) if z not in student.all_special_ids])

    def agreement() -> float:
        """Share of the teacher's characters that the student writes."""
        equal = total = 0
        for sample, answer in zip(samples, answers, strict=True):
            ids = greedy(model, sample.tokens[: sample.prompt_len].tolist(), len(answer), characters)
            written = str(student.decode(ids[sample.prompt_len :]))
            equal += sum(one == other for one, other in zip(written, answer, strict=True))
            total += len(answer)
        return equal / total

    before, losses = agreement(), []
    for _ in range(150):
        loss = torch.zeros(())
        for sample in samples:
            signal = signals[sample.uid]
            states = model.model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).last_hidden_state[0]
            predicting = states[sample.prompt_len - 1 : -1]
            ids, logprobs = torch.from_numpy(signal.topk_ids), torch.from_numpy(signal.topk_logprobs)
            loss = loss + topk_divergence(
                predicting, model.lm_head.weight, ids, logprobs, kind="forward", reduction="sum"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    assert before < 0.3
    assert agreement() > 0.7
