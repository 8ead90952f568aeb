"""Teacher-mixed sampling: what is drawn, what is logged, and that a resume meets the same mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import Preempted

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.gumbel import Distribution, gumbel
from mopd_dataplane.rollout.engines.hf import HfEngine, MixedTeacher
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import FIRST_SAMPLER, SAMPLER, sample_key, sampler
from mopd_dataplane.rollout.runner import SAVED

SHARE = 0.3
LENGTH = 24
TOLERANCE = 2e-5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens: other weights, and one layer less."""
    import json

    shape = json.loads((tiny_model / "config.json").read_text())
    keys = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    settings = {key: shape[key] for key in keys} | {"num_hidden_layers": 1, "initializer_range": 0.3}
    settings["max_position_embeddings"] = 300
    return make_student(sections.Student(config=settings), tmp_path_factory.mktemp("models") / "teacher", seed=11)


def requests(count: int, **settings: Any) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            uid=str(i), key=sample_key(str(i)), max_new_tokens=LENGTH,
            prompt_ids=rng.integers(4, 100, rng.integers(1, 12)).astype(np.int32), **settings,
        )
        for i in range(count)
    ]  # fmt: skip


def decode(engine: HfEngine, work: list[Request]) -> dict[str, tuple[list[int], list[float]]]:
    engine.admit(list(enumerate(work)))
    answers: dict[str, tuple[list[int], list[float]]] = {request.uid: ([], []) for request in work}
    live = len(work)
    while live:
        output = engine.step()
        for slot, token, logprob in zip(output.slots, output.token_ids, output.logprobs, strict=True):
            tokens, logprobs = answers[work[slot].uid]
            tokens.append(int(token))
            logprobs.append(float(logprob))
        live -= int((output.finished > 0).sum())
    return answers


