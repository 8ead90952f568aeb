"""Tables of docs/recipes.md, from the committed results of a recipe: jobs/<recipe>/results/<seed>.json."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable

import numpy as np
from results import Result, Right, over_seeds, points, right, source

from mopd_dataplane.query.statistics import compare

SORTING, SPELLING, SPIRALS, MEAN = "number_sorting", "spell_backward", "spiral_matrix", "mean"
SPECIALISTS = "specialists"
"""Of a recipe with a specialist named after each domain: what every one of them answers in its own."""
MOST_COLUMNS = 5
"""Of more domains only the mean is shown; of those that are no task of their own, as with a hint, there is no mean."""
COMPARED: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "async": (
        ("in-turn", "base", (SORTING, SPELLING, SPIRALS)),
        ("async-icepop", "base", (SORTING, SPELLING, SPIRALS)),
        ("async-tis", "base", (SORTING, SPELLING, SPIRALS)),
        ("async-icepop", "in-turn", (SORTING,)),
        ("async-tis", "in-turn", (SORTING,)),
    ),
    "black-box": (
        ("text-only", "base", (MEAN, SORTING, SPELLING, SPIRALS)),
        ("gad", "text-only", (MEAN, SORTING, SPELLING, SPIRALS)),
    ),
    "coevolve": (
        ("student-2", "student-1", (MEAN,)),
        ("student-1-longer", "student-1", (MEAN,)),
        ("student-2", "student-1-longer", (MEAN, SORTING, SPELLING, SPIRALS)),
        ("sorter-2", "student-1", (SORTING, SPELLING, SPIRALS)),
    ),
    "deepseek-v4": (("student", "generalist", (MEAN,)), ("student", SPECIALISTS, (MEAN,))),
    "exopd": (
        ("lambda-050", "lambda-100", (SORTING, SPIRALS)),
        ("lambda-125", "lambda-100", (SORTING, SPIRALS)),
        ("lambda-150", "lambda-100", (SORTING, SPIRALS)),
        ("lambda-100", "sorter", (SORTING,)),
        ("lambda-150", "sorter", (SORTING,)),
        ("lambda-100", "base", (SPELLING, SPIRALS)),
        ("sampled-150", "base", (SORTING, SPELLING, SPIRALS)),
    ),
    "glm-5": (
        ("reasoning-rl", "base", (SPELLING,)),
        ("general", "reasoning-rl", (SORTING, SPELLING, SPIRALS)),
        ("cross-stage", "general", (SORTING, SPELLING, SPIRALS, MEAN)),
        ("cross-stage", "reasoning-rl", (MEAN,)),
    ),
    "grpo": tuple((stage, "base", (SPELLING, SORTING, SPIRALS)) for stage in ("grpo", "dapo", "dr-grpo")),
    "mimo-v2-flash": (
        ("speller-rl", "base", (SPELLING,)),
        ("mopd", "base", (MEAN, SORTING, SPIRALS)),
        ("mopd-orm", "base", (MEAN, SORTING, SPIRALS)),
        ("orm", "base", (MEAN, SPELLING)),
        ("mopd-orm", "mopd", (MEAN,)),
        ("mopd-orm", "orm", (MEAN,)),
        ("mopd-orm", "sorter", (SORTING,)),
    ),
    "minillm-gkd": (
        ("gkd", "base", (MEAN,)),
        ("gkd", "gkd-supervised", (MEAN, SORTING, SPIRALS)),
        ("minillm-unmixed", "base", (MEAN,)),
        ("minillm", "minillm-unmixed", (MEAN, SORTING, SPIRALS)),
    ),
    "nemotron-cascade-2": (
        ("first-rl", "base", (SPELLING, MEAN)),
        ("mopd", "first-rl", (SORTING, MEAN)),
        ("next-rl", "mopd", (MEAN,)),
        ("next-rl", "next-rl-unbalanced", (SORTING, SPELLING, SPIRALS, MEAN)),
    ),
    "opcd": (("context", "base", ("bare_word", SPELLING, SORTING, SPIRALS)),),
    "opd": (
        ("one-answer", "base", (SORTING, SPELLING, SPIRALS)),
        ("four-answers", "base", (SORTING, SPELLING, SPIRALS)),
        ("discounted", "base", (SORTING, SPELLING, SPIRALS)),
        ("four-answers", "one-answer", (SORTING, MEAN)),
        ("discounted", "one-answer", (SORTING, MEAN)),
    ),
    "opsd": (
        ("reader", "base", ("sorting",)),
        ("self-taught", "base", ("sorting", SPELLING, SPIRALS)),
        ("self-taught", "reader", ("sorting", "hinted")),
    ),
    "other-tokenizer": (
        *((stage, "base", (SORTING,)) for stage in ("same", "of-stranger", "of-across", "of-finer")),
        *((f"bounded-{of}", "base", (SORTING, SPELLING, SPIRALS)) for of in ("same", "stranger", "across", "finer")),
        *((teacher, "sorter", (SORTING,)) for teacher in ("stranger", "across", "finer")),
        *((f"bounded-{name}", f"of-{name}", (SORTING,)) for name in ("stranger", "across", "finer")),
        *((f"bounded-{name}", "bounded-same", (SORTING,)) for name in ("stranger", "across", "finer")),
        *((f"{name}-student", f"{name}-base", (SORTING,)) for name in ("across", "finer")),
    ),
    "qwen3": (
        ("off-policy", "weak", (MEAN,)),
        ("on-policy", "off-policy", (MEAN,)),
        ("on-policy-only", "weak", (MEAN,)),
        ("on-policy", "on-policy-only", (MEAN, SORTING, SPELLING, SPIRALS)),
    ),
    "topk": (
        *((f"topk-{form}", "base", (MEAN,)) for form in ("truncated", "corrected", "tail", "renormalised")),
        ("topk-truncated", "topk-tail", (MEAN, SORTING, SPELLING, SPIRALS)),
        ("topk-truncated", "topk-renormalised", (MEAN, SORTING, SPELLING, SPIRALS)),
        ("topk-tail", "topk-renormalised", (MEAN,)),
    ),
}  # fmt: skip
"""Recipe -> (a stage, the one it is compared with, in which domains), for the table of differences."""
REWARDED = {"glm-5": SPELLING, "grpo": SPELLING, "mimo-v2-flash": SPELLING, "nemotron-cascade-2": SPELLING}
"""Recipes that train by a reward with partial credit, and the domain that has it: the mean reward stands beside."""
BySeed = dict[int, Result]


def ends(result: Result) -> dict[str, Right]:
    """What every stage's last policy got right, and the specialists in their own domains."""
    by_stage = {stage: right(domains) for stage, domains in result["stages"].items()}
    own = {domain: by_stage[domain][domain] for domain in by_stage if domain in by_stage[domain]}
    return {**by_stage, **({SPECIALISTS: own} if own else {})}


