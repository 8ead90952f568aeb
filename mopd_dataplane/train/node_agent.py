"""The trainer processes of this node: `python -m mopd_dataplane.train.node_agent SPEC.json RANKS`.

torchrun's own agent starts RANKS processes of mopd_dataplane.train, watches them, and ends them all when one dies. On
one node they find each other through a file, and talk over the loopback interface. On several nodes torchrun's
variables give the addresses (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR or PET_RDZV_ENDPOINT, …; docs/ranks.md).
"""

import logging
import os
import sys
from pathlib import Path

from mopd_dataplane.base.processes import end_with_parent, parent_named
from mopd_dataplane.errors import EngineError
from mopd_dataplane.train.stop import EXIT_CODE

SHUTDOWN_S = 25
"""How long ranks may take to end at a checkpoint before they are killed, in seconds."""
ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment variables for ranks on one node: nothing listens on a network interface."""


def main(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    logging.disable(logging.WARNING)  # the agent also warns of every requested stop
    spec, ranks = arguments
    options = ["--nproc-per-node", ranks]
    if node_count() == 1:
        os.environ |= ONE_NODE
        meeting = Path(spec).with_name("agent-rendezvous")
        options += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(meeting)]
        options += ["--rdzv-id", "mopd", "--local-addr", "127.0.0.1"]
    config, command, rest = config_from_args(parse_args([*options, "-m", "mopd_dataplane.train", spec]))
    config.shutdown_timeout = SHUTDOWN_S
    try:
        elastic_launch(config, command)(*rest)
    except SignalException:
        return EXIT_CODE
    except ChildFailedError as error:
        return report({rank: failure.exitcode for rank, failure in error.failures.items()})
    return 0


def report(codes: dict[int, int]) -> int:
    """Report which ranks failed; returns EngineError's exit code for a killed rank, else that of the causing error.

    codes: exit code by rank, negative for the signal that killed it.
    """
    killed = {rank: code for rank, code in codes.items() if code < 0}
    if killed:
        for rank, code in sorted(killed.items()):
            print(f"error: rank {rank} was killed by signal {-code}; the other ranks were ended", file=sys.stderr)
        return EngineError.exit_code
    # A rank that lost its peers reports that; a rank with another error is the cause.
    rank = min(codes, key=lambda rank: (codes[rank] == EngineError.exit_code, rank))
    print(f"error: rank {rank} ended with exit code {codes[rank]}; the other ranks were ended", file=sys.stderr)
    return codes[rank]


def node_count() -> int:
    """Return the number of nodes in torchrun's variables."""
    return int(os.environ.get("PET_NNODES", "1").partition(":")[0])


def node_rank() -> int:
    """Return the number of this node, from 0, in torchrun's variables."""
    return int(os.environ.get("PET_NODE_RANK", "0"))


if __name__ == "__main__":
    end_with_parent()
    os.environ |= parent_named()  # for the ranks
    sys.exit(main(sys.argv[1:]))
