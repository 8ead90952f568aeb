"""Cuts a step into forward passes that fit the device.

Cuts lie between samples. Attention, normalisers and weights of a sample do not depend on its neighbours, and every loss
is divided by counts of the whole step, so the sum over passes is the loss of the step however it is cut.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mopd_dataplane import fields
from mopd_dataplane.records import Pack


class Piece(NamedTuple):
    """Neighbouring samples of one pack: `first` to `last` - 1 of pack `pack_index` of its batch."""

    pack_index: int
    first: int
    last: int


def cut_step(teachers: Sequence[str], lengths: Sequence[Sequence[int]], packs: int, tokens: int) -> list[list[Piece]]:
    """Cut a batch into forward passes, in the order of its packs.

    teachers: of each pack. lengths: tokens of each sample of each pack. A pass takes at most `packs` consecutive packs
    of one teacher and `tokens` tokens of them (0 is no bound); a longer sample is a pass of its own.
    """
    passes: list[list[Piece]] = []
    for _, run in groupby(range(len(teachers)), key=lambda index: teachers[index]):
        places = list(run)
        for start in range(0, len(places), packs):
            passes += _cut(places[start : start + packs], lengths, tokens)
    return passes


def _cut(places: Sequence[int], lengths: Sequence[Sequence[int]], tokens: int) -> list[list[Piece]]:
    passes: list[list[Piece]] = [[]]
    load = 0
    for index in places:
        first = 0
        for sample, length in enumerate(lengths[index]):
            if tokens and load and load + length > tokens:
                if sample > first:
                    passes[-1].append(Piece(index, first, sample))
                passes.append([])
                first, load = sample, 0
            load += length
        passes[-1].append(Piece(index, first, len(lengths[index])))
    return passes


def samples_of(pack: Pack, first: int, last: int) -> Pack:
    """Return samples first to last - 1 of a pack, as views of its arrays; the pack itself if these are all."""
    bounds = pack.cu_seqlens
    if (first, last) == (0, len(bounds) - 1):
        return pack
    start, stop = int(bounds[first]), int(bounds[last])
    before = int(pack.loss_mask[:start].sum())
    trained = slice(before, before + int(pack.loss_mask[start:stop].sum()))
    spans = slice(*np.searchsorted(np.asarray(pack.version_starts), (start, stop)).tolist())
    axes = {"token": slice(start, stop), "trained": trained, "sample": slice(first, last), "span": spans}
    views: dict[str, Any] = {}
    for field in fields.in_record(pack):
        array = fields.value(pack, field.pack)
        if array is None or field.axis == "bound":
            continue
        if field.axis == "ragged":
            sizes = fields.value(pack, fields.BY_NAME[field.sizes].pack)
            begin = int(sizes[: trained.start].sum())
            views[field.pack] = array[begin : begin + int(sizes[trained].sum())]
        else:
            views[field.pack] = array[axes[field.pack_axis]]
    views["version_starts"] = views["version_starts"] - start
    return replace(pack, cu_seqlens=bounds[first : last + 1] - start, **fields.arguments(Pack, views))
