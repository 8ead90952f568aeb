"""Views and macros of a store's SQL for common queries: `from responses where response like '%therefore%'`.

Each is one SQL statement over the tables (and other views), with the meaning of every column beside it. A query gets
the ones it names, with all that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from duckdb.func import ARROW

from mopd_dataplane.tables import signal_table

if TYPE_CHECKING:
    import duckdb

    from mopd_dataplane.store.read.decode import Decoder, Numbers

DECODE = "decode_tokens"
"""SQL function: token ids -> their text, without special tokens."""
PIECES = "token_texts"
"""SQL function: token ids -> the text that each of them adds."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A named query. With `parameters` it is a macro, called like a function: `from worse_between(1, 2)`."""

    name: str
    doc: str
    columns: Mapping[str, str]
    """Meaning of every column, in order."""
    sql: str
    reads: tuple[str, ...]
    """Tables and views that the statement reads."""
    parameters: tuple[str, ...] = ()
    example: str = ""
    """A call of the macro."""
    scalar: bool = False
    """True if the macro returns one value instead of a table."""

    def __post_init__(self) -> None:
        if not self.example:
            object.__setattr__(self, "example", self.name)

    @property
    def call(self) -> str:
        """How a query calls it: `responses`, `worse_between(v, w)`."""
        return f"{self.name}({', '.join(self.parameters)})" if self.parameters else self.name

    @property
    def statement(self) -> str:
        """The SQL statement that creates it."""
        if self.scalar:
            return f'create macro "{self.name}"({", ".join(self.parameters)}) as ({self.sql})'
        if self.parameters:
            return f'create macro "{self.name}"({", ".join(self.parameters)}) as table {self.sql}'
        return f'create view "{self.name}" as {self.sql}'


_REWARDS = """(
    select uid, any_value(reward) as reward, any_value(correct) as correct
    from rewards where verifier <> 'discriminator' group by uid)"""

_UNSCORABLE = """(
    select json_extract_string(detail, '$.uid') as uid, any_value(json_extract_string(detail, '$.reason')) as reason
    from events where kind = 'unscorable' group by 1)"""

