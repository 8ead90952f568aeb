"""The Hugging Face engine: batches do not matter, and transformers' own generate agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import TOLERANCE, Answer, assert_same, decode, make_requests

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.engines.engine import LENGTH, STOP, Request
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.stop_strings import StopText


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> dict[str, Answer]:
    return decode(HfEngine(tiny_model, slots=16), make_requests(40))


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_tokens_do_not_depend_on_batch_mates_or_order(
    tiny_model: Path, reference: dict[str, Answer], slots: int
) -> None:
    work = [make_requests(40)[i] for i in np.random.default_rng(slots).permutation(40)]
    answers = decode(HfEngine(tiny_model, slots=slots), work)
    assert_same(answers, reference)


def test_both_ends_occur(reference: dict[str, Answer]) -> None:
    assert {finished for _, _, finished in reference.values()} == {STOP, LENGTH}
    for tokens, _, finished in reference.values():
        assert (tokens[-1] == 2) == (finished == STOP)
        assert len(tokens) == 30 or finished == STOP


def test_greedy_agrees_with_transformers(tiny_model: Path) -> None:
    engine = HfEngine(tiny_model, slots=4)
    work = make_requests(6, temperature=0.0, max_new_tokens=20)
    answers = decode(engine, work)
    for request in work:
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        theirs = engine._decoders[0].model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert answers[request.uid][0] == theirs[0, prompt.shape[1] :].tolist()


def test_logprobs_are_those_of_the_model_at_the_sampling_settings(tiny_model: Path) -> None:
    engine = HfEngine(tiny_model, slots=4)
    work = make_requests(4, temperature=0.8, top_k=20)
    for uid, (tokens, logprobs, _) in decode(engine, work).items():
        prompt = work[int(uid)].prompt_ids
        ids = torch.tensor([[*prompt.tolist(), *tokens]])
        with torch.no_grad():
            logits = engine._decoders[0].model(ids).logits[0, len(prompt) - 1 : -1] / 0.8
        threshold = logits.topk(20).values[:, -1:]
        expected = logits.masked_fill(logits < threshold, -torch.inf).log_softmax(-1)
        picked = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        np.testing.assert_allclose(logprobs, picked.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("length", [1, 7, 29])
def test_a_prefix_continues_as_if_never_interrupted(
    tiny_model: Path, reference: dict[str, Answer], length: int
) -> None:
    engine = HfEngine(tiny_model, slots=5)
    for request in make_requests(40):
        tokens, logprobs, _ = reference[request.uid]
        if len(tokens) <= length:
            continue
        prefix = np.array(tokens[:length], np.int32)
        resumed = Request(
            uid=request.uid, prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=30
        )
        rescored = engine.admit([(0, resumed)])[0]
        np.testing.assert_allclose(rescored, logprobs[max(0, length - 16) : length], atol=TOLERANCE)
        output = engine.step()
        assert output.positions.tolist() == [length]
        assert output.token_ids.tolist() == [tokens[length]]
        engine.release(0)


def test_stop_strings_end_a_sample_wherever_they_fall(tiny_model: Path, reference: dict[str, Answer]) -> None:
    engine = HfEngine(tiny_model, slots=8)
    text = {uid: engine.tokenizer.decode(tokens) for uid, (tokens, _, _) in reference.items()}
    uid = next(uid for uid, answer in text.items() if len(answer) > 12)
    stop = text[uid][7:9]
    answers = decode(engine, make_requests(40, stop=(stop, "never")))
    cut = text[uid].index(stop) + len(stop)
    assert engine.tokenizer.decode(answers[uid][0]) == text[uid][:cut]
    assert answers[uid][2] == STOP
    untouched = [other for other, answer in text.items() if stop not in answer]
    assert untouched
    assert all(answers[other][0] == reference[other][0] for other in untouched)


def test_stop_text_is_found_across_the_resume_point() -> None:
    from mopd_dataplane.models.initial_weights import character_tokenizer

    tokenizer = character_tokenizer()
    ids = tokenizer.encode("ab##c", add_special_tokens=False)
    for cut in range(len(ids)):
        stops = StopText(tokenizer, ("##",), ids[:cut])
        seen = [position for position, token in enumerate(ids[cut:], start=cut) if stops.add(token)]
        assert seen == ([] if cut > 3 else [3])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9)])
def test_garbage_weights_are_an_error_and_write_nothing(tiny_model: Path, top_k: int, top_p: float) -> None:
    engine = HfEngine(tiny_model, slots=2)
    engine.admit([(0, make_requests(1, top_k=top_k, top_p=top_p)[0])])
    engine._decoders[0]._head_weight = engine._decoders[0]._head_weight.clone()
    engine._decoders[0]._head_weight[5] = float("nan")
    with pytest.raises(EngineError, match="non-finite logits for sample 0 at response position 0"):
        engine.step()


def test_a_policy_is_swapped_only_when_every_slot_is_free(tiny_model: Path) -> None:
    engine = HfEngine(tiny_model, slots=2)
    engine.admit([(0, make_requests(1)[0])])
    with pytest.raises(EngineError, match="still live"):
        engine.load_policy(tiny_model, 1)
    engine.release(0)
    engine.load_policy(tiny_model, 1)
    assert engine.policy_version == 1


def test_llama_decodes_too(tmp_path: Path) -> None:
    from mopd_dataplane.models.initial_weights import make_student

    shape = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    folder = make_student(sections.Student(config=shape), tmp_path / "llama", seed=0)
    many, one = (
        decode(HfEngine(folder, slots=8), make_requests(12)),
        decode(HfEngine(folder, slots=1), make_requests(12)),
    )
    assert {uid: answer[0] for uid, answer in many.items()} == {uid: answer[0] for uid, answer in one.items()}
