"""Routes of the viewer's server. Every answer is JSON; searches stream one JSON document a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from mopd_dataplane.errors import InputError, MopdError, UnknownNameError
from mopd_dataplane.query.text import visible
from mopd_dataplane.view import bundle, labels, life, packs, prompt, run_page, teachers_page, typed_query
from mopd_dataplane.view.compare import compare
from mopd_dataplane.view.guard import Guard
from mopd_dataplane.view.plain import to_json
from mopd_dataplane.view.sample import describe, excerpts, read_payload, score_rows
from mopd_dataplane.view.search import Search
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores
from mopd_dataplane.view.topk import candidates

MOST_ROWS = 500
STATUS = {UnknownNameError: 404, InputError: 400}

Answer = Callable[[Shown, dict[str, str]], Any]


def build_app(stores: ShownStores, *, token: str, port: int) -> Starlette:
    """The server's application. token: what every request must show; port: the one it listens on."""
    routes = [
        Route("/", lambda request: FileResponse(bundle.ASSETS / "index.html")),
        Route("/api/stores", _all(stores)),
        *(Route(f"/api/{name}", _answering(stores, answer)) for name, answer in ANSWERS.items()),
        Route("/api/search", _searching(stores)),
        Route("/api/sql", _typed(stores)),
        Route("/api/compare", _over_two(stores, _compare)),
        Route("/api/difference", _over_two(stores, _difference)),
        Route("/api/labels", _labelling(stores), methods=["POST"]),
        Route("/page.js", lambda request: Response(bundle.script(), media_type="text/javascript")),
        Route("/page.css", lambda request: Response(bundle.style(), media_type="text/css")),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, port=port)])


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _error(error: MopdError) -> Response:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return _json({"error": str(error), "kind": type(error).__name__}, status)


