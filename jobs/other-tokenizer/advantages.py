"""What each teacher says of the numbers in the first answers of its student, which the base wrote.

    python jobs/other-tokenizer/advantages.py [--store runs/other-tokenizer/student] [--samples 1024]

Prints one JSON object for each teacher, with means over tokens in nat. The advantage of a token is the teacher's
log-prob minus the sampler's. wrong: of a first number that is wrong. right: of one that is right. right_after_wrong: of
a second number that is right, after a first one that is wrong. Answers that the teacher cannot read are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane import Store, open_store
from mopd_dataplane.models.hf import load_tokenizer

TEACHERS = {"same": "sorter", "of-stranger": "stranger", "of-across": "across", "of-finer": "finer"}
"""Stage -> its teacher."""
NUMBER = re.compile(r"\d\d")
"""Text of a token of the student that is a number; all numbers have two digits."""
FIRST = """
    select sample_row, prompt_id, prompt_len from scores join samples using (uid)
    where stage = '{}' and iteration = 0 and teacher = '{}' and kind = 'logprob' order by sample_row limit {}"""


def advantages(store: Store, tokenizer: Any, stage: str, teacher: str, samples: int) -> dict[str, Any]:
    """Mean advantages of numbers in the first answers of a stage, and how many tokens each mean is of."""
    answers = {prompt.prompt_id: re.findall(r"(\d+)\.", prompt.answer) for prompt in store.prompts()}
    of_kind = defaultdict(list)
    scored = store.sql(FIRST.format(stage, teacher, samples)).to_pylist()
    rows = [sample["sample_row"] for sample in scored]
    payload = store.read_tokens(rows, ["tokens", "logprobs"]).to_pylist()
    for sample, stored, logprobs in zip(scored, payload, store.read_signal(teacher, "logprob", rows), strict=True):
        texts = tokenizer.convert_ids_to_tokens(stored["tokens"][sample["prompt_len"] :])
        differences = np.asarray(logprobs) - np.asarray(stored["logprobs"])
        numbers = [(text, gap) for text, gap in zip(texts, differences, strict=True) if NUMBER.fullmatch(text)]
        is_right = [text == answer for (text, _), answer in zip(numbers, answers[sample["prompt_id"]], strict=False)]
        if is_right:
            of_kind["right" if is_right[0] else "wrong"].append(numbers[0][1])
        if is_right[:2] == [False, True]:
            of_kind["right_after_wrong"].append(numbers[1][1])
    means = {kind: round(float(np.nanmean(gaps)), 2) for kind, gaps in sorted(of_kind.items())}
    return {"teacher": teacher, **means, "tokens": {kind: len(gaps) for kind, gaps in sorted(of_kind.items())}}


def main() -> None:
    """Print what each teacher says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", default="runs/other-tokenizer/student")
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    store = open_store(options.store)
    tokenizer = load_tokenizer(Path(store.uri) / "policies" / "base" / "v1")
    for stage, teacher in TEACHERS.items():
        print(json.dumps(advantages(store, tokenizer, stage, teacher, options.samples)))


if __name__ == "__main__":
    main()
