"""One sample read back token by token, and shown without letting model text steer the terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mopd_dataplane import Store
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.query import show
from mopd_dataplane.query.show import disagreements, read_sample, strength
from mopd_dataplane.query.show_terminal import render
from mopd_dataplane.store.read.decode import Decoder, Numbers, find_decoder


def hostile_uid(store: Store) -> str:
    table = store.sql("select uid from samples where prompt_id = 'chain_sum-train-0' and iteration = 1")
    return str(table["uid"][0].as_py())


def shown(store: Store, uid: str, *, colour: bool = False) -> str:
    console = Console(width=160, force_terminal=colour, color_system="truecolor" if colour else None, record=True)
    with console.capture() as capture:
        console.print(render(read_sample(store, uid)))
    return capture.get()


def test_every_token_carries_what_sampler_and_teacher_said(demo_store: Store) -> None:
    uid = hostile_uid(demo_store)
    view = read_sample(demo_store, uid)
    payload = demo_store.read_tokens([view.sample_row]).to_pylist()[0]
    scored = demo_store.read_signal("chain_sum-expert", "logprob", [view.sample_row])[0]
    trained = np.array([token.trained for token in view.tokens])
    assert [token.id for token in view.tokens] == payload["tokens"][view.metadata["prompt_len"] :]
    assert trained.tolist() == [bool(mask) for mask in payload["loss_mask"]]
    assert not trained.all()
    for position, token in enumerate(view.tokens):
        expected = (payload["logprobs"][position], float(scored[position])) if token.trained else (None, None)
        assert (token.sampler_logprob, token.teacher_logprob) == expected


def test_text_versions_reward_and_interruptions(demo_store: Store) -> None:
    view = read_sample(demo_store, hostile_uid(demo_store))
    assert "".join(token.text for token in view.tokens).startswith("\x1b[31mred")
    assert [span["version"] for span in view.spans] == [1, 2]
    assert view.spans[0]["end"] == view.spans[1]["start"]
    assert view.spans[1]["end"] == len(view.tokens)
    assert {token.policy_version for token in view.tokens[view.spans[1]["start"] :]} == {2}
    assert view.rewards[0]["verifier"] == "reasoning-gym"
    assert view.metadata["interruptions"] == 1


def test_lineage_names_the_step_that_trained_on_it(demo_store: Store) -> None:
    view = read_sample(demo_store, hostile_uid(demo_store))
    assert [(use["stage"], use["window"]) for use in view.uses] == [("student", 1)]
    window = demo_store.plan("student", 1)
    assert window is not None
    pack = view.uses[0]["pack"]
    assert view.sample_row in window.sample_rows[window.pack_starts[pack] : window.pack_starts[pack + 1]]


def test_uid_may_be_shortened_while_it_is_unique(demo_store: Store) -> None:
    uid = hostile_uid(demo_store)
    assert read_sample(demo_store, uid[:10].upper()).uid == uid


@pytest.mark.parametrize("uid", ["", "xyz", "a" * 33, "a' or 1=1"])
def test_what_is_no_uid_is_refused(demo_store: Store, uid: str) -> None:
    with pytest.raises(UnknownNameError, match="not a sample uid"):
        read_sample(demo_store, uid)


def test_unknown_and_ambiguous_uids_are_named(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match="among the 96"):
        read_sample(demo_store, "f" * 32)
    uids = demo_store.samples(columns=["uid"])["uid"].to_pylist()
    first = next(letter for letter in "0123456789abcdef" if sum(uid[0] == letter for uid in uids) > 1)
    with pytest.raises(UnknownNameError, match="start of") as refusal:
        read_sample(demo_store, first)
    candidate = next(uid for uid in uids if uid[0] == first)
    assert candidate[:7] in str(refusal.value)


def test_unknown_teacher_names_those_that_scored(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'chain_sum-expert'"):
        read_sample(demo_store, hostile_uid(demo_store), teacher="chainsum-expert")


def test_model_text_cannot_steer_the_terminal(demo_store: Store) -> None:
    text = shown(demo_store, hostile_uid(demo_store))
    assert "\x1b" not in text
    assert "␛[31mred␛[0m" in text
    assert "[bold]x[/bold]" in text


def test_colour_has_a_legend_and_words_beside_it(demo_store: Store) -> None:
    uid = hostile_uid(demo_store)
    assert "\x1b[" in shown(demo_store, uid, colour=True)
    text = shown(demo_store, uid)
    for expected in (
        "teacher − sampler log-prob",
        "where teacher and sampler differ most",
        "not trained on",
        "signals",
    ):
        assert expected in text


def test_a_long_response_is_shown_in_parts(demo_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = hostile_uid(demo_store)
    whole = read_sample(demo_store, uid).tokens
    monkeypatch.setattr(show, "MOST_TOKENS", 5)
    parts = [read_sample(demo_store, uid, first=first).tokens for first in range(0, len(whole), 5)]
    assert [token for part in parts for token in part] == whole
    assert f"tokens 0 to 4 of {len(whole)}; --from 5 shows the next" in shown(demo_store, uid)
    with pytest.raises(InputError, match=f"the response has positions 0 to {len(whole) - 1}"):
        read_sample(demo_store, uid, first=len(whole))


@pytest.mark.parametrize(("ratio", "level"), [(0.0, 0), (0.1, 1), (-0.6, -2), (1.5, 3), (2.0, 4), (-50.0, -4)])
def test_strength_follows_the_log_ratio(ratio: float, level: int) -> None:
    assert strength(ratio) == level


def test_disagreements_are_the_largest_first(demo_store: Store) -> None:
    view = read_sample(demo_store, hostile_uid(demo_store))
    strongest = [abs(token.log_ratio or 0.0) for token in disagreements(view.tokens, 5)]
    every = sorted((abs(t.log_ratio) for t in view.tokens if t.log_ratio is not None), reverse=True)
    assert strongest == every[:5]


def test_a_sample_without_teacher_has_no_colour(demo_store: Store) -> None:
    view = read_sample(demo_store, hostile_uid(demo_store))
    bare = dataclasses.replace(
        view,
        teacher="",
        scores=[],
        uses=[],
        tokens=[dataclasses.replace(t, teacher_logprob=None, log_ratio=None) for t in view.tokens],
    )
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(render(bare))
    for expected in ("no teacher log-probs are stored", "no teacher has scored this sample", "not yet planned"):
        assert expected in capture.get()


def test_pieces_join_to_the_text_also_where_a_character_spans_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token_id for token_id, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a é 漢").ids
    pieces = Decoder((tmp_path / "tokenizer.json").read_text()).pieces(ids)
    assert len(pieces) == len(ids) > len("a é 漢")
    assert "".join(pieces) == "a é 漢"


def test_ids_stand_in_for_text_without_a_tokenizer() -> None:
    assert Numbers().pieces([5, 7]) == ["⟨5⟩", "⟨7⟩"]


def test_a_folder_without_tokenizer_is_refused(demo_store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no tokenizer\.json"):
        find_decoder(demo_store, tmp_path)
