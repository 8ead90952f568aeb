"""The numbers of a report: one SQL statement each, all at one pinned snapshot of the store."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.answers import HeldOut, Values, held_out, paired
from mopd_dataplane.query.change_marks import change_rows
from mopd_dataplane.query.exactness import SAMPLER_GAPS, SELF_CHECKS, gaps_by_position
from mopd_dataplane.query.job import remembered_job, stage_starts
from mopd_dataplane.query.run_curves import SAMPLED, rollout_curves, step_curves, with_intervals
from mopd_dataplane.query.signal_health import SIGNAL_HEALTH, SIGNAL_PROBES
from mopd_dataplane.query.statistics import recover, share, standard_error
from mopd_dataplane.store.format.dataset_format import sql_name

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

Rows = list[dict[str, Any]]

CURVE_POINTS = 400
"""Most points of one line; longer step logs are averaged into this many stretches."""
LENGTH_BINS = 24
KL_BY_TEACHER = """
            select uid, teacher, any_value(mean_reverse_kl) as mean_reverse_kl
            from scores where not isnan(mean_reverse_kl) group by uid, teacher"""


def _answer(sql: str) -> Any:
    """A field that is the answer to one statement."""
    return field(metadata={"sql": sql})


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Every number of a report."""

    name: str
    """Name of the job, or of the store's folder."""
    uri: str
    snapshot: Snapshot
    rows: dict[str, int]
    """Rows of each table."""
    starts: dict[str, str]
    """Stage -> policy it starts from."""
    held_out: HeldOut
    accuracy: Rows
    """Newest version of every policy: `accuracy` with its interval `low`, `high`, `answers`, and the mean `reward` with
    its standard error `reward_error`. Accuracy is None where the reward is no verifier, reward where none is known."""
    accuracy_by_version: Rows
    heldout_kl: Rows = _answer("""
        select policy, policy_version, domain, avg(reverse_kl)::double as reverse_kl, count(*) as answers
        from evals where not isnan(reverse_kl) group by policy, policy_version, domain
        order by policy_version, policy, domain""")
    routing: Rows = _answer("""
        with counted as (
            select stage, domain, teacher, count(*) as samples
            from samples join (select distinct uid, teacher from scores) using (uid) group by stage, domain, teacher)
        select stage, domain, arg_max(teacher, (samples, teacher)) as teacher, sum(samples)::bigint as samples
        from counted group by stage, domain order by stage, domain""")
    teacher_kl: Rows = _answer(f"""
        select stage, teacher, iteration,
               (sum(mean_reverse_kl * loss_tokens) / sum(loss_tokens))::double as reverse_kl,
               sum(loss_tokens)::bigint as tokens
        from samples join ({KL_BY_TEACHER}) using (uid)
        where loss_tokens > 0 group by stage, teacher, iteration order by stage, teacher, iteration""")
    suitability: Rows = _answer(f"""
        select domain, teacher, (sum(mean_reverse_kl * loss_tokens) / sum(loss_tokens))::double as reverse_kl,
               count(*) as samples
        from samples join ({KL_BY_TEACHER}) using (uid)
        where loss_tokens > 0 group by domain, teacher order by domain, teacher""")
    rewards: Rows = _answer("""
        select stage, domain, iteration, avg(reward)::double as reward, count(*) as samples
        from samples join rewards using (uid) group by stage, domain, iteration order by stage, domain, iteration""")
    unscorable: Rows = _answer("""
        with failed as (
            select json_extract_string(detail, '$.uid') as uid, any_value(json_extract_string(detail, '$.reason'))
                   as reason
            from events where kind = 'unscorable' group by 1)
        select stage, domain, reason, count(*) as samples from samples join failed using (uid)
        where uid not in (select uid from rewards where verifier <> 'discriminator')
        group by stage, domain, reason order by stage, domain, reason""")
    """Sampled answers without a reward because none could be given."""
    unscorable_evals: Rows = _answer("""
        with failed as (
            select policy, policy_version, prompt_id, domain from evals
            where coalesce(isnan(reward), true) and correct is null and finish_reason <> 'benchmark'
            union
            select json_extract_string(detail, '$.row.policy'), (detail->>'$.row.policy_version')::int,
                   json_extract_string(detail, '$.row.prompt_id'), json_extract_string(detail, '$.row.domain')
            from events where kind = 'unscorable_eval'
              and (json_extract_string(detail, '$.row.policy'), (detail->>'$.row.policy_version')::int,
                   json_extract_string(detail, '$.row.prompt_id'))
                  not in (select (policy, policy_version, prompt_id) from evals))
        select policy, policy_version, domain, count(*) as answers from failed
        group by policy, policy_version, domain order by policy, policy_version, domain""")
    """Held-out answers without a reward because none could be given: by their events, in older stores by their rows."""
    steps: Rows = _answer(step_curves(CURVE_POINTS))
    curves: Rows = _answer(rollout_curves(f"({SAMPLED})"))
    """Means of rollouts by (stage, domain, iteration), half widths of their 95 % intervals as `<name>_ci`."""
    training: Rows = _answer("""
        select stage, count(*) as steps, sum(tokens)::bigint as tokens, sum(step_time_s)::double as seconds,
               sum(data_wait_s)::double as data_wait_s, max(staleness_max) as staleness_max
        from steps group by stage order by min(created_at), stage""")
    lengths: Rows = _answer(f"""
        with sampled as (select domain, response_len from samples where policy <> 'reference'),
             width as (select greatest(1, ceil((max(response_len) + 1) / {LENGTH_BINS}.0))::int as w from sampled)
        select domain, (response_len // w) * w as start, any_value(w) as width, count(*) as samples
        from sampled, width group by domain, 2 order by domain, 2""")
    finish: Rows = _answer("""
        select stage, finish_reason, count(*) as samples, sum((interruptions > 0)::int)::bigint as interrupted
        from samples group by stage, finish_reason order by stage, finish_reason""")
    times: Rows = _answer("""
        select stage, coalesce(json_extract_string(detail, '$.action'), 'other') as action,
               sum(value) as seconds, min(created_at) as since
        from events where kind = 'stage_time' group by stage, action order by since, stage, action""")
    cost: Rows = _answer("""
        select kind, codec, count(*) as samples, sum("rows")::bigint as tokens, sum(bytes)::bigint as bytes,
               (sum(bytes) / greatest(sum("rows"), 1))::double as bytes_per_token
        from scores group by kind, codec order by bytes_per_token""")
    totals: Rows = _answer("""
        select count(*) as samples, count(distinct uid) as distinct_uids, coalesce(sum(response_len), 0)::bigint
               as response_tokens, coalesce(sum((interruptions > 0)::int), 0)::bigint as interrupted from samples""")
    teachers: Rows = _answer("select name, source from teachers order by name")
    rounding: Rows = _answer("""
        select json_extract_string(detail, '$.teacher') as teacher,
               any_value(json_extract_string(detail, '$.quantisation')) as quantisation,
               any_value((detail->>'$.tokens')::bigint) as tokens,
               max(value) filter (detail->>'$.measure' = 'kl') as kl,
               max(value) filter (detail->>'$.measure' = 'logprob_gap') as logprob_gap,
               max(value) filter (detail->>'$.measure' = 'top1_agreement') as top1_agreement
        from events where kind = 'quantisation' group by teacher order by teacher""")
    self_checks: Rows = _answer(SELF_CHECKS)
    sampler_gaps: Rows = _answer(SAMPLER_GAPS)
    signal_health: Rows = _answer(SIGNAL_HEALTH)
    signal_probes: Rows = _answer(SIGNAL_PROBES)
    gaps_by_position: Rows
    """Trainer against sampler by position (query/exactness.py)."""
    job: dict[str, Any]
    """Settings of the job, empty where none made the store."""
    changes: Rows
    """Keys of the job that changed in the middle of a stage (query/change_marks.py)."""
    made_with: dict[str, Any]
    """provenance.json: commit, versions, machine and date of each call."""

    def numbers(self) -> dict[str, Any]:
        """The measures and the recovery as plain values, for --json."""
        return {
            "name": self.name,
            "uri": self.uri,
            "versions": self.snapshot.versions,
            "digest": self.snapshot.digest,
            "rows": self.rows,
            "split": self.held_out.split,
            "accuracy": self.accuracy,
            "accuracy_by_version": self.accuracy_by_version,
            **{name: getattr(self, name) for name in QUERIES},
            "recovery": recovery(self),
            "gaps_by_position": self.gaps_by_position,
            "changes": self.changes,
        }


