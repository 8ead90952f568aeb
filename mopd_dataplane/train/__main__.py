"""The trainer process: `python -m mopd_dataplane.train SPEC.json`, or the same under torchrun.

It reads batches from the loader's socket, appends to metrics.jsonl, checkpoints, and publishes a policy folder at the
end of every window. Exit code 0: every window is trained; 130: stopped at a checkpoint, run again to continue;
otherwise the code of the error (mopd_dataplane.errors). It loads torch and never Lance. Several ranks on one node are
started by node_agent.py.
"""

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from mopd_dataplane.base.files import full_disk_named
from mopd_dataplane.base.memory import explain_out_of_memory
from mopd_dataplane.base.processes import end_with_parent
from mopd_dataplane.errors import MopdError
from mopd_dataplane.train.spec import TrainSpec, load_spec
from mopd_dataplane.train.stop import EXIT_CODE, Interrupted, Stop, only_writer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mopd_dataplane.train", description="Train the windows of a stage as they are planned."
    )
    parser.add_argument("spec", help="JSON file: mopd_dataplane.train.spec.TrainSpec")
    stop = Stop()
    stop.listen()
    try:
        with full_disk_named():
            spec = load_spec(parser.parse_args(arguments).spec)
            with explain_out_of_memory(f"stage {spec.stage!r}: training", spec.less_memory):
                return _train(spec, stop)
    except Interrupted:
        return EXIT_CODE
    except MopdError as error:
        rank = os.environ.get("RANK")
        print(f"rank {rank}: error: {error}" if rank else f"error: {error}", file=sys.stderr)
        return error.exit_code


def _train(spec: TrainSpec, stop: Stop) -> int:
    from mopd_dataplane.load.client import LoaderClient
    from mopd_dataplane.models.hf import quiet_transformers
    from mopd_dataplane.train.ranks import Ranks, peers_lost_named
    from mopd_dataplane.train.run import Run

    quiet_transformers()
    with ExitStack() as stack:
        ranks = Ranks.join(
            spec.train.device,
            members=spec.context_parallel,
            rendezvous=spec.rendezvous,
            deadline_s=spec.rank_deadline_s,
        )
        stack.callback(ranks.leave)
        stack.enter_context(peers_lost_named(ranks.rank))
        with stop.interrupting():  # a loader that Ctrl-C ended too never answers
            source = LoaderClient(
                spec.socket,
                rank=ranks.data_rank,
                world_size=ranks.data_world,
                member=ranks.member,
                members=ranks.members,
                deadline_s=spec.deadline_s,
                window_deadline_s=spec.window_deadline_s,
                pin=ranks.device.type == "cuda",
            )
        stack.enter_context(source)
        # After connecting: an orphan whose loader never came must not block the next trainer.
        if ranks.leads:
            stack.enter_context(only_writer(Path(spec.checkpoint_dir)))
        run = stack.enter_context(closing(Run(spec, source, ranks)))
        return 0 if run.train(stop) else EXIT_CODE


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
