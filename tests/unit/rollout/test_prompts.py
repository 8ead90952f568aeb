"""Prompts from generators and files: what the student reads, and what only the teacher does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import datasets
import pytest
from chat_templates import CHAT_FAMILIES, chat_tokenizer

from mopd_dataplane.errors import PromptError
from mopd_dataplane.interchange import row_files
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.prompts import load_prompts, render

SPELL = {"source": "reasoning-gym", "dataset": "spell_backward", "train": 3, "eval": 2}


def test_privileged_text_is_a_template_of_the_entry() -> None:
    domain = Domain(**SPELL, template="{word} < ", teacher_context="answer: {answer}\n")
    for prompt in load_prompts("words", domain):
        assert prompt.text == f"{prompt.answer[::-1]} < "
        assert prompt.teacher_context == f"answer: {prompt.answer}\n"


def test_a_row_brings_its_own_privileged_text(tmp_path: Path) -> None:
    rows = [{"text": "1+1", "answer": "2", "teacher_context": "own"}, {"text": "1+2", "answer": "3"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = load_prompts("sums", Domain(source=str(file), train=2, teacher_context="it is {answer}"))
    assert [prompt.teacher_context for prompt in prompts] == ["own", "it is 3"]


@pytest.mark.parametrize(
    ("line", "problem"), [(b"{", "not JSON"), (b"[1]", "a list; each line must be"), (b'"\xff"', "not JSON")]
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "1+1"}\n' + line)
    with pytest.raises(PromptError, match=f"{file}:2: {problem}"):
        load_prompts("sums", Domain(source=str(file), train=2))


def test_parquet_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(PromptError, match=f"{file}: row 1 cannot be read"):
        load_prompts("sums", Domain(source=str(file), train=2))


@pytest.mark.parametrize("key", ["template", "teacher_context"])
def test_an_unknown_placeholder_is_named_with_those_there_are(key: str) -> None:
    with pytest.raises(PromptError, match=rf"'words': {key} .*wordd.*{{word}}"):
        load_prompts("words", Domain(**SPELL, **{key: "{wordd}"}))


CHAT = [
    [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"1+{i}"},
        {"role": "assistant", "content": f"{1 + i}"},
    ]
    for i in range(4)
]


def saved_dataset(folder: Path, form: str) -> str:
    """A dataset as people have one: from save_to_disk, with splits or without, or parquet files as on the hub."""
    rows = datasets.Dataset.from_dict(
        {"problem": [f"1+{i}" for i in range(4)], "solution": [str(1 + i) for i in range(4)]}
    )
    if form == "hub":
        (folder / "main").mkdir(parents=True)
        rows.to_parquet(folder / "main" / "train-00000-of-00001.parquet")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
        )
    else:
        (datasets.DatasetDict({"train": rows}) if form == "splits" else rows).save_to_disk(str(folder))
    return str(folder)


@pytest.mark.parametrize("form", ["saved", "splits", "hub"])
def test_hugging_face_datasets_give_prompts_by_column(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    domain = Domain(
        source="datasets", dataset=saved_dataset(tmp_path / "set", form), train=2, eval=1,
        columns={"text": "problem", "answer": "solution"}, template="{question} =",
    )  # fmt: skip
    prompts = load_prompts("sums", domain)
    assert [(p.text, p.answer, p.split) for p in prompts] == [
        ("1+0 =", "1", "eval"), ("1+1 =", "2", "train"), ("1+2 =", "3", "train"),
    ]  # fmt: skip
    assert prompts[0].source == f"datasets:{tmp_path / 'set'}"


def test_a_dataset_that_is_not_there_is_named_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    saved = saved_dataset(tmp_path / "set", "splits")
    with pytest.raises(PromptError, match=r"no split 'tests'.*train"):
        load_prompts("sums", Domain(source="datasets", dataset=saved, args={"split": "tests"}, train=1))
    with pytest.raises(PromptError, match=r"row 1 has no column 'problme'.*did you mean 'problem'"):
        load_prompts("sums", Domain(source="datasets", dataset=saved, columns={"text": "problme"}, train=1))
    with pytest.raises(PromptError, match="unexpected keyword argument 'splits'"):
        load_prompts("sums", Domain(source="datasets", dataset=saved, args={"splits": "train"}, train=1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match=r"dataset '.*empty', split 'train'"):
        load_prompts("sums", Domain(source="datasets", dataset=str(tmp_path / "empty"), train=1))


def test_messages_are_a_prompt_and_the_assistants_last_is_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in CHAT))
    prompts = load_prompts("sums", Domain(source=str(file), train=4, template="{question} ="))
    assert prompts[1].asked == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1 ="}]
    assert (prompts[1].text, prompts[1].answer) == ("system: Add.\nuser: 1+1 =", "2")
    single = tmp_path / "single.jsonl"
    single.write_text("\n".join(json.dumps({"prompt": chat[1:2], "answer": "x"}) for chat in CHAT))
    assert [p.asked for p in load_prompts("sums", Domain(source=str(single), train=2))] == ["1+0", "1+1"]


def test_messages_go_through_the_chat_template_and_a_context_before_the_system_message() -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    tokenizer = chat_tokenizer(sorted(CHAT_FAMILIES)[0])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}>{{ m.content }};{% endfor %}"
    render_chat = partial(render, messages, tokenizer, template="chat")
    assert tokenizer.decode(render_chat()) == "system>Add.;user>1+1;"
    assert tokenizer.decode(render_chat(context="It is 2.")) == "system>It is 2.\n\nAdd.;user>1+1;"
    assert messages[0]["content"] == "Add."
    with pytest.raises(PromptError, match="2 messages needs the chat template"):
        render(messages, tokenizer)


@pytest.mark.parametrize(
    "template",
    ["{text:99999999999}", "{text:{answer}}", "{text.__class__.nothing}", "{text[x][y]}", "{text!z}", "{", "{}"],
)
def test_a_template_that_cannot_be_filled_or_is_a_bomb_is_refused(tmp_path: Path, template: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": "2+2?", "answer": "9999999999"}) + "\n")
    with pytest.raises(PromptError, match=r"template .*; placeholders are \{text\}"):
        load_prompts("sums", Domain(source=str(file), template=template, train=1, eval=0))
    fitting = Domain(source=str(file), template="{text:>9}", train=1, eval=0)
    assert [prompt.text for prompt in load_prompts("sums", fitting)] == ["     2+2?"]


def test_a_prompt_that_no_model_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LONGEST", 32)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "a" * 33}) + "\n")
    with pytest.raises(PromptError, match=r"domain 'd': .*: row 2: field 'text' has 33 characters; at most 32"):
        load_prompts("d", Domain(source=str(rows), train=2))
