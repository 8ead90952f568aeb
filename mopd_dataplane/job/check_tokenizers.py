"""Checks of teachers that read text in tokens of their own (`teachers.NAME.tokenizer = "own"`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.score.engines import SCORING

if TYPE_CHECKING:
    from mopd_dataplane.job.job import Job, Stage
    from mopd_dataplane.job.sections import Teacher

KINDS = ("logprob", "topk")
"""Kinds of signals of such a teacher: its hidden states give distributions over other tokens than the student's."""


def check_own_tokenizers(job: Job, where: str) -> None:
    """Raise JobFileError for settings of a teacher that need the student's tokens."""
    for name, teacher in job.teachers.items():
        for member in teacher.blend:
            if _reads_own(job.teachers[member]):
                raise JobFileError(
                    f"{where}: teachers.{name}.blend: {member!r} has other tokens than the student, and a blend adds "
                    f'logits; leave it out, or set teachers.{member}.tokenizer = "student"'
                )
        if _reads_own(teacher):
            foreign = {"blend": teacher.blend, "url": teacher.url, "quantisation": teacher.quantisation != "none"}
            foreign["end"] = teacher.end != "own"
            if named := [key for key, value in foreign.items() if value]:
                raise JobFileError(
                    f'{where}: teachers.{name}: {", ".join(named)}: not for a teacher with tokenizer = "own", which '
                    f"gives plain log-probs of text from weights that are here; leave {'them' if named[1:] else 'it'} "
                    'out, or set tokenizer = "student"'
                )


def check_own_tokenizers_of_stage(job: Job, stage: Stage, samplers: tuple[str, ...], at: str) -> None:
    """Raise JobFileError where a stage asks more of such a teacher than log-probs of the student's text and its top-k.

    samplers: teachers that answer prompts of the stage.
    """
    if foreign := [name for name in samplers if _reads_own(job.teachers[name])]:
        raise JobFileError(
            f"{at}.rollout: teacher {foreign[0]!r} has other tokens than the student, so its answers are not the "
            f'student\'s; let another one answer, or set teachers.{foreign[0]}.tokenizer = "student"'
        )
    if foreign := [name for name in job.others_of(stage) if _reads_own(job.teachers[name])]:
        raise JobFileError(
            f"{at}: policy_gradient names teacher {foreign[0]!r} as reference or for calibration, which needs its "
            "log-prob of each single token, and it has other tokens; name another teacher there, or set "
            f'teachers.{foreign[0]}.tokenizer = "student"'
        )
    foreign = [name for name in job.teachers_of(stage) if _reads_own(job.teachers[name])]
    kinds = [kind for kind in (*job.objective(stage).signals, *stage.score.signals) if kind not in KINDS]
    if foreign and kinds:
        raise JobFileError(
            f"{at}: objective {stage.objective!r} needs {', '.join(kinds)} signals, and teacher {foreign[0]!r} has "
            "other tokens than the student, so it gives log-probs and a top-k alone; take an objective of log-probs "
            f'(policy_gradient) or of a top-k (divergence, signal = "topk"), or set teachers.{foreign[0]}.tokenizer = '
            '"student"'
        )
    gradient = job.objective(stage).policy_gradient
    if foreign and gradient is not None and gradient.baseline == "topk":
        raise JobFileError(
            f'{at}: policy_gradient.baseline = "topk" of objective {stage.objective!r} needs the distribution from '
            f"which each token's log-prob comes, and teacher {foreign[0]!r} has other tokens than the student; leave "
            f'baseline out, or set teachers.{foreign[0]}.tokenizer = "student"'
        )
    if foreign and "topk" in job.objective(stage).signals and stage.score.topk_source == "student":
        raise JobFileError(
            f'{at}: score.topk_source = "student" asks for log-probs of single tokens of the student, and teacher '
            f'{foreign[0]!r} has other tokens; set score.topk_source = "teacher", or '
            f'teachers.{foreign[0]}.tokenizer = "student"'
        )
    if foreign and not SCORING[stage.score.engine].here:
        raise JobFileError(
            f"{at}: teacher {foreign[0]!r} reads its own tokens, which score.engine = {stage.score.engine!r} does not "
            f'do; set score.engine = "hf", or teachers.{foreign[0]}.tokenizer = "student"'
        )


def _reads_own(teacher: Teacher) -> bool:
    return teacher.tokenizer == "own"
