"""One optimizer step: gradients of the declared objective over a batch of packs, an update, and its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.learning_rate import learning_rate
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import Batch, StepMetrics
from mopd_dataplane.train.context import part_of
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.metrics import PADDING
from mopd_dataplane.train.microbatch import DeviceCopies, MicroBatch, build
from mopd_dataplane.train.objective import ObjectiveLoss, TermSums, Totals
from mopd_dataplane.train.optimizer import clip_gradients, make_optimizer
from mopd_dataplane.train.passes import cut_step, samples_of
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.sampler_gap import STOPS_AT, SamplerGap, allowed_gap, gap_problem
from mopd_dataplane.train.spec import Sampling, Window
from mopd_dataplane.train.spikes import REWOUND, SKIPPED, SpikeError, Spikes
from mopd_dataplane.train.student import Student
from mopd_dataplane.train.token_stats import Picked, StatsOfSteps


class BatchSource(Protocol):
    """A source of batches: the loader's client, or another class with its interface."""

    def batches(self, stage: str, window: int, start_step: int) -> Iterator[Batch]:
        """Yield the batches of a window from step `start_step` of the window on."""

    def plan(self, stage: str, window: int) -> dict[str, Any]:
        """Return {"steps", "plan_digest", "snapshot_digest"} of a window, waiting until it is planned; 0 steps close
        the log."""


