"""The published contracts: schemas/<table>/v<format>.json, generated from tables.py.

python -m mopd_dataplane.store.format.schemas schemas           write what is missing
python -m mopd_dataplane.store.format.schemas schemas --check   exit 1 when a file differs
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from mopd_dataplane.tables import FORMAT_VERSION, QUEUE, ROW_CRC, SIGNALS, TABLES, TableSpec


def published() -> dict[str, dict[str, Any]]:
    """Return the contract of every table by folder name; signals/*/topk has the folder signals_topk."""
    signals = {f"signals_{kind}": spec for kind, spec in SIGNALS.items()}
    return {folder: contract(spec) for folder, spec in (TABLES | signals | {"queue": QUEUE}).items()}


def contract(spec: TableSpec) -> dict[str, Any]:
    """Describe one table as plain data: meaning, key, and for each column name, Arrow type, nullability, meaning,
    unit."""
    return {
        "table": spec.name,
        "doc": spec.doc,
        "format_version": FORMAT_VERSION,
        "data_storage_version": spec.storage,
        "key": list(spec.key),
        "payload": spec.heavy,
        "columns": [_column(field) for field in ([] if spec.heavy else [ROW_CRC]) + list(spec.schema)],
    }


def _column(field: pa.Field) -> dict[str, Any]:
    metadata = {key.decode(): value.decode() for key, value in field.metadata.items()}
    kind = "lance blob v2" if metadata.get("blob") == "v2" else str(field.type)
    column = {"name": field.name, "type": kind, "nullable": field.nullable, "doc": metadata["doc"]}
    return column | ({"unit": metadata["unit"]} if "unit" in metadata else {})


def main() -> int:
    """Write or check the files under the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write the table contracts, or check them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    options = parser.parse_args()
    differing = 0
    for folder, content in published().items():
        path = options.folder / folder / f"v{FORMAT_VERSION}.json"
        text = json.dumps(content, indent=2) + "\n"
        if path.is_file() and path.read_text() == text:
            continue
        differing += 1
        print(path)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return int(options.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
