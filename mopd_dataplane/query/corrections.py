"""Where teachers correct the student: the tokens that a teacher disliked, and the word it would have written.

A correction is a token to which the teacher gives a log-prob at least MIN_NATS below the student's, and which is not
the teacher's likeliest. Its own word comes from the stored hidden state times the head, or from the stored top-k; with
log-probs alone, the token is marked and the word stays open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MopdError
from mopd_dataplane.fields import PAYLOAD, column_names
from mopd_dataplane.query.heads import head_logits, log_softmax, read_states
from mopd_dataplane.query.run_curves import half_width
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.format.arrow_rows import list_views

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

Ask = Callable[[str], list[dict[str, Any]]]
"""Answers a statement with its rows."""

MIN_NATS = 1.0
"""Smallest distance below the student's log-prob that counts as a correction."""
MOST_ANSWERS, MOST_TOKENS = 256, 100_000
"""Answers, and response tokens of them, that are read for each teacher and iteration."""
MOST_PRODUCTS = 10_000_000_000
"""Multiplications of states by the head for each teacher and iteration; the most disliked tokens come first."""
LOGITS = 1 << 24
"""Logits in memory at a time."""
MOST_LINES = 8
"""Lines of the list of what a teacher corrected most."""
LINE_SAMPLES = 50
"""Samples that a line names."""
ANSWER_TOKENS = 160
"""Tokens of an answer that are shown, those around the most disliked one."""
PIECE_CHARACTERS = 200
"""Longest text of a token."""
QUANTILE = 0.9
"""Where no answer to the same prompt exists, the answer at this quantile of an iteration's reverse KL stands in."""
SCORED = """
    select stage, iteration, policy_version_first as version, domain, prompt_id, uid, sample_row, response_len, teacher,
           kl
    from samples join (
      select uid, teacher, any_value(sample_row) as sample_row, any_value(mean_reverse_kl)::float as kl from scores
      where not isnan(mean_reverse_kl) group by uid, teacher) using (uid)
    where policy <> 'reference'"""
"""Sampled answers with each teacher that scored them, of a store's tables."""


@dataclass(frozen=True)
class Pick:
    """The answer that shows one teacher's corrections in one iteration, with figures of that iteration."""

    teacher: str
    iteration: int
    version: int
    answers: int
    """Answers that the teacher scored in this iteration."""
    kl: float
    """Mean reverse KL of those answers, in nats a token."""
    kl_ci: float | None
    """Half the width of its 95 % interval."""
    sample_row: int
    uid: str
    prompt_id: str
    domain: str
    answer_kl: float
    is_same_prompt: bool
    """True if it answers the prompt that is followed through the versions."""


def picks(ask: Ask, scored: str, stage: str) -> list[Pick]:
    """One answer for each teacher and iteration of a stage, by teacher and iteration.

    Each teacher's prompt is the one of its first iteration that most iterations share; of several answers, the one with
    the largest reverse KL is taken. scored: a statement with the columns of SCORED.
    """
    rows = ask(f"""
    with scored as materialized (
      select iteration, version, domain, prompt_id, uid, sample_row, teacher, kl from ({scored})
      where stage = {literal(stage)}),
    means as (
      select teacher, iteration, min(version) as version, count(*) as answers, avg(kl)::double as kl,
             stddev_samp(kl)::double as kl_sd, quantile_cont(kl, {QUANTILE})::double as level
      from scored group by teacher, iteration),
    opening as (
      select scored.teacher, prompt_id, min(abs(scored.kl - level)) as distance
      from scored join means on means.teacher = scored.teacher and means.iteration = scored.iteration
      where scored.iteration = (select min(iteration) from means as m where m.teacher = scored.teacher)
      group by scored.teacher, prompt_id),
    threads as (
      select scored.teacher, scored.prompt_id, count(distinct iteration) as versions, max(iteration) as newest,
             any_value(distance) as distance
      from scored join opening on opening.teacher = scored.teacher and opening.prompt_id = scored.prompt_id
      group by scored.teacher, scored.prompt_id),
    followed as (
      select teacher, arg_min(prompt_id, (-versions, -newest, distance, prompt_id)) as lead
      from threads group by teacher)
    select scored.teacher, scored.iteration, any_value(means.version) as version, any_value(answers) as answers,
           any_value(means.kl) as kl, any_value(kl_sd) as kl_sd,
           arg_min({{
             'sample_row': sample_row, 'uid': uid, 'prompt_id': prompt_id, 'domain': domain, 'answer_kl': scored.kl,
             'is_same_prompt': prompt_id = lead
           }}, (prompt_id <> lead, if(prompt_id = lead, -scored.kl, abs(scored.kl - level)), sample_row)) as pick
    from scored join followed on followed.teacher = scored.teacher
      join means on means.teacher = scored.teacher and means.iteration = scored.iteration
    group by scored.teacher, scored.iteration order by scored.teacher, scored.iteration""")
    return [Pick(**row.pop("pick"), kl_ci=half_width(row.pop("kl_sd"), row["answers"]), **row) for row in rows]