def of(end: Right, domain: str) -> Right:
    """One domain, or all for the mean."""
    return end if domain == MEAN else {domain: end[domain]}


def accuracy(recipe: str, by_seed: BySeed) -> Iterable[str]:
    """Share that is entirely right at the end of every stage."""
    ends_by_seed = {seed: ends(result) for seed, result in by_seed.items()}
    stages = list(dict.fromkeys(stage for result in by_seed.values() for stage in result["stages"]))
    every = sorted({domain for end in ends_by_seed.values() for stage in stages for domain in end.get(stage, ())})
    columns = every if len(every) <= MOST_COLUMNS else []
    if set(every) == {SORTING, SPELLING, SPIRALS} or not columns:
        columns = [*columns, MEAN]
    rewarded = REWARDED.get(recipe)
    head = [*columns, *([f"mean reward, {rewarded}"] if rewarded else []), "seeds"]
    yield from _head("entirely right", *head)
    for stage in stages:
        seeds = [seed for seed, end in ends_by_seed.items() if stage in end]
        cells = [over_seeds([of(ends_by_seed[seed][stage], column) for seed in seeds]) for column in columns]
        if rewarded:
            cells.append(_numbers([by_seed[seed]["stages"][stage][rewarded]["reward"] for seed in seeds], ".3f"))
        yield _row(stage, *cells, ", ".join(map(str, seeds)))


def differences(recipe: str, by_seed: BySeed) -> Iterable[str]:
    """Pairs of stages on the same prompts, seed by seed."""
    ends_by_seed = {seed: ends(result) for seed, result in by_seed.items()}
    yield from _head("difference in points", "in", *(f"seed {seed}" for seed in by_seed))
    for stage, rival, domains in COMPARED[recipe]:
        for domain in domains:
            cells = [_paired(of(end[rival], domain), of(end[stage], domain)) for end in ends_by_seed.values()]
            yield _row(f"{stage} − {rival}", domain, *cells)


def _paired(before: Right, after: Right) -> str:
    difference = compare(before, after, binary=True)
    assert difference.p is not None
    return f"{points(difference)}, p {chance(difference.p)}"