def distribution(folder: Path, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """[R, V] a model's log-probs before each token, from one plain forward pass."""
    with torch.no_grad():
        logits = load_model(folder)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_token_is_drawn_from_the_mixture_and_logged_under_it(
    tiny_model: Path, teacher: Path, temperature: float
) -> None:
    """With gumbel/1: token = argmax(log((1 - a) p_S + a p_T) + the sample's own noise)."""
    work = requests(6, temperature=temperature, sampler=FIRST_SAMPLER)
    engine = HfEngine(tiny_model, slots=6, mixed_teacher=MixedTeacher(teacher, SHARE))
    differs = 0
    for uid, (tokens, logprobs) in decode(engine, work).items():
        prompt = work[int(uid)].prompt_ids.tolist()
        own, theirs = (distribution(folder, prompt, tokens, temperature) for folder in (tiny_model, teacher))
        mixed = np.log((1 - SHARE) * np.exp(own) + SHARE * np.exp(theirs))
        noise = gumbel(sample_key(uid), 0, len(tokens), engine.vocab_size)
        assert tokens == (mixed + noise).argmax(1).tolist()
        np.testing.assert_allclose(logprobs, mixed[np.arange(len(tokens)), tokens], atol=TOLERANCE)
        differs += int(((own + noise).argmax(1) != tokens).sum())
    assert differs > 10  # the student alone would have written something else


def test_the_newest_sampler_draws_from_the_mixture_too(tiny_model: Path, teacher: Path) -> None:
    work = requests(6)
    engine = HfEngine(tiny_model, slots=6, mixed_teacher=MixedTeacher(teacher, SHARE))
    for uid, (tokens, logprobs) in decode(engine, work).items():
        prompt = work[int(uid)].prompt_ids.tolist()
        own, theirs = (distribution(folder, prompt, tokens, 1.0) for folder in (tiny_model, teacher))
        mixed = np.log((1 - SHARE) * np.exp(own) + SHARE * np.exp(theirs)).astype(np.float32)
        count = len(tokens)
        mixture = sampler(SAMPLER).of(mixed, np.ones(count), np.zeros(count, np.int64), np.ones(count))
        keys = np.tile(key_words(sample_key(uid)), (count, 1))
        assert tokens == mixture.draw(keys, np.arange(count), np.ones(count)).tolist()
        np.testing.assert_allclose(logprobs, mixed[np.arange(count), tokens], atol=TOLERANCE)


def test_mixture_is_a_distribution_with_all_of_both_supports() -> None:
    with np.errstate(divide="ignore"):
        p, q = np.log([[0.5, 0.5, 0.0, 0.0]]), np.log([[0.0, 0.25, 0.75, 0.0]])
    probabilities = np.exp(Distribution(p).mixed(Distribution(q), share=0.2).log_q())
    np.testing.assert_allclose(probabilities, [[0.4, 0.45, 0.15, 0.0]])


@pytest.mark.parametrize("prefix_len", [1, 11, 23])
def test_a_prefix_continues_as_if_never_interrupted(tiny_model: Path, teacher: Path, prefix_len: int) -> None:
    engine = HfEngine(tiny_model, slots=8, mixed_teacher=MixedTeacher(teacher, SHARE))
    whole = decode(engine, requests(8))
    seen = 0
    for request in requests(8):
        tokens, logprobs = whole[request.uid]
        if len(tokens) <= prefix_len:
            continue
        seen += 1
        prefix = np.array(tokens[:prefix_len], np.int32)
        resumed = Request(
            uid=request.uid, prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=LENGTH
        )
        rescored = engine.admit([(0, resumed)])[0]
        np.testing.assert_allclose(rescored, logprobs[max(0, prefix_len - 16) : prefix_len], atol=TOLERANCE)
        assert engine.step().token_ids.tolist() == [tokens[prefix_len]]
        engine.release(0)
    assert seen > 2


def test_a_polite_stop_keeps_the_cache_of_both_models(
    roll: Callable[..., Any], shelf: Any, tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    """Every bit of the uninterrupted run; a cache of one model only would be another distribution."""

    def rolled(store: Any, name: str, at: int) -> None:
        engine = Preempted(tiny_model, at=at, slots=8, mixed_teacher=MixedTeacher(teacher, SHARE))
        options = {"engine": engine, "home": tmp_path / name, "wal": sections.Wal()}
        roll(store, render=lambda prompt: engine.tokenizer.encode(prompt.text), **options)

    whole = type(shelf)()
    rolled(whole, "whole", 0)
    for at in (7, 12, 0):
        if at:
            with pytest.raises(KeyboardInterrupt):
                rolled(shelf, "stopped", at)
            assert (tmp_path / "stopped" / "student" / "engine-0" / SAVED).exists()
        else:
            rolled(shelf, "stopped", at)
    assert {sample.resume for sample in shelf.samples.values() if sample.interruptions} == {"exact"}
    assert shelf.samples.keys() == whole.samples.keys()
    for uid, sample in whole.samples.items():
        assert shelf.samples[uid].tokens.tobytes() == sample.tokens.tobytes()
        assert shelf.samples[uid].logprobs.tobytes() == sample.logprobs.tobytes()


def test_another_share_or_teacher_is_another_policy(tiny_model: Path, teacher: Path) -> None:
    engines = [
        HfEngine(tiny_model, slots=1),
        HfEngine(tiny_model, slots=1, mixed_teacher=MixedTeacher(teacher, SHARE)),
        HfEngine(tiny_model, slots=1, mixed_teacher=MixedTeacher(teacher, 0.4)),
        HfEngine(tiny_model, slots=1, mixed_teacher=MixedTeacher(tiny_model, SHARE)),
    ]
    assert len({engine.policy_digest for engine in engines}) == 4
    assert engines[1].context_length == 300  # the shorter of the two


def test_a_mixed_teacher_of_other_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from mopd_dataplane.models.initial_weights import character_tokenizer

    settings = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings |= {"num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 32}
    words = make_student(sections.Student(config=settings, tokens=("spam",)), tmp_path / "words", seed=0)
    with pytest.raises(MismatchError, match="a mixture needs the same tokens"):
        HfEngine(tiny_model, slots=1, mixed_teacher=MixedTeacher(words, SHARE))
    wide = make_student(sections.Student(config=settings | {"vocab_size": 200}), tmp_path / "wide", seed=0)
    assert len(character_tokenizer()) < 200
    with pytest.raises(MismatchError, match="has 200 logits, the policy"):
        HfEngine(tiny_model, slots=1, mixed_teacher=MixedTeacher(wide, SHARE))
