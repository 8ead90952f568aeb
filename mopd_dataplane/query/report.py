"""One self-contained HTML page about a store: no scripts, no network, every text from a model escaped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_urls import Place, write_file
from mopd_dataplane.query.measures import Measures, measure
from mopd_dataplane.query.run_sections import run_sections
from mopd_dataplane.query.sections import cards, sections
from mopd_dataplane.query.show import BIN_EDGES, SampleView, read_sample, strength
from mopd_dataplane.query.text import number, visible
from mopd_dataplane.store.decode import find_decoder

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

TEMPLATES = Path(__file__).parent / "templates"
EXCERPT_DOMAINS = 6
EXCERPT_TOKENS = 400
"""Longest response shown in the page; `mopd show` shows all of it."""

_MOST_DIFFERENT = f"""
    with scored as (
        select uid, domain, iteration, mean_reverse_kl from samples join scores using (uid)
        where not isnan(mean_reverse_kl) and policy <> 'reference'),
    newest as (select domain, max(iteration) as iteration from scored group by domain)
    select domain, arg_max(uid, mean_reverse_kl) as uid from scored join newest using (domain, iteration)
    group by domain order by domain limit {EXCERPT_DOMAINS}"""
_ANSWERS = f"""
    with latest as (select policy, max(policy_version) as policy_version from evals group by policy
                    order by max(created_at) desc, policy limit 1)
    select domain, policy, policy_version, correct, reward, response, text as prompt, answer
    from evals join latest using (policy, policy_version) join prompts using (prompt_id, domain)
    where reward is not null
    qualify row_number() over (partition by domain, correct order by prompt_id) = 1
    order by domain, correct desc nulls last limit {2 * EXCERPT_DOMAINS}"""


@dataclass(frozen=True, kw_only=True)
class Excerpts:
    """Samples and answers to read beside the numbers."""

    samples: list[SampleView]
    answers: list[dict[str, Any]]
    """Rows of `evals` joined with their prompt: one right and one wrong answer of each domain."""


def write_report(store: Store, out: Place, *, measures: Measures | None = None, tokenizer: Path | None = None) -> Place:
    """Write the report of a store to one HTML file, a path or a URL, and return where it is.

    measures: numbers already read; tokenizer: folder with a tokenizer.json when the store has none of its own.
    """
    numbers = measures or measure(store)
    page = render(numbers, excerpts(store, numbers.snapshot, tokenizer=tokenizer))
    write_file(out, page.encode())
    return out


def excerpts(store: Store, snapshot: Snapshot, *, tokenizer: Path | None = None) -> Excerpts:
    """For each domain the newest scored sample on which teacher and student differ most, and two held-out answers."""
    decoder = find_decoder(store, tokenizer)
    chosen = store.sql(_MOST_DIFFERENT, snapshot=snapshot)["uid"].to_pylist()
    return Excerpts(
        samples=[read_sample(store, uid, decoder=decoder) for uid in chosen],
        answers=store.sql(_ANSWERS, snapshot=snapshot).to_pylist(),
    )


def render(measures: Measures, shown: Excerpts) -> str:
    """The page as HTML text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "strength": strength, "number": number}
    return environment.get_template("report.html.j2").render(
        name=measures.name,
        measures=measures,
        cards=cards(measures),
        sections=[*sections(measures), *run_sections(measures)],
        samples=shown.samples,
        answers=shown.answers,
        token_limit=EXCERPT_TOKENS,
        bins=_legend(),
    )


def _legend() -> list[tuple[int, str]]:
    """(strength, label) from most disliked to most liked by the teacher."""
    edges = [f"{edge:g}" for edge in BIN_EDGES]
    disliked = [(-4, f"≤ −{edges[3]}"), *((-level, f"−{edges[level - 1]}") for level in (3, 2, 1))]
    return [*disliked, (0, "0"), *((level, edges[level - 1]) for level in (1, 2, 3)), (4, f"≥ {edges[3]}")]
