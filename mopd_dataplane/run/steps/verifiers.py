"""Verifiers of a job: the outcome of one answer, and the share of answers that may go without one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from mopd_dataplane.errors import InputError
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.tools.replies import turn_texts, whose_turns
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.environments import reply_form_of
from mopd_dataplane.score.reward import Outcome, Reward, Unscorable, is_reference, resolve_reward
from mopd_dataplane.score.timed_reward import TimedReward

FEW = 5
"""Unscorable answers of a domain below which their share is not judged."""
EXAMPLES = 3
"""Unscorable answers that a message names."""


class Verifiers:
    """The reward functions of a job's domains, each in a process of its own where the domain sets a time-out.

    A context, which ends these processes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._timed: dict[tuple[str, float], TimedReward] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for reward in self._timed.values():
            reward.close()

    def function(self, domain: str) -> Reward:
        """The verifier that the job names for a domain."""
        return resolve_reward(self._run.job.domains[domain].reward)

    def verify(self, prompt: Prompt, response: list[int], loss_mask: list[int]) -> Outcome | Unscorable:
        """Reward of a response by the domain's verifier, and whether it is right by the domain's rule (`right`)."""
        function, domain = self.function(prompt.domain), self._run.job.domains[prompt.domain]
        ask: Callable[[Prompt, Any], Outcome | Unscorable] = function
        if domain.reward_timeout_s:
            name = (function.name, domain.reward_timeout_s)
            ask = self._timed.setdefault(name, TimedReward(function, domain.reward_timeout_s))
        if function.whole:
            return ask(prompt, _conversation(self._run, prompt.domain, response, loss_mask))
        text = _last_turn(self._run, prompt.domain, response, loss_mask)
        outcome = ask(prompt, text)
        if domain.right == "reference" and isinstance(outcome, Outcome) and outcome.correct is not None:
            return outcome._replace(correct=outcome.correct and is_reference(prompt, text))
        return outcome


def check_share(
    run: Run, where: str, answers: Mapping[str, int], unscorable: Sequence[tuple[str, str, str]], next_step: str
) -> None:
    """Raise InputError for a domain of which more answers cannot be scored than its `max_unscorable` allows.

    answers: count by domain. unscorable: domain, name and reason of each such answer.
    """
    for domain, count in Counter(domain for domain, _, _ in unscorable).items():
        limit = run.job.domains[domain].max_unscorable
        if count >= FEW and count > limit * answers[domain]:
            examples = [f"{name} ({reason})" for other, name, reason in unscorable if other == domain][:EXAMPLES]
            raise InputError(
                f"{where}: {count} of {answers[domain]} answers of domain {domain!r} cannot be scored by "
                f"{run.job.domains[domain].reward!r}, more than domains.{domain}.max_unscorable = {limit:g} allows: "
                f"{', '.join(examples)}; {next_step}"
            )


def _conversation(run: Run, domain: str, response: list[int], loss_mask: list[int]) -> list[str]:
    """Texts of the conversation in turn, the policy first."""
    if not run.job.domains[domain].environment:
        return [run.decode(response)]
    return turn_texts(response, loss_mask, reply_form_of(run.job, domain, run.tokenizer), run.decode)


def _last_turn(run: Run, domain: str, response: list[int], loss_mask: list[int]) -> str:
    """The response's text, or the policy's last turn where an environment answers it."""
    if run.job.domains[domain].environment:
        own = [said for said, is_own in whose_turns(response, loss_mask) if is_own]
        response = own[-1] if own else []
    return run.decode(response)
