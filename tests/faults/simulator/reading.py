"""What a reader sees of a store: every row of the model's tables, with its payload, by the product's own readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator import values
from simulator.model import Key, Value

from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.queue.committed import CommittedQueue
from mopd_dataplane.view.labels import standing

Row = tuple[Key, Value]


class Reader:
    """A process that reads; it reads a table again once its versions have changed.

    template: another reader, whose store this one's is a copy of.
    """

    def __init__(self, uri: str, template: Reader | None = None) -> None:
        self.store = Store.open(uri)
        self.row_ids: dict[str, int] = {}
        """Row id of each sample that was seen last."""
        self.sample_rows: list[tuple[str, int]] = []
        """(uid, row id in `samples`) as `rewards` and `scores` name them."""
        self._uri = uri
        self._results: dict[str, tuple[tuple[str, ...], Any]] = dict(template._results) if template is not None else {}
        """Result of each reading, and the versions it is of."""

    def restart(self) -> None:
        """Go on as a process that has just opened the store."""
        self.store = Store.open(self._uri)

    def rows(self) -> dict[str, list[Row]]:
        """Every row of each table; a key that is there twice is listed twice."""
        return {table: self._read(table, lambda read=read: read(self)) for table, read in _READERS.items()}

    def labelled(self) -> set[str]:
        """Samples that bear the label."""
        return self._read("labelled", lambda: {str(row["uid"]) for row in standing(self.store)})

    def values(self) -> dict[int, str]:
        """The queue: value by key."""

        def values() -> dict[int, str]:
            queue = CommittedQueue(self._uri, "q")
            keys = queue.keys()
            return {key[0]: value.data.decode() for key, value in zip(keys, queue.get(keys), strict=True)}

        return self._read("queue", values)

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        versions = tuple(version for part in _PARTS.get(name, (name,)) for version in self._versions(part))
        if self._results.get(name, ((), None))[0] != versions:
            self._results[name] = versions, read()
        return self._results[name][1]

    def _versions(self, part: str) -> list[str]:
        return self.store.location.children(f"{part}/_versions")

    def samples(self) -> list[Row]:
        """Samples with the digest of their tokens."""
        uids: list[tuple[int, str, str]] = []
        for rows, batch in self.store.scan_samples(["uid", "prompt_id"]):
            uids += zip(rows.tolist(), batch["uid"].to_pylist(), batch["prompt_id"].to_pylist(), strict=True)
        self.row_ids = {uid: row for row, uid, _ in uids}
        if not uids:
            return []
        tokens = self.store.read_tokens([row for row, _, _ in uids], ["tokens"], verify=True)["tokens"]
        return [
            (uid, (prompt, values.digest(token.values.to_numpy())))
            for (_, uid, prompt), token in zip(uids, tokens, strict=True)
        ]

    def scores(self) -> list[Row]:
        """Signals with the digest of their payload."""
        table = self.store.table("scores", ["uid", "kind", "sample_row"])
        rows: list[Row] = []
        for kind in values.KINDS:
            some = [row for row in table.to_pylist() if row["kind"] == kind]
            named = [row["sample_row"] for row in some]
            payloads = self.store.read_signal(values.TEACHER, kind, named, verify=True) if some else []
            rows += [((row["uid"], kind), values.digest(p)) for row, p in zip(some, payloads, strict=True)]
            self.sample_rows += [(row["uid"], row["sample_row"]) for row in some]
        return rows

    def rewards(self) -> list[Row]:
        """Rewards."""
        rows = self.store.table("rewards", ["uid", "verifier", "reward", "sample_row"]).to_pylist()
        self.sample_rows += [(row["uid"], row["sample_row"]) for row in rows]
        return [((row["uid"], row["verifier"]), row["reward"]) for row in rows]

    def labels(self) -> list[Row]:
        """Labels put on and taken off."""
        rows = self.store.table("labels", ["label_id", "uid", "removed"]).to_pylist()
        return [((row["label_id"], row["uid"]), row["removed"]) for row in rows]

    def prompts(self) -> list[Row]:
        """Prompts."""
        rows = self.store.table("prompts", ["prompt_id", "text"]).to_pylist()
        return [(row["prompt_id"], row["text"]) for row in rows]

    def plans(self) -> list[Row]:
        """Windows of plans."""
        rows = self.store.table("plans", ["stage", "window", "digest"]).to_pylist()
        return [((row["stage"], row["window"]), row["digest"]) for row in rows]

    def steps(self) -> list[Row]:
        """Training steps."""
        rows = self.store.table("steps", ["stage", "step", "window", "loss"]).to_pylist()
        return [((row["stage"], row["step"]), (row["window"], row["loss"])) for row in rows]


_READERS: dict[str, Callable[[Any], list[Row]]] = {
    "prompts": Reader.prompts, "samples": Reader.samples, "scores": Reader.scores, "rewards": Reader.rewards,
    "labels": Reader.labels, "plans": Reader.plans, "steps": Reader.steps,
}  # fmt: skip
_PARTS = {
    "labelled": ("labels",),
    "queue": ("queues/q",),
    "samples": ("samples", "tokens"),
    "scores": ("scores", *(f"signals/{values.TEACHER}/{kind}" for kind in values.KINDS)),
}
"""Datasets that a reading is of, where it is not one of that name."""
