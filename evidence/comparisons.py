"""The arms of every job that compares arms: what each one trains, merges or leaves out.

The jobs are in jobs/; evidence/run_arm.py runs an arm at a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import merging
from results import JOBS

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.load import load_job

FACTORS = (0.5, 1.0, 2.0)
"""Learning rates to try, as multiples of the job's: the same search for every arm that trains."""
NEAR_RATES = (1.0, 7.5)
"""Multiples of 2e-4: the low rate, and the quickstart's."""
Merge = Callable[[Path, Sequence[Path], float, Path], None]


@dataclass(frozen=True)
class Arm:
    """One way to use the specialists, or to do without them."""

    description: str
    stages: tuple[str, ...] = ()
    """Stages to run one after another; the arm's policy is that of the last. None: base, a specialist, or a merge."""
    settings: tuple[float, ...] = (1.0,)
    """Multiples of the learning rate, or scales of a merge, that seed 0 tries."""
    merge: Merge | None = None
    uses_teachers: bool = True
    like: str = ""
    """Arm in which this one changes one thing: its setting is used and no search runs."""
    start: str = ""
    """Stage that trains another start than the base, at its own rate and at no cost to the arm."""

    @property
    def trained_stages(self) -> tuple[str, ...]:
        """Stages that this arm trains besides those that all arms share."""
        return (self.start, *self.stages) if self.start else self.stages


@dataclass(frozen=True)
class Comparison:
    """A job's arms, and what they share."""

    folder: Path
    """Folder of the job."""
    arms: dict[str, Arm]
    """Arms by name, among them the base and one for each specialist under its stage's name."""
    specialists: tuple[str, ...]
    base: str = "base"
    """Stage and arm that all others start from."""
    points: int | tuple[int, ...] = 4
    """Versions of an arm that are measured: how many, evenly spread, the last among them; or which."""
    searched_version: int = 0
    """Version of an arm's policy by which its settings are compared; 0: the last."""
    threads: int = 1
    """Compute threads of a training command; arms of one seed may run side by side."""

    @cached_property
    def job(self) -> Job:
        """The job as its file states it."""
        return load_job(self.folder)

    @property
    def shared(self) -> tuple[str, ...]:
        """Base and specialists: all stages that arms have in common, in the order of the job."""
        stages = {stage for name in (self.base, *self.specialists) for stage in self.lineage(name)}
        return tuple(stage.name for stage in self.job.stages if stage.name in stages)

    def lineage(self, stage: str) -> tuple[str, ...]:
        """A stage and those it starts from, the first in front."""
        stages: tuple[str, ...] = ()
        while stage != "init":
            stages, stage = (stage, *stages), self.job.stage(stage).start
        return stages

    def prerequisites(self, name: str) -> tuple[str, ...]:
        """Stages of `shared` that must run before an arm."""
        if name in self.specialists:
            return self.lineage(name)
        if self.arms[name].uses_teachers:
            return self.shared
        starts = {stage for trained in self.arms[name].trained_stages for stage in self.lineage(trained)}
        return tuple(stage for stage in self.shared if stage in {*self.lineage(self.base), *starts})

    def rates(self, arm: Arm, setting: float) -> list[str]:
        """Overrides that multiply the learning rates of an arm's stages by a setting."""
        rates = {stage: self.job.stage(stage).train.learning_rate * setting for stage in arm.stages}
        return [f"stages.{stage}.train.learning_rate={rate!r}" for stage, rate in rates.items()]

    def measured_versions(self, arm: Arm) -> list[tuple[Stage, int]]:
        """Stages and versions of an arm whose accuracy is measured, the arm's policy last."""
        stages = [self.job.stage(name) for name in arm.stages]
        if len(stages) != 1:
            return [(stage, stage.iterations) for stage in stages]
        (stage,) = stages
        if isinstance(self.points, tuple):
            versions = {*(version for version in self.points if version < stage.iterations), stage.iterations}
        else:
            versions = {max(1, round(stage.iterations * (i + 1) / self.points)) for i in range(self.points)}
        return [(stage, version) for version in sorted(versions)]

    def answers_by_point(self, name: str) -> list[int]:
        """Answers that an arm has learnt from at each of its measured versions."""
        arm = self.arms[name]
        return [self.answers_until(arm, stage, version) for stage, version in self.measured_versions(arm)]

    def answers_until(self, arm: Arm, stage: Stage, version: int) -> int:
        """Answers that an arm has learnt from when a version of one of its stages is there."""
        earlier = arm.stages[: arm.stages.index(stage.name)]
        return (
            sum(answers_of(self.job.stage(name)) for name in earlier) + answers_of(stage) * version // stage.iterations
        )


def answers_of(stage: Stage) -> int:
    """Answers that a stage learns from."""
    if stage.data == "reference":
        return stage.examples
    return stage.iterations * stage.rollout.prompts_per_iteration * stage.rollout.group_size


