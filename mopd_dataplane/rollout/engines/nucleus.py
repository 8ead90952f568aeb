"""Thresholds of top-k and top-p cuts, without sorting the vocabulary.

The tokens that are kept are those above a *floor*, and of the tokens that score the floor itself those with the lowest
ids. The floor is found by selection: what is certainly inside or certainly outside is set aside before anything is
sorted, so that the cost is a pass over the scores and little more, and two or three where they are nearly flat.
"""

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

_DEPTH = -8.0
"""Where the boundary of a nucleus is first looked for, in nat below the likeliest token: mostly little is above it."""
_FEW = 512
"""Candidates that are sorted rather than cut again, and size of the sample that says where to cut."""
_MARGIN = 24
"""Places in the sample between where the boundary seems to be and the cuts around it, about the root of its size."""
_ROUNDS = 4
"""Most times that a sample is taken; tied scores cannot be told apart by any number of cuts."""


def floor_of(scores: Singles, tops: Singles, total: float, top_k: int, top_p: float) -> tuple[np.float32, int]:
    """The lowest score that is kept, and the highest id that is kept with just that score.

    scores: [V] float32, the largest is 0. tops: largest scores of parts of the row. total: sum of exp(scores), which a
    row without a top k measures its nucleus by. The nucleus is the smallest set of likeliest tokens of the top k whose
    probability reaches top_p; equal scores keep the lower id.
    """
    if np.isnan(total):  # logits that are not finite, which an engine refuses behind the draw
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
    """[k] the k largest scores, in any order."""
    near = scores
    if k <= len(tops):  # k parts have a score as large as this one, so the k-th largest is no smaller
        near = scores[scores >= np.partition(tops, -k)[-k]]
    return np.partition(near, -k)[-k:]


def _boundary(candidates: Singles, goal: float) -> tuple[np.float32, int]:
    """The lowest score inside the nucleus, and how many tokens with just that score are inside."""
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
                break  # what is below the next pivot is outside already
            if len(above) < len(candidates):
                candidates, before = candidates[~upper], reached
        pivots = _around(candidates, goal - before)
    ordered = np.sort(candidates)[::-1]
    probabilities = np.exp(ordered.astype(np.float64))
    inside = before + np.cumsum(probabilities) - probabilities < goal
    floor = ordered[max(1, int(np.count_nonzero(inside))) - 1]
    return floor, int(np.count_nonzero(inside & (ordered == floor)))


def _around(candidates: Singles, goal: float) -> tuple[np.float32, ...]:
    """Two scores between which a sample of the candidates puts the boundary, the higher one first."""
    every = max(1, len(candidates) // _FEW)
    sample = np.sort(candidates[::every])[::-1]
    index = int(np.searchsorted(np.cumsum(np.exp(sample.astype(np.float64))) * every, goal))
    return sample[max(0, index - _MARGIN)], sample[min(len(sample) - 1, index + _MARGIN)]
