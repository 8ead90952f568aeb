"""Compares the trainer's log-probs of the tokens that its own policy sampled with the sampler's.

Sampler and trainer hold the same weights in the first step of a window, so both must give a sampled token the same
log-prob up to rounding. A larger difference is a fault: weights of another version, a shifted position, another
attention or LM head. It biases every ratio of the two policies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.models.self_check import SelfCheck, band_of
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import Sampling

STOPS_AT = 10
"""Multiple of the band above which the stage stops: no rounding explains such a gap, and ratios of the policies mean
nothing."""
MOST_TOKENS = 4096
"""Number of tokens of one forward pass that are compared: a mean and a 99th percentile need no more."""
SELF_CHECK = "self_check.json"
"""File with the result of the trainer's self-check, beside its checkpoints, for the job to store."""
_PREFIX = "sampler_gap_"
_SMALLEST, _LARGEST, _PER_DECADE = -9, 3, 50
"""Exponents of the histogram's ends in nat, and its bins for each factor of ten: a quantile is 5 % off at most."""


@dataclass(frozen=True)
class Gap:
    """Differences of log-probs |trainer - sampler| over the tokens of a step, in nat."""

    mean: float
    p99: float
    outside: float
    """Share of the tokens whose difference is larger than the band."""
    tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the figures by their names in StepMetrics.extra."""
        return {f"{_PREFIX}{name}": float(value) for name, value in asdict(self).items()}

    @classmethod
    def of_metrics(cls, extra: Mapping[str, float]) -> Gap | None:
        """Read the figures from StepMetrics.extra. Returns None if the step was not compared."""
        if f"{_PREFIX}mean" not in extra:
            return None
        mean, p99, outside = (extra[f"{_PREFIX}{name}"] for name in ("mean", "p99", "outside"))
        return cls(mean, p99, outside, int(extra[f"{_PREFIX}tokens"]))


def allowed_gap(sampling: Sampling, dtype: str) -> float:
    """Return the largest allowed mean difference, in nat: the wider band of the sampler's and the trainer's dtypes.

    The bands are those of the self-check: in both, two correct passes differ by rounding alone. Tiny models with wide
    weights differ by up to 4e-6 nat in float32 and 0.07 in bfloat16 (docs/models.md).
    """
    return max(band_of(sampling.dtype), band_of(dtype))


class SamplerGap:
    """Collects the differences of one step over its forward passes, with nothing copied to the host before the end."""

    def __init__(self, band: float, policy_version: int, device: torch.device) -> None:
        self._band = band
        self._policy_version = policy_version
        self._edges = torch.logspace(
            _SMALLEST, _LARGEST, (_LARGEST - _SMALLEST) * _PER_DECADE + 1, dtype=torch.float64, device=device
        )
        self._sums = torch.zeros(len(self._edges) + 4, dtype=torch.float64, device=device)
        """Sum of the differences, number of tokens outside the band, number of tokens, then the bins of the
        histogram."""

    def chosen(self, policy_versions: Tensor) -> Tensor:
        """Return the indices [n] int64 of the tokens [M] that this step's policy has sampled; at most MOST_TOKENS."""
        return (policy_versions == self._policy_version).nonzero()[:MOST_TOKENS, 0]

    def add(self, trainer: Tensor, sampler: Tensor) -> None:
        """Add log-probs [n] of the same tokens. A difference of NaN counts as infinite."""
        gaps = (trainer - sampler).abs().double().nan_to_num(nan=math.inf)
        bins = torch.bucketize(gaps, self._edges)
        self._sums[0] += gaps.sum()
        self._sums[1] += (gaps > self._band).sum()
        self._sums[2] += len(gaps)
        self._sums[3:] += torch.bincount(bins, minlength=len(self._edges) + 1)

    def over_ranks(self, ranks: Ranks) -> Gap | None:
        """Return the figures over all ranks, or None if this step's policy has sampled none of its tokens."""
        total, outside, tokens, *counts = ranks.sum(self._sums).cpu().tolist()
        if not tokens:
            return None
        reached, index = 0.0, 0
        while reached + counts[index] < 0.99 * tokens:
            reached += counts[index]
            index += 1
        edges = [*self._edges.tolist(), math.inf]
        return Gap(total / tokens, edges[index], outside / tokens, int(tokens))


def gap_problem(gap: Gap, sampling: Sampling, *, stage: str, policy_version: int, dtype: str) -> str:
    """Describe a difference above its band, with likely causes and the next step. Returns an empty string within the
    band."""
    band = allowed_gap(sampling, dtype)
    if gap.mean <= band:
        return ""
    causes = ["weights of another version", "a shifted position", "another attention or LM head"]
    fix = "compare with another engine.kind"
    if sampling.dtype != dtype:
        causes.insert(0, "the engine's own dtype")
        fix = f'set engine.dtype = "{dtype}"'
    if sampling.served:
        causes.insert(0, "a server that holds another policy")
        fix = "load the policy into the server (engine.reload = true)"
    if sampling.routes and not sampling.records_experts:
        causes.append("experts chosen otherwise")
        fix += ', or record them: rollout.record = ["experts"]'
    return (
        f"stage {stage!r}, policy version {policy_version}: the trainer's log-probs of its own samples differ from the "
        f"sampler's by {gap.mean:.3g} nat in the mean over {gap.tokens} tokens (99th percentile {gap.p99:.3g}, "
        f"{100 * gap.outside:.0f} % of the tokens by more than the band); {band:g} is allowed with engine "
        f"{sampling.engine} in {sampling.dtype} and a trainer in {dtype}. Likely causes: {', '.join(causes)}; {fix}"
    )


def write_self_check(folder: Path, passed: SelfCheck) -> None:
    """Write the result of the trainer's self-check for the job, which has the store."""
    folder.mkdir(parents=True, exist_ok=True)
    publish_file(folder / SELF_CHECK, json.dumps(asdict(passed)).encode())
