"""Row 21 of the fault list: faults of a teacher's signal, and the check that names each.

    python tests/faults/signal_rows.py --seeds 10    # the table of docs/signal_health.md

A seed trains a base and two specialists (specialists.py), lets the base answer, and scores the answers with a healthy
teacher and with each fault. Every fault is applied to the teacher as the scorer sees it, and the checks run on what
score_samples and probe return.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inject import Row, Tally
from mopd_kernels import Head
from numpy.typing import NDArray
from specialists import DOMAINS, MARKS, Specialists, make_specialists
from torch import Tensor

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.vocabulary import compare_vocabularies
from mopd_dataplane.score.health import Health, ReadSample, measure
from mopd_dataplane.score.health_checks import Evidence, Probe, findings
from mopd_dataplane.score.probe import probe
from mopd_dataplane.score.readers import Scorable, TeacherForward
from mopd_dataplane.score.scorer import PromptRenderer, score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenizers_apart import exchanged_letters

SETTINGS = sections.Score(stats="full", batch_tokens=4096)
Sequences = Sequence[NDArray[np.int64]]
OVERFLOW = 3e4
"""Factor by which states leave the range of float16."""


class FaultyForward(TeacherForward):
    """A teacher with a fault in what it reads, what it returns, or its head."""

    def __init__(
        self,
        healthy: TeacherForward,
        *,
        reads: Callable[[Sequences, Sequences], tuple[Sequences, Sequences]] = lambda texts, places: (texts, places),
        returns: Callable[[Tensor], Tensor] = lambda states: states,
        weighs: Callable[[Head], Head] = lambda head: head,
    ) -> None:
        super().__init__(healthy.readers, healthy.weights)
        object.__setattr__(self, "_faults", (reads, returns))
        self.__dict__["head"] = weighs(healthy.head)

    def states(self, sequences: Sequences, predicted: Sequences) -> Tensor:
        reads, returns = self._faults  # type: ignore[attr-defined]
        return returns(super().states(*reads(sequences, predicted)))


class FaultyPool(TeacherPool):
    """A pool whose teachers all have the fault that is set. What tokenizers and configs say is read once."""

    def __init__(self, specs: dict[str, TeacherSpec], **settings: Any) -> None:
        super().__init__(specs, **settings)
        self.fault: Callable[[TeacherForward], TeacherForward] = lambda healthy: healthy
        self._unknown = {name: super(FaultyPool, self).unknown_tokens(name) for name in specs}
        self._context = {name: super(FaultyPool, self).context_length(name) for name in specs}

    def teacher(self, name: str) -> TeacherForward:
        return self.fault(super().teacher(name))

    def unknown_tokens(self, name: str) -> dict[int, str]:
        return self._unknown[name]

    def context_length(self, name: str) -> int:
        return self._context[name]


@dataclass(frozen=True)
class Fault:
    """A known failure. `named_by` are the checks of which at least one must fail; empty: none can."""

    name: str
    named_by: tuple[str, ...]
    apply: Callable[[TeacherForward], TeacherForward] = lambda healthy: healthy
    render: Callable[[Specialists, Scorable], list[int]] | None = None
    """Prompt as the teacher reads it."""
    teacher_of: Callable[[str], str] = lambda domain: domain
    """Whose weights score a domain; `base` for the policy that the stage starts from."""
    refusal: Callable[[Specialists], None] | None = None
    """Raises what keeps such a teacher out before anything is scored."""
    least: float = 1.0
    """Share of the cases in which one of `named_by` must fail."""


def shifted(healthy: TeacherForward) -> TeacherForward:
    return FaultyForward(healthy, reads=lambda texts, places: (texts, [at - 1 for at in places]))


def permuted(healthy: TeacherForward) -> TeacherForward:
    """The same vocabulary size, every ordinary token under another id."""
    size = len(healthy.head.weight)
    to = np.concatenate([np.arange(4), 4 + np.roll(np.arange(size - 4), 17)])
    back = torch.from_numpy(to)
    return FaultyForward(
        healthy,
        reads=lambda texts, places: ([to[text] for text in texts], places),
        weighs=lambda head: replace(head, weight=head.weight[back]),
    )


def hotter(temperature: float) -> Callable[[TeacherForward], TeacherForward]:
    return lambda healthy: FaultyForward(
        healthy, weighs=lambda head: replace(head, logit_scale=head.logit_scale / temperature)
    )


def overflowing(healthy: TeacherForward) -> TeacherForward:
    return FaultyForward(healthy, returns=lambda states: (OVERFLOW * states).half().float())


def zero_head(healthy: TeacherForward) -> TeacherForward:
    return FaultyForward(healthy, weighs=lambda head: replace(head, weight=torch.zeros_like(head.weight)))


def prompt_of(sample: Scorable) -> list[int]:
    tokens: list[int] = sample.tokens[: sample.prompt_len].tolist()
    return tokens


def other_template(models: Specialists, sample: Scorable) -> list[int]:
    text = models.tokenizer.decode(prompt_of(sample), skip_special_tokens=True)
    return models.tokenizer.encode(f"User: {text}\nAssistant: ")


def in_characters(models: Specialists, sample: Scorable) -> list[int]:
    """The prompt with every token of several characters split."""
    split = [(models.tokenizer.convert_tokens_to_ids(mark), mark) for mark in MARKS]
    ids = prompt_of(sample)
    for whole, mark in split:
        if whole in ids:
            at = ids.index(whole)
            letters = models.tokenizer.convert_tokens_to_ids(list(mark))
            ids = [*ids[:at], *letters, *ids[at + 1 :]]
    return ids


def refuse_other_ids(models: Specialists) -> None:
    compare_vocabularies(models.tokenizer, exchanged_letters(models.tokenizer), name="other")


FAULTS: tuple[Fault, ...] = (
    Fault("none (healthy)", ()),
    Fault("uniform: states are zero", ("uniform",), lambda t: FaultyForward(t, returns=torch.zeros_like)),
    Fault("zero logits: the head is zero", ("uniform",), zero_head),
    Fault("shifted by one token", ("reference", "likelihood", "lead"), shifted),
    Fault("temperature 4", ("flat", "lead", "own"), hotter(4.0)),
    Fault("temperature 2", (), hotter(2.0)),
    Fault("temperature 0.5", (), hotter(0.5)),
    Fault("other chat template", ("lead", "reference", "rival"), render=other_template),
    Fault("other ids in a tokenizer of the same size", ("vocabulary",), refusal=refuse_other_ids),
    Fault("the same, with the student's tokenizer file", ("reference", "likelihood", "lead"), permuted),
    Fault(
        "other pre-tokeniser, teacher reads its own text", ("lead", "reference", "rival"), render=in_characters,
        least=0.8,
    ),
    Fault("swapped teachers", ("rival", "lead"), teacher_of=lambda domain: DOMAINS[1 - DOMAINS.index(domain)]),
    Fault("half-precision overflow", ("finite",), overflowing),
    Fault("stale adapter: the base's weights", ("base",), teacher_of=lambda _: "base"),
    Fault("prompt masked", ("lead", "reference", "rival"), render=lambda models, _: [models.tokenizer.bos_token_id]),
    Fault("double BOS", (), render=lambda models, sample: [models.tokenizer.bos_token_id, *prompt_of(sample)]),
)  # fmt: skip


class Ward:
    """Trained models of one seed, and what healthy readers make of the references."""

    def __init__(self, root: Path, seed: int) -> None:
        self.models = make_specialists(root, seed)
        folders = {**self.models.teachers, "base": self.models.base}
        specs = {name: TeacherSpec(folder, sections.Teacher(source="x")) for name, folder in folders.items()}
        self._pool = FaultyPool(specs, student_tokenizer=self.models.tokenizer, max_resident=len(specs))
        self.start = {domain: self._probe("base", domain, None) for domain in DOMAINS}
        self.healthy = {domain: {name: self._probe(name, domain, None) for name in DOMAINS} for domain in DOMAINS}

    def failed(self, fault: Fault, domain: str) -> set[str]:
        """Names of the checks that a teacher with a fault fails on a domain; `vocabulary` and `finite` are refusals."""
        if fault.refusal is not None:
            try:
                fault.refusal(self.models)
            except MismatchError:
                return {"vocabulary"}
            return set()
        render = fault.render
        renderer = None if render is None else lambda sample: render(self.models, sample)
        self._pool.fault, name = fault.apply, fault.teacher_of(domain)
        try:
            health = self._health(name, domain, renderer)
            own = self._probe(name, domain, renderer)
        except EngineError:
            return {"finite"}
        swapped = name != domain and name != "base"
        others = {other: probe for other, probe in self.healthy[domain].items() if (other == domain) == swapped}
        evidence = Evidence(domain, domain, health.vocabulary, health, own, self.start[domain], others)
        return {finding.check for finding in findings(evidence)}

    def _health(self, name: str, domain: str, renderer: PromptRenderer | None) -> Health:
        samples = {sample.uid: sample for sample in self.models.samples[domain]}
        end = self.models.tokenizer.eos_token_id
        signals = score_samples(self._pool, name, ["logprob"], list(samples.values()), SETTINGS, render_prompt=renderer)
        read = [
            ReadSample(
                teacher=_some(signal.logprob), student=samples[signal.uid].logprobs, entropy=signal.teacher_entropy,
                is_first_choice=signal.is_first_choice, has_ended=samples[signal.uid].tokens[-1] == end,
            )
            for signal in signals
        ]  # fmt: skip
        health = measure(read, len(self._pool.teacher(name).head.weight))
        assert health is not None
        return health

    def _probe(self, name: str, domain: str, renderer: PromptRenderer | None) -> Probe:
        references = self.models.references[domain]
        bare = [
            replace(one, tokens=one.tokens[: one.prompt_len], loss_mask=one.loss_mask[:0]) for one in references[:4]
        ]
        end = self.models.tokenizer.eos_token_id
        return probe(self._pool, name, references, SETTINGS, prompts=bare, render_prompt=renderer, end=end)


def _some(values: Any) -> Any:
    assert values is not None
    return values


def inject(count: int, seed: int) -> Tally:
    """One case is a fault on one domain of one seed: it must be named by one of its checks, and a healthy teacher by
    none. A fault that is named in a share of them is one case."""
    torch.set_num_threads(1)
    tally = Tally()
    named: dict[Fault, list[bool]] = {}
    for one in range(seed, seed + count):
        with tempfile.TemporaryDirectory() as root:
            ward = Ward(Path(root), one)
            for fault in FAULTS:
                for domain in DOMAINS:
                    failed = ward.failed(fault, domain)
                    if fault.named_by or fault is FAULTS[0]:
                        passed = bool(failed & set(fault.named_by)) if fault.named_by else not failed
                        if fault.least < 1:
                            named.setdefault(fault, []).append(passed)
                        else:
                            tally.case(passed, f"{fault.name} on {domain}, seed {one}: failed {sorted(failed)}")
    for fault, cases in named.items():
        tally.case(sum(cases) >= fault.least * len(cases), f"{fault.name}: named in {sum(cases)} of {len(cases)}")
    return tally


ROWS = (
    Row(21, "faults of a teacher's signal", "a check names each, and none a healthy teacher", inject, (1, 10, 30)),
)  # fmt: skip


def rates(seed: int) -> dict[str, dict[str, int]]:
    """How many domains of a seed fail each check, by fault; `any` counts those that fail some."""
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as root:
        ward = Ward(Path(root), seed)
        for fault in FAULTS:
            failed = [ward.failed(fault, domain) for domain in DOMAINS]
            names = Counter(check for checks in failed for check in checks)
            counts[fault.name] = dict(names | Counter(any=sum(map(bool, failed))))
    return counts


def table(every: Sequence[dict[str, dict[str, int]]]) -> str:
    """Rates of detection over seeds as a table in Markdown: the checks that fail for a fault, by falling rate."""
    cases = len(every) * len(DOMAINS)
    lines = ["| fault | detected | by |", "|---|---|---|"]
    for fault in FAULTS:
        counts = sum((Counter(seed[fault.name]) for seed in every), Counter())
        detected = counts.pop("any", 0)
        shown = ", ".join(f"`{check}` {100 * count / cases:.0f} %" for check, count in counts.most_common())
        lines.append(f"| {fault.name} | {100 * detected / cases:.0f} % | {shown or 'no check'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the table of detection rates.")
    parser.add_argument("--seeds", type=int, default=10)
    every = []
    for seed in range(parser.parse_args().seeds):
        every.append(rates(seed))
        print(f"{seed + 1} seeds\n{table(every)}", flush=True)
