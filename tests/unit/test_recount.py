"""The published shares of the quickstart, counted again from its 4,800 committed answers: no verifier, no code of this
package, only the questions' own text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
ANSWERS = ROOT / "docs" / "notebooks" / "quickstart_run"
PUBLISHED = json.loads((ROOT / "jobs/quickstart/results/full-vocab-0.json").read_text())["policies"]


def spelt_backward(question: str) -> str:
    """Of `backward: word`."""
    return question.removeprefix("backward: ").strip()[::-1]


def in_order(question: str) -> str:
    """Of `descending: ['77.0', '14.0', '46.0']`."""
    numbers = sorted(re.findall(r"\d+\.\d+", question), key=float, reverse=question.startswith("descending"))
    return str(numbers)


def walked(question: str) -> str:
    """Of `spiral: [[1, 2], [3, 4]]`: the first row, then what is left turned left."""
    left, numbers = json.loads(question.removeprefix("spiral: ")), []
    while left:
        numbers += left[0]
        left = [list(column) for column in zip(*left[1:], strict=True)][::-1]
    return " ".join(map(str, numbers))


RIGHT = {"spell_backward": spelt_backward, "number_sorting": in_order, "spiral_matrix": walked}


def counted() -> dict[tuple[str, str], str]:
    """(policy, domain) -> a 0 or 1 for every prompt in the order of its name, newest version."""
    prompts = {row["prompt_id"]: row for row in pq.read_table(ANSWERS / "prompts.parquet").to_pylist()}
    rows = pq.read_table(ANSWERS / "evals.parquet").to_pylist()
    newest = {row["policy"]: 0 for row in rows}
    for row in rows:
        newest[row["policy"]] = max(newest[row["policy"]], row["policy_version"])
    outcomes: dict[tuple[str, str], dict[str, bool]] = {}
    for row in rows:
        if row["policy_version"] == newest[row["policy"]]:
            expected, answer = RIGHT[row["domain"]](prompts[row["prompt_id"]]["text"]), row["response"].strip()
            outcomes.setdefault((row["policy"], row["domain"]), {})[row["prompt_id"]] = answer == expected
    return {key: "".join(str(int(by_name[name])) for name in sorted(by_name)) for key, by_name in outcomes.items()}


def published() -> dict[tuple[str, str], str]:
    """The same of the file from which the README's table is made."""
    return {(name, d): said["correct"] for name, policy in PUBLISHED.items() for d, said in policy["domains"].items()}


def test_every_published_answer_is_right_or_wrong_as_its_question_says() -> None:
    assert counted() == published()
