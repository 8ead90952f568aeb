"""What somebody else's package adds: an engine, a kind of signal, a term of an objective that
reads it, a divergence, prompts, an environment, an importer,
a tracker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from mopd_dataplane import Conversation, Divergence, EngineKind, Environment, Term, TokenSignal
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.records import StepMetrics


class Marking(EngineKind):
    """Transformers, and a line in the file `options.mark` for every policy that samples."""

    here = True
    settings = ("device", "options")

    def open(
        self, folder: Path, version: int, settings: Any, *, dtype: str, mixed_teacher: Any, adapter: Any = None
    ) -> Any:
        """See EngineKind."""
        from mopd_dataplane.rollout.engines.hf import HfEngine

        class Marked(HfEngine):
            def load_policy(self, folder: Path, version: int) -> None:
                super().load_policy(folder, version)
                with Path(settings.options["mark"]).open("a") as lines:
                    lines.write(f"{version}\n")

        return Marked(folder, slots=settings.slots, policy_version=version, dtype=dtype, threads=settings.threads)


class EntropyBonus(Term):
    """Minus the student's entropy at each trained token: minimising it keeps the student from certainty."""

    metrics: ClassVar[tuple[str, ...]] = ("bonus_entropy",)
    base: float = 2.718281828459045
    """The entropy's logarithm."""

    def token_loss(
        self, hidden: Any, head: Any, batch: Any, *, temperature: float, teacher_head: Any
    ) -> tuple[Any, dict[str, Any]]:
        """See Term."""
        import math

        logprobs = (hidden.float() @ head.weight.float().T / temperature).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) / math.log(self.base)
        return -entropy, {"bonus_entropy": entropy}


class Margin(TokenSignal):
    """How much likelier the teacher finds its best token than the one that was sampled, nat; 0 where they are one."""

    def values(self, states: Any, head: Any, targets: Any, *, temperature: float) -> Any:
        """See TokenSignal."""
        logits = states.float() @ head.weight.float().T / temperature
        return logits.amax(-1) - logits.gather(-1, targets[:, None]).squeeze(-1)


class MarginLoss(Term):
    """Log-prob of each trained token times its margin: minimising it takes mass from what the teacher finds worse."""

    metrics: ClassVar[tuple[str, ...]] = ("margin", "margin_loss")

    @property
    def signals(self) -> tuple[str, ...]:
        """See Term."""
        return ("margin",)

    def token_loss(
        self, hidden: Any, head: Any, batch: Any, *, temperature: float, teacher_head: Any
    ) -> tuple[Any, dict[str, Any]]:
        """See Term."""
        logprobs = (hidden.float() @ head.weight.float().T / temperature).log_softmax(-1)
        margin = batch.extra["margin"]
        loss = logprobs.gather(-1, batch.targets[:, None]).squeeze(-1) * margin
        return loss, {"margin": margin, "margin_loss": loss}


class Hellinger(Divergence):
    """Squared Hellinger distance, 1 - sum_v sqrt(p_v q_v): symmetric, and never above 1."""

    def rows(self, student: Any, teacher: Any, *, beta: float, alpha: float) -> Any:
        """See Divergence."""
        return 1 - ((student + teacher) / 2).exp().sum(-1)


def letters(*, seed: int, size: int, alphabet: str = "abcdef") -> Iterator[dict[str, Any]]:
    """Words to write backwards."""
    draw = random.Random(seed)
    for _ in range(size):
        word = "".join(draw.choice(alphabet) for _ in range(6))
        yield {"text": f"{word} < ", "answer": word[::-1]}


class Hints(Environment):
    """Says how long the answer is, `most` times."""

    def __init__(self, *, most: int = 1) -> None:
        self._most = most

    def reply(self, conversation: Conversation) -> str | None:
        """See Environment."""
        if conversation.turns > self._most or conversation.said[-1] == conversation.prompt.answer:
            return None
        return f"{len(conversation.prompt.answer)} letters"


def pairs(fields: dict[str, Any], location: str) -> Iterator[Row]:
    """{"ask": …, "said": …, "good": …}"""
    if not isinstance(fields.get("ask"), str) or not isinstance(fields.get("said"), str):
        raise InputError(f"{location}: fields 'ask' and 'said' must be text")
    yield Row(
        location=location, prompt=fields["ask"], response=fields["said"], rewards={("good", ""): float(fields["good"])}
    )


class Lines:
    """A tracker that appends a line a step to a file."""

    def __init__(self, folder: Path, name: str, steps_done: int) -> None:
        self._file = (folder / "lines").open("a")
        self._name = name

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(f"{self._name} {metrics.step} {metrics.loss!r}\n")

    def close(self) -> None:
        self._file.close()
