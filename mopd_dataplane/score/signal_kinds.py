"""The kinds of signals, and how each follows from a teacher's hidden states.

Another package offers one as an entry point of `mopd.signals`, or it is named `package.module:Name` in `score.signals`:
a class derived from TokenSignal, one number for each trained token. Its payload has one shape, so that a store, a
loader and a trainer read it without the package; a payload of another shape needs rows of its own in fields.py.

Axes: M loss-masked response tokens of a sample, N of a batch, R response tokens, D hidden width, V vocabulary, K top-k.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mopd_kernels import Head, chosen_logprobs, encode, token_logprob, topk_logprobs
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.base.stats_choice import keeps_stats
from mopd_dataplane.errors import EngineError, MismatchError, UnknownNameError
from mopd_dataplane.fields import plugin_field
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.records import Signal
from mopd_dataplane.score.readers import HfReader, ModelInput, Scorable
from mopd_dataplane.score.vllm_logprobs import SequenceLogprobs


class StudentTopk:
    """The likeliest tokens of the policy that wrote a sample, for which a teacher's log-probs are stored.

    folder(version): returns the weights of a version of the stage's policy; one is in memory at a time.
    """

    def __init__(self, folder: Callable[[int], Path], *, dtype: str = "float32", device: str = "cpu") -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._version = -1
        self._reader: HfReader | None = None

    def ids(self, samples: Sequence[Scorable], k: int) -> Tensor:
        """Compute the k likeliest tokens: [sum of M loss-masked tokens, k] int64 on the policy's device, likeliest
        first.

        k is at most the vocabulary. Raises UnknownNameError when the weights of a version are missing.
        """
        written_by = [sample.versions[sample.loss_mask.astype(bool)] for sample in samples]
        every = np.concatenate(written_by)
        parts: list[tuple[NDArray[np.int64], Tensor]] = []
        for version in np.unique(every).tolist():
            reader = self._load(version)
            head = reader.head
            chosen = [(sample, by == version) for sample, by in zip(samples, written_by, strict=True)]
            chosen = [(sample, mine) for sample, mine in chosen if mine.any()]
            states = reader.predicting_states(
                [sample.tokens.astype(np.int64) for sample, _ in chosen],
                [np.flatnonzero(sample.loss_mask)[mine] + sample.prompt_len for sample, mine in chosen],
            )
            top_ids, _ = topk_logprobs(states, head, min(k, len(head.weight)))
            parts.append((np.flatnonzero(every == version), top_ids))
        if not parts:
            return torch.zeros(0, k, dtype=torch.int64, device=self._device)
        ids = parts[0][1].new_zeros(len(every), parts[0][1].shape[1])
        for places, top_ids in parts:
            ids[torch.from_numpy(places).to(ids.device)] = top_ids
        return ids

    def _load(self, version: int) -> HfReader:
        if self._reader is None or self._version != version:
            self._reader = None
            self._reader = HfReader(hf.load_model(self._folder(version), dtype=self._dtype, device=self._device))
            self._version = version
        return self._reader


@dataclass(frozen=True)
class TeacherOutput:
    """The states of a batch, computed by a teacher. Example: see score_samples."""

    items: list[ModelInput]
    teacher: str
    states: Tensor
    """[N, D] last hidden states that predict the loss-masked tokens, sample after sample."""
    head: Head
    temperature: float
    """Temperature of the sampler, at which log-probs are computed."""
    settings: sections.Score
    student: StudentTopk | None = None

    @cached_property
    def targets(self) -> Tensor:
        """[N] the loss-masked tokens."""
        tokens = np.concatenate([item.tokens[item.loss_positions] for item in self.items])
        return torch.from_numpy(tokens).to(self.states.device)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split values [N] or [N, width] into the rows of each sample, on the CPU."""
        return torch.split(values.cpu(), [len(item.loss_positions) for item in self.items])