@dataclass
class Trainer:
    """A student, its optimizer and its objective."""

    student: Student
    objective: ObjectiveLoss
    settings: Train
    ranks: Ranks
    heads: TeacherHeads | None = None
    teachers: Sequence[str] = ()
    total_steps: int = 0
    seed: int = 0
    proximal: Student | None = None
    """The policy at the window's start, if the objective compares with it."""
    sampling: Sampling | None = None
    """How the samples were drawn, to compare log-probs in the first step of a window; None compares nothing."""
    stats: StatsOfSteps | None = None
    """Writer of per-token statistics; None writes none."""

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.student, self.settings)
        self.copies = DeviceCopies(self.ranks.device)
        self.spikes = Spikes(self.settings)

    def step(
        self, batch: Batch, window: Window, step: int, *, waited_s: float = 0.0, is_first: bool = False
    ) -> StepMetrics:
        """Make one update from one batch. Returns its metrics.

        step: ordinal inside the stage. waited_s: seconds already spent waiting for the batch. is_first: the student
        still is the policy from which the window starts.
        Raises SpikeError, with the update not applied, for a spike that is not to be left out; MismatchError when the
        log-probs of a first step are far from the sampler's.
        """
        started = time.perf_counter()
        torch.manual_seed(hash((self.seed, step, self.ranks.rank)) & 0x7FFFFFFF)
        rate = learning_rate(self.settings, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        gap = None
        if is_first and self.sampling is not None:
            gap = SamplerGap(allowed_gap(self.sampling, self._dtype), window.policy_version, self.ranks.device)
        sums = self._gradients(batch, window, step, gap)
        compared = self._compared(gap, batch, window)
        norm = clip_gradients(self.student, self.optimizer, self.settings.grad_clip)
        totals = sums.over_ranks(self.ranks)
        marks = self._spike_marks(batch, step, totals["loss"], norm)
        is_skipped = SKIPPED in marks
        if not is_skipped:
            self.optimizer.step()
        if self.stats is not None:
            self.stats.end_step(step, window.policy_version, is_skipped=is_skipped)
        more = dict(marks)
        if self.student.layout == "rows" and totals["positions"]:
            more[PADDING] = 1 - totals["tokens"] / totals["positions"]
        weighed = self.objective.objective.teacher_weights  # empty if all have the same weight
        weights = {f"teacher/{name}/weight": self.objective.teacher_weight(name, step) for name in weighed}
        return StepMetrics(
            stage=batch.stage,
            step=step,
            window=batch.window,
            plan_digest=window.plan_digest,
            policy_version=window.policy_version,
            loss=totals["loss"],
            grad_norm=norm,
            learning_rate=rate,
            samples=int(totals["samples"]),
            tokens=int(totals["tokens"]),
            loss_tokens=int(totals["loss_tokens"]),
            reverse_kl=_mean(totals.get("reverse_kl", math.nan), totals["loss_tokens"]),
            staleness_mean=totals["staleness"] / max(1.0, totals["stale_tokens"]),
            staleness_max=int(totals["stalest"]),
            step_time_s=time.perf_counter() - started + waited_s,
            data_wait_s=sums.waited_s + waited_s,
            extra=sums.extra(totals) | weights | compared | more,
        )

    def _spike_marks(self, batch: Batch, step: int, loss: float, norm: float) -> dict[str, float]:
        """Marks of a step whose update is left out; none of another. Raises SpikeError for a spike at which to stop."""
        # All ranks have these sums, but only the leading one is sure to have the figures of the steps before.
        decides, window = self.ranks.leads, batch.window
        if self.ranks.max(int(decides and self.spikes.is_over(window))):
            return {SKIPPED: 1.0}
        reason = self.spikes.reason(loss, norm)
        is_spike = bool(self.ranks.max(int(decides and bool(reason))))
        why = self.spikes.why_to_stop(window) if is_spike else None
        if self.ranks.max(int(decides and why is not None)):
            raise SpikeError(batch.stage, step, loss, norm, (why or "") + reason)
        is_rewound = is_spike and self.spikes.rewinds
        self.spikes.count(norm, window, is_skipped=is_spike, is_rewound=is_rewound)
        return dict.fromkeys([SKIPPED] * is_spike + [REWOUND] * is_rewound, 1.0)

    @property
    def _dtype(self) -> str:
        """Dtype of the forward pass."""
        return str(self.student.dtype).removeprefix("torch.")

    def _compared(self, gap: SamplerGap | None, batch: Batch, window: Window) -> dict[str, float]:
        """Return the figures of the comparison with the sampler, if there was one. Raises MismatchError far above the
        band."""
        mean_gap = None if gap is None else gap.over_ranks(self.ranks)
        if mean_gap is None or self.sampling is None:
            return {}
        if not mean_gap.mean <= STOPS_AT * allowed_gap(self.sampling, self._dtype):
            problem = gap_problem(
                mean_gap, self.sampling, stage=batch.stage, policy_version=window.policy_version, dtype=self._dtype
            )
            raise MismatchError(f"{problem}. Window {window.window} was not trained")
        return mean_gap.metrics()

    def _gradients(self, batch: Batch, window: Window, step: int, gap: SamplerGap | None) -> _StepSums:
        totals = Totals(batch.loss_tokens, batch.sequences, step)
        sums = _StepSums(self.objective.metric_names, self.teachers, self.ranks.device)
        teachers, lengths = batch.teachers, batch.lengths
        passes = cut_step(teachers, lengths, self.settings.micro_batch_packs, self.settings.micro_batch_tokens)
        most = self.ranks.max(len(passes))
        for number, pieces in enumerate(passes):
            following = passes[(number + 1) % len(passes)]
            teacher_head = self._teacher_head(teachers[pieces[0].pack_index], teachers[following[0].pack_index])
            wait_start = time.perf_counter()
            packs = [batch.packs[piece.pack_index] for piece in pieces]
            sums.waited_s += time.perf_counter() - wait_start
            parts = [samples_of(pack, at.first, at.last) for pack, at in zip(packs, pieces, strict=True)]
            micro = build(parts, self.student.layout)
            if self.ranks.member == 0:
                sums.count(micro, window.policy_version)
            share = part_of(micro, self.ranks.member, self.ranks.members)
            picked = None if self.stats is None else self.stats.pick(share, self.ranks.device)
            share = self.copies.to_device(share)
            self._backward(share, totals, teacher_head, sums, picked, gap)
            del micro, share, parts
            used = [pack for pack, at in zip(packs, pieces, strict=True) if at.last == len(lengths[at.pack_index])]
            if used:  # release() without arguments would release every pack
                self.copies.finish()
                batch.release(*used)
        for _ in range(most - len(passes)):
            # Sharded parameters are gathered by every rank together, so a rank without packs left still runs passes.
            empty = self.copies.to_device(part_of(_no_tokens(), self.ranks.member, self.ranks.members))
            self._backward(empty, totals, None, sums)
        return sums

    def _backward(
        self,
        micro: MicroBatch,
        totals: Totals,
        teacher_head: Head | None,
        sums: _StepSums,
        picked: Picked | None = None,
        gap: SamplerGap | None = None,
    ) -> None:
        """Compute the gradients of one forward pass, its loss and metrics. Without a trained token they are zero."""
        trains = len(micro.targets) > 0
        proximal = None
        if self.proximal is not None:
            with torch.no_grad():
                proximal = self.proximal(
                    micro, lambda hidden, head: self.objective.logprob(hidden, head, micro) if trains else None
                )

        def compute_loss(hidden: Tensor, head: Head) -> tuple[Tensor, TermSums]:
            loss, term_sums = self.objective(
                hidden, head, micro, totals, teacher_head=teacher_head, proximal_logprobs=proximal
            )
            if picked is not None and self.stats is not None:
                self.stats.add(picked, term_sums.per_token, hidden, head, micro)
            if gap is not None:
                self._compare(gap, hidden, head, micro)
            return loss, term_sums

        loss, term_sums = self.student(micro, compute_loss if trains else _zero)
        loss.backward()
        sums.add(loss, term_sums, micro)

    @torch.no_grad()
    def _compare(self, gap: SamplerGap, hidden: Tensor, head: Head, micro: MicroBatch) -> None:
        """Add the tokens of a forward pass to the comparison with the sampler."""
        chosen = gap.chosen(micro.policy_versions)
        if len(chosen):
            mask = None if micro.sampling_mask is None else micro.sampling_mask[chosen]
            part = replace(micro, targets=micro.targets[chosen], sampling_mask=mask)
            gap.add(self.objective.logprob(hidden[chosen], head, part), micro.sampler_logprobs[chosen])

    def _teacher_head(self, teacher: str, following: str) -> Head | None:
        """Return the head of a teacher, and start loading the one needed after it.

        After the last pack, the next step probably begins with this step's first teacher.
        """
        if not self.objective.needs_head or self.heads is None:
            return None
        head = self.heads.get(teacher)
        self.heads.prefetch(following)
        return head


class _StepSums:
    """Sums of one step, in the same layout on every rank so that one all-reduce adds them."""

    def __init__(self, names: Sequence[str], teachers: Sequence[str], device: torch.device) -> None:
        self._terms = list(names)
        self._teachers = list(teachers) if "reverse_kl" in names else []
        counts = (
            "loss",
            "samples",
            "tokens",
            "positions",
            "loss_tokens",
            "stale_tokens",
            "staleness",
            "rewarded",
            "reward",
        )
        teacher_names = [f"teacher/{t}/{what}" for t in self._teachers for what in ("reverse_kl", "tokens")]
        self._index = {name: i for i, name in enumerate([*counts, *self._terms, *teacher_names])}
        self._sums = torch.zeros(len(self._index), dtype=torch.float64, device=device)
        self._stalest = 0
        self.waited_s = 0.0
        """Seconds this rank waited for packs."""

    def add(self, loss: Tensor, term_sums: TermSums, micro: MicroBatch) -> None:
        self._add("loss", loss.detach().double())
        for name, value in term_sums.values.items():
            self._add(name, value)
        if micro.teacher in self._teachers and "reverse_kl" in term_sums.values:
            self._add(f"teacher/{micro.teacher}/reverse_kl", term_sums.values["reverse_kl"])
            self._add(f"teacher/{micro.teacher}/tokens", len(micro.targets))

    def count(self, micro: MicroBatch, policy_version: int) -> None:
        self._add("samples", len(micro.loss_counts))
        self._add("tokens", micro.tokens)
        self._add("positions", micro.input_ids.numel())
        self._add("loss_tokens", len(micro.targets))
        sampled = micro.policy_versions[micro.policy_versions >= 0]
        age = policy_version - sampled
        self._add("stale_tokens", len(sampled))
        self._add("staleness", age.sum())
        self._stalest = max(self._stalest, int(age.max()) if len(age) else 0)
        rewards = micro.rewards[~micro.rewards.isnan()]
        self._add("rewarded", len(rewards))
        self._add("reward", rewards.double().sum())

    def _add(self, name: str, value: Tensor | float) -> None:
        self._sums[self._index[name]] += value

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        values = ranks.sum(self._sums).cpu().tolist()
        return {name: values[i] for name, i in self._index.items()} | {"stalest": ranks.max(self._stalest)}

    def extra(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the means that have no field of their own in StepMetrics."""
        tokens = totals["loss_tokens"]
        extra = {name: _mean(totals[name], tokens) for name in self._terms if name != "reverse_kl"}
        for teacher in self._teachers:
            if count := totals[f"teacher/{teacher}/tokens"]:
                extra[f"teacher/{teacher}/reverse_kl"] = totals[f"teacher/{teacher}/reverse_kl"] / count
        if totals["rewarded"]:
            extra["reward"] = totals["reward"] / totals["rewarded"]
        return extra


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _zero(hidden: Tensor, head: Head) -> tuple[Tensor, TermSums]:
    return hidden.sum() * 0.0 + head.weight.sum() * 0.0, TermSums()


def _no_tokens() -> MicroBatch:
    """Build a micro-batch of two tokens, of which none is trained."""
    none = torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0)
    return MicroBatch(
        teacher="", input_ids=torch.zeros(1, 2, dtype=torch.int64), position_ids=torch.tensor([[0, 1]]),
        sequence_lengths=[2], sequence_starts=torch.tensor([0, 2], dtype=torch.int32),
        predictors=none, targets=none, sequence=none, position=none, sampler_logprobs=empty, policy_versions=none,
        loss_counts=none, advantages=empty, rewards=empty, sample_rows=none, tokens=0,
    )  # fmt: skip