_WITHOUT_TEACHERS = {
    "joint-sft": Arm("SFT on all domains' reference answers", ("joint-sft",), FACTORS, uses_teachers=False),
    "grpo": Arm("GRPO on the mixture", ("grpo",), FACTORS, uses_teachers=False),
}
_MERGED = {
    "task-arithmetic": Arm("base + scale x sum of weight changes", (), (0.3, 0.5, 1.0), merging.task_arithmetic),
    "ties": Arm("trimmed, signs elected, merged", (), (0.5, 1.0, 1.5), merging.ties),
}
_TAUGHT = {
    "teacher-sft": Arm("SFT on the teachers' answers", ("teacher-sft",), FACTORS),
    "teacher-forward": Arm("forward KL on the teachers' answers", ("teacher-forward",), FACTORS),
    "gkd": Arm("GKD: half the teachers' answers, half its own, JSD", ("gkd",), FACTORS),
    "mopd-sampled": Arm("MOPD, sampled tokens", ("mopd-sampled",), FACTORS),
    "mopd-baseline": Arm("MOPD, sampled tokens, less their mean", ("mopd-baseline",), FACTORS),
    "mopd-exact": Arm("MOPD, full vocabulary", ("mopd-exact",), FACTORS),
    "mopd-outcome": Arm("MOPD, sampled, with the outcome's advantage", ("mopd-outcome",), FACTORS),
}
"""Arms that both models have."""

_TOY_SPECIALISTS = ("speller", "sorter", "walker")
_ALTERNATIVES = {
    "base": Arm("the start of all others", uses_teachers=False),
    **{name: Arm(f"specialist of one domain: {name}") for name in _TOY_SPECIALISTS},
    **_WITHOUT_TEACHERS,
    "cascade": Arm("GRPO one domain after another", ("cascade-spelling", "cascade-sorting", "cascade"), FACTORS,
                   uses_teachers=False),
    "average": Arm("mean of the specialists' weights", merge=merging.average),
    **_MERGED,
    **_TAUGHT,
    "one-teacher": Arm("one teacher, spelling", ("one-teacher",), like="mopd-exact"),
    "two-teachers": Arm("two teachers, spelling and sorting", ("two-teachers",), like="mopd-exact"),
    "group-4": Arm("four answers to each of a quarter of the prompts", ("group-4",), like="mopd-exact"),
    "wrong-teacher": Arm("the sorter scores spelling too", ("wrong-teacher",), like="mopd-exact"),
    "weak": Arm("a weaker start: a fifth of the base's examples", like="mopd-exact", start="weak", uses_teachers=False),
    "weak-on-policy": Arm("MOPD from the weaker start", ("weak-on-policy",), like="mopd-exact", start="weak"),
    "weak-imitation-first": Arm("the same after forward KL on the teachers' answers, half of all",
                                ("weak-imitation", "weak-imitation-first"), like="mopd-exact", start="weak"),
}  # fmt: skip

_DOUBLED = (1, 2, 4, 8, 16, 32)
"""Versions of the pretrained model's arms that are measured."""
_SMOLLM2_MOPD = {
    "base": Arm("SmolLM2-135M-Instruct after 96 examples of all domains", uses_teachers=False),
    "date": Arm("specialist: GRPO on 1,536 answers"),
    "larger": Arm("specialist: GRPO on 256 answers"),
    "json": Arm("specialist: SFT on 192 lines of JSON"),
    **_WITHOUT_TEACHERS,
    "cascade": Arm("GRPO one domain after another", ("cascade-date", "cascade-larger", "cascade"), uses_teachers=False,
                   like="grpo"),
    "cascade-mopd": Arm("the same, then MOPD on 480 answers, full vocabulary",
                        ("cascade-date", "cascade-larger", "cascade", "cascade-mopd")),
    "turns-mopd": Arm("the same rewards, and MOPD on 160 answers after those of each domain",
                      ("cascade-date", "turns-date-mopd", "turns-larger", "turns-larger-mopd", "turns-json",
                       "turns-mopd"), like="cascade-mopd"),
    **_MERGED,
    **_TAUGHT,
    "mopd-outcome-quarter": Arm("the same, a quarter of that advantage", ("mopd-outcome-quarter",),
                                like="mopd-outcome"),
    "mopd-outcome-fourfold": Arm("the same, four times that advantage", ("mopd-outcome-fourfold",),
                                 like="mopd-outcome"),
    "mopd-date": Arm("MOPD of the one skill that GRPO took longest to learn", ("mopd-date",), like="mopd-exact"),
    "weak": Arm("another base: a quarter of the examples", like="mopd-exact", start="weak", uses_teachers=False),
    "weak-date": Arm("the same skill, distilled into that base", ("weak-date",), like="mopd-exact", start="weak"),
    "weak-imitation-first": Arm("the same, the first half of the answers the specialist's, forward KL",
                                ("weak-date-imitation", "weak-date-then"), like="mopd-exact", start="weak"),
}  # fmt: skip

_SMOLLM2_KEPT = {
    **{name: _SMOLLM2_MOPD[name] for name in ("base", "date", "larger", "json")},
    "kept-general": Arm("MOPD, full vocabulary, and the base teaches questions about things", ("kept-general",)),
    "kept-countries": Arm("the same, about countries, none for a capital", ("kept-countries",)),
}