def rows_to_read(ask: Ask, scored: str, stage: str, iteration: int) -> dict[str, list[int]]:
    """Rows of the answers that are read of an iteration, for each teacher: a draw by uid, at most MOST_ANSWERS of them
    and MOST_TOKENS tokens, and one in any case."""
    rows = ask(f"""
    select teacher, sample_row, response_len from ({scored})
    where stage = {literal(stage)} and iteration = {int(iteration)}
    qualify row_number() over (partition by teacher order by hash(uid), sample_row) <= {MOST_ANSWERS}
    order by teacher, hash(uid), sample_row""")
    chosen: dict[str, list[int]] = {}
    tokens: dict[str, int] = defaultdict(int)
    for row in rows:
        tokens[row["teacher"]] += row["response_len"]
        if tokens[row["teacher"]] <= MOST_TOKENS or row["teacher"] not in chosen:
            chosen.setdefault(row["teacher"], []).append(row["sample_row"])
    return {teacher: sorted(sample_rows) for teacher, sample_rows in chosen.items()}


@dataclass(frozen=True)
class Answer:
    """One answer with the tokens that a teacher disliked."""

    sample_row: int
    uid: str
    response: NDArray[np.int32]
    """[R]"""
    positions: NDArray[np.int64]
    """[n] of the disliked tokens in the response, ascending."""
    ordinals: NDArray[np.int64]
    """[n] their places among the trained tokens."""
    nats: NDArray[np.float32]
    """[n] student's minus teacher's log-prob."""


@dataclass(frozen=True)
class Correction:
    """A token that the teacher disliked."""

    answer: Answer
    position: int
    nats: float
    word: int | None
    """The teacher's likeliest token; None where log-probs alone are stored."""
    logprob: float | None
    """What the teacher gives its own word."""


def read_answers(store: Store, snapshot: Snapshot, teacher: str, sample_rows: Sequence[int]) -> list[Answer]:
    """Answers with the tokens at least MIN_NATS below the student's log-prob. Raises DamagedError, UnknownNameError."""
    tokens = store.read_tokens(sample_rows, column_names(PAYLOAD), snapshot, verify=True)
    about = store.take_samples(sample_rows, ["uid", "prompt_len"], snapshot).to_pylist()
    signals = store.read_signal(teacher, "logprob", sample_rows, snapshot, verify=True)
    columns = {name: list_views(tokens[name]) for name in column_names(PAYLOAD)}
    lists = zip(columns["tokens"], columns["logprobs"], columns["loss_mask"], strict=True)
    answers = []
    for row, sample, signal, (ids, logprobs, mask) in zip(sample_rows, about, signals, lists, strict=True):
        if ids is None or logprobs is None or mask is None:
            continue
        trained = np.asarray(mask, bool)
        gaps = np.where(trained, np.asarray(logprobs) - signal, 0).astype(np.float32)
        positions = np.flatnonzero(gaps >= MIN_NATS)
        ordinals = (np.cumsum(trained) - 1)[positions]
        response = np.asarray(ids[sample["prompt_len"] :])
        answers.append(Answer(int(row), sample["uid"], response, positions, ordinals, gaps[positions]))
    return answers


def corrections(
    store: Store, snapshot: Snapshot, teacher: str, answers: Sequence[Answer]
) -> tuple[list[Correction], str]:
    """The corrections of some answers, strongest first, and a note on words that are not known.

    Tokens beyond MOST_PRODUCTS are left out, weakest first, and so are those that the teacher likes best itself.
    """
    tokens = [(answer, at) for answer in answers for at in range(len(answer.positions))]
    tokens.sort(key=lambda token: -token[0].nats[token[1]])
    words, logprobs, note = _likeliest(store, snapshot, teacher, tokens)
    result = []
    for (answer, at), word, logprob in zip(tokens, words.tolist(), logprobs.tolist(), strict=False):
        position = int(answer.positions[at])
        if word != answer.response[position]:
            named = (word, logprob) if word >= 0 else (None, None)
            result.append(Correction(answer, position, float(answer.nats[at]), *named))
    return result, note


def _likeliest(
    store: Store, snapshot: Snapshot, teacher: str, tokens: Sequence[tuple[Answer, int]]
) -> tuple[NDArray[np.int64], NDArray[np.float32], str]:
    """[n] the teacher's likeliest id at each token, −1 where it is not known, its log-prob, and a note on those; n is
    smaller than len(tokens) where MOST_PRODUCTS is reached."""
    positions = [(answer.sample_row, int(answer.ordinals[at])) for answer, at in tokens]
    words, logprobs = np.full(len(positions), -1, np.int64), np.full(len(positions), np.nan, np.float32)
    if not positions:
        return words, logprobs, ""
    note = "only log-probs are stored, so its own words are not known"
    if f"signals/{teacher}/hidden" in snapshot.versions:
        try:
            return _from_hidden(store, snapshot, teacher, positions)
        except (MopdError, OSError, ValueError) as error:
            note = str(error)
    if f"signals/{teacher}/topk" in snapshot.versions:
        try:
            rows = list(dict.fromkeys(row for row, _ in positions))
            of_row = dict(zip(rows, store.read_signal(teacher, "topk", rows, snapshot), strict=True))
            for at, (row, ordinal) in enumerate(positions):
                ids, values = of_row[row][0][ordinal], of_row[row][1][ordinal]
                words[at] = ids[values.argmax()]
                logprobs[at] = values.max() if words[at] >= 0 else np.nan  # no slot is used inside of some chunks
            return words, logprobs, ""
        except (MopdError, OSError) as error:
            note = str(error)
    return words, logprobs, note


