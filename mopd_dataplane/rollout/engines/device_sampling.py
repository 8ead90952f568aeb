"""`grouped-gumbel/1` on the device of the logits, which are never copied to the host.

Only small tensors are copied to the host: a sum for each group of the vocabulary, and the logits of the chosen group.
The host adds the noise from its usual generator while the device still computes the logits. The rules are those of
grouped_gumbel.py, so the token equals the one that the host would have drawn from these logits, but for the rounding of
the sums: float32, as between two shapes of a batch (decision 0012).

One pass over the logits computes the sums (mopd_kernels.group_masses), one their largest. A cut to the likeliest tokens
works on a copy of the rows that have one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from mopd_kernels import group_masses
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.rollout.engines import grouped_gumbel
from mopd_dataplane.rollout.engines.grouped_gumbel import group_noise, group_size, pick_group, pick_token
from mopd_dataplane.rollout.engines.philox import Words
from mopd_dataplane.rollout.engines.sampling import Distribution

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_LIKELIEST = 1024
"""Number of tokens in which the boundary of a cut is first searched; a row whose boundary is further is sorted
whole."""


def distribution_of(
    kind: type[Distribution], logits: Tensor, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats
) -> Distribution:
    """Build the distribution of logits [B, V], on their device if the sampler can; see sampling.Distribution.of."""
    if logits.device.type != "cpu" and kind is grouped_gumbel.Distribution:
        return DeviceDistribution.of(logits, temperature, top_k, top_p)
    return kind.of(logits.cpu().numpy(), temperature, top_k, top_p)


@dataclass(frozen=True, slots=True)
class DeviceDistribution:
    """See sampling.Distribution; its tensors are on the device of the logits."""

    logits: Tensor
    """[B, V]"""
    peak: Tensor
    """[B] largest logit"""
    scale: Tensor
    """[B] 1 / temperature"""
    log_masses: Tensor
    """[B, G] float64 log of the sum of exp((logits - peak) * scale) over the tokens of each group that the cut left"""
    floor: Tensor
    """[B] lowest (logits - peak) * scale inside the cut; -inf without one"""
    last: Tensor
    """[B] highest id among the tokens whose score equals the floor and that are inside; -1 without a cut"""

    @classmethod
    def of(cls, logits: Tensor, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats) -> DeviceDistribution:
        rows, vocab = logits.shape
        device, size = logits.device, group_size(vocab)
        scale = torch.from_numpy((1 / np.where(temperature > 0, temperature, 1.0)).astype(np.float32)).to(device)
        top_k = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
        tops, masses = group_masses(logits, scale, size)
        peak = tops.amax(1)
        log_masses = _log_masses(tops, masses, peak, scale)
        floor = torch.full((rows,), -torch.inf, device=device)
        last = torch.full((rows,), -1, dtype=torch.int64, device=device)
        cut = np.flatnonzero((top_k < vocab) | (top_p < 1))
        if len(cut):
            at = torch.from_numpy(cut).to(device)
            scores = (logits[at] - peak[at, None]) * scale[at, None]
            k, p = torch.from_numpy(top_k[cut]).to(device), torch.from_numpy(top_p[cut]).to(device)
            floor[at], last[at] = _floors(scores, log_masses[at].exp().sum(1), k, p)
            scores.masked_fill_(~_inside(scores, _ids(vocab, device), floor[at], last[at]), -torch.inf)
            ones = torch.ones_like(scale[at])
            log_masses[at] = _log_masses(*group_masses(scores, ones, size), torch.zeros_like(ones), ones)
        return cls(logits, peak, scale, log_masses, floor, last)

    def mixed(self, other: DeviceDistribution, *, share: float) -> DeviceDistribution:
        parts = (self._log_q() + float(np.log1p(-share)), other._log_q() + float(np.log(share)))
        rows = len(self.logits)
        return DeviceDistribution.of(torch.logaddexp(*parts), np.ones(rows), np.zeros(rows, np.int64), np.ones(rows))

    def log_q(self) -> Floats:
        return self._log_q().double().cpu().numpy()

    def logprobs(self, tokens: NDArray[np.integer]) -> Singles:
        ids = torch.from_numpy(tokens.astype(np.int64))[:, None].to(self.logits.device)
        scores = self._scores(ids)
        own = torch.where(_inside(scores, ids, self.floor, self.last), scores - self._log_total()[:, None], -torch.inf)
        return own[:, 0].clamp(max=0.0).float().cpu().numpy()

    def kept(self) -> NDArray[np.bool_]:
        return (self._log_q() > -torch.inf).cpu().numpy()

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        vocab = self.logits.shape[1]
        noise = group_noise(keys, positions, vocab)  # before waiting for the device, which is still at work
        group = pick_group(self.log_masses.cpu().numpy(), noise)
        ids = torch.from_numpy(group[:, None] * group_size(vocab) + np.arange(group_size(vocab)))
        ids = ids.to(self.logits.device)
        scores = self._scores(ids.clamp(max=vocab - 1))
        inside = _inside(scores, ids, self.floor, self.last) & (ids < vocab)
        tokens = pick_token(group, torch.where(inside, scores, -torch.inf).cpu().numpy(), noise)
        greedy = np.flatnonzero(temperature == 0)
        if len(greedy):
            tokens[greedy] = self.logits[torch.from_numpy(greedy).to(self.logits.device)].argmax(1).cpu().numpy()
        return tokens

    def _log_q(self) -> Tensor:
        """Compute the log-probs: [B, V] float32."""
        scores = (self.logits - self.peak[:, None]) * self.scale[:, None]
        inside = _inside(scores, _ids(scores.shape[1], scores.device), self.floor, self.last)
        return torch.where(inside, scores - self._log_total()[:, None].float(), -torch.inf)

    def _scores(self, ids: Tensor) -> Tensor:
        """Compute the scores of ids [B, n]: [B, n]."""
        return (self.logits.gather(1, ids) - self.peak[:, None]) * self.scale[:, None]

    def _log_total(self) -> Tensor:
        return self.log_masses.logsumexp(1)


def _ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device)[None]


def _log_masses(tops: Tensor, masses: Tensor, peak: Tensor, scale: Tensor) -> Tensor:
    """Compute [B, G] float64 log masses from the results of group_masses."""
    shift = torch.where(tops == -torch.inf, 0.0, (tops - peak[:, None]) * scale[:, None])
    return shift.double() + masses.double().log()


def _inside(scores: Tensor, ids: Tensor, floor: Tensor, last: Tensor) -> Tensor:
    """Return whether the cut left the tokens with these scores [B, n] and ids: [B, n] bool."""
    return (scores > floor[:, None]) | ((scores == floor[:, None]) & (ids <= last[:, None]))


def _floors(scores: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Compute floor and last id [n] of rows with a cut. See nucleus.floor_of.

    scores: [n, V]. total: [n] sums of exp(scores).
    """
    vocab = scores.shape[1]
    floor, spare, done = _boundary(scores, min(_LIKELIEST, vocab), total, top_k, top_p)
    if vocab > _LIKELIEST and not bool(done.all()):
        floor, spare, _ = _boundary(scores, vocab, total, top_k, top_p)
    tied = scores == floor[:, None]
    last_ties = tied & (tied.cumsum(1) == spare[:, None])
    return floor, last_ties.int().argmax(1)


def _boundary(scores: Tensor, count: int, total: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lowest score inside the cut, how many tokens with that score are inside, and whether the `count`
    likeliest tokens were enough to tell."""
    values = scores.topk(count, dim=1).values
    ranked = torch.arange(count, device=scores.device)[None] < top_k[:, None]
    probabilities = torch.where(ranked, values.double().exp(), 0.0)
    summed = probabilities.cumsum(1)
    uncut = top_k == scores.shape[1]
    goal = top_p * torch.where(uncut, total, summed[:, -1])
    within = ranked & ((summed - probabilities < goal[:, None]) | (top_p >= 1)[:, None])
    floor = values.gather(1, (within.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
    spare = (within & (values == floor[:, None])).sum(1)
    return floor, spare, torch.where(uncut, summed[:, -1] >= goal, top_k <= count)
