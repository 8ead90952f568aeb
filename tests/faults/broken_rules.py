"""Rules of the store that are broken one at a time, to see that the simulator finds each.

python tests/faults/mutations.py simulator     # breaks each in a copy and says which seed found it, and when
"""

from __future__ import annotations

from mutation import Mutation

SIMULATOR = "simulator"
"""In place of a test: the seeds of simulation.py, up to the first that fails."""


def _rule(name: str, file: str, old: str, new: str, *focus: str) -> Mutation:
    return Mutation(f"simulator: {name}", file, old, new, SIMULATOR, focus)


BROKEN_RULES = [
    # Deletions.
    _rule("look at the deletions once", "store/dataset.py",
          "        apply_deletions_since(self, earlier_deletions)\n", ""),
    _rule("take back a sample that was deleted", "store/dataset.py",
          "            is_deleted = self.deletions.are_deleted(batch)\n",
          "            is_deleted = np.zeros(len(batch), np.bool_)\n"),
    _rule("leave late samples of a deleted prompt", "store/maintain/delete_samples.py",
          "    if late := late_samples(store, deletion):", "    if late := {}:", "delete"),
    _rule("delete and leave the snapshots", "store/maintain/delete_samples.py",
          "    for tag in tags:\n        tables", "    for tag in ():\n        tables", "tag", "delete"),
    _rule("leave a snapshot that a deletion overtook", "store/read/snapshot.py",
          "        if not is_overtaken(snapshot):", "        if True:", "tag", "delete"),
    _rule("close a deletion that goes on", "store/maintain/deletion_records.py", '            "finished": False,',
          '            "finished": True,'),
    _rule("give the rows that stay new ids", "store/maintain/remove_rows.py",
          "    fresh.row_id_meta = RowIdSequence(kept_ids).to_inline_metadata()\n", ""),
    # Copies and upgrades.
    _rule("two writers of one target", "store/maintain/copy_target.py", "        if not try_lock(descriptor):",
          "        if False:", "copy"),
    _rule("copy what was deleted meanwhile", "run/whole_copy.py",
          "    leave_out = partial(_leave_out, source, location, owner, cut.finished)\n",
          "    leave_out = lambda deletions: None\n"),
    _rule("take half a copy for a whole one", "store/maintain/copy_target.py",
          "    return Ownership(location, {**record, \"state\": state})",
          "    location.write_json(MARK, source.read_json(MARK))\n"
          "    return Ownership(location, {**record, \"state\": state})"),
    # Time.
    _rule("do not register commits in flight", "store/commit/in_flight.py",
          "    if location.root is None:\n        yield\n        return\n    descriptor = location.lock_file(f\"{table",
          "    if True:\n        yield\n        return\n    descriptor = location.lock_file(f\"{table"),
    _rule("drop the acknowledged version", "store/commit/clean_up.py",
          "    return [version for version in versions if version < acknowledged and version not in stays]",
          "    return [version for version in versions if version < dataset.version and version not in stays]",
          "compact now", "power loss"),
    _rule("order labels by the clock", "view/labels.py", 'table("labels", filter=keys).to_pylist()',
          'table("labels", filter=keys).sort_by("created_at").to_pylist()', "label", "clock"),
    _rule("fail a commit whose version was merged meanwhile", "store/commit/table.py",
          "                if self._acknowledged_record.newest() < dataset.version:\n                    raise\n",
          "                raise\n"),
    # Commits and damage.
    _rule("ignore the key of a row", "store/commit/table.py",
          "            is_new = (matches < 0) & (first_index == np.arange(rows.num_rows))",
          "            is_new = first_index == np.arange(rows.num_rows)"),
    _rule("metadata before payload", "store/commit/samples.py",
          "        payload_rows[absent], with_payload = place_payload(",
          "        payload_rows[absent] = tokens.open().count_rows() + np.arange(len(absent))\n"
          "        early = placed_rows(rows.result(), payload_rows)\n"
          "        samples.make_durable(samples.insert(early).dataset)\n"
          "        payload_rows[absent], with_payload = place_payload("),
    _rule("acknowledge what is not synced", "store/commit/table.py",
          "                    self.barrier.sync_version(dataset, since=acknowledged_version)",
          "                    pass"),
    _rule("open a manifest with a hole", "store/format/manifests.py",
          " or any(not any(sector) for sector in sectors)", "", "power loss"),
    _rule("reply to a batch before it is committed", "store/group_commit/committer.py",
          "        self._commit(samples)\n",
          "        for named in samples:\n"
          "            self._reply(named.name, Reply(rows=(-1,) * len(named.request.samples)))\n"
          "        self._commit(samples)\n", "commit together"),
    _rule("record another plan for a window", "store/dataset.py",
          '        self._insert_records("plans", [plan_record(plan)], compare=("digest",))',
          '        self._insert_records("plans", [plan_record(plan)])', "plan"),
    _rule("clear a key of the queue without a record", "store/queue/committed.py",
          "            self._append([(key, Value(CLEARED, b\"\"), write) for key in cleared])\n", "            pass\n"),
    _rule("release a tag and forget its versions", "store/read/snapshot.py",
          "        set_tag(dataset, tag, version)\n", ""),
]  # fmt: skip
