"""Links a stage to samples of other stores: their metadata and signals come here, their payload stays there."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.job.further_samples import SourceStore
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.records import Snapshot
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.other_stores import check_stage, conditions_there, open_source
from mopd_dataplane.run.stage_rows import linked_uids, stage_samples
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.store.linked.link import Wanted, link_samples, link_signals, link_stage
from mopd_dataplane.store.linked.readers import require_rows
from mopd_dataplane.store.linked.references import is_own
from mopd_dataplane.store.read.row_reader import scored_rows

Rows = NDArray[np.int64]
LINK, LINK_SIGNALS = "link", "link_signals"
"""Kinds of the events of a store whose samples, and whose signals, a stage has been linked to."""


def link_sources(run: Run, stage: Stage) -> None:
    """Link a stage to the samples of `data.from` that it may train on, store after store; what was linked stays.

    Raises UnknownNameError for a store that is not there, MismatchError for samples of another tokenizer, QueryError
    for a condition that cannot be answered, InputError when no sample is left.
    """
    for entry_number, entry in enumerate(stage.sources):
        event = f"{LINK}/{stage.name}/{entry_number}"
        if run.has_event(event):
            continue
        with run.progress.step(stage.name, "link", total=None, unit="samples") as (_, report):
            source = open_source(run.job, entry)
            at = source.snapshot()
            rows, left_out = _choose(run, stage, source, entry, at)
            if source.uuid == run.store.uuid:
                uids = source.take_samples(rows, ["uid"], at)["uid"].combine_chunks()
            else:
                uids = link_samples(run.store, source, rows, at)
            link_stage(run.store, stage.name, uids, source.uri)
            report.facts = {"samples": f"{len(rows):,}", "of": source.uri}
            report.facts |= {f"left out ({reason})": f"{count:,}" for reason, count in left_out.items()}
        detail = {"store": source.uri, "uuid": source.uuid, "where": entry.where, "versions": at.versions}
        run.store.add_event(event, stage.name, LINK, -1, len(rows), {**detail, "left_out": left_out})
    if not len(linked_uids(run.store, stage.name)):
        raise InputError(
            f"stage {stage.name!r}: no sample of the stores in data.from is left; look at what they have: mopd query "
            f'{stage.sources[0].store} "select stage, domain, count(*) from rollouts group by all"'
        )


def check_links(run: Run, stage: Stage) -> None:
    """Check that other stores still have what a stage is linked to. Raises UnknownNameError for what is gone there."""
    rows, samples = stage_samples(run.store, stage, None, ["uid", "payload_row"])
    require_rows(run.store.sources, "tokens", samples)
    if "hidden" not in run.job.objective(stage).signals:
        return
    for teacher in run.job.teachers_of(stage):
        scored = scored_rows(run.store.dataset("scores"), teacher, "hidden")
        scored = scored.filter(pc.is_in(scored["sample_row"], value_set=pa.array(rows)))
        scored = scored.filter(pa.array(~is_own(scored["payload_row"].to_numpy())))
        headers = run.store.signal_headers(teacher, "hidden", scored) if scored.num_rows else None
        if headers is not None and (freed := int(pc.sum(pc.equal(headers["codec"], FREED)).as_py())):
            raise UnknownNameError(
                f"stage {stage.name!r}: hidden states of {freed} of {len(rows)} samples were freed in the store that "
                f"had them, after its job trained on them ([retain]); give teacher {teacher!r} another name in this "
                "job, so that they are computed and stored here"
            )


def take_signals(run: Run, stage: Stage) -> None:
    """Link the signals of this stage's teachers that its other stores have; the teachers are known to the store."""
    teachers, uids = run.store.teachers(), linked_uids(run.store, stage.name)
    for entry_number, entry in enumerate(stage.sources):
        event = f"{LINK_SIGNALS}/{stage.name}/{entry_number}"
        source = open_source(run.job, entry)
        if source.uuid == run.store.uuid or run.has_event(event):
            continue
        counts = {
            name: link_signals(
                run.store, source, teachers[name], _wanted(run.job, stage, name, teachers[name].vocab_size), uids
            )
            for name in run.job.scorers_of(stage)
        }
        run.store.add_event(event, stage.name, LINK_SIGNALS, -1, sum(counts.values()), {"signals": counts})


def _choose(run: Run, stage: Stage, source: Store, entry: SourceStore, at: Snapshot) -> tuple[Rows, dict[str, int]]:
    """Rows of another store's samples that a stage trains on, and how many were left out for which reason."""
    check_stage(source, entry, at)
    conditions = conditions_there(run.job, source, at)
    rows = conditions.rows(entry.where, "data.from.where") if entry.where else conditions.sample_rows
    samples = source.take_samples(rows, ["stage", "domain", "tokenizer"], at)
    chosen = np.ones(len(rows), np.bool_)
    if entry.stage:
        chosen &= np.asarray(pc.equal(samples["stage"], entry.stage))
    domains = pa.array(run.job.domains_of(stage), pa.string())
    in_domains = np.asarray(pc.is_in(samples["domain"], value_set=domains))
    left_out = {"domain": int((chosen & ~in_domains).sum())}
    chosen &= in_domains
    strange = chosen & np.asarray(pc.not_equal(samples["tokenizer"], run.tokenizer_digest))
    if strange.any():
        raise MismatchError(
            f"stage {stage.name!r}: {int(strange.sum()):,} of {int(chosen.sum()):,} samples in {source.uri} have token "
            "ids of another tokenizer than the student's; leave them out with `where` or `stage` in data.from"
        )
    return rows[chosen], {reason: count for reason, count in left_out.items() if count}


def _wanted(job: Job, stage: Stage, teacher: str, vocabulary: int) -> list[Wanted]:
    """What a teacher's signals are like in a stage."""
    settings = stage.score
    forms = {
        "hidden": Wanted("hidden", codec=settings.hidden_codec),
        "topk": Wanted("topk", k=min(settings.topk, vocabulary), topk_source=settings.topk_source),
    }
    own = [ALIGNMENT] if job.teachers[teacher].tokenizer == "own" else []
    kinds = dict.fromkeys((*job.objective(stage).signals, *settings.signals, "logprob", *own))
    return [forms.get(kind, Wanted(kind)) for kind in kinds]
