"""The trainer's log-probs of what its own policy sampled, beside those of the engine that sampled it.

A real engine samples, its tokens and log-probs go to a real trainer. Faults are put into the engine behind its
self-check: that is what this comparison is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import decode, make_requests
from families import FAMILIES

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.self_check import BANDS
from mopd_dataplane.records import Pack, StepMetrics
from mopd_dataplane.rollout.engines.decoder import Decoder
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.sampler_gap import STOPS_AT, Gap, SamplerGap, gap_problem
from mopd_dataplane.train.spec import Sampling, Window
from mopd_dataplane.train.student import load_student

ALONE = Ranks(0, 1, torch.device("cpu"))
VERSION = 3
WINDOW = Window(window=3, plan_digest="p", snapshot_digest="s", steps=2, policy_version=VERSION)
NAMES = ("llama", "gpt-oss", "gemma3", "qwen3.5", "qwen3-moe")


def make_folder(name: str, folder: Path, *, seed: int = 3) -> Path:
    """Folder of a random model of a family of tests/families.py."""
    return make_student(StudentSettings(config=FAMILIES[name]), folder, seed=seed)


def sampled(
    folder: Path, dtype: str = "float32", *, spoil: Callable[[HfEngine], None] = lambda engine: None, **settings: Any
) -> list[Pack]:
    """What an engine samples, a pack for each answer; `spoil` changes the engine after its self-check."""
    engine = HfEngine(folder, slots=3, dtype=dtype)
    spoil(engine)
    requests = make_requests(6, longest=20, **settings)
    answers = decode(engine, requests)
    packs = []
    for index, request in enumerate(requests):
        tokens, logprobs, _ = answers[request.uid]
        prompt = request.prompt_ids.tolist()
        length = len(prompt) + len(tokens)
        packs.append(
            Pack(
                index=index, teacher="", tokens=np.array(prompt + tokens, np.int32),
                cu_seqlens=np.array([0, length], np.int32),
                loss_mask=np.array([0] * len(prompt) + [1] * len(tokens), np.uint8),
                sampler_logprobs=np.array([0.0] * len(prompt) + logprobs, np.float32),
                sample_rows=np.array([index]), version_starts=np.zeros(1, np.int32),
                versions=np.full(1, VERSION, np.int32), rewards=np.full(1, np.nan, np.float32),
                advantages=np.zeros(1, np.float32),
            )
        )  # fmt: skip
    return packs


def first_step(
    folder: Path, packs: list[Pack], batch: Callable[..., Any], dtype: str = "float32", *, is_first: bool = True,
    sampling: Sampling | None = None,
) -> StepMetrics:  # fmt: skip
    """The trainer's first step of a window on these packs."""
    trainer = Trainer(
        load_student(folder, ALONE, dtype=getattr(torch, dtype)),
        ObjectiveLoss(Objective(cross_entropy=CrossEntropyTerm())), Train(), ALONE,
        sampling=sampling or Sampling(engine="hf", dtype=dtype),
    )  # fmt: skip
    return trainer.step(batch(packs, window=3), WINDOW, 0, is_first=is_first)


def gap_of(metrics: StepMetrics) -> Gap:
    """The comparison in a step's metrics."""
    gap = Gap.of_metrics(metrics.extra)
    assert gap is not None
    return gap


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_healthy_models_are_within_the_band(name: str, dtype: str, tmp_path: Path, batch: Callable[..., Any]) -> None:
    folder = make_folder(name, tmp_path / "model")
    packs = sampled(folder, dtype)
    gap = gap_of(first_step(folder, packs, batch, dtype))
    assert gap.tokens == sum(int(pack.loss_mask.sum()) for pack in packs)
    assert gap.mean <= gap.p99
    assert gap_problem(gap, Sampling(engine="hf", dtype=dtype), stage="s", policy_version=VERSION, dtype=dtype) == ""
    if dtype == "float32":
        assert gap.mean < BANDS[torch.float32] / 10
        assert gap.outside == 0


def shift_positions(engine: HfEngine) -> None:
    """Decode every token one position further than it stands."""
    forward = Decoder.forward
    decoder = engine._decoders[0]
    decoder.forward = lambda last, columns: forward(decoder, last, columns + 1)


