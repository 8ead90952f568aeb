"""Columns of the table of rollouts: those of `samples`, and columns from other tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.open_store import OpenStore

MOST_TEACHERS = 12
"""Number of teachers with a column of their own; `kl` and `teachers` count all."""
HIDDEN = frozenset({"sample_row", "payload_row", "payload_crc", "schema_version", "tokenizer", "writer_seq"})
"""Columns of `samples` that the table does not show."""
DOCS: dict[str, tuple[str, str]] = {
    "reward": ("mean over its verifiers", ""),
    "kl": ("mean sampler minus teacher log-prob over loss tokens, mean of its teachers", "nat/token"),
    "teachers": ("teachers that scored it", ""),
    "kl_spread": ("largest minus smallest of its teachers' divergences", "nat/token"),
    "signal_bytes": ("stored signals of all teachers", "bytes"),
    "group_size": ("answers in its group", ""),
    "group_spread": ("largest minus smallest reward of its group; 0 teaches nothing to a group baseline", ""),
    "advantage": ("reward minus the mean of its group", ""),
    "truncated": ("the token budget ended it", ""),
    "interrupted": ("it was interrupted and continued", ""),
    "several_versions": ("more than one policy version wrote it", ""),
    "no_logprobs": ("sampled, but the sampler's log-probs were not recorded", ""),
    "all_masked": ("no token of it is trained", ""),
    "unscored": ("no teacher scored it, though others of its stage and iteration were", ""),
    "gap": ("mean |trainer - sampler| log-prob at the first step that trained it", "nat/token"),
    "student_entropy": ("mean entropy of the student at that step", "nat"),
    "teacher_entropy": ("mean entropy of its teachers", "nat"),
    "repetitive": ("more than half of its runs of four tokens occurred before in it", ""),
    "zero_teacher": ("a teacher gave every token the log-prob 0", ""),
    "uniform_teacher": ("a teacher gave every token the log-prob -log V", ""),
    "constant_teacher": ("a teacher gave every token the same log-prob", ""),
    "far_trainer": ("trainer and sampler are more than 0.1 nat/token apart at the first step that trained it", ""),
    "surprising": ("among the 1 % with the largest kl of its domain", ""),
    "labels": ("labels that readers gave it, in alphabetical order with a comma between them", ""),
    "eval_answers": ("held-out answers of policies to its prompt", ""),
    "eval_reward": ("mean reward of those answers", ""),
    "eval_accuracy": ("share of those answers that is entirely right", ""),
}
DERIVED = frozenset(DOCS)
FLAGS = (
    "truncated", "interrupted", "several_versions", "no_logprobs", "all_masked", "unscored", "repetitive",
    "zero_teacher", "uniform_teacher", "constant_teacher", "far_trainer", "surprising",
)  # fmt: skip
"""Columns that mark unusual samples; each is a filter of one click."""
TEACHER_COLUMNS: dict[str, tuple[str, str]] = {
    "kl_": ("mean sampler minus log-prob of teacher {teacher} over loss tokens", "nat/token"),
}
SPREAD, STATS, REPETITION = "logprob_std", "token_stats", "repetition"
"""Optional sources, which a store may lack: a column of `scores`, a table, a column of `samples`."""
READ: dict[str, tuple[str, ...]] = {
    "rewards": ("sample_row", "reward"),
    "scores": ("sample_row", "teacher", "mean_reverse_kl", "bytes", "rows", SPREAD),
    STATS: ("sample_row", "step", "mean_abs_gap", "mean_student_entropy", "mean_teacher_entropy"),
    "labels": ("uid", "label", "removed", "created_at"),
    "evals": ("prompt_id", "reward", "correct", "finish_reason"),
}
"""Columns of other tables that the definition reads, if a store has them."""
_ALIKE = """
           list({kl: mean_reverse_kl, size: vocab_size})
             filter (logprob_std < 1e-3 and scored_tokens >= 4) as alike,"""
"""Teachers of a sample whose log-probs are all the same."""
_ODD_TEACHERS = """
         coalesce(len(list_filter(alike, lambda t: abs(mean_logprob - t.kl) < 1e-3)) > 0, false) as zero_teacher,
         coalesce(len(list_filter(alike, lambda t: abs(mean_logprob - t.kl + ln(t.size)) < 1e-2)) > 0, false)
             as uniform_teacher,
         alike is not null as constant_teacher,"""
LABELLED_SQL = """
  select uid, label from labels
  qualify row_number() over (partition by uid, label order by created_at desc) = 1 and not removed"""
"""Current labels of samples."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of rollouts."""

    name: str
    kind: str
    """One of number, word, time, flag."""
    doc: str
    unit: str = ""


