"""Prompts as a teacher reads them: its own template, privileged context, and where it has one its own tokenizer."""

from collections.abc import Sequence

from mopd_dataplane.prompts import render
from mopd_dataplane.run.context import Run
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import PromptRenderer
from mopd_dataplane.score.teacher_pool import TeacherPool


def prompt_renderer(run: Run, pool: TeacherPool, teacher: str, samples: Sequence[Scorable]) -> PromptRenderer | None:
    """Renderer of the samples' prompts for a teacher of the pool; None where it reads them as the student does."""
    template, own = run.job.teachers[teacher].prompt_template, pool.own_tokenizer(teacher)
    if not template and own is None:
        return None
    tokenizer = run.tokenizer if own is None else own.tokenizer
    prompt_ids = {sample.prompt_id for sample in samples}
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts() if prompt.prompt_id in prompt_ids}

    def as_the_teacher_reads_it(sample: Scorable) -> list[int]:
        prompt = prompts[sample.prompt_id]
        written = template or run.job.student.prompt_template
        return render(prompt.asked, tokenizer, template=written, context=prompt.teacher_context)

    return as_the_teacher_reads_it
