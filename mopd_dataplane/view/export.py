"""The page over chosen samples as files: a folder that opens from disk or any web server, or one file for one sample.

No request leaves the page: data are scripts beside it, and a content-security policy allows nothing else.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import InputError, MopdError, UnknownNameError
from mopd_dataplane.view import bundle, life, prompt, red_pen, run_page, teachers_page
from mopd_dataplane.view.index import Index
from mopd_dataplane.view.plain import to_json
from mopd_dataplane.view.sample import Payload, describe, excerpts, read_payload, read_teachers, score_rows
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.topk import candidates, with_pieces

MARK = "mopd-view.json"
"""In a folder that an export made; a later one replaces what is there."""
CANDIDATE_TOKENS = 24
"""Tokens of a sample, the most surprising first, whose candidates travel along."""
REDPEN_BYTES = 2_900_000
"""Largest file of the first page."""
REDPEN_ITERATIONS = 24
LINE_SAMPLES = 3
"""Samples of each line of the first page's lists that an export names."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; {policy}">
<meta name="color-scheme" content="light dark">
<title>mopd view</title>
<link rel="icon" href="data:,">
{style}
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header id="top"></header>
<main id="main" tabindex="-1"></main>
<div id="said" class="unseen" role="status" aria-live="polite"></div>
{script}
</body>
</html>
"""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    path: str
    samples: int
    files: int
    bytes: int


def export_folder(shown: Shown, folder: Path, *, where: str, order: str, limit: int) -> Exported:
    """Write the page over the samples that match, at most `limit` of them in this order.

    Raises InputError when the folder holds something else, QueryError for a filter that is none.
    """
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / MARK).is_file())):
        raise InputError(f"{folder} exists and is not an export of mopd view; name a new or an empty folder")
    index = shown.index()
    index.fill()
    page_of_rows = index.page(where, order, 0, limit)
    data = _shared(shown, index, page_of_rows) | _of_samples(shown, index, [row[0] for row in page_of_rows["rows"]])
    (folder / "data").mkdir(parents=True, exist_ok=True)
    keys = {key: f"data/{number:05d}.js" for number, key in enumerate(data)}
    written = 0
    for key, name in keys.items():
        written += _write(folder / name, f"mopdData({_script_json(key)}, {_script_json(data[key])});\n")
    start = f"window.mopdFiles = {{keys: {_script_json(keys)}, start: '#/samples', data: {{}}}};\n"
    written += _write(folder / "mopd.js", start + bundle.script())
    written += _write(folder / "mopd.css", bundle.style())
    page = PAGE.format(
        policy="script-src 'self' file:; style-src 'self' file:",
        style='<link rel="stylesheet" href="mopd.css">', script='<script src="mopd.js"></script>',
    )  # fmt: skip
    written += _write(folder / "index.html", page)
    facts = {
        "store": str(shown.store.uri),
        "digest": index.snapshot.digest,
        "samples": len(page_of_rows["rows"]),
        "where": where,
    }
    written += _write(folder / MARK, to_json(facts) + "\n")
    return Exported(str(folder / "index.html"), len(page_of_rows["rows"]), len(keys) + 4, written)


def export_sample(shown: Shown, file: Path, uid: str) -> Exported:
    """Write one sample as one HTML file without anything beside it. Raises UnknownNameError."""
    index = shown.index()
    index.fill()
    row = index.row(uid)
    listed = {"columns": list(index.columns), "rows": [[row[name] for name in index.columns]]}
    data = {**_of_samples(shown, index, [uid]), "stores": [shown.describe() | {"follow": False}], "samples": listed}
    return _publish(file, _page(f"#/sample/{uid}", data), samples=1)


def export_redpen(shown: Shown, file: Path) -> Exported:
    """Write the first page, teachers correcting the student, as one HTML file of at most REDPEN_BYTES.

    It has up to REDPEN_ITERATIONS iterations of the newest stage with scored answers, spread evenly, and the pages of
    the samples that it shows, as many as fit: those of the first and the last iteration before the others.
    Raises UnknownNameError when no teacher has scored an answer.
    """
    index = shown.index()
    index.fill()
    home = red_pen.overview(shown)
    if not home["iterations"]:
        raise UnknownNameError(
            f"no teacher has scored an answer of {shown.store.uri}; run the job's scoring, then export again"
        )
    spread = np.linspace(0, len(home["iterations"]) - 1, min(REDPEN_ITERATIONS, len(home["iterations"]))).round()
    home["iterations"] = [home["iterations"][int(at)] for at in spread]
    home["stages"] = [home["stage"]]
    order = sorted(range(len(spread)), key=lambda at: (min(at, len(spread) - 1 - at), -at))
    data: dict[str, Any] = {"stores": [shown.describe() | {"follow": False}], "home": home}
    answered: list[list[str]] = []
    listed: list[str] = []
    for at in order:
        iteration = home["iterations"][at]["iteration"]
        answers = red_pen.corrected_answers(shown, home["stage"], iteration)
        words = [
            teacher | {"lines": [line | {"uids": line["uids"][:LINE_SAMPLES]} for line in teacher["lines"]]}
            for teacher in red_pen.corrected_words(shown, home["stage"], iteration)
        ]
        data |= {f"corrections/{iteration}": answers, f"corrected/{iteration}": words}
        answered.append([answer["uid"] for answer in answers])
        listed += [uid for teacher in words for line in teacher["lines"] for uid in line["uids"]]
    rows = index.rows_of(list(dict.fromkeys([*chain.from_iterable(answered), *listed])), with_comparisons=True)
    data["samples"] = {
        "columns": list(index.columns), "rows": [[row[name] for name in index.columns] for row in rows.values()],
    }  # fmt: skip
    data["excerpts"] = excerpts(shown.store, list(rows.values()), index.snapshot, shown.decoder)
    page = _page("#/home", data)
    chosen: list[str] = []
    for uids in answered:
        data |= _of_samples(shown, index, uids, siblings=chosen)
        larger = _page("#/home", data)
        if len(larger) > REDPEN_BYTES:
            break
        page = larger
        chosen += uids
    return _publish(file, page, samples=len(chosen))


def _page(start: str, data: dict[str, Any]) -> bytes:
    """The page with its data as one HTML file. start: address of the view that it opens with."""
    code = (
        f"window.mopdFiles = {{keys: {{}}, start: {_script_json(start)}, data: {_script_json(data)}}};\n"
        + bundle.script()
    )
    sheet = bundle.style()
    page = PAGE.format(
        policy=f"script-src '{_hash(code)}'; style-src '{_hash(sheet)}'",
        style=f"<style>{sheet}</style>", script=f"<script>{code}</script>",
    )  # fmt: skip
    return page.encode()


def _publish(file: Path, page: bytes, *, samples: int) -> Exported:
    publish_file(file, page)
    return Exported(str(file), samples, 1, len(page))


def _shared(shown: Shown, index: Index, page: dict[str, Any]) -> dict[str, Any]:
    """Data of the export that do not belong to a single sample."""
    described = shown.describe() | {"follow": False, "samples": len(page["rows"])}
    uids = [values[0] for values in page["rows"]]
    rows = list(index.rows_of(uids).values())
    return {
        "stores": [described], "samples": {"columns": page["columns"], "rows": page["rows"]},
        "excerpts": excerpts(shown.store, rows, index.snapshot, shown.decoder),
        "run": run_page.run_page(shown.store, index), "teachers": teachers_page.teachers_page(shown.store, index),
    }  # fmt: skip


def _of_samples(shown: Shown, index: Index, uids: list[str], *, siblings: Sequence[str] = ()) -> dict[str, Any]:
    """sample/…, life/…, candidates/… of each, and prompt/… of each prompt with the chosen answers only.

    siblings: uids exported before, which the pages of the prompts list too.
    """
    data: dict[str, Any] = {}
    rows = index.rows_of(uids)
    data |= {
        f"life/{uid}": events for uid, events in life.lives(shown.store, index.snapshot, list(rows.values())).items()
    }
    for uid in uids:
        row = rows[uid]
        prompt_text = prompt.prompt_text(shown.store, row["prompt_id"], index.snapshot)
        data[f"sample/{uid}"] = describe(shown.store, row, index.snapshot, shown.decoder, prompt_text)
        data[f"candidates/{uid}"] = _candidates(shown, index, row)
    for prompt_id in dict.fromkeys(row["prompt_id"] for row in rows.values()):
        data[f"prompt/{prompt_id}"] = prompt.answers(
            shown.store, index, shown.decoder, prompt_id=prompt_id, only=frozenset([*uids, *siblings])
        )
    return data


def _candidates(shown: Shown, index: Index, row: dict[str, Any]) -> dict[str, Any]:
    """Candidates of the tokens on which teachers and sampler differ most, by position."""
    try:
        payload = read_payload(shown.store, row, index.snapshot)
    except (MopdError, OSError):
        return {}
    scores = score_rows(shown.store, row["sample_row"], index.snapshot)
    if not {"topk", "hidden"} & set(scores["kind"].to_pylist()):
        return {}
    teachers = read_teachers(shown.store, row, scores, index.snapshot)
    positions = _surprising(payload, teachers)
    ordinals = np.cumsum(payload.mask) - payload.mask
    places = [(int(payload.response[position]), int(ordinals[position])) for position in positions]
    by_token = {}
    for position, said in zip(positions, candidates(shown.store, row, scores, places, index.snapshot), strict=True):
        by_token[str(position)] = {"teachers": [with_pieces(teacher, shown.decoder) for teacher in said], "note": ""}
    return by_token


def _surprising(payload: Payload, teachers: list[dict[str, Any]]) -> list[int]:
    size = np.zeros(len(payload.mask), np.float32)
    for teacher in teachers:
        if "logprob" in teacher and payload.logprobs is not None:
            size = np.fmax(size, np.abs(prompt.log_ratio(payload, teacher["logprob"])))
    trained = np.flatnonzero(payload.mask)
    return sorted(trained[np.argsort(-size[trained], kind="stable")][:CANDIDATE_TOKENS].tolist())


def _script_json(value: Any) -> str:
    """JSON inside a script: no text of a model ends the element."""
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(path: Path, text: str) -> int:
    content = text.encode()
    path.write_bytes(content)
    return len(content)