def _from_hidden(
    store: Store, snapshot: Snapshot, teacher: str, positions: list[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.float32], str]:
    about = store.teachers()[teacher]
    positions = positions[: max(1, MOST_PRODUCTS // (about.vocab_size * about.hidden_size))]
    words, logprobs = np.full(len(positions), -1, np.int64), np.full(len(positions), np.nan, np.float32)
    states, is_stored = read_states(store, about, positions, snapshot)
    stored = np.flatnonzero(is_stored)
    step = max(1, LOGITS // about.vocab_size)
    for start in range(0, len(stored), step):
        some = stored[start : start + step]
        predicted = log_softmax(head_logits(store.path(about.head_file), states[some]))
        words[some], logprobs[some] = predicted.argmax(1), predicted.max(1)
    note = "" if len(stored) == len(positions) else "its hidden states were freed, so its own words are not known"
    return words, logprobs, note


def marked_answer(
    store: Store, snapshot: Snapshot, decoder: Decoder | Numbers, teacher: str, sample_row: int
) -> dict[str, Any]:
    """An answer as the page shows it: `pieces` of the text from token `start` on, `before` and `after`, tokens left
    out, and `fixes`: position, nats, the teacher's `word` and its probability."""
    answers = read_answers(store, snapshot, teacher, [sample_row])
    if not answers:
        return {"pieces": [], "start": 0, "before": 0, "after": 0, "fixes": [], "note": "no log-probs of the student"}
    [answer] = answers
    fixes, note = corrections(store, snapshot, teacher, answers)
    length = len(answer.response)
    worst = fixes[0].position if fixes else 0
    start = min(max(0, worst - ANSWER_TOKENS // 2), max(0, length - ANSWER_TOKENS))
    end = min(length, start + ANSWER_TOKENS)
    pieces = [visible(piece[:PIECE_CHARACTERS]) for piece in decoder.pieces(answer.response[:end].tolist())[start:]]
    texts = _texts(decoder, {fix.word for fix in fixes if fix.word is not None})
    shown = [
        {"at": fix.position, "nats": fix.nats, "word": None if fix.word is None else texts[fix.word],
         "p": None if fix.logprob is None else float(np.exp(fix.logprob))}
        for fix in sorted(fixes, key=lambda fix: fix.position) if start <= fix.position < end
    ]  # fmt: skip
    return {
        "pieces": pieces, "start": start, "before": start, "after": length - end, "fixes": shown, "note": note,
        "worst": worst,
    }  # fmt: skip


def most_corrected(
    store: Store, snapshot: Snapshot, decoder: Decoder | Numbers, teacher: str, sample_rows: Sequence[int]
) -> dict[str, Any]:
    """`lines` of the list of an iteration: `token`, the teacher's `word`, `count`, `nats` in all, and `uids` of the
    samples, strongest first; `looked_at`, answers that were read, and a `note` on unknown words."""
    answers = read_answers(store, snapshot, teacher, sample_rows)
    fixes, note = corrections(store, snapshot, teacher, answers)
    pairs: dict[tuple[int, int | None], list[Correction]] = defaultdict(list)
    for fix in fixes:
        pairs[int(fix.answer.response[fix.position]), fix.word].append(fix)
    total = {pair: sum(fix.nats for fix in own) for pair, own in pairs.items()}
    strongest = sorted(pairs, key=lambda pair: -total[pair])[:MOST_LINES]
    texts = _texts(decoder, {token for pair in strongest for token in pair if token is not None})
    lines = [
        {"token": texts[pair[0]], "word": None if pair[1] is None else texts[pair[1]], "count": len(pairs[pair]),
         "nats": total[pair],
         "uids": list(dict.fromkeys(fix.answer.uid for fix in pairs[pair]))[:LINE_SAMPLES]}
        for pair in strongest
    ]  # fmt: skip
    return {"lines": lines, "looked_at": len(answers), "note": note, "fixes": len(fixes)}


def _texts(decoder: Decoder | Numbers, ids: Iterable[int]) -> dict[int, str]:
    """Text of each token on its own, harmless to look at."""
    tokens = list(ids)
    texts = decoder.texts([[token] for token in tokens]) if tokens else []
    return {token: visible(text[:PIECE_CHARACTERS]) for token, text in zip(tokens, texts, strict=True)}