_FIXED = (
    View(
        name="responses",
        doc="One row is a sample with its prompt, its decoded response and its reward.",
        columns={
            "uid": "sample",
            "stage": "job stage that owns the sample",
            "iteration": "iteration of the stage that asked for it",
            "domain": "domain of the prompt",
            "policy": "policy that sampled it; 'reference' for text that was not sampled",
            "policy_version": "version that wrote the first token",
            "prompt": "text of the prompt",
            "answer": "reference answer",
            "response": "decoded response, without special tokens",
            "response_len": "length in tokens, tool output included",
            "reward": "outcome reward; null where none was given",
            "correct": "whether the answer is entirely right; null where the reward does not say",
            "unscorable": "why the answer has no reward though one was asked for; null for all others",
            "finish_reason": "stop, length, reference, abandoned or unknown",
        },
        sql=f"""
            select s.uid, s.stage, s.iteration, s.domain, s.policy,
                   s.policy_version_first as policy_version, p.text as prompt, p.answer,
                   {DECODE}(t.tokens[s.prompt_len + 1:]) as response, s.response_len, r.reward, r.correct,
                   case when r.reward is null then u.reason end as unscorable, s.finish_reason
            from samples s join tokens t on t.uid = s.uid
            left join prompts p on p.prompt_id = s.prompt_id
            left join {_REWARDS} r on r.uid = s.uid
            left join {_UNSCORABLE} u on u.uid = s.uid""",
        reads=("samples", "tokens", "prompts", "rewards", "events"),
    ),
    View(
        name="sample_text",
        doc="The decoded response of one sample, by its full uid.",
        columns={"sample_text": "decoded response, without special tokens"},
        sql=f"""
            select {DECODE}(any_value(written)) from (
                select t.uid as written_uid, t.tokens[s.prompt_len + 1:] as written
                from samples s join tokens t on t.uid = s.uid) where written_uid = sample_uid""",
        reads=("samples", "tokens"),
        parameters=("sample_uid",),
        example="sample_text('')",
        scalar=True,
    ),
    View(
        name="accuracy",
        doc="One row is a policy version on the held-out prompts of a domain: the share it answers entirely right.",
        columns={
            "policy": "stage whose policy answered",
            "policy_version": "its version",
            "split": "eval, or tune: held-out prompts that settings are chosen on",
            "domain": "domain of the prompts",
            "answers": "held-out prompts whose answer is known to be right or wrong",
            "right_answers": "answers that are entirely right",
            "accuracy": "right_answers / answers",
            "mean_reward": "mean reward, partial credit included",
        },
        sql="""
            select e.policy, e.policy_version, coalesce(p.split, 'eval') as split, e.domain,
                   count(e.correct) as answers, count(*) filter (e.correct) as right_answers,
                   avg(e.correct::int) as accuracy, avg(e.reward)::double as mean_reward
            from evals e left join prompts p on p.prompt_id = e.prompt_id
            group by all having count(e.correct) > 0""",
        reads=("evals", "prompts"),
    ),
    View(
        name="worse_between",
        doc="Held-out prompts that version v of a policy answered better than version w.",
        columns={
            "policy": "stage whose policy answered",
            "domain": "domain of the prompt",
            "prompt_id": "held-out prompt",
            "reward_before": "reward of version v",
            "reward_after": "reward of version w, lower",
            "prompt": "text of the prompt",
            "answer": "reference answer",
            "before": "response of version v",
            "after": "response of version w",
        },
        sql="""
            select a.policy, a.domain, a.prompt_id, a.reward as reward_before, b.reward as reward_after,
                   p.text as prompt, p.answer, a.response as before, b.response as after
            from evals a join evals b on b.policy = a.policy and b.prompt_id = a.prompt_id
            left join prompts p on p.prompt_id = a.prompt_id
            where a.policy_version = v and b.policy_version = w and b.reward < a.reward""",
        reads=("evals", "prompts"),
        parameters=("v", "w"),
        example="worse_between(1, 2)",
    ),
    View(
        name="kl_by_step",
        doc="One row is an optimizer step: the student's distance from its teachers on the trained tokens.",
        columns={
            "stage": "job stage",
            "step": "ordinal inside the stage",
            "policy_version": "version the step starts from",
            "reverse_kl": "student to teacher, mean over trained tokens, nat/token",
            "loss": "objective value",
            "learning_rate": "at this step",
            "loss_tokens": "trained tokens of the batch",
        },
        sql="""
            select stage, step, policy_version, case when isnan(reverse_kl) then null else reverse_kl end as reverse_kl,
                   loss, learning_rate, loss_tokens from steps""",
        reads=("steps",),
    ),
    View(
        name="staleness",
        doc="One row is a policy version while it was trained: how old its samples were.",
        columns={
            "stage": "job stage",
            "policy_version": "version that was being trained",
            "steps": "optimizer steps",
            "samples": "samples trained on",
            "mean_age": "policy versions between sampling and training, mean over samples",
            "oldest": "largest age of a sample, in policy versions",
        },
        sql="""
            select stage, policy_version, count(*) as steps, sum(samples)::bigint as samples,
                   sum(staleness_mean * samples) / sum(samples) as mean_age, max(staleness_max) as oldest
            from steps group by stage, policy_version""",
        reads=("steps",),
    ),
    View(
        name="teacher_kl",
        doc="One row is a teacher on the samples of one domain and iteration of a stage.",
        columns={
            "stage": "job stage that owns the samples",
            "domain": "domain of the samples",
            "teacher": "teacher that scored the samples",
            "iteration": "iteration of the stage",
            "samples": "samples that it scored",
            "reverse_kl": "sampler to teacher, mean over trained tokens, nat/token",
        },
        sql="""
            select s.stage, s.domain, k.teacher, s.iteration, count(*) as samples,
                   (sum(k.reverse_kl * s.loss_tokens) / sum(s.loss_tokens))::double as reverse_kl
            from samples s join (
                select uid, teacher, any_value(mean_reverse_kl) as reverse_kl
                from scores where not isnan(mean_reverse_kl) group by uid, teacher) k on k.uid = s.uid
            where s.loss_tokens > 0 group by all""",
        reads=("samples", "scores"),
    ),
)


def views(datasets: Iterable[str]) -> dict[str, View]:
    """Return every view by name, for a store with these datasets: some have one column for each teacher.

    datasets: from Store.names().
    """
    signals = [name.split("/")[1:] for name in datasets if name.startswith("signals/")]
    teachers = sorted({teacher for teacher, _ in signals})
    heard = sorted(teacher for teacher, kind in signals if kind == "logprob")
    return {view.name: view for view in (*_FIXED, _side_by_side(teachers), _sample_tokens(heard))}


