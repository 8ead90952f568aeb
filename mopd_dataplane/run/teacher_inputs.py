"""Stored samples as teachers read them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.fields import PAYLOAD, column_names
from mopd_dataplane.prompts import render
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import Rows
from mopd_dataplane.score.model_input import Scorable
from mopd_dataplane.score.scorer import PromptRenderer


def stored_samples(run: Run, rows: Rows) -> Iterator[Scorable]:
    """Rows of `samples` as a teacher takes them."""
    metadata = run.store.take_samples(rows, ["uid", "prompt_id", "prompt_len", "temperature"])
    payload = run.store.read_tokens(rows, columns=column_names(PAYLOAD))
    for place, row in enumerate(rows.tolist()):
        logprobs = payload["logprobs"][place]
        yield Scorable(
            uid=metadata["uid"][place].as_py(),
            sample_row=row,
            prompt_id=metadata["prompt_id"][place].as_py(),
            prompt_len=metadata["prompt_len"][place].as_py(),
            tokens=_array(payload["tokens"][place]),
            loss_mask=_array(payload["loss_mask"][place]),
            versions=_token_versions(payload, place),
            logprobs=_array(logprobs) if logprobs.is_valid else None,
            temperature=metadata["temperature"][place].as_py(),
        )


def prompt_renderer(run: Run, teacher: str, samples: Sequence[Scorable]) -> PromptRenderer | None:
    """Renderer of the samples' prompts for a teacher; None where it reads them as the student does."""
    template = run.job.teachers[teacher].prompt_template
    if not template:
        return None
    wanted = {sample.prompt_id for sample in samples}
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts() if prompt.prompt_id in wanted}

    def as_the_teacher_reads_it(sample: Scorable) -> list[int]:
        prompt = prompts[sample.prompt_id]
        return render(prompt.asked, run.tokenizer, template=template, context=prompt.teacher_context)

    return as_the_teacher_reads_it


def _token_versions(payload: pa.Table, place: int) -> NDArray[np.int32]:
    """[R] policy version of each response token, from its spans."""
    starts, versions = _array(payload["version_starts"][place]), _array(payload["versions"][place])
    return np.repeat(versions, np.diff(starts, append=len(payload["loss_mask"][place])))


def _array(values: pa.ListScalar) -> NDArray[Any]:
    array: NDArray[Any] = values.values.to_numpy(zero_copy_only=True)
    return array