class SignalKind(ABC):
    """A kind of signal, created with the name under which it is stored. Its attributes are its capabilities."""

    follows_from_logprobs: bool = False
    """True if `from_logprobs` computes it, so that a teacher that gives log-probs only can be used."""
    ranked: bool = False
    """True if it needs the top-k: the likeliest tokens of the vocabulary at each position."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        """Yield one Signal for each sample of the batch, in order. Raises EngineError for NaN or infinity."""

    def from_logprobs(self, item: ModelInput, result: SequenceLogprobs) -> Signal:
        """Build a sample's signal from log-probs of its M trained tokens, and of the K likeliest (K is 0 if not
        `ranked`)."""
        raise NotImplementedError(self.name)


class TokenSignal(SignalKind):
    """One number for each trained token: the kind of signal that another package can add."""

    @abstractmethod
    def values(self, states: Tensor, head: Head, targets: Tensor, *, temperature: float) -> Tensor:
        """Compute one finite number per row, [N], from that row only.

        states [N, D]: last hidden states of the teacher that predict the tokens. head: the teacher's; `head.weight` is
        [V, D]. targets [N]: the tokens. temperature: of the sampler. Called without gradients. N varies from call to
        call, and N times V numbers may not fit in memory: work in parts, as mopd_kernels does.
        """

    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        with torch.no_grad():
            signals = self.values(output.states, output.head, output.targets, temperature=output.temperature)
        if signals.shape != output.targets.shape:
            raise MismatchError(
                f"signal {self.name!r}: values have shape {list(signals.shape)}, expected "
                f"{list(output.targets.shape)}, one for each trained token"
            )
        check_finite(output.teacher, output.items, signals, f"signal {self.name!r} of ")
        for item, values in zip(output.items, output.split(signals.float()), strict=True):
            yield _signal(item, self.name, extra={self.name: _at_responses(item, values.numpy())})


class Logprob(SignalKind):
    """The teacher's log-prob of each sampled token."""

    follows_from_logprobs = True

    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        with torch.no_grad():
            logprobs, entropy = token_logprob(
                output.states, output.head, output.targets, temperature=output.temperature, return_entropy=True
            )
        check_finite(output.teacher, output.items, logprobs)
        choices = self._first_choices(output)
        for item, values, entropies, own in zip(
            output.items, output.split(logprobs), output.split(entropy), choices, strict=True
        ):
            yield _logprob_signal(item, values.numpy(), teacher_entropy=entropies.numpy(), is_first_choice=own)

    def _first_choices(self, output: TeacherOutput) -> list[NDArray[np.bool_] | None]:
        """[M] for each sample that keeps statistics: whether the teacher's likeliest token is the one written."""
        is_kept = keeps_stats(output.settings.stats, [item.sample.sample_row for item in output.items])
        lengths = [len(item.loss_positions) for item in output.items]
        rows = torch.from_numpy(np.flatnonzero(np.repeat(is_kept, lengths))).to(output.states.device)
        ids, _ = topk_logprobs(output.states[rows], output.head, 1)
        parts = iter(torch.split((ids[:, 0] == output.targets[rows]).cpu(), np.array(lengths)[is_kept].tolist()))
        return [next(parts).numpy() if keep else None for keep in is_kept]

    def from_logprobs(self, item: ModelInput, result: SequenceLogprobs) -> Signal:
        has_teachers_choice = result.topk_source == "teacher" and result.ids.shape[1] > 0
        is_first_choice = result.ids[:, 0] == item.tokens[item.loss_positions] if has_teachers_choice else None
        return _logprob_signal(item, result.token_logprobs, is_first_choice=is_first_choice)


class Topk(SignalKind):
    """The teacher's log-probs of the K likeliest tokens, its own or the student's."""

    follows_from_logprobs = True
    ranked = True

    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        ids, logprobs = self._rows(output)
        for item, own_ids, own in zip(output.items, output.split(ids), output.split(logprobs), strict=True):
            yield _signal(
                item, self.name, topk_ids=own_ids.to(torch.int32).numpy().copy(), topk_logprobs=own.numpy().copy(),
                topk_source=output.settings.topk_source,
            )  # fmt: skip

    def from_logprobs(self, item: ModelInput, result: SequenceLogprobs) -> Signal:
        return _signal(
            item, self.name, topk_ids=result.ids, topk_logprobs=result.logprobs, topk_source=result.topk_source
        )

    def _rows(self, output: TeacherOutput) -> tuple[Tensor, Tensor]:
        """Return ids and teacher log-probs [N, K] of the teacher's or the student's likeliest tokens."""
        states, head, settings = output.states, output.head, output.settings
        if settings.topk_source == "teacher":
            return topk_logprobs(states, head, min(settings.topk, len(head.weight)))
        ids = students_topk(output.student, output.items, settings.topk).to(states.device)
        return ids, chosen_logprobs(states, head, ids)[0]


