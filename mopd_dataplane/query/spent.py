"""What a policy version cost: answers and tokens that its steps learnt from, and seconds of its stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.text import count, duration

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

Budget = Literal["answers", "tokens", "seconds"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of a policy version, from the start of its stage."""

    answers: int = 0
    """Answers that its steps learnt from; one that several epochs use counts each time."""
    tokens: int = 0
    """Trained tokens of these answers."""
    seconds: float = 0.0
    """Time of its rollouts, rewards, scores, plans and training; evaluation is left out."""

    def of(self, budget: Budget) -> float:
        """Amount of one kind of cost."""
        return float(getattr(self, budget))

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            answers=self.answers + other.answers,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        return f"{count(self.answers)} answers, {count(self.tokens)} tokens, {duration(self.seconds)}"


def spent_by_version(store: Store, stage: str) -> dict[int, Spent]:
    """Version of a stage -> its cost. Version 0 has none."""
    name = literal(stage)
    rows = store.sql(f"""
        with trained as (
            select "window" + 1 as version, sum(samples)::bigint as answers, sum(loss_tokens)::bigint as tokens
            from steps where stage = {name} group by 1),
        timed as (
            select greatest(iteration, 0) + 1 as version, sum(value)::double as seconds from events
            where kind = 'stage_time' and stage = {name} and json_extract_string(detail, '$.action') <> 'evaluate'
            group by 1)
        select version, coalesce(answers, 0) as answers, coalesce(tokens, 0) as tokens, coalesce(seconds, 0) as seconds
        from trained full join timed using (version) order by version""").to_pylist()
    costs = [Spent(answers=row["answers"], tokens=row["tokens"], seconds=row["seconds"]) for row in rows]
    return {0: Spent(), **dict(zip((row["version"] for row in rows), accumulate(costs), strict=True))}


def cost_of(spent: Mapping[int, Spent], version: int) -> Spent:
    """Cost of a version: that of the newest one up to it that has steps or times of its own."""
    return spent[max(earlier for earlier in spent if earlier <= version)]


def nearest_version(spent: Mapping[int, Spent], versions: list[int], budget: Budget, amount: float) -> int:
    """The version whose cost is nearest to an amount; of two as near the older one."""
    return min(versions, key=lambda version: (abs(cost_of(spent, version).of(budget) - amount), version))