def column_of(name: str, kind: pa.DataType) -> Column:
    """Return the column of a name and a type."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        shape = "word"
    else:
        shape = "time" if pa.types.is_timestamp(kind) else "flag" if pa.types.is_boolean(kind) else "number"
    field = (SAMPLES.schema.field(name).metadata if name in SAMPLES.schema.names else None) or {}
    doc, unit = DOCS.get(name) or (field.get(b"doc", b"").decode(), field.get(b"unit", b"").decode())
    for prefix, (text, of) in TEACHER_COLUMNS.items():
        if name.startswith(prefix) and name not in DERIVED:
            doc, unit = text.format(teacher=name.removeprefix(prefix)), of
    return Column(name=name, kind=shape, doc=doc, unit=unit)


def described(schema: pa.Schema) -> dict[str, Column]:
    """Return the columns that a reader sees."""
    return {field.name: column_of(field.name, field.type) for field in schema if field.name not in HIDDEN}


def optional_sources(store: OpenStore, snapshot: Snapshot | None) -> Iterator[str]:
    """Yield the optional sources (SPREAD, STATS, REPETITION) in a snapshot, or in the newest versions."""
    if SPREAD in store.dataset("scores", snapshot).schema.names:
        yield SPREAD
    if STATS in (store.names() if snapshot is None else snapshot.versions):
        yield STATS
    if REPETITION in store.dataset("samples", snapshot).schema.names:
        yield REPETITION


def definition(teachers: Sequence[str], *, has: Collection[str] = (), with_rows: bool = False) -> str:
    """Return the SELECT over `samples` and the tables of READ that makes the table of rollouts.

    has: those of SPREAD, STATS and REPETITION in the store. with_rows: include the columns of HIDDEN, for a `samples`
    that carries `sample_row`, by which tables are then joined; else by uid, which takes longer.

    Comparisons between samples use only the few columns that they need: a window over whole rows would hold all of
    them.
    """
    spread = SPREAD in has
    key = "sample_row" if with_rows else "uid"
    scored_more = (
        ", max(logprob_std) as logprob_std, any_value(rows) as scored_tokens, any_value(vocab_size) as vocab_size"
    )
    scored_from = "scores join (select name as teacher, vocab_size from teachers) using (teacher)"
    measured = f"""
  first_steps as (
    select {key}, arg_min(mean_abs_gap, step) filter (step >= 0) as gap,
           arg_min(mean_student_entropy, step) filter (step >= 0) as student_entropy,
           avg(mean_teacher_entropy)::float as teacher_entropy
    from token_stats group by {key}),"""
    odd = ["coalesce(repetition > 0.5, false) as repetitive,"] * (REPETITION in has) + [
        "coalesce(gap > 0.1, false) as far_trainer,"
    ] * (STATS in has)
    flags = " ".join(odd)
    trained = (
        (f", first_steps.* exclude ({key})", f" left join first_steps using ({key})") if STATS in has else ("", "")
    )
    own = ", ".join(
        f'(avg(mean_reverse_kl) filter (teacher = {literal(name)}))::float as "kl_{name}"'
        for name in teachers[:MOST_TEACHERS]
    )
    hidden = "" if with_rows else " exclude (payload_row, payload_crc, schema_version, tokenizer, writer_seq)"
    return f"""
  with scored as (
    select {key}, teacher, avg(mean_reverse_kl) filter (not isnan(mean_reverse_kl)) as mean_reverse_kl,
           sum(bytes)::bigint as bytes{scored_more if spread else ""}
    from {scored_from if spread else "scores"} group by {key}, teacher),{measured if STATS in has else ""}
  said as (
    select {key}, avg(mean_reverse_kl)::float as kl, count(*)::int as teachers,
           (max(mean_reverse_kl) - min(mean_reverse_kl))::float as kl_spread,
           {_ALIKE if spread else ""}
           sum(bytes)::bigint as signal_bytes{", " + own if own else ""}
    from scored group by {key}),
  rewarded as (select {key}, avg(reward)::float as reward from rewards where not isnan(reward) group by {key}),
  joined as materialized (
    select samples.{key}, stage, iteration, domain, group_id, reward,
           said.* exclude ({key}) replace (coalesce(teachers, 0) as teachers){trained[0]}
    from samples left join rewarded using ({key}) left join said using ({key}){trained[1]}),
  grouped as (
    select stage, group_id, count(*) as group_size, (max(reward) - min(reward))::float as group_spread,
           avg(reward) as group_mean
    from joined group by stage, group_id),
  batched as (select stage, iteration, max(teachers) > 0 as any_teacher from joined group by stage, iteration),
  likely as (select domain, quantile_cont(kl, 0.99) as high from joined group by domain),
  compared as (
    select joined.* exclude (stage, iteration, domain, group_id), group_size, group_spread,
           (reward - group_mean)::float as advantage, teachers = 0 and any_teacher as unscored,
           coalesce(kl >= high and kl > 0, false) as surprising
    from joined join grouped using (stage, group_id) join batched using (stage, iteration) join likely using (domain)),
  labelled_once as (select uid, string_agg(label, ', ' order by label) as labels from ({LABELLED_SQL}) group by uid),
  answered as (
    select prompt_id, count(*)::int as eval_answers, avg(reward)::float as eval_reward,
           avg(correct::int)::float as eval_accuracy
    from evals where finish_reason <> 'benchmark' group by prompt_id)
  select samples.*{hidden}, compared.* exclude ({key}{", alike" if spread else ""}, unscored, surprising),
         finish_reason = 'length' as truncated, interruptions > 0 as interrupted,
         policy_version_last > policy_version_first as several_versions,
         policy <> 'reference' and mean_logprob is null as no_logprobs, loss_tokens = 0 as all_masked,
         {_ODD_TEACHERS if spread else ""} {flags} unscored, surprising, labels,
         coalesce(eval_answers, 0) as eval_answers, eval_reward, eval_accuracy
  from samples join compared using ({key}) left join labelled_once using (uid)
  left join answered using (prompt_id)"""
