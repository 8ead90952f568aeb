"""Routes of the viewer's server. Every answer is JSON; searches stream one JSON document a line."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from mopd_dataplane.errors import InputError, MopdError, UnknownNameError
from mopd_dataplane.store.read.describe import columns as describe_table
from mopd_dataplane.store.read.describe import relations
from mopd_dataplane.view import bundle, labels, life, packs, prompt, red_pen, run_page, teachers_page, typed_query
from mopd_dataplane.view.compare import compare
from mopd_dataplane.view.guard import Guard
from mopd_dataplane.view.index import Index
from mopd_dataplane.view.matches import Matches
from mopd_dataplane.view.plain import to_json
from mopd_dataplane.view.run_state import run_state
from mopd_dataplane.view.sample import describe, excerpts, read_payload, score_rows
from mopd_dataplane.view.search import Search
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores
from mopd_dataplane.view.topk import candidates, with_pieces

MOST_ROWS = 500
STATUS = {UnknownNameError: 404, InputError: 400}

Answer = Callable[[Shown, dict[str, str]], Any]


def build_app(stores: ShownStores, *, token: str, port: int, once: str = "") -> Starlette:
    """The server's application. token: what every request must show; port: the one it listens on; once: a token that
    opens the page a single time."""
    routes = [
        Route("/", lambda request: FileResponse(bundle.ASSETS / "index.html")),
        Route("/api/stores", _answering(lambda query: stores.describe())),
        *(Route(f"/api/{name}", _answering(partial(_of_one, stores, answer))) for name, answer in ANSWERS.items()),
        Route("/api/search", _answering(partial(_searching, stores))),
        Route("/api/sql", _answering(partial(_typed, stores))),
        Route("/api/compare", _answering(partial(_of_two, stores, _compare))),
        Route("/api/difference", _answering(partial(_of_two, stores, _difference))),
        Route("/api/labels", _labelling(stores), methods=["POST"]),
        Route("/page.js", lambda request: Response(bundle.script(), media_type="text/javascript")),
        Route("/page.css", lambda request: Response(bundle.style(), media_type="text/css")),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, port=port, once=once)])


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _error(error: MopdError) -> Response:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return _json({"error": str(error), "kind": type(error).__name__}, status)


def _answering(answer: Callable[[dict[str, str]], Any]) -> Callable[[Request], Any]:
    """An endpoint: what was asked, answered in a thread. answer: gives a Response, or what becomes one."""

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(_answered, lambda: answer(dict(request.query_params)))

    return endpoint


def _answered(work: Callable[[], Any]) -> Response:
    try:
        result = work()
        return result if isinstance(result, Response) else _json(result)
    except MopdError as error:
        return _error(error)


def _of_one(stores: ShownStores, answer: Answer, query: dict[str, str]) -> Response:
    shown = stores.get(query.get("store", "0"))
    with shown.queries.asking():
        return _json(answer(shown, query))


def _of_two(stores: ShownStores, answer: Callable[[Shown, Shown, dict[str, str]], Any], query: dict[str, str]) -> Any:
    """An answer that reads the store that was asked and `other`, by default the same."""
    one = query.get("store", "0")
    return answer(stores.get(one), stores.get(query.get("other", one)), query)


def _typed(stores: ShownStores, query: dict[str, str]) -> Response:
    """Any read-only statement, in the sandbox of `mopd query`."""
    shown = stores.get(query.get("store", "0"))
    shown.prepare()  # both at once would take more memory than the server promises
    answer = typed_query.ask(shown.store, shown.index().snapshot, query.get("q", ""))
    return Response(answer, media_type="application/json")


def _searching(stores: ShownStores, query: dict[str, str]) -> Response:
    """How far a search is, line by line; its matches are remembered for the table that is asked for next."""
    shown = stores.get(query.get("store", "0"))
    index = shown.index()
    search = _search(shown, index, query)

    def lines() -> Iterator[str]:
        item: dict[str, Any] = {}
        try:
            for item in search.progress():
                yield to_json({name: value for name, value in item.items() if name != "matches"}) + "\n"
            if shown.index() is index:
                shown.remembered(_search_key(query), lambda _: item["matches"])
        except (MopdError, OSError) as error:
            yield to_json({"error": str(error), "kind": type(error).__name__}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _search(shown: Shown, index: Index, query: dict[str, str], among: NDArray[np.int64] | None = None) -> Search:
    return Search(shown.store, index, shown.decoder, kind=query.get("kind", "text"), pattern=query.get("q", ""),
                  where=query.get("where", ""), among=among)  # fmt: skip


def _search_key(query: dict[str, str]) -> str:
    return "\0".join(["search", *(query.get(name, "") for name in ("kind", "q", "where"))])


def _matches(shown: Shown, query: dict[str, str]) -> Matches | None:
    """Samples that match the search of a request, if it has one."""
    if not query.get("q"):
        return None
    matches: Matches = shown.remembered(_search_key(query), lambda index: _search(shown, index, query).run())
    return matches


def _labelling(stores: ShownStores) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            return _json({"error": "the body is not JSON"}, 400)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _json({"error": "labels are sent as application/json"}, 415)

        def work() -> Any:
            shown = stores.get(request.query_params.get("store", "0"))
            return labels.write(shown.store, shown.index().row, shown.labelled, body)

        return await run_in_threadpool(_answered, work)

    return endpoint


# -- answers -----------------------------------------------------------------------------------------------------------


def _number(query: dict[str, str], name: str, default: int, most: int | None = None) -> int:
    text = query.get(name, str(default))
    if not text.isdecimal() or len(text) > 12:
        raise InputError(f"{name}={text!r} is not a whole number")
    return min(int(text), most) if most is not None else int(text)


def _page(shown: Shown, query: dict[str, str]) -> Any:
    limit, offset = _number(query, "limit", 50, MOST_ROWS), _number(query, "offset", 0)
    where, order = query.get("where", ""), query.get("order", "")
    matches = _matches(shown, query)
    page = shown.index().page(where, order, offset, limit, with_comparisons=query.get("whole") == "1", matches=matches)
    return page | {"cut": matches is not None and matches.is_cut}


def _histograms(shown: Shown, query: dict[str, str]) -> Any:
    names = [name for name in query.get("columns", "").split(",") if name]
    matches = _matches(shown, query)
    return shown.index().histograms(query.get("where", ""), names, matches.sample_rows if matches else None)


def _excerpts(shown: Shown, query: dict[str, str]) -> Any:
    """Start of prompt and response of some samples, for the page of a table, and where a search matches as `hit`."""
    table = shown.index()
    rows = table.rows_of([uid for uid in query.get("uids", "").split(",")[:MOST_ROWS] if uid])
    texts: dict[str, dict[str, Any]] = {**excerpts(shown.store, list(rows.values()), table.snapshot, shown.decoder)}
    if query.get("q") and rows:
        among = np.array([row["sample_row"] for row in rows.values()], np.int64)
        for uid, hit in _search(shown, table, query | {"where": ""}, among).hits().items():
            texts[uid]["hit"] = hit
    return texts


def _sample(shown: Shown, query: dict[str, str]) -> Any:
    index = shown.index()
    row = index.row(query.get("uid", ""))
    asked_of_it = prompt.prompt_text(shown.store, row["prompt_id"], index.snapshot)
    view = describe(shown.store, row, index.snapshot, shown.decoder, asked_of_it)
    return view | {"labels": labels.standing(shown.store, row["uid"]), "whole": index.comparison_columns_loaded}


def _text(shown: Shown, query: dict[str, str]) -> Any:
    """The whole text of a sample's prompt and answer, character by character as it was decoded."""
    index = shown.index()
    payload = read_payload(shown.store, index.row(query.get("uid", "")), index.snapshot)
    prompt_ids, response_ids = payload.tokens[: payload.prompt_len], payload.response
    prompt_said, answer = shown.decoder.texts([prompt_ids.tolist(), response_ids.tolist()])
    return {"prompt": prompt_said, "answer": answer}


