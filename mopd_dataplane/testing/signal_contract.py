"""Contract of a kind of signal (score/signal_kinds.py) with scoring, store and trainer, checked on random states."""

import numpy as np
import torch
from mopd_kernels.heads import Head
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.errors import MopdError
from mopd_dataplane.fields import of_signal, value
from mopd_dataplane.job import sections
from mopd_dataplane.records import Signal
from mopd_dataplane.score.readers import ModelInput, Scorable
from mopd_dataplane.score.signal_kinds import SignalKind, TeacherOutput

VOCABULARY, WIDTH = 37, 8
MASKS = ((1, 1, 0, 1, 1), (0, 1, 1), (1,))
"""Loss masks of the samples."""
TOLERANCE = 1e-5
"""Largest difference between a sample scored alone and beside others: sums over a vocabulary of 37 in float32."""


def check_signal(kind: SignalKind) -> None:
    """Compute a kind of signal for random samples, and raise AssertionError for what could not be stored or trained on.

    Example: check_signal(Margin("margin")).
    """
    try:
        fields = of_signal(kind.name)
    except MopdError as error:
        raise AssertionError(str(error)) from None
    items = [_item(number, mask) for number, mask in enumerate(MASKS)]
    count = sum(len(item.loss_positions) for item in items)
    states = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))
    head = Head(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(4)))
    for temperature in (1.0, 0.7):
        together = _signals(kind, items, states, head, temperature)
        apart = [
            signal
            for item, own in zip(items, torch.split(states, [len(item.loss_positions) for item in items]), strict=True)
            for signal in _signals(kind, [item], own, head, temperature)
        ]
        for item, signal, alone in zip(items, together, apart, strict=True):
            for field in fields:
                array = _array(signal, field.name)
                rows = len(item.sample.loss_mask) if field.axis == "response" else len(item.loss_positions)
                where = f"{field.name} of sample {item.sample.uid}"
                assert len(array) == rows, f"{where} has {len(array)} rows, expected {rows}"
                if field.is_float:
                    assert np.isfinite(array).all(), f"{where} holds NaN or infinity"
                    silent = np.flatnonzero(np.equal(item.sample.loss_mask, 0))
                    assert field.axis != "response" or not array[silent].any(), f"{where} is not 0 where loss_mask is 0"
                gap = np.abs(array.astype(np.float64) - _array(alone, field.name)).max(initial=0)
                assert gap <= TOLERANCE, f"{where} changes by {gap:g} with the samples beside it"


def _signals(kind: SignalKind, items: list[ModelInput], states: Tensor, head: Head, temperature: float) -> list[Signal]:
    before = states.clone()
    signals = list(kind.signals(TeacherOutput(items, "teacher", states, head, temperature, sections.Score(topk=4))))
    assert torch.equal(states, before), "the teacher's states were changed; other kinds read them too"
    uids = [item.sample.uid for item in items]
    assert [signal.uid for signal in signals] == uids, f"signals of {[s.uid for s in signals]}, expected {uids}"
    for signal in signals:
        assert signal.kind == kind.name, f"the signal is of kind {signal.kind!r}, expected {kind.name!r}"
    return signals


def _array(signal: Signal, name: str) -> NDArray[np.float32]:
    value_of_name = value(signal, name)
    assert value_of_name is not None, f"{name} of sample {signal.uid} is missing"
    return np.asarray(value_of_name)


def _item(number: int, mask: tuple[int, ...]) -> ModelInput:
    draw = np.random.default_rng(number)
    tokens = draw.integers(0, VOCABULARY, 2 + len(mask))
    sample = Scorable(
        uid=f"s{number}", sample_row=number, prompt_id="p", prompt_len=2, tokens=tokens.astype(np.int32),
        loss_mask=np.array(mask, np.uint8), logprobs=-draw.gamma(2.0, 0.5, len(mask)).astype(np.float32),
    )  # fmt: skip
    return ModelInput(sample, tokens, np.flatnonzero(mask) + 2)