QUERIES: dict[str, str] = {one.name: one.metadata["sql"] for one in fields(Measures) if one.metadata}
"""Statement by field."""


def measure(store: Store) -> Measures:
    """The numbers of a report, read from a store at its newest snapshot."""
    snapshot = store.snapshot()
    counts = " union all ".join(
        f'select {literal(name)} as name, count(*) as n from "{sql_name(name)}"' for name in snapshot.versions
    )
    rows = {row["name"]: row["n"] for row in store.sql(counts, snapshot=snapshot).to_pylist()}
    answers = {name: store.sql(query, snapshot=snapshot).to_pylist() for name, query in QUERIES.items()}
    answers["curves"] = [with_intervals(row) for row in answers["curves"]]
    for row in answers["steps"]:
        row.pop("extra")
    job = remembered_job(store)
    starts = stage_starts(job)
    held_out_answers = held_out(store, snapshot)
    by_version = accuracies(held_out_answers)
    answers["heldout_kl"] = from_the_start(answers["heldout_kl"], starts)
    name = job.get("name") or store.uri.rstrip("/").rpartition("/")[2]
    return Measures(
        name=name, uri=store.uri, snapshot=snapshot, rows=rows, starts=starts, held_out=held_out_answers,
        accuracy=newest(by_version), accuracy_by_version=from_the_start(by_version, starts), job=job,
        changes=change_rows(store, snapshot), gaps_by_position=gaps_by_position(store, snapshot),
        made_with=store.read_json("provenance.json") or {}, **answers,
    )  # fmt: skip