def _answering(stores: ShownStores, answer: Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        asked = dict(request.query_params)

        def work() -> Response:
            try:
                shown = stores.get(asked.get("store", "0"))
                with shown.asked():
                    return _json(answer(shown, asked))
            except MopdError as error:
                return _error(error)

        return await run_in_threadpool(work)

    return endpoint


def _all(stores: ShownStores) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        def work() -> Response:
            try:
                return _json(stores.describe())
            except MopdError as error:
                return _error(error)

        return await run_in_threadpool(work)

    return endpoint


def _searching(stores: ShownStores) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        asked = dict(request.query_params)

        def begin() -> Search:
            shown = stores.get(asked.get("store", "0"))
            return Search(shown.store, shown.index(), shown.decoder, kind=asked.get("kind", "text"),
                          wanted=asked.get("q", ""), where=asked.get("where", ""))  # fmt: skip

        try:
            search = await run_in_threadpool(begin)
        except MopdError as error:
            return _error(error)

        def lines() -> Iterator[str]:
            try:
                for item in search.hits():
                    yield to_json(item) + "\n"
            except (MopdError, OSError) as error:
                yield to_json({"error": str(error)}) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return endpoint


def _typed(stores: ShownStores) -> Callable[[Request], Any]:
    """Any read-only statement, in the sandbox of `mopd query`."""

    async def endpoint(request: Request) -> Response:
        asked = dict(request.query_params)

        def work() -> Response:
            try:
                shown = stores.get(asked.get("store", "0"))
                shown.prepare()  # both at once would take more memory than the server promises
                found = typed_query.ask(shown.store, shown.index().snapshot, asked.get("q", ""))
                return Response(found, media_type="application/json")
            except MopdError as error:
                return _error(error)

        return await run_in_threadpool(work)

    return endpoint


def _over_two(stores: ShownStores, answer: Callable[[Shown, Shown, dict[str, str]], Any]) -> Callable[[Request], Any]:
    """An answer that reads the store that was asked and `other`, by default the same."""

    async def endpoint(request: Request) -> Response:
        asked = dict(request.query_params)

        def work() -> Response:
            try:
                one = asked.get("store", "0")
                return _json(answer(stores.get(one), stores.get(asked.get("other", one)), asked))
            except MopdError as error:
                return _error(error)

        return await run_in_threadpool(work)

    return endpoint


def _labelling(stores: ShownStores) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            given = json.loads(await request.body())
        except ValueError:
            return _json({"error": "the body is not JSON"}, 400)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _json({"error": "labels are sent as application/json"}, 415)

        def work() -> Response:
            try:
                shown = stores.get(request.query_params.get("store", "0"))
                return _json(labels.write(shown.store, shown.index(), shown.labelled, given))
            except MopdError as error:
                return _error(error)

        return await run_in_threadpool(work)

    return endpoint


# -- answers -----------------------------------------------------------------------------------------------------------


def _number(asked: dict[str, str], name: str, default: int, most: int | None = None) -> int:
    text = asked.get(name, str(default))
    if not text.isdigit() or len(text) > 12:
        raise InputError(f"{name}={text!r} is not a whole number")
    return min(int(text), most) if most is not None else int(text)


def _page(shown: Shown, asked: dict[str, str]) -> Any:
    limit, offset = _number(asked, "limit", 50, MOST_ROWS), _number(asked, "offset", 0)
    where, order = asked.get("where", ""), asked.get("order", "")
    return shown.index().page(where, order, offset, limit, whole=asked.get("whole") == "1")


def _histograms(shown: Shown, asked: dict[str, str]) -> Any:
    names = [name for name in asked.get("columns", "").split(",") if name]
    return shown.index().histograms(asked.get("where", ""), names)


def _excerpts(shown: Shown, asked: dict[str, str]) -> Any:
    """Start of prompt and response of some samples, for the page of a table."""
    table = shown.index()
    rows = table.rows_of([uid for uid in asked.get("uids", "").split(",")[:MOST_ROWS] if uid])
    return excerpts(shown.store, list(rows.values()), table.snapshot, shown.decoder)


def _sample(shown: Shown, asked: dict[str, str]) -> Any:
    index = shown.index()
    row = index.row(asked.get("uid", ""))
    asked_of_it = prompt.prompt_text(shown.store, row["prompt_id"], index.snapshot)
    view = describe(shown.store, row, index.snapshot, shown.decoder, asked_of_it)
    return view | {"labels": labels.of_sample(shown.store, row["uid"]), "whole": index.whole}


def _row(shown: Shown, asked: dict[str, str]) -> Any:
    """A sample's row of the table with the columns that compare it with others."""
    uid = asked.get("uid", "")
    return shown.index().rows_of([uid], whole=True)[uid]


def _candidates(shown: Shown, asked: dict[str, str]) -> Any:
    index = shown.index()
    row, position = index.row(asked.get("uid", "")), _number(asked, "position", 0)
    payload = read_payload(shown.store, row, index.snapshot)
    if position >= len(payload.mask):
        raise InputError(f"position {position}; allowed: 0 to {len(payload.mask) - 1}, the tokens of the response")
    if not payload.mask[position]:
        return {"teachers": [], "note": "this token was not written by the policy, so no teacher scored it"}
    ordinal = int(payload.mask[:position].sum())
    token = int(payload.response[position])
    scores = score_rows(shown.store, row["sample_row"], index.snapshot)
    [found] = candidates(shown.store, row, scores, [(token, ordinal)], index.snapshot)
    for teacher in found:
        if "ids" in teacher:
            teacher["pieces"] = [visible(text) for text in shown.decoder.texts([[i] for i in teacher["ids"]])]
    return {"teachers": found, "note": ""}


def _student(shown: Shown, asked: dict[str, str]) -> Any:
    """The student's likeliest tokens at a position, or a `note` why they are not known."""
    index = shown.index()
    row, position = index.row(asked.get("uid", "")), _number(asked, "position", 0)
    payload = read_payload(shown.store, row, index.snapshot)
    if position >= len(payload.mask) or not payload.mask[position]:
        raise InputError(f"position {position} is no token that the policy wrote; choose one")
    try:
        found = shown.student.candidates(row, payload, position)
    except (MopdError, OSError) as error:
        return {"note": str(error)}
    return found | {"pieces": [visible(text) for text in shown.decoder.texts([[i] for i in found["ids"]])]}


def _prompt(shown: Shown, asked: dict[str, str]) -> Any:
    return prompt.answers(
        shown.store, shown.index(), shown.decoder, prompt_id=asked.get("prompt", ""), group=asked.get("group", ""),
        stage=asked.get("stage", ""), offset=_number(asked, "offset", 0),
    )  # fmt: skip


def _compare(one: Shown, other: Shown, asked: dict[str, str]) -> Any:
    return compare(one.index(), other.index(), asked.get("a", ""), asked.get("b", ""))


def _difference(one: Shown, other: Shown, asked: dict[str, str]) -> Any:
    sides = ((one, asked.get("a", "")), (other, asked.get("b", "")))
    return prompt.compared(*(prompt.Side(of.store, of.index(), of.decoder, uid) for of, uid in sides))


def _life(shown: Shown, asked: dict[str, str]) -> Any:
    return life.life(shown.store, shown.index(), asked.get("uid", ""))


def _run(shown: Shown, asked: dict[str, str]) -> Any:
    return shown.remembered(("run",), lambda index: run_page.run_page(shown.store, index))


def _trace(shown: Shown, asked: dict[str, str]) -> Any:
    return run_page.trace(shown.store, shown.index())


def _teachers(shown: Shown, asked: dict[str, str]) -> Any:
    return shown.remembered(("teachers",), lambda index: teachers_page.teachers_page(shown.store, index))


def _step(shown: Shown, asked: dict[str, str]) -> Any:
    stage, step, ranks = asked.get("stage", ""), _number(asked, "step", 0), _number(asked, "ranks", 0)
    return packs.step_page(shown.store, shown.index().snapshot, stage, step, ranks)


ANSWERS: dict[str, Answer] = {
    "samples": _page, "row": _row, "histograms": _histograms, "excerpts": _excerpts, "sample": _sample,
    "candidates": _candidates, "student": _student,
    "prompt": _prompt, "life": _life, "run": _run, "trace": _trace, "teachers": _teachers,
    "step": _step, "pulse": lambda shown, asked: shown.pulse(),
    "stages": lambda shown, asked: shown.stages(),
    "store": lambda shown, asked: shown.describe(),
    "labelled": lambda shown, asked: labels.all_of(shown.store),
}  # fmt: skip
