"""Self-check of a teacher in another process (vLLM, a server): its log-probs beside the model's plain pass.

It reads texts of the job as it reads samples; transformers reads them too, on the CPU and one sequence alone, from the
teacher's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import embedding_weight, load_model
from mopd_dataplane.models.self_check import (
    SelfCheck,
    affordable_on_host,
    band_of,
    fits_into_memory,
    plain_logits,
    require_same_logprobs,
)
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool


def check_scorer(
    pool: TeacherPool,
    teacher: str,
    folder: Path,
    texts: Sequence[NDArray[np.int64]],
    settings: sections.Score,
    *,
    dtype: str,
) -> SelfCheck:
    """Compare a teacher's log-probs of the tokens of a text with those of the plain pass of `folder`.

    texts: token ids of the job (see texts_to_check), each read as far as is affordable. The gap is None, and nothing
    was compared, where the weights do not fit into memory. Raises MismatchError when the mean difference is above the
    band of the dtype, and names the first position that is; EngineError.
    """
    if not fits_into_memory(folder):
        return SelfCheck(folder.name, dtype, None, band_of(dtype))
    model = load_model(folder, dtype=dtype)
    room = min(affordable_on_host(model.num_parameters()), pool.context_length(teacher))
    vocabulary = len(embedding_weight(model))
    left_out = list({*pool.unknown_tokens(teacher), *pool.exchanged_tokens(teacher)})
    gaps: list[tuple[float, int]] = []
    read = [_readable(text[:room] % vocabulary, left_out) for text in texts]
    for text in read:
        [signal] = score_samples(pool, teacher, ("logprob",), [_as_answer(text)], settings)
        assert signal.logprob is not None
        plain = plain_logits(model, torch.from_numpy(text))[:-1].log_softmax(-1)
        expected = plain.gather(1, torch.from_numpy(text[1:, None]))[:, 0].numpy()
        differences = np.abs(signal.logprob - expected).tolist()
        gaps += [(gap, position) for position, gap in enumerate(differences, start=1)]
    return require_same_logprobs(
        gaps, model, dtype=dtype, tokens=max(map(len, read), default=0),
        problem=f"teacher {teacher!r} does not give the log-probs of {folder}",
        advice=f"serve the folder of teachers.{teacher}.source, set teachers.{teacher}.dtype, or use score.engine = "
        '"hf"',
    )  # fmt: skip


def _readable(text: NDArray[np.int64], left_out: Sequence[int]) -> NDArray[np.int64]:
    """A text with another token in place of those that are left out."""
    other = next(token for token in range(len(left_out) + 1) if token not in left_out)
    return np.where(np.isin(text, left_out), other, text)


def _as_answer(text: NDArray[np.int64]) -> Scorable:
    """A text as the answer to a prompt of its first token."""
    return Scorable(
        uid="self-check", sample_row=-1, prompt_id="", prompt_len=1, tokens=text.astype(np.int32),
        loss_mask=np.ones(len(text) - 1, np.uint8),
    )  # fmt: skip