def accuracies(held_out_answers: HeldOut) -> Rows:
    """Accuracy and mean reward of every (policy, version, domain), versions of a policy rising."""
    rows = []
    for (policy, version), answers in held_out_answers.policies.items():
        for domain in answers.prompts:
            if domain not in answers.correct and domain not in answers.reward:
                continue
            right = share(answers.correct[domain]) if domain in answers.correct else None
            paid = answers.reward.get(domain)
            rows.append({
                "policy": policy, "policy_version": version, "domain": domain,
                "accuracy": right and right.value, "low": right and right.low, "high": right and right.high,
                "answers": len(answers.prompts[domain]), "reward": None if paid is None else float(paid.mean()),
                "reward_error": None if paid is None else standard_error(paid),
            })  # fmt: skip
    return rows


def newest(rows: Rows) -> Rows:
    """Rows of every policy's newest version."""
    last = {row["policy"]: row["policy_version"] for row in rows}  # rows rise by version
    return [row for row in rows if row["policy_version"] == last[row["policy"]]]


def from_the_start(rows: Rows, starts: dict[str, str]) -> Rows:
    """Rows by version, with a stage's version 0 taken from the policy it starts from.

    That policy is evaluated as its own version 0 when it is no stage (`init`), else as its newest version.
    """
    own = [row for row in rows if row["policy_version"] > 0]
    newest = {row["policy"]: row["policy_version"] for row in rows}  # rows rise by version
    first = [
        {**row, "policy": stage, "policy_version": 0}
        for stage in dict.fromkeys(row["policy"] for row in own)
        for row in rows
        if (row["policy"], row["policy_version"]) == (starts.get(stage), newest.get(starts.get(stage, ""), 0))
    ]
    return first + own


def teacher_policies(measures: Measures) -> dict[str, str]:
    """Evaluated policy that each teacher is: the one its weights came from, or one of its name."""
    evaluated = {row["policy"] for row in measures.accuracy}
    policies = {}
    for teacher in measures.teachers:
        origin = teacher["source"].removeprefix("stage:").replace("\\", "/").split("/")
        matches = [part for part in [*origin, teacher["name"]] if part in evaluated]
        if matches:
            policies[teacher["name"]] = matches[0]
    return policies


def recovery(measures: Measures) -> Rows:
    """Share of each domain teacher's lead over the start that a student has, on held-out prompts all three answered.

    One row per (student stage, domain), and one of domain `mean` over those: `policy`, `domain`, `teacher` (of the mean
    all of them), `base`, their accuracies, `recovery` = (student - base) / (teacher - base) with `low` and `high`, None
    where the teacher's lead is within its own interval, and `warning`, which then says so. A domain's teacher is the
    one that scored most of the stage's samples. Stages whose start or teacher was not evaluated have no rows.
    """
    policy_of = teacher_policies(measures)
    rows: Rows = []
    for stage in dict.fromkeys(route["stage"] for route in measures.routing):
        routes = {route["domain"]: route["teacher"] for route in measures.routing if route["stage"] == stage}
        student, base_name = measures.held_out.newest(stage), measures.starts.get(stage, "")
        base = measures.held_out.newest(base_name)
        if student is None or base is None:
            continue
        parts: dict[str, dict[str, dict[str, Values]]] = {}
        for domain, teacher in routes.items():
            measured = measures.held_out.newest(policy_of.get(teacher, ""))
            if measured is None or policy_of[teacher] == stage:
                continue
            pairs = paired({"base": base, "teacher": measured, "student": student}, [domain])
            if domain in pairs["student"]:
                parts[domain] = pairs
                rows.append(_recovered(stage, domain, teacher, base_name, pairs))
        if parts:
            whole = {who: {d: part[who][d] for d, part in parts.items()} for who in ("base", "teacher", "student")}
            rows.append(_recovered(stage, "mean", ", ".join(routes[d] for d in parts), base_name, whole))
    return rows


def _recovered(stage: str, domain: str, teacher: str, base: str, pairs: dict[str, dict[str, Values]]) -> dict[str, Any]:
    result = recover(pairs["base"], pairs["teacher"], pairs["student"])
    means = {who: float(np.mean([values.mean() for values in pairs[who].values()])) for who in pairs}
    return {
        "policy": stage, "domain": domain, "teacher": teacher, "base": base, "accuracy": means["student"],
        "teacher_accuracy": means["teacher"], "base_accuracy": means["base"], "recovery": result.value,
        "low": result.low, "high": result.high, "answers": result.n, "warning": result.warning,
    }  # fmt: skip
