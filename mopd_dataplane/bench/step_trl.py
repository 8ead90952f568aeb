"""An iteration of TRL's SDFTTrainer: full logits, reverse KL, the initial weights with the context as its teacher.

    python step_trl.py WORK FOUND

WORK, FOUND: JSON files (see step.py). Needs an interpreter with trl 1.16 and datasets; nothing of this package is
imported. The trainer is told to put the context into a system message, as the job does; all else is its own. Its loss
asks student and teacher one after the other, so that both are timed where it asks them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

AT_ONCE = 8
"""Sequences of a forward pass."""


class Timed(SDFTTrainer):  # type: ignore[misc]  # TRL is not typed
    """The trainer, with a clock at each phase."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.spent: list[dict[str, float]] = []
        super().__init__(*args, **named)
        self.teacher_context_builder._compose_teacher_prompt = lambda prompt, context: [
            {"role": "system", "content": context}, *prompt
        ]  # fmt: skip

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.spent[-1][phase] = self.spent[-1].get(phase, 0.0) + time.perf_counter() - began
        return result

    def _prepare_training_batch(self, inputs: Any) -> Any:
        self.spent.append({"began": time.perf_counter()})
        return super()._prepare_training_batch(inputs)

    def _generate(self, prompt_ids: Any) -> Any:
        completions = self._timed("rollout", lambda: super(Timed, self)._generate(prompt_ids))
        self.spent[-1]["tokens"] = sum(map(len, completions[1]))
        return completions

    def _forward_logits(self, *args: Any, **named: Any) -> Any:
        phase = "student" if torch.is_grad_enabled() else "score"
        return self._timed(phase, lambda: super(Timed, self)._forward_logits(*args, **named))


def main() -> None:
    """Medians over all iterations but the first."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    at_once = min(AT_ONCE, work["batch_samples"])
    steps = work["per_iteration"] // work["batch_samples"]
    rows = [
        {"prompt": [{"role": "user", "content": one["text"]}], "privileged_context": one["context"]}
        for one in work["prompts"]
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = SDFTConfig(
            output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", bf16=False,
            gradient_checkpointing=False, max_steps=steps * work["iterations"], learning_rate=work["learning_rate"],
            per_device_train_batch_size=at_once, gradient_accumulation_steps=work["batch_samples"] // at_once,
            generation_batch_size=work["per_iteration"], num_generations=1, num_iterations=1, shuffle_dataset=False,
            max_completion_length=work["new_tokens"], temperature=work["temperature"], max_grad_norm=1.0,
            distillation_mode="full_logits", distillation_alpha=1.0, distillation_is_clip=None, seed=0,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(work["model"], local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, local_files_only=True)
        trainer = Timed(
            model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )  # fmt: skip
        trainer.train()
        ended = time.perf_counter()
    begins = [one["began"] for one in trainer.spent] + [ended]
    whole = [after - before for before, after in itertools.pairwise(begins)]
    for one, seconds in zip(trainer.spent, whole, strict=True):
        one["train"] = seconds - one["rollout"] - one["score"]  # forward, backward, loss, optimizer
    timed_steps = trainer.spent[1:]
    figures: dict[str, Any] = {
        f"{name}, s": statistics.median(one[name] for one in timed_steps) for name in ("rollout", "score", "train")
    }
    figures |= {"an iteration, s": statistics.median(whole[1:]), "version": trl.__version__}
    figures["response tokens"] = statistics.mean(one["tokens"] for one in timed_steps)
    Path(sys.argv[2]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