def weaken_head(engine: HfEngine) -> None:
    """Scale the logits by half a percent, as a wrong logit scale would."""
    engine._decoders[0]._logit_scale *= 1.005


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_shifted_position_stops_the_stage(name: str, tmp_path: Path, batch: Callable[..., Any]) -> None:
    folder = make_folder(name, tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(MismatchError) as error:
        first_step(folder, sampled(folder, spoil=shift_positions), batch)
    text = str(error.value)
    for part in ("policy version 3", "engine hf in float32", "a shifted position", "0.001 is allowed", "99th"):
        assert part in text
    assert text.endswith("Window 3 was not trained")
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_weights_stop_the_stage(dtype: str, tmp_path: Path, batch: Callable[..., Any]) -> None:
    stale, newer = (make_folder("llama", tmp_path / str(seed), seed=seed) for seed in (3, 4))
    with pytest.raises(MismatchError, match="weights of another version"):
        first_step(newer, sampled(stale, dtype), batch, dtype)


def test_a_small_fault_is_described_and_training_goes_on(tmp_path: Path, batch: Callable[..., Any]) -> None:
    folder = make_folder("llama", tmp_path / "model")
    sampling = Sampling(engine="hf", dtype="float32")
    gap = gap_of(first_step(folder, sampled(folder, spoil=weaken_head), batch))
    assert BANDS[torch.float32] < gap.mean < STOPS_AT * BANDS[torch.float32]
    assert 0 < gap.outside < 1
    text = gap_problem(gap, sampling, stage="student", policy_version=VERSION, dtype="float32")
    assert "attention or LM head" in text
    assert f"{gap.mean:.3g} nat in the mean over {gap.tokens} tokens" in text


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(engine="vllm", dtype="bfloat16"), 'set engine.dtype = "float32"'),
        (Sampling(engine="vllm", dtype="float32"), "compare with another engine.kind"),
        (Sampling(engine="vllm", dtype="float32", served=True), "engine.reload = true"),
        (Sampling(engine="hf", dtype="float32", routes=True), 'rollout.record = ["experts"]'),
    ],
)
def test_the_causes_that_a_setting_suggests_are_named(sampling: Sampling, named: str) -> None:
    text = gap_problem(Gap(0.5, 1.0, 0.9, 10), sampling, stage="s", policy_version=0, dtype="float32")
    assert named in text


def test_only_the_first_step_and_the_own_policys_tokens_are_compared(tmp_path: Path, batch: Callable[..., Any]) -> None:
    folder = make_folder("llama", tmp_path / "model")
    packs = sampled(folder)
    assert Gap.of_metrics(first_step(folder, packs, batch, is_first=False).extra) is None
    for pack in packs[1:]:
        pack.versions[:] = VERSION - 1
        pack.sampler_logprobs[:] = -50.0
    assert gap_of(first_step(folder, packs, batch)).tokens == int(packs[0].loss_mask.sum())
    packs[0].versions[:] = VERSION - 1
    assert Gap.of_metrics(first_step(folder, packs, batch).extra) is None


def test_figures_are_those_of_the_gaps() -> None:
    gaps = torch.logspace(-6, 0, 2000)
    sampler_gap = SamplerGap(1e-3, 0, torch.device("cpu"))
    for part in gaps.split(300):
        sampler_gap.add(part, torch.zeros(len(part)))
    figures = sampler_gap.over_ranks(ALONE)
    assert figures is not None
    assert figures.mean == pytest.approx(float(gaps.mean()), rel=1e-6)
    assert figures.p99 == pytest.approx(float(gaps.quantile(0.99)), rel=0.05)
    assert figures.outside == pytest.approx(0.5, abs=0.001)
    assert figures.tokens == 2000


def test_a_log_prob_that_is_no_number_is_outside_every_band() -> None:
    sampler_gap = SamplerGap(1e-3, 0, torch.device("cpu"))
    sampler_gap.add(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]))
    figures = sampler_gap.over_ranks(ALONE)
    assert figures is not None
    assert (figures.mean, figures.p99, figures.outside) == (math.inf, math.inf, 0.5)
