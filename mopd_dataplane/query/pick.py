"""Chooses the sample to show when no uid was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mopd_dataplane.errors import UnknownNameError, nearest
from mopd_dataplane.query.lineage import literal
from mopd_dataplane.query.text import number

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

Pick = Literal["worst", "disagreement", "random", "newest"]

_SAMPLED = (
    "from samples where (policy <> 'reference' or not exists (from samples where policy <> 'reference' {domain}))"
)
"""Samples of policies, or reference answers if there are none."""
_LATEST = " and (stage, iteration) = (select (stage, iteration) from samples order by created_at desc limit 1)"
"""Those of the iteration that was sampled last."""
_QUERIES: dict[Pick, str] = {
    "disagreement": """
        select uid, max(mean_reverse_kl) as value, count(*) over () as total, count(*) as teachers,
               max(mean_reverse_kl) - min(mean_reverse_kl) as spread
        from scores join (select uid, domain, policy {sampled}) using (uid)
        where kind = 'logprob' and not isnan(mean_reverse_kl) {domain}
        group by uid order by spread desc, value desc, uid limit 1""",
    "worst": """
        select uid, min(reward) as value, count(*) over () as total, any_value(kl) as kl
        from rewards join (select uid, domain, policy {sampled}) using (uid)
        left join (select uid, max(mean_reverse_kl) as kl from scores where not isnan(mean_reverse_kl) group by uid)
            using (uid)
        where true {domain} group by uid order by value, kl desc nulls last, uid limit 1""",
    "random": "select uid, 0 as value, count(*) over () as total {sampled} {domain} order by random() limit 1",
    "newest": """
        select uid, 0 as value, count(*) over () as total {sampled} {domain}
        order by created_at desc, writer_seq desc limit 1""",
}
_DEFAULT: tuple[Pick, ...] = ("disagreement", "worst", "newest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Picked:
    """A sample, and why it was chosen."""

    uid: str
    why: str


def pick_sample(store: Store, by: Pick | None = None, *, domain: str | None = None) -> Picked:
    """A sample worth seeing, of one domain or of all.

    by: `worst` has the lowest reward; `disagreement` the largest difference between its teachers, or between its
    teacher and the sampler if only one scored it; `random` is any. None: disagreement in the newest iteration, which
    shows the student as it is; if no teacher has scored that, the first of disagreement, worst and newest for which the
    store has a sample. Raises UnknownNameError when there is no such sample.
    """
    if domain is not None:
        domains = store.sql("select distinct domain from samples")["domain"].to_pylist()
        if domain not in domains:
            raise UnknownNameError(f"no samples of domain {domain!r} in {store.uri}: {nearest(domain, domains)}")
    condition = "" if domain is None else f"and domain = {literal(domain)}"
    ways: list[tuple[Pick, str]] = [(way, "") for way in ((by,) if by else _DEFAULT)]
    for way, of in ways if by else [("disagreement", _LATEST), *ways]:
        rows = store.sql(
            _QUERIES[way].format(sampled=_SAMPLED.format(domain=condition) + of, domain=condition)
        ).to_pylist()
        if rows:
            return Picked(uid=rows[0]["uid"], why=_why(way, rows[0], "of the newest iteration" if of else ""))
    missing = {"worst": "rewards", "disagreement": "log-probs of a teacher"}.get(by or "newest", "samples")
    of = "" if domain is None else f" of domain {domain!r}"
    raise UnknownNameError(f"{store.uri} holds no {missing}{of} yet; run the job first, or choose in another way")


def _why(way: Pick, row: dict[str, float], part: str) -> str:
    among = " ".join(filter(None, (f"of {row['total']:,} samples", part)))
    if way == "worst":
        equals = "" if row["kl"] is None else "; of those with it, the farthest from its teacher"
        return f"lowest reward {among}: {number(row['value'])}{equals}"
    if way == "random":
        return f"one {among}, at random"
    if way == "newest":
        return f"the newest {among}; nothing has scored them yet"
    if row["teachers"] > 1:
        return f"its teachers differ most {among}: by {number(row['spread'])} nat/token"
    return f"farthest from its teacher {among}: reverse KL {number(row['value'])} nat/token"
