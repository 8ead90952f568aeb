"""The process behind `mopd view`: one loopback socket, one printed address, until Ctrl-C."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import uvicorn

from mopd_dataplane.base.memory import freed_memory_returned
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.view.addresses import LOOPBACK, listen, new_token
from mopd_dataplane.view.app import build_app
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores

ENDING_S = 30.0
"""How long the thread may take to end who reads columns."""


@dataclass(frozen=True)
class Answering:
    """A server that answers."""

    port: int
    address: str
    """Opens the page as often as one likes."""
    opening: str
    """Opens the page a single time."""


def serve(
    stores: list[Store], *, port: int | None, token: str, tokenizer: Path | None, follow: bool,
    announce: Callable[[Answering], None],
) -> None:  # fmt: skip
    """Answer until interrupted. port: as for addresses.listen. announce: is called once the server answers.

    Raises ResourceError when the port is taken.
    """
    listening = listen(port, [str(store.uri) for store in stores])
    freed_memory_returned()
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keeps what it frees
    with listening:
        bound, once = listening.getsockname()[1], new_token()
        shown = [Shown(store, tokenizer=tokenizer, follow=follow) for store in stores]
        config = uvicorn.Config(
            build_app(ShownStores(shown), token=token, port=bound, once=once), log_level="warning", access_log=False,
            server_header=False, lifespan="off", timeout_graceful_shutdown=2,
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(_no_ending)
        base = f"http://{LOOPBACK}:{bound}/?token="
        announce(Answering(bound, base + token, base + once))
        # The store that the page opens with: its table is likely there when a reader first filters or sorts.
        preparing = threading.Thread(target=shown[0].prepare)
        try:
            preparing.start()
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            for one in shown:
                one.end()
            preparing.join(ENDING_S)


def _no_ending(record: logging.LogRecord) -> bool:
    """Whether to log it: not that Ctrl-C cut an answer short, which it is meant to."""
    cut_short = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
    return not cut_short and "graceful shutdown" not in record.getMessage()
