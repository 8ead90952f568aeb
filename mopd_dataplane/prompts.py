"""Sources of prompts, and prompts as the token ids that a model reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.extras import require
from mopd_dataplane.base.file_urls import files_at, is_url, local_path, open_file, suffix_of
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import InputError, PromptError, ResourceError, UnknownNameError, nearest, require_known
from mopd_dataplane.interchange.row_files import check_text, rows_in
from mopd_dataplane.interchange.rows import conversation_text, read_messages
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.models.chat_template import Messages, answer_tokens, render_messages
from mopd_dataplane.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RATIO, _FREE_BYTES = 100, 64 << 20
"""A file may unpack to this many times its size and this much more."""
_FORM = re.compile(r"[^{}\d]{0,4}\d{0,3}[^{}\d]{0,2}\d{0,3}[^{}\d]?")
"""Format specifications of a placeholder: without other placeholders, and not wider than 999 characters."""
_SUFFIXES = (".jsonl", ".parquet")
_ASKED = ("text", "prompt", "question", "messages")
"""Columns that may hold what is asked."""
_SAVED = ("dataset_dict.json", "state.json")
"""Files by which a folder of `save_to_disk` is known."""
_SUPPLY = 50
"""A generator that gives fewer than one new question in this many is exhausted."""


def load_prompts(name: str, domain: Domain) -> list[Prompt]:
    """Training and held-out prompts of one domain, distinct in text, the same for the same settings.

    Evaluation prompts are drawn first and tuning prompts last, so that another number of training prompts never changes
    the evaluation prompts, and asking for tuning prompts changes neither. Raises PromptError when the source is empty,
    unreadable or has too few distinct prompts.
    """
    splits = _splits(domain)
    slots = [(split, ordinal) for split, count in splits.items() for ordinal in range(count)]
    try:
        entries = list(islice(_distinct(_entries(domain)), len(slots)))
    except InputError as error:
        raise PromptError(f"domain {name!r}: {error}") from None
    if len(entries) < len(slots):
        counts_text = " + ".join(f"{count} {split}" for split, count in splits.items())
        raise PromptError(
            f"domain {name!r}: {f'{domain.source} {domain.dataset}'.strip()} has {len(entries)} distinct prompts, "
            f"{counts_text} were asked for; lower them or widen the source"
        )
    source = f"{domain.source}:{domain.dataset}" if domain.dataset else domain.source
    shared = {"domain": name, "effort": domain.effort, "source": source}
    return [
        Prompt(prompt_id=f"{name}-{split}-{ordinal}", split=split, **shared, **entry)
        for (split, ordinal), entry in zip(slots, entries, strict=True)
    ]


def _splits(domain: Domain) -> dict[str, int]:
    """Numbers of prompts that a domain wants, in the order in which they are drawn."""
    return {"eval": domain.eval, "train": domain.train, "tune": domain.tune}


def render(
    text: str | Messages, tokenizer: PreTrainedTokenizerBase, *, template: str = "{prompt}", context: str = ""
) -> list[int]:
    """Token ids of a prompt as a model reads it, special tokens of the tokenizer included.

    text: or chat messages. template: text with `{prompt}` and optionally `{context}`, or `chat` for the tokenizer's
    chat template, where the context becomes the system message, or stands in front of the one there is.
    Raises PromptError for messages under another template than `chat`, and for a chat template that fails.
    """
    if template == "chat":
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        if context and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{context}\n\n{messages[0]['content']}"}
        elif context:
            messages.insert(0, {"role": "system", "content": context})
        try:
            rendered = render_messages(tokenizer, messages, add_generation_prompt=True)
        except InputError as error:
            raise PromptError(f"prompt {text!r:.80}: {error}") from None
        return list(tokenizer.encode(rendered, add_special_tokens=False))
    if not isinstance(text, str):
        raise PromptError(f'a prompt of {len(text)} messages needs the chat template: set prompt_template = "chat"')
    filled = template.replace("{context}", context).replace("{prompt}", text)
    encoded: list[int] = tokenizer.encode(filled)
    return encoded


def render_answer(
    text: str | Messages, answer: str, tokenizer: PreTrainedTokenizerBase, *, template: str = "{prompt}"
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, and of an answer as the policy would write it, with the token that ends it.

    With the template `chat` both are what the chat template writes; else the answer is its text and the tokenizer's
    end-of-sequence token. Raises PromptError for a tokenizer without that token, or a template that does not tell where
    an answer begins.
    """
    if template == "chat":
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        try:
            tokens = answer_tokens(tokenizer, messages, [{"role": "assistant", "content": answer}])
        except InputError as error:
            raise PromptError(f"answer {answer!r:.80}: {error}") from None
        prompt_ids, response_ids, is_terminated = tokens.prompt_ids, tokens.response_ids, tokens.is_terminated
    else:
        prompt_ids = render(text, tokenizer, template=template)
        response_ids = tokenizer.encode(answer, add_special_tokens=False)
        is_terminated = tokenizer.eos_token_id is not None
        response_ids = [*response_ids, tokenizer.eos_token_id] if is_terminated else response_ids
    if not is_terminated:
        raise PromptError(
            "the student's tokenizer has no end-of-sequence token, with which an answer ends; set eos_token in its "
            "tokenizer_config.json"
        )
    return prompt_ids, response_ids


