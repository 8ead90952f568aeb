"""Self-check of an engine in another process (vLLM, a server): its log-probs beside the model's plain pass.

Such an engine has code, weights and rounding of its own. Before it samples for the first time it decodes a few tokens
of the job's texts; transformers then reads the same tokens on the CPU, one sequence alone and with plain attention,
from the folder of the policy that the engine is meant to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.self_check import (
    SelfCheck,
    affordable_on_host,
    band_of,
    fits_into_memory,
    plain_logits,
    require_same_logprobs,
)
from mopd_dataplane.rollout.engines.engine import GOING, Engine, Request
from mopd_dataplane.rollout.engines.sampling import SAMPLER, sample_key

NEW_TOKENS = 8
"""Tokens that the engine decodes behind each text."""
Answer = tuple[list[int], list[float]]
"""Token ids that the engine drew behind a text, and their log-probs in nat."""


def check_engine(
    engine: Engine,
    folder: Path,
    texts: Sequence[NDArray[np.int64]],
    *,
    dtype: str,
) -> SelfCheck:
    """Compare the engine's log-probs of what it draws with those of the plain pass of `folder`.

    texts: token ids of the job (see texts_to_check), each read as far as the bounds above allow. Every slot must be
    free, and is free afterwards. The gap is None, and nothing was compared, where the weights do not fit into memory
    beside what is there. Raises MismatchError when the mean difference is above the band of the dtype, and names the
    first position that is.
    """
    if not fits_into_memory(folder):
        return SelfCheck(folder.name, dtype, None, band_of(dtype))
    model = load_model(folder, dtype=dtype)
    room = min(affordable_on_host(model.num_parameters()), engine.context_length) - NEW_TOKENS
    prompts = [(text[:room] % engine.vocab_size).astype(np.int32) for text in texts]
    answers = [_decode(engine, prompt, number) for number, prompt in enumerate(prompts)]
    gaps: list[tuple[float, int]] = []
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        read = np.concatenate([prompt, np.array(ids, np.int32)]).astype(np.int64)
        start = len(read) - len(ids)
        plain = plain_logits(model, torch.from_numpy(read))[start - 1 : -1].log_softmax(-1)
        expected = plain.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        gaps += [(abs(a - b), start + n) for n, (a, b) in enumerate(zip(logprobs, expected, strict=True))]
    return require_same_logprobs(
        gaps, model, dtype=dtype, tokens=max(map(len, prompts), default=0) + NEW_TOKENS,
        problem=f"the engine's log-probs of its own tokens are not those of {folder}",
        advice='load the policy into the server (engine.reload = true), set engine.dtype, or use engine.kind = "hf"',
    )  # fmt: skip


def _decode(engine: Engine, prompt: NDArray[np.int32], number: int) -> Answer:
    """Decode up to NEW_TOKENS tokens behind a prompt, alone in the engine."""
    uid = f"self-check-{number}"
    request = Request(
        uid=uid, prompt_ids=prompt, key=sample_key(uid), max_new_tokens=NEW_TOKENS,
        sampler=engine.samplers[0] if engine.samplers else SAMPLER,
    )  # fmt: skip
    engine.admit([(0, request)])
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        output = engine.step()
        ids += output.token_ids.tolist()
        logprobs += output.logprobs.tolist()
        if output.finished[-1] != GOING:
            return ids, logprobs