class Hidden(SignalKind):
    """The teacher's hidden states, from which its whole distribution follows."""

    def signals(self, output: TeacherOutput) -> Iterator[Signal]:
        codec = output.settings.hidden_codec
        for item, rows in zip(output.items, output.split(encode(output.states, codec)), strict=True):
            yield _signal(item, self.name, codec=codec, hidden=rows.numpy().copy())


SIGNALS: dict[str, type[SignalKind]] = {"logprob": Logprob, "topk": Topk, "hidden": Hidden}
"""Built-in kinds, by the name under which they are stored."""


def signal_kind(name: str, named: Mapping[str, str]) -> SignalKind:
    """Return the kind that is stored as `name`: built in, else from `named` (`score.signals`), else an entry point.

    Raises UnknownNameError for an unknown name, and for a name that no kind may have.
    """
    if name in SIGNALS:
        return SIGNALS[name](name)
    plugin: Any = find_plugin("mopd.signals", named.get(name, name), SIGNALS)
    plugin_field(name)
    if not (isinstance(plugin, type) and issubclass(plugin, TokenSignal)):
        raise UnknownNameError(f"signal {name!r} is no class derived from {__name__}.TokenSignal")
    return plugin(name)


def students_topk(student: StudentTopk | None, items: Sequence[ModelInput], k: int) -> Tensor:
    """Compute the student's k likeliest tokens at the trained tokens of a batch, see StudentTopk.ids.

    Raises MismatchError without a student.
    """
    if student is None:
        raise MismatchError('topk_source = "student" needs the policy that wrote the samples; pass `student`')
    return student.ids([item.sample for item in items], k)


def check_finite(teacher: str, items: list[ModelInput], values: Tensor, what: str = "") -> None:
    """Check that values [N] or [N, D] are finite. Raises EngineError naming teacher and sample."""
    if not len(values):
        return
    finite = torch.isfinite(values).reshape(len(values), -1).all(1).cpu()
    for item, good in zip(items, torch.split(finite, [len(item.loss_positions) for item in items]), strict=True):
        if not bool(good.all()):
            position = int((~good).nonzero()[0])
            raise EngineError(
                f"{what}teacher {teacher!r} answered with NaN or infinity for sample {item.sample.uid} "
                f"(trained token {position} of {len(good)}); nothing of this batch was written: "
                "check the teacher's weights and dtype"
            )


def _logprob_signal(
    item: ModelInput,
    values: NDArray[np.float32],
    *,
    teacher_entropy: NDArray[np.float32] | None = None,
    is_first_choice: NDArray[np.bool_] | None = None,
) -> Signal:
    sample = item.sample
    mask = sample.loss_mask.astype(bool)
    reverse_kl = None
    if sample.logprobs is not None and mask.any():
        reverse_kl = float(np.mean(sample.logprobs[mask].astype(np.float64) - values))
    return _signal(
        item, "logprob", logprob=_at_responses(item, values), mean_reverse_kl=reverse_kl,
        teacher_entropy=teacher_entropy, is_first_choice=is_first_choice,
        logprob_std=float(np.std(values, dtype=np.float64)) if len(values) else None,
    )  # fmt: skip


def _at_responses(item: ModelInput, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scatter the values [M] of loss-masked tokens to response tokens: [R], 0 elsewhere."""
    mask = item.sample.loss_mask.astype(bool)
    whole = np.zeros(len(mask), dtype=np.float32)
    whole[mask] = values
    return whole


def _signal(item: ModelInput, kind: str, **payload: object) -> Signal:
    return Signal(uid=item.sample.uid, sample_row=item.sample.sample_row, kind=kind, **payload)  # type: ignore[arg-type]
