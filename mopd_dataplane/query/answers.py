"""Held-out answers of every policy, prompt by prompt: what shares, differences and recovery are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

Values = NDArray[np.float64]
Policy = tuple[str, int]
"""(stage, version)"""
SPLITS = ("eval", "tune")
"""Splits that figures may be of: the first one that has answers is used."""

# An answer that could not be scored is left out, so that its domain keeps its accuracy over the others.
_QUERY = """
    select policy, policy_version, domain, prompt_id, correct, reward, coalesce(split, 'eval') as split
    from evals left join (select prompt_id, split from prompts) using (prompt_id)
    where finish_reason <> 'benchmark'
    qualify correct is not null or not coalesce(isnan(reward), true)
        or count(reward) over (partition by policy, policy_version, domain) = 0
    order by min(created_at) over (partition by policy), policy, policy_version, domain, prompt_id"""


@dataclass(frozen=True)
class Answers:
    """One policy's results on the held-out prompts."""

    prompts: dict[str, tuple[str, ...]]
    """Domain -> prompt ids, in rising order."""
    correct: dict[str, Values]
    """Domain -> 1 or 0 for each of its prompts; only domains of which every answer is known to be right or wrong."""
    reward: dict[str, Values]
    """Domain -> reward for each of its prompts; only domains of which every answer has one."""


@dataclass(frozen=True)
class HeldOut:
    """Every evaluated policy of a store."""

    split: str
    """The prompts that were answered: `eval`, or `tune` where figures only serve to choose settings."""
    policies: dict[Policy, Answers]
    """In the order in which policies were first evaluated, versions rising."""

    def newest(self, stage: str) -> Answers | None:
        """Answers of a stage's newest evaluated version."""
        versions = [version for name, version in self.policies if name == stage]
        return self.policies[stage, max(versions)] if versions else None


def held_out(store: Store, snapshot: Snapshot | None = None) -> HeldOut:
    """Read the held-out answers of a store."""
    table = store.sql(_QUERY, snapshot=snapshot)
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    split = next((name for name in SPLITS if (columns["split"] == name).any()), SPLITS[0])
    mine = columns["split"] == split
    columns = {name: values[mine] for name, values in columns.items()}
    groups: dict[Policy, dict[str, list[int]]] = {}
    for index, (policy, version, domain) in enumerate(
        zip(columns["policy"], columns["policy_version"].tolist(), columns["domain"], strict=True)
    ):
        groups.setdefault((policy, version), {}).setdefault(domain, []).append(index)
    policies = {
        policy: Answers(
            {domain: tuple(columns["prompt_id"][places]) for domain, places in domains.items()},
            _known(columns["correct"], domains),
            _known(columns["reward"], domains),
        )
        for policy, domains in groups.items()
    }
    return HeldOut(split, policies)


def paired(answers: Mapping[str, Answers], domains: Iterable[str]) -> dict[str, dict[str, Values]]:
    """Name -> domain -> right or wrong, over the prompts that every one of the named policies answered.

    Domains without such prompts, or in which some policy has no accuracy, are left out.
    """
    paired_values: dict[str, dict[str, Values]] = {name: {} for name in answers}
    for domain in domains:
        if not all(domain in policy.correct for policy in answers.values()):
            continue
        common = set.intersection(*(set(policy.prompts[domain]) for policy in answers.values()))
        for name, policy in answers.items():
            if common:
                in_common = np.array([prompt in common for prompt in policy.prompts[domain]])
                paired_values[name][domain] = policy.correct[domain][in_common]
    return paired_values


def _known(values: NDArray[np.object_], domains: dict[str, list[int]]) -> dict[str, Values]:
    """The domains in which no value is missing."""
    picked = {domain: values[places] for domain, places in domains.items()}
    whole = {d: v for d, v in picked.items() if not any(one is None or one != one for one in v)}
    return {domain: v.astype(np.float64) for domain, v in whole.items()}