def create_views(
    connection: duckdb.DuckDBPyConnection, views: Iterable[View], decoder: Callable[[], Decoder | Numbers]
) -> None:
    """Create views, and the functions they call, in a connection with the tables they read.

    decoder: opens the store's tokenizer, when text is needed.
    """
    view_list = list(views)
    functions = {name for name in (DECODE, PIECES) if any(name in view.sql for view in view_list)}
    if functions:
        _create_functions(connection, functions, decoder())
    for view in view_list:
        connection.execute(view.statement)


def _create_functions(connection: duckdb.DuckDBPyConnection, names: set[str], decoder: Decoder | Numbers) -> None:
    kinds: dict[str, tuple[Callable[[list[list[int]]], Sequence[object]], pa.DataType, str]] = {
        DECODE: (decoder.plain_texts, pa.string(), "VARCHAR"),
        PIECES: (lambda rows: [decoder.pieces(row) for row in rows], pa.list_(pa.string()), "VARCHAR[]"),
    }
    for name in names:
        function, kind, answer = kinds[name]
        connection.create_function(name, _vectorised(function, kind), ["INTEGER[]"], answer, type=ARROW)


def _vectorised(function: Callable[[list[list[int]]], Sequence[object]], kind: pa.DataType) -> Callable[..., pa.Array]:
    """Wrap a function of lists of token ids for DuckDB: on Arrow arrays, whose nulls stay null."""

    def apply(ids: pa.Array) -> pa.Array:
        rows = ids.to_pylist()
        answers: Iterator[object] = iter(function([row for row in rows if row is not None]))
        return pa.array([None if row is None else next(answers) for row in rows], kind)

    return apply


def _side_by_side(teachers: list[str]) -> View:
    columns = "".join(
        f", max(mean_reverse_kl) filter (teacher = '{name}' and not isnan(mean_reverse_kl)) as \"{name}\""
        for name in teachers
    )
    return View(
        name="teachers_side_by_side",
        doc="One row is a sample that was scored, with one column per teacher.",
        columns={
            "uid": "sample",
            "stage": "job stage that owns the sample",
            "domain": "domain of the prompt",
            "iteration": "iteration of the stage that asked for it",
            "reward": "outcome reward; null where none was given",
            **{name: f"reverse KL from the sampler to {name}, nat per trained token" for name in teachers},
        },
        sql=f"""
            select s.uid, s.stage, s.domain, s.iteration, r.reward, k.* exclude (uid)
            from samples s join (select uid{columns} from scores group by uid) k on k.uid = s.uid
            left join {_REWARDS} r on r.uid = s.uid""",
        reads=("samples", "scores", "rewards"),
    )


def _sample_tokens(teachers: list[str]) -> View:
    tables = {name: f"signals_{name}_logprob" for name in teachers}
    columns = "".join(f', "{name}".logprob[place + 1] as "{name}"' for name in teachers)
    joins = "".join(f' left join "{table}" "{name}" on "{name}".uid = written_uid' for name, table in tables.items())
    return View(
        name="sample_tokens",
        doc="The response of one sample, by its full uid: one row a token, one column per teacher with log-probs.",
        columns={
            "position": "response position, from 0",
            "token": "token id",
            "text": "text that the token adds",
            "trained": "whether the policy wrote it (false: a tool or the environment did)",
            "logprob": "the sampler's log-prob, nat; null when not recorded",
            **{name: f"log-prob of teacher {name}, nat" for name in teachers},
        },
        sql=f"""
            select place as position, ids[place + 1] as token, texts[place + 1] as text, mask[place + 1] = 1 as trained,
                   sampler[place + 1] as logprob{columns}
            from (select *, {PIECES}(ids) as texts, unnest(range(len(ids))) as place from (
                select t.uid as written_uid, t.tokens[s.prompt_len + 1:] as ids, t.loss_mask as mask,
                       t.logprobs as sampler
                from samples s join tokens t on t.uid = s.uid) where written_uid = sample_uid){joins}
            order by position""",
        reads=("samples", "tokens", *(signal_table(name, "logprob") for name in teachers)),
        parameters=("sample_uid",),
        example="sample_tokens('')",
    )
