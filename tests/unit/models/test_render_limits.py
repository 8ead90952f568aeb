"""A chat template that takes too long, grows without end or fails is refused by name, and leaves the thread usable."""

from __future__ import annotations

import threading
import time

import pytest
from chat_templates import CHAT_FAMILIES, chat_tokenizer

from mopd_dataplane.errors import InputError, PromptError
from mopd_dataplane.models import render_limits
from mopd_dataplane.models.chat_template import render_messages
from mopd_dataplane.models.render_limits import RenderLimitError
from mopd_dataplane.prompts import render

QUESTION = [{"role": "user", "content": "2+2?"}]
BOMBS = {
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xx{% endfor %}{% endfor %}",
    "loops that write nothing": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "repetition": "{{ 'ab' * (2 ** 26) }}",
    "recursion without end": "{% macro f(x) %}{% for a in range(9) %}{{ f(x) }}{% endfor %}{% endmacro %}{{ f(1) }}",
}
ERRORS = {
    "syntax": "{% for %}", "unknown name": "{{ nothing.at.all }}", "its own": "{{ raise_exception('no roles') }}",
    "type": "{{ messages + 1 }}", "unknown filter": "{{ messages | nonsense }}", "division": "{{ 1 // 0 }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_bound_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "RENDER_S", 1.0)
    monkeypatch.setattr(render_limits, "RENDER_BYTES", 256 << 20)
    tokenizer = chat_tokenizer(sorted(CHAT_FAMILIES)[0])
    tokenizer.chat_template = BOMBS[name]
    with pytest.raises(InputError, match="chat template") as refused:
        render_messages(tokenizer, QUESTION)
    assert len(str(refused.value)) < 400
    time.sleep(3 * render_limits.POLL_INTERVAL_S)  # nothing is raised in this thread behind the block
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render_messages(tokenizer, QUESTION) == "2+2?"


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_template_is_an_input_error(name: str) -> None:
    tokenizer = chat_tokenizer(sorted(CHAT_FAMILIES)[0])
    tokenizer.chat_template = ERRORS[name]
    with pytest.raises(InputError, match="the chat template fails on this conversation"):
        render_messages(tokenizer, QUESTION)
    with pytest.raises(PromptError, match=r"prompt '2.2.': the chat template fails"):
        render("2+2?", tokenizer, template="chat")


def test_a_bomb_in_one_thread_leaves_the_renderings_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "RENDER_S", 1.0)
    good, bomb = (chat_tokenizer(sorted(CHAT_FAMILIES)[0]) for _ in range(2))
    good.chat_template = "{{ messages[0].content }}"
    bomb.chat_template = BOMBS["loops that write nothing"]
    errors: list[Exception] = []

    def explode() -> None:
        try:
            render_messages(bomb, QUESTION)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=explode)
    thread.start()
    while thread.is_alive():
        assert render_messages(good, QUESTION) == "2+2?"
    assert [type(error) for error in errors] == [RenderLimitError]


def test_the_prompt_of_a_chat_is_what_the_tokenizer_itself_encodes() -> None:
    for name in sorted(CHAT_FAMILIES):
        tokenizer = chat_tokenizer(name)
        ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        assert render("2+2?", tokenizer, template="chat") == list(ids)
