"""Breaks one rule at a time in a copy of the package and shows which test notices.

    python tests/faults/mutations.py            # every mutation
    python tests/faults/mutations.py salt       # those whose name contains a word

A mutation that nothing notices is a hole in the tests: the exit code is the number of holes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from broken_rules import BROKEN_RULES, SIMULATOR
from mutation import Mutation, mutate

ROOT = Path(__file__).parents[2]
UNIT = "tests/unit/rollout/"
STORE = "tests/unit/store/"
_DEADLINE_S = 300
"""A mutation that makes its test hang is noticed too."""
_SEEDS = 2000
"""Seeds within which the simulator must find a broken rule."""
_SEEDS_S = 1800


MUTATIONS = [
    Mutation("skip the group-commit sync", "base/log/flusher.py", "            self._sync()\n", "", "5"),
    Mutation(
        "state the watermark before the sync", "base/log/flusher.py",
        "            newest = self.written\n            self._sync()\n",
        "            newest = self.synced = self.written\n            self._sync()\n",
        UNIT + "test_wal_log.py -k watermark_is_stated_only",
    ),
    Mutation("try a failed sync again", "base/log/segment_file.py",
             "            os.fdatasync(self._descriptor)\n        except",
             "            try:\n                os.fdatasync(self._descriptor)\n            except OSError:\n"
             "                os.fdatasync(self._descriptor)\n        except", "7"),
    Mutation("name a segment before its header is synced", "base/log/segment_file.py",
             "        self.write(header)\n        self.sync()\n", "        self.write(header)\n", "5"),
    Mutation("drop the salt", "base/log/framing.py",
             'return crc32c(self.log_uuid + self.segment.to_bytes(8, "little"))',
             "return 0", UNIT + "test_wal_framing.py -k another_segment"),
    Mutation("do not check the padding", "base/log/framing.py", " or any(data[end:padded])", "", "4"),
    Mutation("do not check the body", "base/log/framing.py", "crc32c(data[offset + 4 : end], start=salt)",
             "crc32c(data[offset + 4 : end], start=salt) and False", "4"),
    Mutation("call all damage a torn tail", "rollout/log/recovery.py",
             "    if segment.watermark >= first:", "    if False:", "4"),
    Mutation("call every torn tail damage", "rollout/log/recovery.py", "    if segment.watermark >= first:",
             "    if segment.valid_end < segment.size:", "5"),
    Mutation("ignore the fence", "rollout/log/recovery.py",
             "fence.epoch == epoch), None)", "False), None)",
             UNIT + "test_wal_log.py -k zombie"),
    Mutation("a writer that lost its lock goes on", "rollout/log/wal.py",
             "        if next_one.exists() or not mine.exists():",
             "        if False:", "6"),
    Mutation("retire segments before the checkpoint is durable", "rollout/log/wal.py",
             '        fault_point("wal.base")\n', '        self._retire()\n        fault_point("wal.base")\n', "5"),
    Mutation("write the checkpoint without finished samples", "rollout/log/ledger.py",
             "        for handle, partial in self.partials.items():\n            yield log_records.Open",
             "        for handle, partial in self.unfinished().items():\n            yield log_records.Open", "1"),
    Mutation("commit before FINISH is durable", "rollout/committer.py",
             "        self._log.wait_durable(max(finished.lsn for finished in batch))\n", "",
             UNIT + "test_rollout_runner.py -k before_its_finish"),
    Mutation("log COMMIT before the store has the samples", "rollout/committer.py",
             "        once_there_is_space(\n",
             "        self._done.put([finished.handle for finished in batch])\n        time.sleep(0.2)\n"
             "        once_there_is_space(\n",
             UNIT + 'test_rollout_runner.py -k "named_point or full_store or stays_full"'),
    Mutation("show an environment tokens that are not durable", "rollout/loop.py",
             "        self.log.wait_durable(self.log.appended_lsn)\n", "",
             UNIT + "test_rollout_runner.py -k waits_for_the_disk"),
    Mutation("write the checkpoint without sampling masks", "rollout/log/ledger.py",
             "    if sets := len(partial.masks):\n",
             "    if sets := 0:\n", UNIT + "test_sampling_masks.py -k checkpoint"),
    Mutation("keep a set whose step was never logged", "rollout/partial_sample.py",
             "            del self.ids[-dropped:]\n", "            pass\n",
             UNIT + "test_sampling_masks.py -k replaces"),
    Mutation("draw a token before its experts are logged", "rollout/loop.py",
             "        self._say_routes(output, handles)\n", "", UNIT + "test_experts.py -k died_anywhere"),
    Mutation("write the checkpoint without experts", "rollout/log/ledger.py",
             "    if partial.routed:\n", "    if partial.routed < 0:\n",
             UNIT + "test_experts.py -k known_and_never_skip"),
    Mutation("noise that starts over after a resume", "rollout/engines/hf.py",
             "len(ids), len(request.prompt_ids), request.max_new_tokens",
             "len(ids), len(request.prompt_ids) + len(request.prefix_ids), request.max_new_tokens",
             UNIT + "test_hf_engine.py -k as_if_never_interrupted"),
    Mutation("restart with an empty prefix", "rollout/partial_sample.py", "prefix_ids=self.response",
             "prefix_ids=np.zeros(0, np.int32)", UNIT + "test_rollout_runner.py -k dying_at_a_step"),
    Mutation("write what the engine said without a look", "rollout/loop.py",
             "        check_step(output, self.engine.vocab_size)\n", "",
             UNIT + "test_engine_faults.py -k garbage"),
    Mutation("take a step that answers for no sample", "rollout/engines/engine.py",
             "    _refuse(output, {", "    return\n    _refuse(output, {", "13"),
    Mutation("wait for a hanging engine for ever", "rollout/engines/call_timeout.py",
             "time.monotonic() - since - DEADLINE_S",
             "time.monotonic() - since - 9999", "13"),
    Mutation("metadata before payload", "store/commit/samples.py",
             "        payload_rows[absent], with_payload = place_payload(",
             "        payload_rows[absent] = tokens.open().count_rows() + np.arange(len(absent))\n"
             "        early = placed_rows(rows.result(), payload_rows)\n"
             "        samples.make_durable(samples.insert(early).dataset)\n"
             "        payload_rows[absent], with_payload = place_payload(", "8"),
    Mutation("skip the store's barrier", "store/commit/table.py",
             "                    self.barrier.sync_version(dataset, since=acknowledged_version)",
             "                    pass", "9"),
    Mutation("name data that is not synced", "store/commit/durability.py",
             "        self._sync(paths)\n\n    def sync_version",
             "\n    def sync_version", "9"),
    Mutation("ignore the uid key", "store/commit/table.py",
             "            is_new = (matches < 0) & (first_index == np.arange(rows.num_rows))",
             "            is_new = first_index == np.arange(rows.num_rows)", "8"),
    Mutation("commit two contents of a uid together", "store/group_commit/committer.py",
             "            if uids.isdisjoint(own):", "            if True:", STORE + "test_group_commit.py"),
    Mutation("refuse all batches with a wrong one", "store/group_commit/committer.py",
             "            if len(group) == 1 or isinstance(", "            if True or isinstance(",
             STORE + "test_group_commit.py"),
    Mutation("take a term that is held", "store/group_commit/election.py",
             "            if beat != _ENDED and now", "            if False and now",
             STORE + "test_group_commit.py"),
    Mutation("open a manifest with a hole", "store/format/manifests.py",
             " or any(not any(sector) for sector in sectors)", "",
             STORE + "test_store_disk.py -k hole"),
    Mutation("open whatever the format version", "store/format/dataset_format.py",
             "    if version == FORMAT_VERSION:", "    if True:",
             "14"),
    Mutation("cursor ahead of the checkpoint", "train/run.py", "        self._checkpoints.save(self._position,",
             "        ahead = replace(self._position, step=self._position.step + 1, "
             "window_step=self._position.window_step + 1)\n        self._checkpoints.save(ahead,", "12"),
    Mutation("copy rows without a look at their sums", "store/maintain/copy_samples.py",
             "    for row, crc, committed in wrong_rows(rows):", "    for row, crc, committed in ():",
             STORE + "test_store_copy.py -k damaged_row"),
    Mutation("open a copy before it is whole", "store/maintain/copy_files.py",
             "        if not report.ok:", "        if False:",
             STORE + "test_store_copy.py -k damaged_row"),
    Mutation("copy a manifest that is not the acknowledged one", "store/maintain/copy_tables.py",
             "        if problem := old.manifest_damage():", "        if problem := \"\":",
             STORE + "test_store_copy.py -k acknowledged_one"),
    Mutation("forget what ended the audit", "store/maintain/verify_apart.py",
             "    deadly: dict[Step, str] = {(table, step, row): why for table, step, row, why in request[\"deadly\"]}",
             "    deadly: dict[Step, str] = {}", STORE + "test_verify_apart.py -k named"),
    Mutation("list tags once", "store/read/tags.py", "ATTEMPTS = 64", "ATTEMPTS = 0", STORE + "test_tags.py"),
    Mutation("delete and leave the snapshots", "store/maintain/delete_samples.py",
             "    for tag in tags:\n        tables",
             "    for tag in ():\n        tables", STORE + "test_store_delete.py -k who_meets"),
    Mutation("leave a snapshot that was taken while rows went", "store/maintain/delete_samples.py",
             "        _unpin(store, pins_of(store, remaining))  #", "        pass  #",
             STORE + "test_deletion_races.py -k while_rows_go"),
    Mutation("pin what a deletion has removed", "store/read/snapshot.py",
             "        if not is_overtaken(snapshot):", "        if True:",
             STORE + "test_deletion_races.py -k overtakes"),
    Mutation("leave what a killed deletion left pinned", "store/maintain/delete_samples.py",
             "    if again:", "    if False:", STORE + "test_deletion_races.py -k killed_processes"),
    Mutation("delete and leave the token log", "run/delete.py", "            if done or gone:", "            if False:",
             STORE + "test_store_delete.py -k goes_with_its"),
    Mutation("give the rows that stay new ids", "store/maintain/remove_rows.py",
             "    fresh.row_id_meta = RowIdSequence(kept_ids).to_inline_metadata()\n", "",
             STORE + "test_store_delete.py -k one_sample"),
    Mutation("train on what was deleted", "load/source.py", "        store.deletions.raise_if_rows_deleted(rows)\n", "",
             STORE + "test_store_delete.py -k who_meets"),
    Mutation("close a deletion that goes on", "store/maintain/deletion_records.py", '            "finished": False,',
             '            "finished": True,', STORE + "test_store_delete.py -k killed_deletion"),
    Mutation("look at the deletions once", "store/dataset.py",
             "        apply_deletions_since(self, earlier_deletions)\n", "",
             STORE + "test_deletion_races.py -k stalls_across"),
    Mutation("leave late samples of a deleted prompt", "store/maintain/delete_samples.py",
             "    if late := late_samples(store, deletion):", "    if late := {}:",
             STORE + "test_deletion_races.py -k samples"),
    Mutation("copy what was deleted meanwhile", "store/maintain/copy_samples.py",
             "for deletion in deletions for part in remove(copy, deletion)]", "for deletion in () for part in ()]",
             STORE + "test_deletion_races.py -k copy_beside"),
    Mutation("continue any deletion", "cli/stores.py", "        if deletion.where != where:", "        if False:",
             STORE + "test_deletion_races.py -k own_command"),
    Mutation("keep what a dead reader held", "load/server.py", "                self._loader.leave(self._consumer)",
             "                pass", "12"),
    Mutation("continue a copy of a source that changed", "store/maintain/copy_target.py",
             '    elif begun.get("state") != state:', "    elif False:", STORE + "test_copy_continued.py"),
]  # fmt: skip


def main() -> int:
    """Apply each mutation to a fresh copy, run its test, and print what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutations whose name contains one of these")
    words = parser.parse_args().words
    chosen = [
        mutation
        for mutation in (*MUTATIONS, *BROKEN_RULES)
        if not words or any(word in mutation.name for word in words)
    ]
    if not chosen:
        parser.error(f"no mutation's name contains {' or '.join(words)}; without a word every mutation runs")
    holes = 0
    for mutation in chosen:
        began = time.monotonic()
        caught = find_by_seeds(mutation) if mutation.test == SIMULATOR else noticed(mutation)
        holes += not caught
        verdict = "noticed" if caught else "NOT NOTICED"
        print(
            f"{mutation.name:<52} {verdict:<12} by {_label(mutation.test)}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
    print(f"{len(chosen) - holes} of {len(chosen)} mutations noticed")
    return holes


def find_by_seeds(mutation: Mutation) -> bool:
    """Whether a seed of the simulator finds a broken rule, and passes where the rule is whole; prints which, and the
    invariant that did not hold."""
    with _copy() as copy:
        mutate(copy, mutation)
        result = _simulate(copy, mutation, "--seeds", str(_SEEDS), "--until-failure")
    print(*(line for line in result.stdout.splitlines() if line.startswith(("seed ", "found "))), sep="\n")
    if mutation.focus:
        print(f"in sequences with many: {', '.join(mutation.focus)}")
    if (failed := re.search(r"^seed (\d+):", result.stdout, re.MULTILINE)) is None:
        return False
    with _copy() as copy:
        if _simulate(copy, mutation, "--first", failed[1], "--seeds", "1").returncode:
            raise SystemExit(f"{mutation.name}: seed {failed[1]} fails without the mutation too")
    return True


def _simulate(copy: Path, mutation: Mutation, *options: str) -> subprocess.CompletedProcess[str]:
    focus = [word for operation in mutation.focus for word in ("--focus", operation)]
    command = [sys.executable, "tests/faults/simulation.py", *options, *focus]
    return subprocess.run(
        command, cwd=copy, env=_environment(copy), capture_output=True, text=True, timeout=_SEEDS_S, check=False
    )


def noticed(mutation: Mutation) -> bool:
    """Whether the test fails on a mutated copy, and passes on one that is whole."""
    if not _passes(mutation.test):
        raise SystemExit(f"{mutation.name}: {mutation.test} fails without the mutation too")
    with _copy() as copy:
        mutate(copy, mutation)
        return not _run(mutation.test, copy)


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutation-", dir="/dev/shm") as scratch:
        for name in ("mopd_dataplane", "tests"):
            shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        yield Path(scratch)


@cache
def _passes(test: str) -> bool:
    with _copy() as copy:
        return _run(test, copy)


def _run(test: str, copy: Path) -> bool:
    """Whether a test passes on a copy in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    if test.isdigit():
        command = [sys.executable, "tests/faults/inject.py", "--tier", "test", "--rows", test]
    else:
        test_path, _, words = test.partition(" -k ")
        command += [test_path, "-k", words.strip('"')]
    try:
        done = subprocess.run(command, cwd=copy, env=_environment(copy), capture_output=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == 5:
        raise SystemExit(f"no test matches {test}")
    return done.returncode == 0


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(ROOT / "kernels")])}


def _label(test: str) -> str:
    return f"fault row {test}" if test.isdigit() else test.removeprefix(UNIT).removeprefix(STORE)


if __name__ == "__main__":
    sys.exit(main())
