"""The least time for the work of an iteration: plain transformers in one process, with nothing stored.

    python step_floor.py WORK FOUND

WORK, FOUND: JSON files (see step.py). `generate` in batches of as many sequences as the engine has slots; the teacher
and the student over the samples of the last iteration, sorted by length, with logits of the response alone; the sum of
exact reverse KL and its gradient, AdamW at the end of each batch. Needs torch and transformers alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROUNDS = 3


def main() -> None:
    """Median seconds of each phase."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(work["model"], padding_side="left", local_files_only=True)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, local_files_only=True).eval()
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=work["learning_rate"], foreach=True)
    texts = [_chat(tokenizer, one["text"]) for one in work["prompts"][-work["per_iteration"] :]]
    batches = _batches(work, tokenizer)
    figures = {
        "rollout, s": _median(lambda: _generate(student, tokenizer, texts, work)),
        "score, s": _median(lambda: [_logits(teacher, batch, "teacher") for batch in batches]),
        "train, s": _median(lambda: _train(student, teacher, optimizer, batches)),
    }
    figures["train, s"] -= figures["score, s"]  # it asks the teacher again
    figures["an iteration, s"] = sum(figures.values())
    Path(sys.argv[2]).write_text(json.dumps(figures))


def _chat(tokenizer: Any, text: str, context: str = "") -> str:
    system = [{"role": "system", "content": context}] if context else []
    messages = [*system, {"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _generate(model: Any, tokenizer: Any, texts: list[str], work: dict[str, Any]) -> None:
    """All answers of an iteration, prompts of like length together."""
    texts = sorted(texts, key=len)
    with torch.inference_mode():
        for start in range(0, len(texts), work["slots"]):
            batch = tokenizer(texts[start : start + work["slots"]], return_tensors="pt", padding=True)
            model.generate(
                **batch, do_sample=True, temperature=work["temperature"], top_k=0, top_p=1.0,
                max_new_tokens=work["new_tokens"], pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip


def _batches(work: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Samples of like length, as many tokens as a pack has, right-aligned: prompt and response of both readers."""
    samples = []
    for one in work["samples"]:
        response = one["tokens"][one["prompt_len"] :]
        prompt_ids = tokenizer(_chat(tokenizer, one["text"], one["context"]))["input_ids"]
        samples.append({"student": one["tokens"], "teacher": prompt_ids + response, "response": len(response)})
    samples.sort(key=lambda one: len(one["student"]))
    batches: list[list[dict[str, Any]]] = [[]]
    for one in samples:
        if sum(len(other["student"]) for other in batches[-1]) + len(one["student"]) > work["pack_tokens"]:
            batches.append([])
        batches[-1].append(one)
    return [_padded(batch, tokenizer.pad_token_id) for batch in batches if batch]


def _padded(batch: list[dict[str, Any]], blank: int) -> dict[str, Any]:
    """student, teacher: ids [B, T] and their mask; kept: most response tokens; trained: bool [B, kept]."""
    longest = max(one["response"] for one in batch)
    batch_arrays: dict[str, Any] = {"kept": longest}
    for reader in ("student", "teacher"):
        width = max(len(one[reader]) for one in batch)
        ids = torch.full((len(batch), width), blank)
        for row, one in enumerate(batch):
            ids[row, width - len(one[reader]) :] = torch.tensor(one[reader])
        lengths = torch.tensor([len(one[reader]) for one in batch])
        batch_arrays[reader] = ids, (torch.arange(width)[None] >= width - lengths[:, None]).long()
    counts = torch.tensor([one["response"] for one in batch])
    batch_arrays["trained"] = torch.arange(longest)[None] >= longest - counts[:, None]
    return batch_arrays


def _logits(model: Any, batch: dict[str, Any], reader: str, *, grad: bool = False) -> torch.Tensor:
    """[M, V] log-probs at the places of the responses."""
    ids, mask = batch[reader]
    with torch.set_grad_enabled(grad):
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=batch["kept"] + 1, use_cache=False).logits
        said: torch.Tensor = logits[:, :-1][batch["trained"]].log_softmax(-1)
        return said


def _train(student: Any, teacher: Any, optimizer: Any, batches: list[dict[str, Any]]) -> None:
    """Exact reverse KL of every token, two steps."""
    for part in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        for batch in part:
            scored = _logits(teacher, batch, "teacher")
            said = _logits(student, batch, "student", grad=True)
            ((said.exp() * (said - scored)).sum() / 1000).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _median(work: Callable[[], object]) -> float:
    spent = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
