"""Corrections of teachers against a plain reference: log-softmax of stored hidden states times the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corrected_store import ITERATIONS, KINDS, LENGTH, PROMPTS, VOCABULARY, WIDTH, Scored

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.query import corrections
from mopd_dataplane.query.corrections import SCORED, marked_answer, most_corrected, picks, rows_to_read
from mopd_dataplane.query.heads import read_states
from mopd_dataplane.store.read.decode import Numbers


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored(tmp_path_factory.mktemp("corrected") / "store")


@pytest.mark.parametrize("name", KINDS)
def test_corrections_agree_with_the_plain_reference(scored: Scored, name: str) -> None:
    total = 0
    for at, row in enumerate(scored.rows):
        shown = marked_answer(scored.store, scored.store.snapshot(), Numbers(), name, row)
        reference = scored.reference(name, at)
        assert [fix["at"] for fix in shown["fixes"]] == [position for position, _, _ in reference]
        np.testing.assert_allclose([fix["nats"] for fix in shown["fixes"]], [nats for _, nats, _ in reference], 1e-4)
        words = [None if word is None else f"⟨{word}⟩" for _, _, word in reference]
        assert [fix["word"] for fix in shown["fixes"]] == words
        assert shown["pieces"] == [f"⟨{token}⟩" for token in scored.samples[at].tokens[2:]]
        assert ("only log-probs" in shown["note"]) == (name == "bare" and bool(reference))
        total += len(reference)
    assert total > 20


@pytest.mark.parametrize("name", KINDS)
def test_the_list_counts_each_pair_of_words(scored: Scored, name: str) -> None:
    pairs: dict[tuple[str, str | None], list[float]] = {}
    for at, sample in enumerate(scored.samples):
        for position, nats, word in scored.reference(name, at):
            token = f"⟨{sample.tokens[2 + position]}⟩"
            pairs.setdefault((token, None if word is None else f"⟨{word}⟩"), []).append(nats)
    listed = most_corrected(scored.store, scored.store.snapshot(), Numbers(), name, scored.rows)
    assert listed["fixes"] == sum(map(len, pairs.values()))
    assert listed["looked_at"] == len(scored.rows)
    strongest = sorted(pairs.items(), key=lambda item: -sum(item[1]))[: corrections.MOST_LINES]
    assert [(line["token"], line["word"], line["count"]) for line in listed["lines"]] == [
        (*pair, len(nats)) for pair, nats in strongest
    ]
    np.testing.assert_allclose([line["nats"] for line in listed["lines"]], [sum(n) for _, n in strongest], 1e-4)
    uids = {uid for line in listed["lines"] for uid in line["uids"]}
    assert uids <= {sample.uid for sample in scored.samples}


def test_the_prompt_that_most_iterations_share_is_followed(scored: Scored) -> None:
    chosen = picks(scored.ask, SCORED, "student")
    assert [(pick.teacher, pick.iteration) for pick in chosen] == [
        (name, iteration) for name in sorted(KINDS) for iteration in range(ITERATIONS)
    ]
    assert {pick.prompt_id for pick in chosen} == {"p3"}
    assert all(pick.is_same_prompt for pick in chosen)
    for pick in chosen:
        own = [s for s in scored.samples if s.iteration == pick.iteration]
        assert pick.answers == len(own)
        assert pick.uid == next(s.uid for s in own if s.prompt_id == "p3")
        assert pick.kl_ci is not None
    means = scored.ask("select iteration, avg(mean_reverse_kl) as kl from samples join scores using (uid) "
                       "where teacher = 'bare' group by iteration order by iteration")  # fmt: skip
    shown = [pick.kl for pick in chosen if pick.teacher == "bare"]
    np.testing.assert_allclose(shown, [row["kl"] for row in means], rtol=1e-6)


def test_an_iteration_without_the_followed_prompt_shows_another(tmp_path: Path) -> None:
    scored = Scored(tmp_path / "store")
    others = f"select * from ({SCORED}) where not (prompt_id = 'p3' and iteration = 1)"
    chosen = [pick for pick in picks(scored.ask, others, "student") if pick.teacher == "full"]
    assert [pick.is_same_prompt for pick in chosen] == [True, False, True]
    assert chosen[1].prompt_id != "p3"


def test_only_so_many_answers_are_read(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {len(rows) for rows in rows_to_read(scored.ask, SCORED, "student", 1).values()} == {PROMPTS + 1}
    monkeypatch.setattr(corrections, "MOST_ANSWERS", 4)
    few = rows_to_read(scored.ask, SCORED, "student", 1)
    assert {name: len(rows) for name, rows in few.items()} == dict.fromkeys(KINDS, 4)
    assert few == rows_to_read(scored.ask, SCORED, "student", 1)
    monkeypatch.setattr(corrections, "MOST_TOKENS", 2 * LENGTH)
    assert {len(rows) for rows in rows_to_read(scored.ask, SCORED, "student", 1).values()} == {2}


def test_the_head_is_multiplied_only_for_the_most_disliked_tokens(
    scored: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = most_corrected(scored.store, scored.store.snapshot(), Numbers(), "full", scored.rows)
    monkeypatch.setattr(corrections, "MOST_PRODUCTS", 3 * VOCABULARY * WIDTH)
    fewer = most_corrected(scored.store, scored.store.snapshot(), Numbers(), "full", scored.rows)
    assert everything["fixes"] > 3 >= fewer["fixes"] > 0


def test_freed_hidden_states_leave_the_words_open(tmp_path: Path) -> None:
    scored = Scored(tmp_path / "store")
    at = next(at for at in range(len(scored.rows)) if scored.reference("full", at))
    row, teacher = scored.rows[at], scored.store.teachers()["full"]
    scored.store.free_hidden("full", scored.rows)
    snapshot = scored.store.snapshot()
    assert not read_states(scored.store, teacher, [(row, 0)], snapshot)[1].any()
    shown = marked_answer(scored.store, snapshot, Numbers(), "full", row)
    assert "freed" in shown["note"]
    assert {fix["word"] for fix in shown["fixes"]} == {None}
    assert [fix["at"] for fix in shown["fixes"]][:1]


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    scored = Scored(tmp_path / "store")
    at = next(at for at in range(len(scored.rows)) if scored.reference("full", at))
    head = scored.store.path("heads/full.safetensors")
    head.write_bytes(head.read_bytes()[:20])
    shown = marked_answer(scored.store, scored.store.snapshot(), Numbers(), "full", scored.rows[at])
    assert "head file" in shown["note"]
    assert shown["fixes"][0]["word"] is None


def test_a_damaged_answer_is_refused(tmp_path: Path) -> None:
    scored = Scored(tmp_path / "store")
    files = list((scored.store.path("tokens") / "data").glob("*.lance"))
    assert files
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedError):
        marked_answer(scored.store, scored.store.snapshot(), Numbers(), "full", scored.rows[0])
