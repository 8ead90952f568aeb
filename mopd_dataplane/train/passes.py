"""Which samples go through the model together: a step is cut into as many forward passes as the device needs.

Cuts lie between samples. Attention, normalisers and weights of a sample do not depend on its neighbours, and every loss
is divided by counts of the whole step, so the sum over passes is the loss of the step however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mopd_dataplane.records import Pack

_PER_TOKEN = ("tokens", "loss_mask", "sampler_logprobs", "experts", "teacher_logprobs", "reference_logprobs")
_PER_TRAINED_TOKEN = ("sampling_mask_sizes", "topk_ids", "topk_logprobs", "hidden")
_PER_SAMPLE = ("sample_rows", "rewards", "advantages")
_PER_SPAN = ("version_starts", "versions")


class Piece(NamedTuple):
    """Neighbouring samples of one pack."""

    place: int
    """The pack's place in its batch."""
    first: int
    last: int
    """Samples first to last - 1 of the pack."""


def cut_step(teachers: Sequence[str], lengths: Sequence[Sequence[int]], packs: int, tokens: int) -> list[list[Piece]]:
    """The forward passes of a batch, in the order of its packs.

    teachers: of each pack. lengths: tokens of each sample of each pack. A pass takes at most `packs` consecutive packs
    of one teacher and `tokens` tokens of them (0 is no bound); a longer sample is a pass of its own.
    """
    passes: list[list[Piece]] = []
    for _, run in groupby(range(len(teachers)), key=lambda place: teachers[place]):
        places = list(run)
        for start in range(0, len(places), packs):
            passes += _cut(places[start : start + packs], lengths, tokens)
    return passes


def _cut(places: Sequence[int], lengths: Sequence[Sequence[int]], tokens: int) -> list[list[Piece]]:
    passes: list[list[Piece]] = [[]]
    held = 0
    for place in places:
        first = 0
        for sample, length in enumerate(lengths[place]):
            if tokens and held and held + length > tokens:
                if sample > first:
                    passes[-1].append(Piece(place, first, sample))
                passes.append([])
                first, held = sample, 0
            held += length
        passes[-1].append(Piece(place, first, len(lengths[place])))
    return passes


def samples_of(pack: Pack, first: int, last: int) -> Pack:
    """Samples first to last - 1 of a pack, as views of its arrays; the pack itself when that is all of them."""
    bounds = pack.cu_seqlens
    if (first, last) == (0, len(bounds) - 1):
        return pack
    start, stop = int(bounds[first]), int(bounds[last])
    before = int(pack.loss_mask[:start].sum())
    trained = slice(before, before + int(pack.loss_mask[start:stop].sum()))
    axes = {
        **dict.fromkeys(_PER_TOKEN, slice(start, stop)),
        **dict.fromkeys(_PER_TRAINED_TOKEN, trained),
        **dict.fromkeys(_PER_SAMPLE, slice(first, last)),
        **dict.fromkeys(_PER_SPAN, slice(*np.searchsorted(np.asarray(pack.version_starts), (start, stop)).tolist())),
    }
    if pack.sampling_mask_sizes is not None:
        begin = int(pack.sampling_mask_sizes[: trained.start].sum())
        axes["sampling_mask_ids"] = slice(begin, begin + int(pack.sampling_mask_sizes[trained].sum()))
    arrays = {name: getattr(pack, name) for name in axes}
    views: dict[str, Any] = {name: None if array is None else array[axes[name]] for name, array in arrays.items()}
    views["version_starts"] = views["version_starts"] - start
    return replace(pack, cu_seqlens=bounds[first : last + 1] - start, **views)
