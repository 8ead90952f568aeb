"""Prompts as a teacher reads them: its own template, and privileged context."""

from collections.abc import Sequence

from mopd_dataplane.prompts import render
from mopd_dataplane.run.context import Run
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import PromptRenderer


def prompt_renderer(run: Run, teacher: str, samples: Sequence[Scorable]) -> PromptRenderer | None:
    """Renderer of the samples' prompts for a teacher; None where it reads them as the student does."""
    template = run.job.teachers[teacher].prompt_template
    if not template:
        return None
    prompt_ids = {sample.prompt_id for sample in samples}
    prompts = {prompt.prompt_id: prompt for prompt in run.store.prompts() if prompt.prompt_id in prompt_ids}

    def as_the_teacher_reads_it(sample: Scorable) -> list[int]:
        prompt = prompts[sample.prompt_id]
        return render(prompt.asked, run.tokenizer, template=template, context=prompt.teacher_context)

    return as_the_teacher_reads_it
