"""One self-contained HTML page about a store: no scripts, no network, every text from a model escaped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_urls import PathOrUrl, write_file
from mopd_dataplane.query.ancestry import tree_of
from mopd_dataplane.query.measures import Measures, measure
from mopd_dataplane.query.red_pen import red_pen
from mopd_dataplane.query.run_sections import run_sections
from mopd_dataplane.query.sections import cards, sections
from mopd_dataplane.query.show import BINS, read_sample, strength
from mopd_dataplane.query.text import number, visible
from mopd_dataplane.store.read.decode import find_decoder

if TYPE_CHECKING:
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


def write_report(
    store: Store, out: PathOrUrl, *, measures: Measures | None = None, tokenizer: Path | None = None
) -> PathOrUrl:
    """Write the report of a store to one HTML file, a path or a URL, and return where it is.

    It begins with what teachers correct in the student's answers. Then come the measures and, to read beside them, for
    each domain the newest scored sample on which teacher and student differ most, and of its held-out answers one that
    is right and one that is wrong.

    measures: numbers already read; tokenizer: folder with a tokenizer.json when the store has none of its own.
    """
    measures, decoder = measures or measure(store), find_decoder(store, tokenizer)
    chosen = store.sql(_MOST_DIFFERENT, snapshot=measures.snapshot)["uid"].to_pylist()
    page = fill_template(
        "report.html.j2",
        name=measures.name,
        pen=red_pen(store, measures.snapshot, decoder),
        measures=measures,
        cards=cards(measures),
        tree=tree_of(store),
        sections=[*sections(measures), *run_sections(measures)],
        samples=[read_sample(store, uid, decoder=decoder) for uid in chosen],
        answers=store.sql(_ANSWERS, snapshot=measures.snapshot).to_pylist(),
        token_limit=EXCERPT_TOKENS,
        bins=BINS.items(),
    )
    write_file(out, page.encode())
    return out


def fill_template(template: str, **values: Any) -> str:
    """Fill a template of this package with values. Every text in it is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "strength": strength, "number": number}
    return environment.get_template(template).render(**values)