_Entry = dict[str, str]
"""Fields of a Prompt that a source gives: `text`, `answer`, and what else it has."""
PromptSource = Callable[..., Iterable[dict[str, Any]]]
"""(seed, size, and the domain's `args`) -> rows as a .jsonl file has them: a text in `text`, `prompt` or `question`, or
messages there or in `messages`, and where they have them `answer`, `teacher_context`, `verifier_data`; at most `size`
are needed. An entry point of `mopd.prompts`, or `package.module:Name` as a domain's source."""


def _distinct(entries: Iterator[_Entry]) -> Iterator[_Entry]:
    """Entries whose text did not occur before, until hardly any is new."""
    seen: set[str] = set()
    misses = 0
    for entry in entries:
        if entry["text"] not in seen:
            seen.add(entry["text"])
            misses = 0
            yield entry
        elif misses > _SUPPLY * (len(seen) + 1):
            return
        else:
            misses += 1


def _entries(domain: Domain) -> Iterator[_Entry]:
    if domain.source in _BUILT_IN:
        return _BUILT_IN[domain.source](domain)
    if not _names_files(domain.source):
        return _plugin(domain)
    files = files_at(domain.source, _SUFFIXES)
    return iter([entry for file in files for entry in _from_rows(file, _rows(file), domain)])


def _names_files(source: str) -> bool:
    return is_url(source) or suffix_of(source) in _SUFFIXES or local_path(source).is_dir()


def find_prompts(source: str) -> None:
    """Check that the files, or the plug-in, of a domain's source exist; nothing is read of them.

    source: files or a plug-in, not one of the built-in names.
    Raises InputError when there are none, or a server does not answer.
    """
    if _names_files(source):
        files_at(source, _SUFFIXES)
    else:
        find_plugin("mopd.prompts", source, {})


def source_package(source: str) -> str:
    """Module that a built-in source reads with; empty for files, plug-ins and the job's own store."""
    return source.replace("-", "_") if source in _BUILT_IN else ""


def _reasoning_gym(domain: Domain) -> Iterator[_Entry]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    require_known(domain.dataset, DATASETS, "no reasoning-gym dataset")
    try:
        dataset = reasoning_gym.create_dataset(domain.dataset, seed=domain.seed, size=_supply(domain), **domain.args)
    except (TypeError, AssertionError) as error:
        raise PromptError(f"reasoning-gym refuses args {domain.args}: {error}") from None
    for entry in dataset:
        fields = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
        yield {
            "text": _fill("template", domain.template, fields),
            "answer": str(entry["answer"]),
            "verifier_data": json.dumps({"dataset": domain.dataset, "entry": entry}, default=str),
            "teacher_context": _fill("teacher_context", domain.teacher_context, fields),
        }


def _datasets(domain: Domain) -> Iterator[_Entry]:
    try:
        rows = _dataset_rows(domain.dataset, **domain.args)
    except TypeError as error:
        raise InputError(f"args {domain.args} of a dataset: {error}") from None
    return _from_rows(domain.dataset, rows, domain)


def _dataset_rows(
    dataset: str, *, split: str = "train", name: str | None = None, revision: str | None = None
) -> list[dict[str, Any]]:
    """Every row of one split, in the dataset's order. No code of a dataset is run.

    dataset: `owner/name` on the hub, a folder of files, or one that `save_to_disk` wrote. split: as `datasets` writes
    it, so `train[:1000]` is one too (but for a folder of `save_to_disk`). name: configuration. revision: branch, tag or
    commit on the hub.
    """
    if not dataset:
        raise InputError('source = "datasets" needs `dataset`: a name on the Hugging Face hub, or a folder')
    require(["datasets"])
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if any((Path(dataset) / file).is_file() for file in _SAVED):
        loaded = datasets.load_from_disk(dataset)
        if isinstance(loaded, datasets.DatasetDict):
            require_known(split, loaded, f"dataset {dataset}: no split")
            loaded = loaded[split]
        elif split != "train":
            raise UnknownNameError(f"dataset {dataset} was saved without splits; leave `split` out, not {split!r}")
    else:
        try:
            loaded = datasets.load_dataset(dataset, name, split=split, revision=revision)
        except (HfHubHTTPError, OfflineModeIsEnabled, ConnectionError) as error:
            raise ResourceError(
                f"dataset {dataset!r}: the hub does not answer ({error!s:.160}); run the same again"
            ) from None
        except (FileNotFoundError, ValueError) as error:
            raise UnknownNameError(f"dataset {dataset!r}, split {split!r}: {error!s:.300}") from None
    rows: list[dict[str, Any]] = loaded.to_list()
    return rows


