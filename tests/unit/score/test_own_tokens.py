"""A teacher of another tokenizer: alignment on random tokenizers, and its log-probs where the truth is known."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from own_token_samples import CONFIG, pool_of, random_samples, sample_of
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers_apart import exchanged_letters
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job import sections
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import character_tokenizer, make_student
from mopd_dataplane.models.token_bytes import TokenBytes
from mopd_dataplane.records import Signal
from mopd_dataplane.score.own_tokens import OwnTokenizer, align, credit
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool

END = "<|end|>"
ALPHABET = (
    "abcdefghij xyzABC 0123456789 .,;:\n\t"
    + "äßéñ"
    + "e\u0301o\u0308"
    + "日本語"
    + "אבגد"
    + "🙂👩‍👩‍👧🇫🇷"
    + "\u2028\u00a0\ufeff"
)
"""Letters, combining marks, Hebrew and Arabic, Chinese, emoji that are several characters, unusual white space."""
TEXTS = 10_000


def random_text(draw: random.Random, length: int = 40) -> str:
    words = ["hello", "world", " the", "ing", "123", "  ", "\r\n"]
    return "".join(
        draw.choice(words) if draw.random() < 0.3 else draw.choice(ALPHABET) for _ in range(draw.randrange(length))
    )


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def byte_level(seed: int, merges: int, *added: str) -> PreTrainedTokenizerBase:
    """Byte-level BPE, as of Qwen, Llama 3 or GPT-2, trained on random texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=seed % 2 == 0)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    draw = random.Random(seed)
    tokenizer.train_from_iterator([random_text(draw) for _ in range(300)], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return fast(tokenizer)


def byte_fallback(seed: int, *, prefix_space: bool) -> PreTrainedTokenizerBase:
    """BPE on characters with a token for each byte, as SentencePiece writes it: Gemma, and Llama 2 with its space."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    draw = random.Random(seed)
    for character in ["\u2581", *"abcdefghijxyz0123456789é日"]:
        vocabulary[character] = len(vocabulary)
    merges = []
    letters = "abcdefghijxyz\u2581"
    for _ in range(20):
        pair = draw.choice(letters), draw.choice(letters)
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix_space else space
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return fast(tokenizer)


TOKENIZERS = {
    "bytes": byte_level(0, 0),
    "small": byte_level(1, 60, "hello"),
    "large": byte_level(2, 500),
    "fallback": byte_fallback(3, prefix_space=False),
    "prefixed": byte_fallback(4, prefix_space=True),
}


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)), st.integers(0, 2**31))
def test_chunks_are_the_smallest_and_keep_every_sum(ours: set[int], theirs: set[int], seed: int) -> None:
    """Against a walk of two pointers that knows no cumulative sums."""
    lengths = [np.diff([0, *sorted(cuts | {41})]).tolist() for cuts in (ours, theirs)]
    alignment = align(*lengths)
    expected: tuple[list[int], list[int]] = [], []
    left, right, chunk = lengths[0][:], lengths[1][:], 0
    while left:
        behind, steps = 0, 0
        while behind or not steps:
            side = 0 if behind <= 0 else 1
            length = (left, right)[side].pop(0)
            behind += length if side == 0 else -length
            expected[side].append(chunk)
            steps += 1
        chunk += 1
    assert (alignment.student.tolist(), alignment.teacher.tolist()) == expected
    rng = np.random.default_rng(seed)
    teacher = -rng.gamma(2.0, 0.5, len(lengths[1])).astype(np.float32)
    student = -rng.gamma(2.0, 0.5, len(lengths[0])).astype(np.float32) * (rng.random(len(lengths[0])) < 0.8)
    for own in (student.astype(np.float32), None):
        values = credit(alignment, teacher, own)
        assert (values <= 0).all()
        sums = np.bincount(alignment.student, values.astype(np.float64))
        np.testing.assert_allclose(sums, np.bincount(alignment.teacher, teacher.astype(np.float64)), rtol=1e-5)
    single = np.bincount(alignment.student)[alignment.student] == 1
    np.testing.assert_allclose(
        values[single], np.bincount(alignment.teacher, teacher)[alignment.student[single]], rtol=1e-5
    )


@pytest.mark.parametrize("student", ["bytes", "small", "large", "fallback"])
def test_no_text_is_misaligned(student: str) -> None:
    """Every byte of a text belongs to one token of each side, and every chunk has the same bytes on both."""
    ours = TOKENIZERS[student]
    bytes_of = TokenBytes(ours)
    draw = random.Random(student)
    teachers = {name: OwnTokenizer(ours, tokenizer, name=name) for name, tokenizer in TOKENIZERS.items()}
    theirs = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
    for number in range(TEXTS // 4):
        text = random_text(draw)
        cut = draw.randrange(len(text) + 1)  # tokens that no tokenizer would make of the whole text
        ids = [token for part in (text[:cut], text[cut:]) for token in ours.encode(part, add_special_tokens=False)]
        ids += [ours.eos_token_id] * (number % 2)
        name = draw.choice(list(teachers))
        own = teachers[name].retokenize(sample_of(ids), [7])
        mine = bytes_of(ids)
        its = theirs[name](own.teacher_sample.tokens[1:].tolist())
        if number % 2:
            mine[-1] = its[-1] = b"\0"
        assert b"".join(mine) == text.encode() + b"\0" * (number % 2)
        if name == "prefixed" and text:
            its[0] = its[0].removeprefix(b" ")
        for chunk in range(int(own.alignment.student.max(initial=-1)) + 1):
            on_both = [b"".join(part for part, at in zip(parts, chunks, strict=True) if at == chunk)
                       for parts, chunks in ((mine, own.alignment.student), (its, own.alignment.teacher))]  # fmt: skip
            assert on_both[0] == on_both[1] != b""


def test_tokens_that_split_a_character_share_its_chunk() -> None:
    own = OwnTokenizer(TOKENIZERS["bytes"], byte_level(5, 0, "🙂"), name="t")
    ids = TOKENIZERS["bytes"].encode("a🙂b", add_special_tokens=False)
    assert own.retokenize(sample_of(ids), ()).alignment.student.tolist() == [0, 1, 1, 1, 1, 2]


@pytest.fixture(scope="module")
def character_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(StudentSettings(config=CONFIG), tmp_path_factory.mktemp("models") / "plain", seed=1)


def values_of(pool: TeacherPool, name: str, samples: list[Scorable], **more: Any) -> dict[str, NDArray[np.float32]]:
    signals = score_samples(pool, name, ["logprob"], samples, sections.Score(batch_tokens=64), **more)
    return {signal.uid: signal.logprob for signal in signals if signal.logprob is not None}


def test_renumbered_tokens_change_nothing(character_student: Path, tmp_path: Path) -> None:
    """The same model with two rows of its embeddings and its tokenizer exchanged: the truth is known exactly."""
    folder, tokenizer = tmp_path / "renumbered", hf.load_tokenizer(character_student)
    shutil.copytree(character_student, folder)
    exchanged_letters(tokenizer).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    one, other = tokenizer.convert_tokens_to_ids(["a", "b"])
    for name, rows in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows[[one, other]] = rows[[other, one]].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "checksums.json").unlink(missing_ok=True)
    pool, samples = pool_of(character_student, renumbered=folder), random_samples(tokenizer)
    theirs = hf.load_tokenizer(folder)
    assert theirs.encode("ab") != tokenizer.encode("ab")
    plain = values_of(pool, "plain", samples)
    own = values_of(pool, "renumbered", samples, render_prompt=lambda sample: theirs.encode("ab 1"))
    for uid, expected in plain.items():
        np.testing.assert_allclose(own[uid], expected, atol=1e-5)
    assert pool.register("renumbered", tmp_path).tokenizer_digest == hf.tokenizer_digest(theirs)


def test_the_alignment_is_a_signal_that_needs_no_model(character_student: Path, tmp_path: Path) -> None:
    """Beside the log-probs, and alone: then no weights are loaded."""
    theirs = character_tokenizer(["abc", "de", " 1"])
    theirs.save_pretrained(tmp_path / "tokenizer")
    settings = StudentSettings(config=CONFIG, tokenizer=str(tmp_path / "tokenizer"))
    pool = pool_of(character_student, whole=make_student(settings, tmp_path / "whole", seed=2))
    tokenizer = hf.load_tokenizer(character_student)
    samples, reads = random_samples(tokenizer), theirs.encode("ab 1")

    def scored(*kinds: str) -> list[Signal]:
        return list(score_samples(pool, "whole", kinds, samples, sections.Score(), render_prompt=lambda sample: reads))

    alone = {signal.uid: signal for signal in scored("alignment")}
    assert pool.loads == {}
    both = scored("alignment", "logprob")
    assert [signal.kind for signal in both] == ["alignment"] * len(samples) + ["logprob"] * len(samples)
    own = OwnTokenizer(tokenizer, theirs, name="whole")
    for sample, signal in zip(samples, both, strict=False):
        read = own.retokenize(sample, reads)
        assert signal.teacher_tokens is not None
        assert signal.teacher_tokens.tolist() == read.teacher_sample.tokens[len(reads) :].tolist()
        for side, chunks in (("student", read.alignment.student), ("teacher", read.alignment.teacher)):
            ends = getattr(signal, f"{side}_chunk_ends")
            assert (np.cumsum(ends) - ends).tolist() == chunks.tolist()
            assert getattr(alone[sample.uid], f"{side}_chunk_ends").tolist() == ends.tolist()
    with pytest.raises(UnknownNameError, match="'alignment'"):
        list(score_samples(pool, "plain", ["alignment"], samples, sections.Score()))


def test_a_chunk_has_the_log_prob_of_its_text(character_student: Path, tmp_path: Path) -> None:
    """Tokens of the teacher are up to three characters; by a plain pass of its model over the same text."""
    folder = tmp_path / "whole"
    tokenizer, theirs = hf.load_tokenizer(character_student), character_tokenizer(["abc", "de", " 1"])
    theirs.save_pretrained(tmp_path / "tokenizer")
    make_student(StudentSettings(config=CONFIG, tokenizer=str(tmp_path / "tokenizer")), folder, seed=2)
    samples = random_samples(tokenizer)
    prompt = theirs.encode("ab 1")
    pool = pool_of(character_student, whole=folder)
    own = values_of(pool, "whole", samples, render_prompt=lambda sample: prompt)
    model, merged = hf.load_model(folder), 0
    for sample in samples:
        text = tokenizer.decode(sample.tokens[sample.prompt_len : -1], skip_special_tokens=True)
        ids = [*prompt, *theirs.encode(text, add_special_tokens=False), theirs.eos_token_id]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double() / 0.7
        answer = ids[len(prompt) :]
        logprobs = logits.log_softmax(-1)[range(len(prompt) - 1, len(ids) - 1), answer]
        begin = 0
        assert sample.logprobs is not None
        for token, expected in zip(answer, logprobs.tolist(), strict=True):
            width = 1 if token == theirs.eos_token_id else len(theirs.decode([token]))
            part = slice(begin, begin + width)
            share = sample.logprobs[part].astype(np.float64) / sample.logprobs[part].sum()
            np.testing.assert_allclose(own[sample.uid][part], expected * share, atol=1e-4)
            begin, merged = begin + width, merged + (width > 1)
        assert begin == len(sample.loss_mask)
    assert merged > 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda ids, end: [ids[0], end, *ids[1:]], "has the special token '<|end|>'"),
        (lambda ids, end: [*ids, end, end], "has the special token '<|end|>'"),
        (lambda ids, end: [*ids, TOKENIZERS["bytes"].encode("é", add_special_tokens=False)[0]], "no UTF-8 text"),
    ],
)
def test_a_sample_without_a_text_is_named(change: Callable[[list[int], int], list[int]], problem: str) -> None:
    ours = TOKENIZERS["bytes"]
    own = OwnTokenizer(ours, TOKENIZERS["large"], name="t")
    sample = sample_of(change(ours.encode("abc", add_special_tokens=False), ours.eos_token_id))
    with pytest.raises(MismatchError, match=f"cannot read sample s, which .*{problem}".replace("|", r"\|")):
        own.retokenize(sample, ())
    assert problem in own.problem(sample)


def test_text_of_a_tool_between_tokens_of_the_policy_is_named() -> None:
    ours = TOKENIZERS["bytes"]
    sample = sample_of(ours.encode("abc", add_special_tokens=False))
    with pytest.raises(MismatchError, match="text of tools"):
        OwnTokenizer(ours, ours, name="t").retokenize(replace(sample, loss_mask=np.array([1, 0, 1], np.uint8)), ())


def test_a_tokenizer_that_changes_the_text_is_named() -> None:
    described = json.loads(TOKENIZERS["large"].backend_tokenizer.to_str())
    described["normalizer"] = {"type": "Lowercase"}
    lower = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token=END)
    ours = TOKENIZERS["bytes"]
    with pytest.raises(MismatchError, match="has the text b'aBc', in its tokens b'abc'"):
        OwnTokenizer(ours, lower, name="t").retokenize(sample_of(ours.encode("aBc", add_special_tokens=False)), ())


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(MismatchError, match="decodes by WordPiece"):
        OwnTokenizer(TOKENIZERS["bytes"], PreTrainedTokenizerFast(tokenizer_object=pieces), name="t")
