"""The data of a job: prompts of its domains, and reference answers as samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mopd_dataplane.errors import PromptError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.prompts import load_prompts, render
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.store.dataset import Store

if TYPE_CHECKING:
    from mopd_dataplane.run.context import Run

REFERENCE_BATCH = 4096
"""Reference samples committed together."""


def ensure_prompts(job: Job, store: Store, loaded: Mapping[str, list[Prompt]]) -> None:
    """Write the prompts of every domain once; a domain already in the store is left as it is.

    loaded: prompts of domains whose source was read already.
    Raises PromptError when a source is empty or too small.
    """
    for name, domain in job.domains.items():
        if domain.source == "store":
            continue
        own = f"domain = '{name}' AND split != 'import'"
        stored = store.table("prompts", columns=["prompt_id"], filter=own).num_rows
        if stored == 0:
            store.add_prompts(loaded[name] if name in loaded else load_prompts(name, domain))
        elif stored != domain.train + domain.eval + domain.tune:
            raise PromptError(
                f"domain {name!r}: the store at {store.uri} holds {stored} prompts, the job asks for "
                f"{domain.train} train + {domain.eval} eval + {domain.tune} tune; prompts are fixed once a store "
                "exists: use another store"
            )


def store_reference(run: Run, stage: Stage, prompts: Sequence[Prompt] | None = None, *, iteration: int = 0) -> None:
    """Commit the reference samples of a stage, or of some prompts of an iteration; what is stored stays as it is."""
    if prompts is None:
        prompts = run.store.prompts(split="train", domains=run.job.domains_of(stage))
    samples = list(_reference_samples(run, stage, prompts, iteration))
    with run.progress.step(stage.name, "data", total=len(samples), unit="samples") as (advance, report):
        for start in range(0, len(samples), REFERENCE_BATCH):
            run.store.commit_samples(samples[start : start + REFERENCE_BATCH])
            advance(start)
        report.facts = {"samples": f"{len(samples):,}", "tokens": f"{sum(len(s.tokens) for s in samples):,}"}


def _reference_samples(run: Run, stage: Stage, prompts: Sequence[Prompt], iteration: int) -> Iterator[Sample]:
    """Reference answers as off-policy samples: prompt tokens, answer tokens, end-of-sequence; no sampler log-probs.

    iteration: the iteration they belong to, which also is the policy version they count as.
    """
    job, tokenizer = run.job, run.tokenizer
    if tokenizer.eos_token_id is None:
        raise PromptError(
            f"stage {stage.name!r}: the student's tokenizer has no end-of-sequence token, with which an answer "
            "ends; set eos_token in its tokenizer_config.json"
        )
    per_domain = -(-stage.examples // len(job.domains_of(stage))) if stage.examples else 0
    taken: dict[str, int] = {}
    for ordinal, prompt in enumerate(prompts):
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if per_domain and taken[prompt.domain] > per_domain:
            continue
        prompt_ids = render(prompt.asked, tokenizer, template=job.student.prompt_template)
        answer = tokenizer.encode(prompt.answer, add_special_tokens=False)
        response = [*answer, tokenizer.eos_token_id]
        yield Sample(
            uid=sample_uid(job.seed, stage.name, prompt.prompt_id, 0, iteration),
            prompt_id=prompt.prompt_id,
            group_id=f"{prompt.prompt_id}#{iteration}",
            group_index=0,
            iteration=iteration,
            domain=prompt.domain,
            effort=prompt.effort,
            stage=stage.name,
            writer="reference",
            writer_seq=ordinal,
            policy="reference",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            prompt_len=len(prompt_ids),
            tokens=np.array(prompt_ids + response, np.int32),
            logprobs=None,
            loss_mask=np.ones(len(response), np.uint8),
            version_starts=np.zeros(1, np.int32),
            versions=np.full(1, iteration, np.int32),
            finish_reason="reference",
            tokenizer=run.tokenizer_digest,
        )
