"""Outcome rewards: one plug-in point for anything that turns (prompt, response) into a number.

| name | reward | entirely right |
|---|---|---|
| `reasoning-gym` | the verifier of the dataset the prompt came from, partial credit included | reward 1 |
| `exact` | 1 when the stripped response is the stripped answer, else 0 | reward 1 |
| `verifiers` | the weighted sum of a verifiers task's rewards, over the whole conversation | not known |
| `mine.judge:score` | any function (prompt, response) -> bool that can be imported | true |
| | the same -> (float, bool) | the bool |
| | the same -> float: no verifier | not known, so there is no accuracy |
| | the same -> None: this answer cannot be scored | not known |

An answer that cannot be scored has no reward: its baseline and group do without it.
Accuracy is the share of answers that are entirely right. A float alone does not say that, and no threshold is assumed.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mopd_dataplane.base.plugins import find_plugin, raised_at
from mopd_dataplane.errors import InputError, MopdError, PromptError, UnknownNameError
from mopd_dataplane.records import Prompt

_log = logging.getLogger(__name__)
_BUILT_IN = ("reasoning-gym", "exact", "verifiers")
_VERIFIERS = "mopd_dataplane.integrations.verifiers:task_reward"


class Outcome(NamedTuple):
    """Result of a reward function for one response."""

    reward: float
    """The reward, by convention in [0, 1]."""
    correct: bool | None
    """Whether the response is entirely right; None if the function does not tell."""


class Unscorable(NamedTuple):
    """An answer without a reward: the function returned None, or took too long."""

    reason: str


class RewardError(InputError):
    """A reward function raised an error or returned an invalid reward: a fault of the function, not of the answer."""


@dataclass(frozen=True)
class Reward:
    """A resolved reward function; call it with a prompt and the decoded response."""

    name: str
    """Name in the job file; `rewards.verifier` in the store."""
    version: str
    """Version of the function's package; `rewards.verifier_version` in the store."""
    score: Callable[[Prompt, Any], float | tuple[float, bool] | None]
    """Returns a bool (right or wrong), a number (correctness unknown), both as (number, bool), or None for an answer
    that cannot be scored."""
    whole: bool = False
    """True if it reads all turns (a list, the policy first and last) instead of the policy's last turn."""

    def __call__(self, prompt: Prompt, response: str | list[str]) -> Outcome | Unscorable:
        """Return the reward of one response (a list of turns if `whole`), and whether it is entirely right.

        Raises RewardError when the function raises, naming its file and line, when the reward is not a finite number,
        or when the value beside it is not a bool.
        """
        try:
            said = self.score(prompt, response)
        except MopdError:
            raise
        except (Exception, SystemExit) as error:  # the function is the user's and may raise anything
            raise RewardError(
                f"reward {self.name!r} raised {type(error).__name__}: {error!s:.200} ({raised_at(error)}) "
                f"at prompt {prompt.prompt_id!r}, answer {str(response)[:80]!r}; mend it, or let it return None for an "
                "answer that cannot be scored, then run the same command again: what is rewarded stays"
            ) from error
        if said is None:
            return Unscorable("the function returned None")
        value, correct = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
        if isinstance(said, bool):
            correct = said
        if not isinstance(value, int | float) or not math.isfinite(value) or not isinstance(correct, bool | None):
            raise RewardError(
                f"reward {self.name!r} returned {said!r:.80} for prompt {prompt.prompt_id!r}; a bool, a finite number, "
                "both as (number, bool), or None for an answer that cannot be scored is needed"
            )
        return Outcome(float(value), correct)


@cache
def resolve_reward(name: str) -> Reward:
    """Return the reward function with this name in a job file.

    Raises UnknownNameError for a name that is neither built in, nor an entry point of `mopd.rewards`, nor an importable
    `package.module:function`.
    """
    if name == "reasoning-gym":
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UnknownNameError("reward 'reasoning-gym' needs the package: pip install 'mopd-dataplane[gym]'")
        return Reward(name, importlib.metadata.version("reasoning-gym"), _reasoning_gym)
    if name == "exact":
        return Reward(name, importlib.metadata.version("mopd-dataplane"), is_reference)
    if name == "verifiers":
        conversation_reward = find_plugin("mopd.rewards", _VERIFIERS, {})
        return Reward(name, importlib.metadata.version("verifiers"), conversation_reward, whole=True)
    function: Callable[[str, str], float | tuple[float, bool] | None] = find_plugin(
        "mopd.rewards", name, dict.fromkeys(_BUILT_IN)
    )
    if not callable(function):
        raise UnknownNameError(f"reward {name!r} is {type(function).__name__}, a function (prompt, response) is needed")
    version = _version(sys.modules[function.__module__])
    return Reward(name, version, lambda prompt, response: function(prompt.text, response))


def is_reference(prompt: Prompt, response: str) -> bool:
    """Check if a response equals the prompt's reference answer, ignoring white space around either."""
    return response.strip() == prompt.answer.strip()


def _reasoning_gym(prompt: Prompt, response: str) -> tuple[float, bool]:
    try:
        data = json.loads(prompt.verifier_data)
        dataset, entry = str(data["dataset"]), dict(data["entry"])
    except (ValueError, KeyError, TypeError):
        raise PromptError(
            f"prompt {prompt.prompt_id!r} has no reasoning-gym entry to verify against; "
            "give its domain source 'reasoning-gym', or another reward"
        ) from None
    verifier = _verifier(dataset)
    try:
        value = float(verifier(response.strip(), entry))
    except Exception as error:
        # The response is untrusted text that some verifiers fail to parse. Such an answer is wrong.
        _log.warning("verifier %s refused a response to %s: %r", dataset, prompt.prompt_id, error)
        value = 0.0
    return value, value >= 1


@cache
def _verifier(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    verifier: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return verifier


def _version(module: ModuleType) -> str:
    """Return `__version__` of the module or its top package; for a loose file, 12 hex digits of its source."""
    top = importlib.import_module(module.__name__.partition(".")[0])
    for package in (module, top):
        if version := getattr(package, "__version__", None):
            return str(version)
    source = Path(module.__file__ or "")
    return hashlib.sha256(source.read_bytes()).hexdigest()[:12] if source.is_file() else "unknown"