def chance(p: float) -> str:
    """`= 0.03`, `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def by_domain(by_seed: BySeed) -> Iterable[str]:
    """deepseek-v4's ten domains: the start, the domain's specialist, and the student of all."""
    seeds = [ends(result) for result in by_seed.values()]
    yield from _head("entirely right", "generalist, the start", "the domain's specialist", "student")
    for domain in (*seeds[0][SPECIALISTS], MEAN):
        cells = [
            over_seeds([of(end[name], domain) for end in seeds]) for name in ("generalist", SPECIALISTS, "student")
        ]
        yield _row(domain, *cells)


def concurrency(by_seed: BySeed) -> Iterable[str]:
    """async: what came of sampling and training at the same time."""
    told = _with("training", by_seed)
    yield from _head(
        f"mean over steps, {_listed(told)}", "staleness in versions", "most", "tokens dropped by IcePop",
        "mismatch, nat a token", "answers of two versions, of all",
    )  # fmt: skip
    for stage in ("in-turn", "async-icepop", "async-tis"):
        each = [result["training"][stage] for result in told.values()]
        dropped = "–" if stage == "async-tis" else _numbers([100 * one["dropped"] for one in each], ".2f", " %")
        yield _row(
            stage, _numbers([one["staleness"] for one in each], ".2f"), str(max(one["oldest"] for one in each)),
            dropped, _numbers([one["logprob_gap"] for one in each], ".3f"),
            f"{' / '.join(str(one['mixed']) for one in each)}, of {each[0]['samples']:,}",
        )  # fmt: skip


def sampled_rewards(by_seed: BySeed) -> Iterable[str]:
    """grpo: mean reward of what was sampled in every iteration."""
    told = _with("training", by_seed)
    stages = {stage: [r["training"][stage]["rewards"] for r in told.values()] for stage in ("grpo", "dapo", "dr-grpo")}
    columns = range(len(stages["grpo"][0]))
    yield from _head(f"mean reward of samples, {_listed(told)}", *(f"iteration {number}" for number in columns))
    for stage, each in stages.items():
        yield _row(stage, *(f"{np.mean([rewards[number] for rewards in each]):.3f}" for number in columns))


def told_apart(by_seed: BySeed) -> Iterable[str]:
    """black-box: pairs in which the discriminator tells the student's answer from the teacher's, window by window.

    Of the last pass over a window's pairs, each before the update that uses it; the first window has three passes.
    """
    told = _with("training", by_seed)
    each = {seed: result["training"]["gad"]["discriminator"] for seed, result in told.items()}
    windows = [f"window {number}" for number in range(1, len(next(iter(each.values()))))]
    yield from _head("pairs told apart", "window 0, third pass", *windows)
    for seed, shares in each.items():
        yield _row(f"seed {seed}", *(f"{100 * share:.1f} %" for share in shares))


def overlap(by_seed: BySeed) -> Iterable[str]:
    """topk: the student's probability on the tokens that are among the likeliest of both models."""
    told = _with("training", by_seed)
    yield from _head(f"overlap mass, {_listed(told)}", "first window", "last window")
    for stage in dict.fromkeys(stage for stage, _, _ in COMPARED["topk"]):
        each = [result["training"][stage]["overlap_mass"] for result in told.values()]
        yield _row(stage, *(_numbers([masses[window] for masses in each], ".2f") for window in (0, -1)))


MORE: dict[str, Callable[[BySeed], Iterable[str]]] = {
    "async": concurrency, "black-box": told_apart, "deepseek-v4": by_domain, "grpo": sampled_rewards, "topk": overlap,
}  # fmt: skip
"""Recipe -> a table that only it has."""


def tables(recipe: str, by_seed: BySeed) -> Iterable[str]:
    """All tables of a recipe, and where they come from."""
    yield from (*accuracy(recipe, by_seed), "")
    if recipe in COMPARED:
        yield from (*differences(recipe, by_seed), "")
    if recipe == "deepseek-v4" or (recipe in MORE and _with("training", by_seed)):
        yield from (*MORE[recipe](by_seed), "")
    yield from textwrap.wrap(sources(by_seed), 120, break_on_hyphens=False)


def sources(by_seed: BySeed) -> str:
    """Prompts, and the provenance of every seed."""
    first = next(iter(by_seed.values()))
    counts = sorted({len(digits) for end in ends(first).values() for digits in end.values()}, reverse=True)
    sentences = [f"{' or '.join(map(str, counts))} prompts a domain ({first['split']} split)."]
    runs: dict[str, list[int]] = {}
    for seed, result in by_seed.items():
        runs.setdefault(source(result), []).append(seed)
    sentences += [f"{_listed(seeds).capitalize()}: {run}" for run, seeds in runs.items()]
    return " ".join(sentences)


def _with(key: str, by_seed: BySeed) -> BySeed:
    """Results that say it; those of the first runs are of held-out answers alone."""
    return {seed: result for seed, result in by_seed.items() if key in result}


def _numbers(values: list[float], form: str, unit: str = "") -> str:
    """`1.42 (1.40 … 1.45)`."""
    mean = format(float(np.mean(values)), form)
    spread = f" ({format(min(values), form)} … {format(max(values), form)})" if len(values) > 1 else ""
    return f"{mean}{unit}{spread}"


def _listed(seeds: Collection[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _head(*cells: str) -> tuple[str, str]:
    return _row(*cells), "|---" * len(cells) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def accuracies(by_seed: BySeed) -> dict[str, list[float]]:
    """Stage -> the mean over domains of what is right, seed by seed."""
    by_stage: dict[str, list[float]] = {}
    for result in by_seed.values():
        for stage, domains in result["stages"].items():
            by_stage.setdefault(stage, []).append(float(np.mean([values.mean() for values in right(domains).values()])))
    return by_stage
