"""The command that opens a store in a browser, or writes what a browser would show to files."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option, Typer

from mopd_dataplane.cli.answers import PANEL, TokenizerFolder
from mopd_dataplane.cli.output import note, print_facts, print_json, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import InputError, MopdError, UnknownNameError

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.export import Exported

EXPORTED = 200
"""Samples of an export, unless the command line says how many."""
NEWEST = "-created_at"
WAIT_S = 0.5
"""Pause between two looks for a store that does not exist yet."""


def view(
    stores: Annotated[
        list[str], Argument(metavar="STORE…", help="Folders or URIs of stores, or a folder that has several.")
    ],
    port: Annotated[
        int | None,
        Option("--port", min=0, max=65535, help="Port on this machine, 0 for a free one; default: the store's own."),
    ] = None,
    token_file: Annotated[
        Path | None,
        Option(
            "--token-file", metavar="FILE", help="Take the token from FILE, so that bookmarks open after a restart."
        ),
    ] = None,
    no_open: Annotated[bool, Option("--no-open", help="Open no browser, only print the address.")] = False,
    follow: Annotated[
        bool, Option("--follow", help="Follow a running job, with its unfinished samples; wait for a missing store.")
    ] = False,
    export: Annotated[
        Path | None,
        Option(
            "--export",
            metavar="DIR|FILE.html",
            help="Write the page as files and end; to FILE.html, the first page or --sample as one file.",
        ),
    ] = None,
    where: Annotated[str, Option("--where", metavar="SQL", help="Condition on the samples of an export.")] = "",
    order: Annotated[
        str,
        Option(
            "--order",
            metavar="COLUMN",
            help="Order in which an export takes samples, -COLUMN descending; default: newest first.",
        ),
    ] = "",
    limit: Annotated[
        int | None, Option("--limit", min=1, max=5000, help="Most samples of an export; default: 200.")
    ] = None,
    sample: Annotated[str | None, Option("--sample", metavar="UID", help="Export one sample as one file.")] = None,
    tokenizer: TokenizerFolder = None,
    as_json: Annotated[bool, Option("--json", help="Print what an export wrote as one JSON object.")] = False,
) -> None:
    """Open rollouts in a browser: every sample, every token, every teacher.

    A server on this machine's loopback interface prints an address with a token; requests without it are refused. A
    store has the same port at every start; a second line is the command for another machine. Of several stores, or a
    folder of them, a table shows how far each is. The first page of a store shows what each teacher corrects in the
    student's answers, version by version; with --export FILE.html it becomes one file to send around. The others filter
    a table of samples by histograms or SQL, show all teachers over one text, the answers to a prompt side by side, the
    history of a sample, and the curves and times of the run. The server writes nothing but labels. Ctrl-C ends it.
    """
    if export is None and (where or order or sample or limit is not None or as_json):
        raise InputError(
            "--where, --order, --limit, --sample and --json only go with --export; without it, choose samples in the "
            "page"
        )
    if export is not None and follow:
        raise InputError(
            "--follow updates the page of a running server, and an export never changes; leave --follow out"
        )

    if export is None:
        with suppress(KeyboardInterrupt):  # this is how it ends
            _serve(stores, port, token_file, tokenizer, follow=follow, opens=not no_open)
        return

    from mopd_dataplane import open_store

    opened = [open_store(uri) for uri in stores]
    if len(opened) != 1:
        raise InputError(f"an export shows one store, and {len(opened)} are named; name one")
    done = _export(opened[0], export, tokenizer, sample=sample, where=where, order=order, limit=limit)
    if as_json:
        print_json(done)
    else:
        print_facts(vars(done))
        note(f"open {done.path} in a browser")


def _serve(
    names: list[str], port: int | None, token_file: Path | None, tokenizer: Path | None, *, follow: bool, opens: bool
) -> None:
    """Answer for these stores and folders of stores until Ctrl-C."""
    from mopd_dataplane.view.addresses import has_browser, new_token, open_browser, token_in, tunnel
    from mopd_dataplane.view.server import Answering, serve

    def announce(server: Answering) -> None:
        print(server.address, flush=True)
        stderr().print(Text(f"from another machine: {tunnel(server.port)}", style="dim"), soft_wrap=True)
        if opens and sys.stdout.isatty() and has_browser(os.environ):
            open_browser(server.opening)

    token = token_in(token_file) if token_file is not None else new_token()
    stores = [store for name in names for store in _stores_at(name, follow=follow)]
    serve(stores, port=port, token=token, tokenizer=tokenizer, follow=follow, announce=announce)


def _stores_at(name: str, *, follow: bool) -> list[Store]:
    """The store of this name, or those in the folder, the newest first. follow: wait for one that does not exist yet.

    Raises UnknownNameError where there is none.
    """
    from mopd_dataplane import open_store

    is_announced = False
    while True:
        try:
            return [open_store(name)]
        except UnknownNameError:
            if stores := _stores_in(Path(name)):
                return stores
            if not follow:
                raise
        if not is_announced:
            note(f"there is no store at {name} yet: waiting for one; Ctrl-C ends")
            is_announced = True
        time.sleep(WAIT_S)


def _stores_in(folder: Path) -> list[Store]:
    """The stores right inside a folder, the newest first; one that cannot be opened is named and left out."""
    from mopd_dataplane import open_store
    from mopd_dataplane.store.location import MARK

    stores = []
    for mark in sorted(folder.glob(f"*/{MARK}"), key=lambda mark: -mark.stat().st_mtime):
        try:
            stores.append(open_store(str(mark.parent)))
        except MopdError as error:
            note(f"left out: {error}")
    return stores


def _export(
    store: Store, path: Path, tokenizer: Path | None, *, sample: str | None, where: str, order: str, limit: int | None
) -> Exported:
    """Write one sample, the first page (a name that ends in .html) or a folder of samples."""
    from mopd_dataplane.query.lineage import find_sample
    from mopd_dataplane.view.export import export_folder, export_redpen, export_sample
    from mopd_dataplane.view.shown import Shown

    shown = Shown(store, tokenizer=tokenizer)
    if sample is not None:
        return export_sample(shown, path, find_sample(store, sample)[0])
    if path.suffix.lower() != ".html":
        return export_folder(shown, path, where=where, order=order or NEWEST, limit=limit or EXPORTED)
    if where or order or limit is not None:
        raise InputError(
            f"{path} becomes one file with the first page, on which --where, --order and --limit have no effect; leave "
            "them out, or name a folder without .html to export the samples that they choose"
        )
    return export_redpen(shown, path)


def add_to(app: Typer) -> None:
    register(
        app, view, "mopd view runs/quickstart",
        'mopd view runs/quickstart --export share --where "reward < 1" --order -kl --limit 50',
        "mopd view runs/quickstart --export red-pen.html",
        "mopd view runs/quickstart --export sample.html --sample 3fa9", panel=PANEL,
    )  # fmt: skip