def _row(shown: Shown, query: dict[str, str]) -> Any:
    """A sample's row of the table with the columns that compare it with others."""
    uid = query.get("uid", "")
    return shown.index().rows_of([uid], with_comparisons=True)[uid]


def _candidates(shown: Shown, query: dict[str, str]) -> Any:
    index = shown.index()
    row, position = index.row(query.get("uid", "")), _number(query, "position", 0)
    payload = read_payload(shown.store, row, index.snapshot)
    if position >= len(payload.mask):
        raise InputError(f"position {position}; allowed: 0 to {len(payload.mask) - 1}, the tokens of the response")
    if not payload.mask[position]:
        return {"teachers": [], "note": "this token was not written by the policy, so no teacher scored it"}
    ordinal = int(payload.mask[:position].sum())
    token = int(payload.response[position])
    scores = score_rows(shown.store, row["sample_row"], index.snapshot)
    [candidate] = candidates(shown.store, row, scores, [(token, ordinal)], index.snapshot)
    return {"teachers": [with_pieces(said, shown.decoder) for said in candidate], "note": ""}


def _student(shown: Shown, query: dict[str, str]) -> Any:
    """The student's likeliest tokens at a position, or a `note` why they are not known."""
    index = shown.index()
    row, position = index.row(query.get("uid", "")), _number(query, "position", 0)
    payload = read_payload(shown.store, row, index.snapshot)
    if position >= len(payload.mask) or not payload.mask[position]:
        raise InputError(f"the policy did not write the token at position {position}; choose one that it wrote")
    try:
        return with_pieces(shown.student.candidates(row, payload, position), shown.decoder)
    except (MopdError, OSError) as error:
        return {"note": str(error)}