_SMOLLM2_SUMS = {
    "base": Arm("SmolLM2-135M-Instruct after 192 sums", uses_teachers=False),
    "sum": Arm("specialist: GRPO on 6,144 answers"),
    "mopd-sum": Arm("MOPD of that specialist, full vocabulary, on 3,072 answers", ("mopd-sum",)),
}

_NEAR = {
    "base": Arm("the start of all others", uses_teachers=False),
    "near": Arm("the teacher: the base after 4,000 sorted lists at a low rate"),
    "exact": Arm("reverse KL, full vocabulary", ("exact",), NEAR_RATES),
    "skew-reverse": Arm("skewed reverse KL, alpha 0.1", ("skew-reverse",), NEAR_RATES),
    "skew-forward": Arm("skewed forward KL, alpha 0.1", ("skew-forward",), NEAR_RATES),
    "corrected-8": Arm("teacher's top 8, corrected", ("corrected-8",), NEAR_RATES),
    "corrected-64": Arm("teacher's top 64, corrected", ("corrected-64",), NEAR_RATES),
    "tail-8": Arm("student's top 8 and a tail", ("tail-8",), NEAR_RATES),
    "icepop": Arm("sampled tokens, IcePop", ("icepop",), NEAR_RATES),
    "uncorrected": Arm("sampled tokens, no correction", ("uncorrected",), NEAR_RATES),
    "outcome": Arm("sampled tokens and the outcome's advantage", ("outcome",), NEAR_RATES),
    "outcome-alone": Arm("the outcome's advantage alone", ("outcome-alone",), NEAR_RATES, uses_teachers=False),
}

_CONFLICT = {
    "base": Arm("SmolLM2-135M-Instruct after 24 examples of each question, and 24 capitals", uses_teachers=False),
    "larger": Arm("specialist: GRPO on 192 answers"),
    "smaller": Arm("specialist: GRPO on 192 answers"),
    "grpo": Arm("GRPO on both rewards together, 384 answers", ("grpo",), uses_teachers=False),
    "cascade": Arm("from `larger`, GRPO on 192 answers to `smaller`", ("cascade",), uses_teachers=False),
    "cascade-kl": Arm("the same with `kl_coef = 0.04` to its start", ("cascade-kl",), uses_teachers=False),
    "cascade-strong-kl": Arm("the same with `kl_coef = 1`", ("cascade-strong-kl",), uses_teachers=False),
    "cascade-entropy": Arm("`cascade` with an entropy bonus of 0.01", ("cascade-entropy",), uses_teachers=False),
    "cascade-strong-entropy": Arm("the same with 0.3", ("cascade-strong-entropy",), uses_teachers=False),
    "mopd-exact": Arm("MOPD of both specialists, full vocabulary, 192 answers", ("mopd-exact",)),
}

TEACHER_ORDER = ("spell-high", "sort-low", "spiral-high", "spell-low", "spiral-low", "spell-max", "sort-high",
                 "sort-max", "sum-low", "sum-high")  # fmt: skip
"""Teachers of teacher-count in the order in which they are added, each with the domain of its name."""
TEACHER_COUNTS = {"one": 1, "two": 2, "three": 3, "five": 5, "ten": 10}
_TEACHER_COUNT = {
    "generalist": Arm("the start of all students", uses_teachers=False),
    **{name: Arm(f"taught by {', '.join(TEACHER_ORDER[:count])}", (name,)) for name, count in TEACHER_COUNTS.items()},
}

_SELECTION = {
    "base": Arm("the start of all others", uses_teachers=False),
    "all": Arm("all answers", ("all",)),
    "half": Arm("half of the answers, by chance", ("half",)),
    "solved": Arm("answers with full reward", ("solved",)),
    "far": Arm("the half with the larger divergence from the teacher", ("far",)),
    "spread": Arm("groups with different rewards", ("spread",)),
    "weighted": Arm("half of the answers, drawn in proportion to the divergence", ("weighted",)),
}

COMPARISONS = {
    comparison.folder.name: comparison
    for comparison in (
        Comparison(JOBS / "alternatives", _ALTERNATIVES, _TOY_SPECIALISTS),
        Comparison(
            JOBS / "smollm2-mopd", _SMOLLM2_MOPD, ("date", "larger", "json"), points=_DOUBLED, searched_version=8
        ),
        Comparison(JOBS / "smollm2-kept", _SMOLLM2_KEPT, ("date", "larger", "json"), points=(2, 4, 8)),
        Comparison(JOBS / "smollm2-sums", _SMOLLM2_SUMS, ("sum",), points=(*_DOUBLED, 64)),
        Comparison(JOBS / "near", _NEAR, ("near",), points=3),
        Comparison(JOBS / "conflict", _CONFLICT, ("larger", "smaller"), points=1),
        Comparison(JOBS / "selection", _SELECTION, (*_TOY_SPECIALISTS, "gather"), points=1),
        Comparison(JOBS / "teacher-count", _TEACHER_COUNT, TEACHER_ORDER, base="generalist", points=1),
    )
}
"""Name of a job -> its arms."""
