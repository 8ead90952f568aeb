"""Thresholds of top-k and top-p cuts, without sorting the vocabulary.

The tokens inside a cut are those above a *floor*, and of the tokens whose score equals the floor those with the lowest
ids. The floor is found by selection: scores that are certainly inside or certainly outside are set aside before
anything is sorted. So the cost is little more than a pass over the scores, or two to three where they are nearly flat.
"""

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

_DEPTH = -8.0
"""Depth at which the boundary of a nucleus is first searched, in nat below the likeliest token: few tokens are
above."""
_FEW = 512
"""Number of candidates that are sorted instead of cut again, and size of the sample that selects the cut."""
_MARGIN = 24
"""Distance in the sample between the estimated boundary and the cuts around it, about the root of the sample's size."""
_ROUNDS = 4
"""Upper bound of the number of samples taken; no number of cuts separates tied scores."""


def floor_of(scores: Singles, tops: Singles, total: float, top_k: int, top_p: float) -> tuple[np.float32, int]:
    """Return the lowest score inside the cut, and the highest id inside among the tokens with that score.

    scores: [V] float32, the largest is 0. tops: largest scores of parts of the row. total: sum of exp(scores), by which
    a row without a top k measures its nucleus. The nucleus is the smallest set of likeliest tokens of the top k whose
    probability reaches top_p; of equal scores the lower ids are inside.
    """
    if np.isnan(total):  # non-finite logits, which an engine refuses after the draw
        return np.float32(-np.inf), -1
    candidates = scores
    if top_k < len(scores):
        candidates = _largest(scores, tops, top_k)
        total = float(np.exp(candidates.astype(np.float64)).sum())
    if top_p < 1:
        floor, spare = _boundary(candidates, top_p * total)
    else:
        floor = candidates.min()
        spare = int(np.count_nonzero(candidates == floor))
    return floor, int(np.flatnonzero(scores == floor)[spare - 1])


def _largest(scores: Singles, tops: Singles, k: int) -> Singles:
    """Return the k largest scores in any order: [k]."""
    near = scores
    if k <= len(tops):  # k parts have such a score, so the k-th largest is no smaller
        near = scores[scores >= np.partition(tops, -k)[-k]]
    return np.partition(near, -k)[-k:]


def _boundary(candidates: Singles, goal: float) -> tuple[np.float32, int]:
    """Return the lowest score inside the nucleus, and how many tokens with that score are inside."""
    before = 0.0
    pivots: tuple[np.float32, ...] = (np.float32(_DEPTH),)
    for _ in range(_ROUNDS):
        if len(candidates) <= _FEW:
            break
        for pivot in pivots:
            upper = candidates >= pivot
            above = candidates[upper]
            reached = before + float(np.exp(above.astype(np.float64)).sum())
            if reached >= goal:
                candidates = above
                break  # everything below the next pivot is outside already
            if len(above) < len(candidates):
                candidates, before = candidates[~upper], reached
        pivots = _around(candidates, goal - before)
    ordered = np.sort(candidates)[::-1]
    probabilities = np.exp(ordered.astype(np.float64))
    inside = before + np.cumsum(probabilities) - probabilities < goal
    floor = ordered[max(1, int(np.count_nonzero(inside))) - 1]
    return floor, int(np.count_nonzero(inside & (ordered == floor)))


def _around(candidates: Singles, goal: float) -> tuple[np.float32, ...]:
    """Return two scores around the boundary as estimated from a sample of the candidates, the higher one first."""
    every = max(1, len(candidates) // _FEW)
    sample = np.sort(candidates[::every])[::-1]
    index = int(np.searchsorted(np.cumsum(np.exp(sample.astype(np.float64))) * every, goal))
    return sample[max(0, index - _MARGIN)], sample[min(len(sample) - 1, index + _MARGIN)]
