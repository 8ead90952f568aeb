"""A declared objective as the loss of a planned step, for a causal language model of transformers.

The loss is that of `mopd train`: sums over trained tokens, divided by the counts of the whole step, on hidden states
and heads, so that no [N, V] logits exist.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.job.parse import parse_section
from mopd_dataplane.load.client import LoadedBatch
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss, Totals
from mopd_dataplane.train.passes import cut_step, samples_of
from mopd_dataplane.train.spec import HeadFile
from mopd_dataplane.train.student import Student


def parsed_objective(objective: Objective | Mapping[str, Any]) -> Objective:
    """An objective as `[objectives.NAME]` of a job file says it: {"divergence": {"kind": "reverse"}}.

    Raises InputError that names the key, and for one that needs what only `mopd train` has: the policy at the window's
    start, or the tokens of thoughts.
    """
    if not isinstance(objective, Objective):
        objective = parse_section(Objective, json.dumps(objective), "objective")
    if ObjectiveLoss(objective).needs_proximal:
        raise InputError("objective.policy_gradient: clip and correction together need the log-probs of the policy at "
                         "the window's start, which this trainer does not compute; leave one of them out, or train "
                         "with mopd run")  # fmt: skip
    if objective.leaves_thoughts_out:
        raise InputError('objective.teacher_parts: "outside_thought" needs token ids of the student, which this '
                         "trainer does not look up; leave teacher_parts out, or train with mopd run")  # fmt: skip
    return objective


class StoreLoss:
    """The objective of a store's planned steps."""

    def __init__(
        self, store: Store, objective: Objective, *, temperature: float = 1.0, max_new_tokens: int = 1,
        pass_tokens: int = 0,
    ) -> None:  # fmt: skip
        """temperature, max_new_tokens: of the sampler, see ObjectiveLoss. pass_tokens: most tokens of one forward pass;
        0 takes whole packs."""
        self._loss = ObjectiveLoss(objective, temperature=temperature, max_new_tokens=max_new_tokens)
        self._pass_tokens = pass_tokens
        self._heads: TeacherHeads | None = None
        self._store = store
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.sums: dict[str, float] = {}
        """Sums of the objective's metrics over the trained tokens of the last step."""

    def passes(self, student: Student, batch: LoadedBatch, device: torch.device) -> Iterator[Tensor]:
        """The loss (0-dim, differentiable) of each forward pass of a step; their sum is the loss of the step.

        Packs are given back as they are used up: call backward on each before asking for the next.
        """
        totals = Totals(batch.loss_tokens, batch.sequences, batch.step)
        teachers, lengths = batch.teachers, batch.lengths
        self.sums = {}
        for pieces in cut_step(teachers, lengths, 1, self._pass_tokens):
            packs = [batch.packs[piece.pack_index] for piece in pieces]
            parts = [samples_of(pack, at.first, at.last) for pack, at in zip(packs, pieces, strict=True)]
            micro = build(parts, student.layout).to(device)
            head = self._head(micro.teacher, device)
            loss, sums = student(
                micro, lambda hidden, own, batch=micro, teacher=head: self._loss(
                    hidden, own, batch, totals, teacher_head=teacher
                )
            )  # fmt: skip
            for name, value in sums.values.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
            yield loss
            del micro, parts
            used = [pack for pack, at in zip(packs, pieces, strict=True) if at.last == len(lengths[at.pack_index])]
            if used:  # without a name everything would go back
                batch.release(*used)

    def close(self) -> None:
        """Let go of teacher heads."""
        if self._heads is not None:
            self._heads.close()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._heads = self._scratch = None

    def _head(self, teacher: str, device: torch.device) -> Any:
        if not self._loss.needs_head:
            return None
        if self._heads is None:
            self._heads = TeacherHeads(self._head_files(), device)
        return self._heads.get(teacher)

    def _head_files(self) -> dict[str, HeadFile]:
        """Heads on this disk."""
        head_files = {}
        for name, teacher in self._store.teachers().items():
            if not teacher.head_file:
                continue
            if self._store.files is None:
                path = self._store.path(teacher.head_file)
            else:
                self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="mopd-heads-")
                path = Path(self._scratch.name) / f"{name}.safetensors"
                self._store.files.download(teacher.head_file, path)
            head_files[name] = HeadFile(path=str(path), digest=teacher.head_digest)
        return head_files