def _prompt(shown: Shown, query: dict[str, str]) -> Any:
    return prompt.answers(
        shown.store, shown.index(), shown.decoder, prompt_id=query.get("prompt", ""), group=query.get("group", ""),
        stage=query.get("stage", ""), offset=_number(query, "offset", 0),
    )  # fmt: skip


def _compare(one: Shown, other: Shown, query: dict[str, str]) -> Any:
    return compare(one.index(), other.index(), query.get("a", ""), query.get("b", ""))


def _difference(one: Shown, other: Shown, query: dict[str, str]) -> Any:
    return prompt.compared(one, query.get("a", ""), other, query.get("b", ""))


def _step(shown: Shown, query: dict[str, str]) -> Any:
    stage, step, ranks = query.get("stage", ""), _number(query, "step", 0), _number(query, "ranks", 0)
    return packs.step_page(shown.store, shown.index().snapshot, stage, step, ranks)


def _corrections(shown: Shown, params: dict[str, str]) -> Any:
    return red_pen.corrected_answers(shown, params.get("stage", ""), _number(params, "iteration", 0))


def _corrected(shown: Shown, params: dict[str, str]) -> Any:
    return red_pen.corrected_words(shown, params.get("stage", ""), _number(params, "iteration", 0))


def _schema(shown: Shown, query: dict[str, str]) -> Any:
    """What a statement can select from; with `table`, the columns of one."""
    if name := query.get("table"):
        return [asdict(column) for column in describe_table(shown.store, name)]
    return [asdict(relation) for relation in relations(shown.store)]


ANSWERS: dict[str, Answer] = {
    "home": lambda shown, params: red_pen.overview(shown, params.get("stage", "")),
    "corrections": _corrections, "corrected": _corrected,
    "samples": _page, "row": _row, "histograms": _histograms, "excerpts": _excerpts, "sample": _sample,
    "text": _text, "candidates": _candidates, "student": _student,
    "prompt": _prompt, "step": _step,
    "life": lambda shown, query: life.life(shown.store, shown.index(), query.get("uid", "")),
    "run": lambda shown, query: shown.remembered("run", lambda index: run_page.run_page(shown.store, index)),
    "state": lambda shown, query: shown.remembered("state", lambda index: run_state(shown.store, index)),
    "trace": lambda shown, query: run_page.trace(shown.store, shown.index()),
    "teachers": lambda shown, query: shown.remembered(
        "teachers", lambda index: teachers_page.teachers_page(shown.store, index)
    ),
    "schema": _schema,
    "pulse": lambda shown, query: shown.pulse(),
    "stages": lambda shown, query: shown.stages(),
    "store": lambda shown, query: shown.describe(),
    "labelled": lambda shown, query: labels.standing(shown.store),
}  # fmt: skip
