"""Environments that a job names: what they are asked, what the student reads of their replies, whose each token is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane.errors import InputError, PromptError, UnknownNameError
from mopd_dataplane.models.initial_weights import EOS, character_tokenizer
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.tools.environments import CommandTool, Conversation, Environment, make_environment
from mopd_dataplane.rollout.tools.replies import ReplyForm, answering, reply_form, turn_texts, whose_turns
from mopd_dataplane.rollout.tools.sandbox import Command, Result, SubprocessSandbox, Turn
from mopd_dataplane.run.environments import UnloggedTurns
from mopd_dataplane.run.steps.evaluate import generate
from mopd_dataplane.testing.toy_engine import EOS as TOY_EOS
from mopd_dataplane.testing.toy_engine import ToyEngine

PROMPT = Prompt(prompt_id="p", domain="sums", text="3+4=")
ADD: dict[str, Any] = {"call": "^add (?P<a>[0-9]+) (?P<b>[0-9]+)$", "argv": ["expr", "{a}", "+", "{b}"]}
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def reply_of(tool: Environment, *said: str, folder: Path) -> str | None:
    """What a tool replies, its commands run."""
    box = SubprocessSandbox(folder)

    def run(argv: list[str], *, timeout_s: float) -> Result:
        done = box.run("s", f"s-{len(said)}", Command(tuple(argv), timeout_s))
        assert done is not None
        return done

    return tool.reply(Conversation(prompt=PROMPT, said=list(said), run=run))


def test_a_turn_that_fits_runs_the_command_and_another_ends_the_conversation(tmp_path: Path) -> None:
    tool = make_environment("command", {**ADD, "turns": 2})
    assert reply_of(tool, "add 12 34", folder=tmp_path) == "46"
    assert reply_of(tool, "the sum is 46", folder=tmp_path) is None
    assert reply_of(tool, "add 1 2", "3", "add 3 4", folder=tmp_path) == "7"
    assert reply_of(tool, "add 1 2", "3", "add 3 4", "7", "add 7 1", folder=tmp_path) is None


def test_what_the_policy_wrote_is_never_another_word_of_the_command(tmp_path: Path) -> None:
    tool = CommandTool(call="say (?P<what>.*)", argv=["printf", "[%s]", "{what}"])
    assert (
        reply_of(tool, "say x; touch /nope $(id) {what} -- 'y", folder=tmp_path)
        == "[x; touch /nope $(id) {what} -- 'y]"
    )
    assert reply_of(CommandTool(call="x", argv=["ls", "/nowhere"]), "x", folder=tmp_path / "b").startswith(
        "exit code 2: ls"
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"call": "(", "argv": ["a"]}, "no regular expression"),
        ({"call": "x", "argv": "expr 1"}, "expected a list of words"),
        ({"call": "x(?P<a>y)", "argv": ["echo", "{b}"]}, r"argv names 'b'; the groups of call are \['a'\]"),
        ({"call": "x"}, "refuses environment_args"),
    ],
)
def test_arguments_of_no_use_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_environment("command", arguments)


def test_an_environment_of_another_package_is_named_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_environment("mopd_dataplane.rollout.tools.environments:CommandTool", ADD), CommandTool)
    with pytest.raises(UnknownNameError, match=r"no environment 'comand'.*did you mean 'command'"):
        make_environment("comand", {})
    with pytest.raises(UnknownNameError, match="no class derived from"):
        make_environment("json:loads", {})


def test_a_reply_reads_as_the_chat_template_writes_the_whole_conversation() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHATML
    form = reply_form(tokenizer, prompt_template="chat", reply_template="", role="tool")
    conversation = [
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": "add 3 4"},
        {"role": "tool", "content": "7"},
    ]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    first = tokenizer.apply_chat_template(conversation[:1], add_generation_prompt=True, return_dict=False)
    policy = tokenizer.encode("add 3 4" + EOS, add_special_tokens=False)
    assert [*first, *policy, *form.ids("7")] == list(whole)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(PromptError, match="does not end an answer with a special token and append a message of 'tool'"):
        reply_form(tokenizer, prompt_template="chat", reply_template="", role="tool")


def test_without_a_chat_template_the_domain_says_how_a_reply_reads() -> None:
    tokenizer = character_tokenizer()
    form = reply_form(tokenizer, prompt_template="{prompt}", reply_template="\n{reply}\n", role="tool")
    assert tokenizer.decode(form.ids("46")) == "\n46\n"
    assert form.text("\n46\n") == "46"


def test_an_environment_reads_replies_without_what_frames_them() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHATML
    form = reply_form(tokenizer, prompt_template="chat", reply_template="", role="tool")
    own = tokenizer.encode("add 3 4" + EOS, add_special_tokens=False)
    reply = form.ids("7")
    texts = turn_texts(
        [*own, *reply, *own], [1] * len(own) + [0] * len(reply) + [1] * len(own), form,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
    )  # fmt: skip
    assert texts == ["add 3 4", "7", "add 3 4"]


def test_each_domain_is_answered_by_its_own_environment() -> None:
    heard: list[list[str]] = []

    class Says(Environment):
        def reply(self, conversation: Conversation) -> str | None:
            heard.append(conversation.said)
            return "ok"

    answer = answering(
        {"sums": Says()}, {"sums": ReplyForm(lambda text: list(map(ord, text)))}, lambda ids: "".join(map(chr, ids))
    )

    def turn(domain: str) -> Turn:
        prompt = Prompt(prompt_id="p", domain=domain, text="?")
        return Turn(
            prompt, [97, 98, 99, 100], loss_mask=[1, 1, 0, 1], uid="u", calls=[], sandbox=None, say=lambda *_: None
        )

    assert answer(turn("sums")) == [111, 107]
    assert heard == [["ab", "c", "d"]]
    assert answer(turn("other")) is None


def test_whose_turns() -> None:
    assert whose_turns([7, 8, 9, 7], [1, 1, 0, 1]) == [([7, 8], True), ([9], False), ([7], True)]


def test_an_evaluation_holds_the_same_conversations_with_commands_of_its_own(tmp_path: Path) -> None:
    """Two turns of the toy policy with replies between them; a second call is no repetition of the first."""

    def append_line(turn: Turn) -> list[int] | None:
        if turn.response.count(TOY_EOS) > 2:
            return None
        return [9, 1 + int(turn.run(["sh", "-c", "echo x >> log; wc -l < log"]).stdout)]

    requests = [
        Request(uid=f"u{i}", prompt_ids=np.array([1, 2], np.int32), key=sample_key(f"u{i}"), max_new_tokens=400)
        for i in range(3)
    ]
    turns = UnloggedTurns(append_line, tmp_path)
    answers = generate(ToyEngine(slots=2), requests, lambda index, *said: turns.reply(PROMPT, f"u{index}", *said))
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert [ids for ids, own in whose_turns(answer.ids, answer.mask) if not own] == [[9, 2], [9, 3]]
        assert answer.ids.count(TOY_EOS) == 3
    short = [Request(uid="u9", prompt_ids=requests[0].prompt_ids, key=requests[0].key, max_new_tokens=400)]
    [cut] = generate(ToyEngine(slots=1), short, lambda index, ids, mask: [9] * 400)
    assert cut.finish_reason == "length"
    assert set(cut.mask) == {1}


def test_a_log_of_a_conversation_replays_its_commands(roll: Callable[..., Any], shelf: Any, tmp_path: Path) -> None:
    """The text-level environment under the rollout that logs: one reply each, masked, its command run once."""

    class Counts(Environment):
        def reply(self, conversation: Conversation) -> str | None:
            if conversation.turns > 1:
                return None
            return conversation.run(["sh", "-c", "echo x >> log; wc -l < log"]).stdout.strip()

    answer = answering(
        {"toy": Counts(), "words": Counts()},
        dict.fromkeys(("toy", "words"), ReplyForm(lambda text: [9, int(text)])),
        str,
    )
    roll(shelf, environment=answer, sandbox=SubprocessSandbox(tmp_path / "box"), count=4, slots=4)
    domains = {sample.domain for sample in shelf.samples.values()}
    assert domains <= {"toy", "words"}
    masked = [sample.tokens[sample.prompt_len :][sample.loss_mask == 0].tolist() for sample in shelf.samples.values()]
    assert [9, 1] in masked
    assert all(said in ([], [9, 1]) for said in masked)
