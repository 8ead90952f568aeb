"""Which teachers may judge which student: texts of ordinary tokens must agree, roles and markers need not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import TINY
from safetensors.torch import load_file
from tokenizers import AddedToken
from tokenizers_apart import exchanged_letters, with_roles
from transformers import PreTrainedTokenizerBase

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import character_tokenizer, make_student
from mopd_dataplane.models.vocabulary import compare_vocabularies, unknown_tokens
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

MARKERS = ("<|endoftext|>", "<|im_end|>")


def marked(*markers: str, special: bool = True) -> PreTrainedTokenizerBase:
    """Characters, with added tokens behind them."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in markers])
    return tokenizer


def test_equal_tokenizers_have_no_differences() -> None:
    assert compare_vocabularies(marked(*MARKERS), marked(*MARKERS), name="t") == ()


def test_a_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = marked(*MARKERS), marked(*MARKERS)
    compare_vocabularies(student, teacher, name="t")
    monkeypatch.setattr(type(student), "get_vocab", lambda self: pytest.fail("read again"))
    assert compare_vocabularies(student, teacher, name="t") == ()


def test_a_base_student_under_an_instruct_teacher_is_told_of_both_ends() -> None:
    base = with_roles(marked(*MARKERS), eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    instruct = with_roles(marked(*MARKERS), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    (own,) = compare_vocabularies(base, instruct, name="big")
    assert "'<|endoftext|>'" in own
    assert "'<|im_end|>'" in own
    assert 'teachers.big.end = "map"' in own
    (mapped,) = compare_vocabularies(base, instruct, name="big", ends_mapped=True)
    assert "probability of its own end" in mapped


def test_another_padding_is_told_and_follows_nothing() -> None:
    (told,) = compare_vocabularies(marked(*MARKERS), with_roles(marked(*MARKERS), pad_token="<|im_end|>"), name="t")
    assert "the pad token is" in told
    assert "This has no effect" in told


def test_relabelled_markers_are_told() -> None:
    (told,) = compare_vocabularies(marked("<|im_start|>"), marked("<｜User｜>"), name="t")
    assert "1 special tokens have other names" in told
    assert "'<｜User｜>'" in told


def test_one_added_token_more_is_told() -> None:
    (told,) = compare_vocabularies(marked(*MARKERS, "<tool>"), marked(*MARKERS), name="t")
    assert "does not know 1 tokens" in told
    assert "'<tool>'" in told
    assert compare_vocabularies(marked(*MARKERS), marked(*MARKERS, "<tool>"), name="t") == ()


def test_an_ordinary_token_of_another_text_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"2 of .* common token ids stand for other texts.*'a' for the student"):
        compare_vocabularies(character_tokenizer(), exchanged_letters(character_tokenizer()), name="t")


def test_a_word_is_no_marker() -> None:
    with pytest.raises(MismatchError, match="'ab' for the student and 'cd' for the teacher"):
        compare_vocabularies(marked("ab", special=False), marked("cd", special=False), name="t")


def _model(folder: Path, tokenizer: PreTrainedTokenizerBase, *, tied: bool) -> Path:
    settings = TINY | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    model_folder = make_student(sections.Student(config=settings), folder, seed=1)
    tokenizer.save_pretrained(model_folder)
    (model_folder / "checksums.json").unlink(missing_ok=True)
    return model_folder


def _sample(tokenizer: PreTrainedTokenizerBase, *, last: int) -> Scorable:
    tokens = np.array([*range(10, 22), last], np.int32)
    return Scorable(
        uid="s", sample_row=0, prompt_id="p", prompt_len=4, tokens=tokens, loss_mask=np.ones(9, np.uint8),
        logprobs=np.zeros(9, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_mapped_end_is_read_at_the_students_end(tmp_path: Path, tied: bool) -> None:
    base = with_roles(marked(*MARKERS), eos_token="<|endoftext|>")
    instruct = with_roles(marked(*MARKERS), eos_token="<|im_end|>")
    folder = _model(tmp_path / "teacher", instruct, tied=tied)
    here, there = base.eos_token_id, instruct.eos_token_id
    signals, digests = {}, set()
    for end in ("own", "map"):
        spec = TeacherSpec(folder, sections.Teacher(source="x", end=end))
        pool = TeacherPool({"t": spec}, student_tokenizer=base)
        sample = _sample(base, last=here)
        sample_signals = score_samples(pool, "t", ("logprob", "topk"), [sample], sections.Score(topk=len(instruct)))
        signals[end] = {signal.kind: signal for signal in sample_signals}
        digests.add(pool.register("t", tmp_path / end).weights_digest)
    assert len(digests) == 2, "signals of both settings must not be taken for one teacher's"
    model = hf.load_model(folder)
    ids = torch.tensor([[*range(10, 22), here]])
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    np.testing.assert_allclose(signals["own"]["logprob"].logprob[-1], expected[-2, here], atol=1e-5)
    np.testing.assert_allclose(signals["map"]["logprob"].logprob[-1], expected[-2, there], atol=1e-5)
    before_the_end = [signals[end]["logprob"].logprob[:-1] for end in ("own", "map")]
    np.testing.assert_allclose(*before_the_end, atol=1e-5)
    stored = hf.lm_head(model).weight
    head = load_file(next((tmp_path / "map" / "heads").iterdir()))["weight"]
    torch.testing.assert_close(head[here], stored[there].detach())
    torch.testing.assert_close(head[there], stored[here].detach())
    torch.testing.assert_close(model.get_input_embeddings().weight[here], hf.embedding_weight(model)[here])


def test_a_sample_with_a_token_that_its_teacher_lacks_is_refused(tmp_path: Path) -> None:
    student = marked(*MARKERS, "<tool>")
    folder = _model(tmp_path / "teacher", marked(*MARKERS), tied=True)
    pool = TeacherPool({"t": TeacherSpec(folder, sections.Teacher(source="x"))}, student_tokenizer=student)
    tool = next(iter(unknown_tokens(student, hf.load_tokenizer(folder))))
    with pytest.raises(MismatchError, match="token '<tool>'"):
        list(score_samples(pool, "t", ("logprob",), [_sample(student, last=tool)], sections.Score()))


def test_a_sample_beyond_the_teachers_context_is_refused_unless_the_job_takes_it(tmp_path: Path) -> None:
    tokenizer = marked(*MARKERS)
    settings = TINY | {"vocab_size": len(tokenizer), "max_position_embeddings": 8}
    folder = make_student(sections.Student(config=settings, tokens=()), tmp_path / "teacher", seed=1)
    student = hf.load_tokenizer(folder)
    sample = _sample(student, last=20)
    refusing = TeacherPool({"t": TeacherSpec(folder, sections.Teacher(source="x"))}, student_tokenizer=student)
    with pytest.raises(MismatchError, match=r"has 13 tokens .* context length 8.*beyond_context"):
        list(score_samples(refusing, "t", ("logprob",), [sample], sections.Score()))
    spec = TeacherSpec(folder, sections.Teacher(source="x", beyond_context=True))
    taking = TeacherPool({"t": spec}, student_tokenizer=student)
    assert len(list(score_samples(taking, "t", ("logprob",), [sample], sections.Score()))) == 1
