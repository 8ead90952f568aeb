"""Compares two policies on the same held-out prompts, of two stores, two stages or two versions, with intervals.

A policy is written STORE, STORE#STAGE or STORE#STAGE@VERSION; without a stage the last that was evaluated, without a
version its newest, or with a budget the one that has spent as much as the other policy. Answers are paired by prompt;
prompts that only one policy answered, or that read differently in the two stores, are left out and counted.
"""

from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.files import publish_figure
from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError, nearest
from mopd_dataplane.query.ancestry import origin_of
from mopd_dataplane.query.answers import Answers, HeldOut, Values, held_out
from mopd_dataplane.query.spent import Budget, Spent, cost_of, nearest_version, spent_by_version
from mopd_dataplane.query.statistics import Difference, Estimate, compare, mean_share, share
from mopd_dataplane.records import Change
from mopd_dataplane.store.commit.changes import read_changes
from mopd_dataplane.store.dataset import Store

Columns = dict[str, tuple[Values, Values]]
"""Domain -> what A and B got, prompt by prompt."""


@dataclass(frozen=True, kw_only=True)
class ComparedDomain:
    """One row of a comparison."""

    domain: str
    """Name of a domain, or `mean` over all that are compared, each weighing the same."""
    prompts: int
    a: Estimate | None
    """Accuracy of A; None where the reward does not say what is right."""
    b: Estimate | None
    accuracy: Difference | None
    """B minus A in accuracy."""
    reward: Difference | None
    """B minus A in mean reward; None where rewards are missing."""

    @property
    def verdict(self) -> str:
        """`B better`, `A better`, or `no difference found`: what the interval says, where McNemar's test agrees."""
        difference = self.accuracy or self.reward
        if difference is None or not difference.is_significant:
            return "no difference found"
        return "B better" if difference.value > 0 else "A better"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two policies, domain by domain."""

    a: str
    b: str
    a_spent: Spent
    """Cost of A."""
    b_spent: Spent
    split: str
    """Held-out prompts that were answered: `eval` or `tune`."""
    rows: list[ComparedDomain]
    left_out: int
    """Prompts that only one of the two answered, or that read differently."""
    changes: dict[str, list[str]]
    """`a` and `b` -> changes of the job that the policy was trained by, from which iteration on."""
    origins: dict[str, str]
    """`a` and `b` -> point and run that the store was forked from; without those that are no forks."""


@dataclass(frozen=True)
class EvaluatedStage:
    """A stage of a store with the held-out answers of its versions."""

    uri: str
    stage: str
    held_out: HeldOut
    versions: list[int]
    """Evaluated versions, rising."""
    spent: dict[int, Spent]
    texts: dict[str, tuple[str, str]]
    """Prompt id -> its text and reference answer."""
    changes: list[Change]
    """Changes of the job that its training went by."""
    origin: str
    """Point and run that the store was forked from; empty for none."""


@dataclass(frozen=True)
class _Policy:
    label: str
    split: str
    answers: Answers
    spent: Spent
    texts: dict[str, tuple[str, str]]
    changes: list[str]
    """Changes of the job that it was trained by."""
    origin: str


def compare_policies(a: str, b: str, *, equal: Budget | None = None) -> Comparison:
    """Compare two policies.

    equal: compare at equal cost of this kind: the newest version of the policy that has spent less, and the version of
    the other that is nearest to it. Raises UnknownNameError for a stage or version that was not evaluated,
    MismatchError where the two have no held-out prompt in common, InputError for a version beside `equal`.
    """
    if equal is None:
        first, second = (_policy(read_stage(name), name) for name in (a, b))
    else:
        first, second = _at_equal_cost(a, b, equal)
    if first.split != second.split:
        raise MismatchError(
            f"{first.label} answered {first.split} prompts, {second.label} {second.split} prompts; "
            "compare two policies on the same split (eval.split)"
        )
    right: Columns = {}
    paid: Columns = {}
    shared = 0
    for domain in first.answers.prompts.keys() & second.answers.prompts.keys():
        places = _places(first, second, domain)
        shared += len(places[0])
        for columns, of_a, of_b in (
            (right, first.answers.correct, second.answers.correct),
            (paid, first.answers.reward, second.answers.reward),
        ):
            if len(places[0]) and domain in of_a and domain in of_b:
                columns[domain] = of_a[domain][places[0]], of_b[domain][places[1]]
    if not right and not paid:
        raise MismatchError(
            f"{first.label} and {second.label} have answered no held-out prompt in common; compare policies whose jobs "
            "hold out the same prompts"
        )
    total = sum(map(len, first.answers.prompts.values())) + sum(map(len, second.answers.prompts.values()))
    domains = sorted(right.keys() | paid.keys())
    rows = [_row(domain, right, paid, [domain]) for domain in domains]
    if len(domains) > 1:
        rows.append(_row("mean", right, paid, domains))
    return Comparison(
        a=first.label, b=second.label, a_spent=first.spent, b_spent=second.spent, split=first.split, rows=rows,
        left_out=total - 2 * shared, changes={"a": first.changes, "b": second.changes},
        origins={name: policy.origin for name, policy in (("a", first), ("b", second)) if policy.origin},
    )  # fmt: skip


def plot_comparison(comparison: Comparison, out: Path) -> None:
    """Difference of every domain with its interval, as an image; the name's ending says which kind."""
    from matplotlib.figure import Figure

    rows = [row for row in comparison.rows if row.accuracy or row.reward]
    figure = Figure(figsize=(6.4, 1.1 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        difference = row.accuracy or row.reward
        assert difference is not None
        scale = 100 if row.accuracy else 1
        colour = "#1f77b4" if difference.is_significant else "#888888"
        axes.plot([scale * difference.low, scale * difference.high], [index, index], color=colour, linewidth=2)
        axes.plot([scale * difference.value], [index], "o", color=colour, markersize=6)
    axes.axvline(0, color="#444444", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.domain} ({row.prompts})" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    unit = "points of accuracy" if all(row.accuracy for row in rows) else "points of accuracy, or mean reward"
    axes.set_xlabel(f"B − A, {unit}, 95 % interval; B = {comparison.b}")
    axes.set_title(f"A = {comparison.a}", fontsize=9, loc="left")
    publish_figure(figure, out, dpi=130)


def _row(name: str, right: Columns, paid: Columns, domains: list[str]) -> ComparedDomain:
    graded, rewarded = [d for d in domains if d in right], [d for d in domains if d in paid]
    a, b = ({d: right[d][side] for d in graded} for side in (0, 1))
    prompts = sum(len((right.get(d) or paid[d])[0]) for d in domains)
    estimate = (lambda values: share(values[name])) if name in right else mean_share
    reward_a, reward_b = ({d: paid[d][side] for d in rewarded} for side in (0, 1))
    return ComparedDomain(
        domain=name,
        prompts=prompts,
        a=estimate(a) if graded else None,
        b=estimate(b) if graded else None,
        accuracy=compare(a, b, binary=True) if graded else None,
        reward=compare(reward_a, reward_b, binary=False) if rewarded else None,
    )


def _places(first: _Policy, second: _Policy, domain: str) -> tuple[list[int], list[int]]:
    """Indices of the prompts that both answered and that have the same text."""
    there = {prompt: index for index, prompt in enumerate(second.answers.prompts[domain])}
    pairs = [
        (index, there[prompt])
        for index, prompt in enumerate(first.answers.prompts[domain])
        if prompt in there and first.texts.get(prompt) == second.texts.get(prompt)
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


def read_stage(name: str) -> EvaluatedStage:
    """Read the held-out answers of STORE[#STAGE[@VERSION]], whatever its version.

    Raises UnknownNameError for a store without such answers, or a stage that was not evaluated.
    """
    uri, hash_sign, chosen = name.partition("#")
    stage = chosen.partition("@")[0]
    try:
        store = Store.open(uri)
    except UnknownNameError as error:
        hint = "" if hash_sign or "@" not in uri else "; a policy of a store is written STORE#STAGE@VERSION"
        raise UnknownNameError(f"{error}{hint}") from None
    answers = held_out(store)
    if not answers.policies:
        raise UnknownNameError(f"{uri}: no policy was evaluated on held-out prompts; give its domains `eval` prompts")
    stages = list(dict.fromkeys(policy for policy, _ in answers.policies))
    stage = stage or stages[-1]
    if stage not in stages:
        raise UnknownNameError(f"{uri}: no policy of stage {stage!r} was evaluated: {nearest(stage, stages)}")
    versions = sorted(number for policy, number in answers.policies if policy == stage)
    texts = {prompt.prompt_id: (prompt.text, prompt.answer) for prompt in store.prompts(split=answers.split)}
    changes = [change for change in read_changes(store) if change.stage == stage and change.change_class != "free"]
    origin = origin_of(store)
    came_from = "" if origin is None else origin.text
    return EvaluatedStage(uri, stage, answers, versions, spent_by_version(store, stage), texts, changes, came_from)


def _policy(evaluated: EvaluatedStage, name: str) -> _Policy:
    """The version that STORE[#STAGE[@VERSION]] names, by default the newest. Raises UnknownNameError."""
    version = name.partition("#")[2].partition("@")[2] or str(evaluated.versions[-1])
    if version not in map(str, evaluated.versions):
        raise UnknownNameError(
            f"{evaluated.uri}: version {version!r} of {evaluated.stage!r} was not evaluated; versions are "
            f"{', '.join(map(str, evaluated.versions))}"
        )
    return _of_version(evaluated, int(version))


def _at_equal_cost(a: str, b: str, budget: Budget) -> tuple[_Policy, _Policy]:
    """The two policies at the largest cost that both have reached."""
    for name in (a, b):
        if "@" in name.partition("#")[2]:
            raise InputError(
                f"{name}: --equal {budget} chooses the versions; give STORE or STORE#STAGE without @VERSION"
            )
    stages = [read_stage(name) for name in (a, b)]
    amount = min(cost_of(stage.spent, stage.versions[-1]).of(budget) for stage in stages)
    first, second = (
        _of_version(stage, nearest_version(stage.spent, stage.versions, budget, amount)) for stage in stages
    )
    return first, second


def _of_version(evaluated: EvaluatedStage, version: int) -> _Policy:
    return _Policy(
        f"{evaluated.uri}#{evaluated.stage}@{version}",
        evaluated.held_out.split,
        evaluated.held_out.policies[evaluated.stage, version],
        cost_of(evaluated.spent, version),
        evaluated.texts,
        [change.line for change in evaluated.changes if change.iteration < version],
        evaluated.origin,
    )
