"""The Ray cluster that a job rolls out and scores on.

    mopd run JOB --ray               at RAY_ADDRESS (a submitted job has it), else a cluster started on this machine
    mopd run JOB --ray auto          the cluster that runs on this machine
    mopd run JOB --ray HOST:PORT     that cluster

A cluster started here listens on the loopback interface only, and ends with the job. Several nodes must see the store's
folder at the same path.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from mopd_dataplane.base.extras import require
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.ray.workers import RayFleet

ON_THIS_MACHINE = "local"
REACH_S = 10.0
"""How long a cluster may take to accept a connection."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for a cluster whose address is 127.0.0.1; read when Ray is imported."""


@contextmanager
def ray_fleet(address: str, run: Run) -> Iterator[RayFleet]:
    """Connect, and leave at the end of the block. Raises InputError when Ray is not installed, ResourceError when no
    cluster answers."""
    run.policies.initial()  # made here, once, before workers look for it
    address = address or os.environ.get("RAY_ADDRESS", ON_THIS_MACHINE)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == ON_THIS_MACHINE:
        os.environ |= LOOPBACK
    require(["ray"])
    import ray

    _reach(address)
    alone = {"include_dashboard": False} if address == ON_THIS_MACHINE else {}
    try:
        ray.init(address=address, **alone)
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ResourceError(f"no Ray cluster answers at {address} ({error}); start one, or leave ADDRESS out") from None
    try:
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        where = "on this machine" if address == ON_THIS_MACHINE else f"at {address}"
        run.progress.say(f"ray {ray.__version__} {where}: {nodes} node(s), {_listed(ray.cluster_resources())}")
        yield RayFleet(run)
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise ResourceError when nothing listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"no Ray cluster answers at {address} ({error}); start one, or leave ADDRESS out") from None


def _listed(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources)