def _verifiers(domain: Domain) -> Iterator[_Entry]:
    from mopd_dataplane.integrations.verifiers import task_rows

    return _from_rows(domain.dataset, task_rows(domain.dataset, domain.args, _supply(domain)), domain)


_BUILT_IN = {"reasoning-gym": _reasoning_gym, "datasets": _datasets, "verifiers": _verifiers}
"""By the name of the package that each reads with."""


def _plugin(domain: Domain) -> Iterator[_Entry]:
    """Rows of another package's source, see PromptSource."""
    try:
        source: PromptSource = find_plugin("mopd.prompts", domain.source, {})
    except UnknownNameError as error:
        raise UnknownNameError(
            f"source {domain.source!r} is neither 'reasoning-gym', 'datasets' nor 'verifiers', nor a .jsonl or "
            f".parquet file, nor a plug-in: {error}"
        ) from None
    rows = source(seed=domain.seed, size=_supply(domain), **domain.args)
    return _from_rows(domain.source, list(rows), domain)


def _supply(domain: Domain) -> int:
    """Number of entries that a generator is asked for."""
    return _SUPPLY * sum(_splits(domain).values())


def _fill(key: str, template: str, fields: dict[str, Any]) -> str:
    try:
        for _, name, form, _ in Formatter().parse(template):
            if form and (not _FORM.fullmatch(form)):
                raise ValueError(f"{{{name}:{form}}} is no form of a number or text; widths have at most 3 digits")
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        names_text = ", ".join(f"{{{field}}}" for field in fields)
        raise PromptError(
            f"{key} {template!r:.80}: {error!r}; placeholders are {names_text}; write {{{{ for a brace"
        ) from None


def _from_rows(path: str, rows: list[dict[str, Any]], domain: Domain) -> Iterator[_Entry]:
    if not rows:
        raise PromptError(f"{path} has no prompts")
    for number, row in enumerate(rows, start=1):
        location = f"{path}: row {number}"
        row = {**row, **_renamed(row, domain.columns, location)}
        question = next((row[key] for key in _ASKED if row.get(key)), None)
        messages: Messages = []
        if isinstance(question, list):
            messages, said = _conversation(question, location)
            row = {"answer": said, **row}
            question = messages[-1]["content"]
        if not isinstance(question, str) or not question:
            raise PromptError(
                f"{location} has no text or messages in a column `text`, `prompt`, `question` or `messages`"
            )
        row.setdefault("question", question)
        filled = _fill("template", domain.template, row)
        if len(messages) > 1:
            messages = [*messages[:-1], {**messages[-1], "content": filled}]
            filled = conversation_text(messages)
        context = str(row.get("teacher_context", ""))
        for name, value in (("text", filled), ("answer", str(row.get("answer", ""))), ("teacher_context", context)):
            check_text(value, name, location)
        yield {
            "text": filled,
            "answer": str(row.get("answer", "")),
            "verifier_data": json.dumps(row["verifier_data"], default=str) if "verifier_data" in row else "",
            "teacher_context": context or _fill("teacher_context", domain.teacher_context, row),
            "messages": json.dumps(messages, ensure_ascii=False) if len(messages) > 1 else "",
        }


def _renamed(row: dict[str, Any], columns: Mapping[Any, str], location: str) -> dict[str, Any]:
    """The columns that a domain reads under other names than the source's."""
    for column in columns.values():
        if column not in row:
            raise PromptError(
                f"{location} has no column {column!r}: {nearest(column, row)}; see the domain's `columns`"
            )
    return {name: row[column] for name, column in columns.items()}


def _conversation(value: list[Any], location: str) -> tuple[Messages, str]:
    """Messages up to the last that is no answer, and the answer."""
    messages = read_messages(value, "messages", location)
    answer = str(messages.pop()["content"]) if messages[-1]["role"] == "assistant" else ""
    if not messages:
        raise PromptError(f"{location} has an answer of the assistant and no prompt before it")
    return messages, answer


def _rows(path: str) -> list[dict[str, Any]]:
    """Rows of a file. Raises PromptError when it unpacks to far more than prompts ever do."""
    rows: list[dict[str, Any]] = []
    with open_file(path) as content:
        size = content.seek(0, 2)
        content.seek(0)
        limit, unpacked = _FREE_BYTES + _RATIO * size, 0
        packed = suffix_of(path) == ".parquet"
        for _, row in rows_in(content, path):
            unpacked += sum(len(str(value)) for value in row.values()) if packed else 0
            if unpacked > limit:
                raise PromptError(
                    f"{path}: {size:,} bytes unpack to more than {limit:,}; text does not compress like "
                    "that: look at the file, or give it as .jsonl"
                )
            rows.append(row)
    return rows
