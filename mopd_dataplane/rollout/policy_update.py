"""Samples in flight when the weights change: which policy version samples their next token.

`pin` lets them finish on the version with which they began, `span` continues them with the new one
(docs/durability.md). Either way no key or value of the old weights is read by the new ones, and no sample is abandoned.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.rollout.engines.engine import Engine
from mopd_dataplane.rollout.log.ledger import Ledger

Published = Callable[[], tuple[int, Path]]
"""Returns the newest policy: its version and its folder."""
_LOOK_STEPS = 8
"""Decode steps between two checks for a newer policy."""


class WeightChange:
    """Detects a newer policy during a rollout, and swaps it in when the rollout is ready for it."""

    def __init__(
        self, rule: Literal["pin", "span"], published: Published | None, policies: Callable[[int], Path] | None
    ) -> None:
        self.pins = rule == "pin"
        """True if samples in flight finish on their own version."""
        self.awaited = False
        """True while a newer policy waits to be loaded."""
        self._published = published
        self._policies = policies
        self._newest = -1
        self._steps = 0

    def look(self, version: int) -> bool:
        """Check if there is a policy newer than `version`; asks only every few calls."""
        if self._published is not None and self._steps % _LOOK_STEPS == 0:
            self._newest, _ = self._published()
        self._steps += 1
        self.awaited = self._newest > version
        return self.awaited

    def take_up(self, engine: Engine) -> None:
        """Load the newest policy into an engine whose slots are free."""
        if self._published is not None:
            version, folder = self._published()
            engine.load_policy(folder, version)
        self.awaited = False

    def pinned(self, engine: Engine, ledger: Ledger) -> Iterator[list[int]]:
        """Yield the handles of unfinished samples that began with other weights, one policy version after the other.

        The oldest version comes first, and each is loaded before its handles are yielded; at the end the current
        version is loaded again. Raises MismatchError when the weights of a version are missing or differ.
        """
        behind: dict[int, list[int]] = {}
        for handle, partial in ledger.unfinished().items():
            if partial.spans and not partial.is_by(engine.policy_digest):
                behind.setdefault(partial.spans[-1][1], []).append(handle)
        current = engine.policy_version
        for version, handles in sorted(behind.items()):
            folder = self._policies(version) if self._policies is not None else None
            if folder is None or not folder.is_dir():
                raise MismatchError(
                    f"the log holds samples begun by policy version {version}, the engine has {engine.policy_version}, "
                    f"and version {version} is not at hand ({folder}); bring it back, or finish them on the current "
                    'policy with rollout.weight_change = "span"'
                )
            engine.load_policy(folder, version)
            first = ledger.partials[handles[0]]
            if not first.is_by(engine.policy_digest):
                raise MismatchError(
                    f"policy version {version} has weights {engine.policy_digest[:16]}, the log's samples were begun "
                    f"by {first.spans[-1][2][:16]}; bring those weights back, or set "
                    'rollout.weight_change = "span"'
                )
            yield handles
        if engine.policy_version != current and self._policies is not None:
            engine.load_policy(self._policies(current), current)
