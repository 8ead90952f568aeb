"""The data of analysis.ipynb, taken from a finished quickstart: `python docs/notebooks/excerpt.py runs/quickstart`.

evals.parquet holds every held-out answer, steps.parquet every step of the student, samples.parquet for each domain
EACH samples of the student's first and last iteration, signals.parquet what the domain's teacher said of their tokens.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mopd_dataplane import Store, open_store
from mopd_dataplane.interchange.exporter import export_samples

OUT = Path(__file__).parent / "quickstart_run"
EACH = 16
WRITTEN = ("created_at", "row_crc")
"""Columns that a store gives to a row when it is added."""
CHOSEN = f"""
select uid from samples where stage = 'student' and iteration in (0, (select max(iteration) from samples))
qualify row_number() over (partition by domain, iteration order by uid) <= {EACH} order by uid
"""
SCORED = """
select s.uid, s.teacher, s.mean_reverse_kl, list(coalesce({teachers}) order by t.position)::float[] as logprob
from (select * from scores where uid = '{uid}' and kind = 'logprob') s, sample_tokens('{uid}') t group by all
"""


def main(uri: str) -> None:
    """Write the files anew."""
    store = open_store(uri)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    uids = store.sql(CHOSEN)["uid"].to_pylist()
    export_samples(store, OUT / "samples.parquet", kind="parquet", where=f"uid in {tuple(uids)}")
    _write("signals", pa.concat_tables(_scored(store, uid) for uid in uids))
    _write("prompts", store.sql("select * exclude (source, verifier_data) from prompts where split = 'eval'"))
    _write("evals", store.table("evals"))
    _write("steps", store.sql("select * from steps where stage = 'student' order by step"))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy2(store.path("policies/init") / name, OUT / name)


def _scored(store: Store, uid: str) -> pa.Table:
    """One row: the teacher that scored a sample, and its log-prob of every token."""
    return store.sql(SCORED.format(uid=uid, teachers=", ".join(store.teachers())))


def _write(name: str, table: pa.Table) -> None:
    kept = table.drop_columns([column for column in WRITTEN if column in table.schema.names])
    pq.write_table(kept.replace_schema_metadata(None), OUT / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    main(sys.argv[1])
