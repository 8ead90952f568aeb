"""A trainer process that only reads: `python -m mopd_dataplane.bench.trainer SOCKET STAGE MEMBER MEMBERS`.

It makes one pass to warm up, then a measured pass for every line on stdin; each touches every byte. See crowd.py.
"""

import sys
import time
from typing import Any

import numpy as np

from mopd_dataplane.bench.crowd import make_passes
from mopd_dataplane.load.client import LoaderClient

DEADLINE_S = 120.0


def one_pass(client: LoaderClient, stage: str) -> dict[str, Any]:
    """Read window 0 pack by pack: {tokens, hidden_bytes, seconds, cpu_seconds}."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = hidden_bytes = 0
    for batch in client.batches(stage, 0):
        for pack in batch.packs:  # the client's checksum reads every field but the hidden states
            tokens += len(pack.tokens)
            if pack.hidden is not None:
                hidden_bytes += pack.hidden.nbytes
                np.bitwise_xor.reduce(pack.hidden.reshape(-1).view(np.uint64))
            batch.release(pack)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {"tokens": tokens, "hidden_bytes": hidden_bytes, "seconds": seconds, "cpu_seconds": cpu_seconds}


def main() -> None:
    socket, stage, member, members = sys.argv[1:5]
    with LoaderClient(socket, member=int(member), members=int(members), views="numpy", deadline_s=DEADLINE_S) as client:
        make_passes(lambda: one_pass(client, stage))


if __name__ == "__main__":
    main()
