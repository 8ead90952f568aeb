"""Other loaders on the same work: `python -m mopd_dataplane.bench.peers NAME FOLDER` delivers every pack once.

The work is a folder made by `write_work`: samples as byte records one after the other, and packs that name samples.
Each peer stores it in its own format, delivers pack after pack to this process from another one where its design has
one, and this process takes the checksum of every byte, as the client of mopd's loader does. A peer's packs are the bare
bytes of their samples; mopd's also carry positions, policy versions and offsets.

A peer warms up, then makes a measured pass for every line on stdin; see crowd.py.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.bench.crowd import make_passes

GROUP = 8
"""Packs the hand-rolled loader joins in one buffer, which is what makes it fast."""
READERS = 1
"""Reading processes of a DataLoader."""
LANCE_ROWS = 512
"""Rows of one file of a Lance dataset."""
Bytes = NDArray[np.uint8]
Pass = Callable[[], Iterator[Bytes]]


class Work:
    """records: samples as bytes, in storage order. packs: sample numbers of each pack, in order of use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: Bytes = np.memmap(folder / "records.bin", np.uint8, "r")
        self.offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")
        self.packs: list[list[int]] = json.loads((folder / "packs.json").read_text())
        self.packing_cpu_s = 0.0
        """CPU seconds of writing the packs of this one plan, by a peer that can follow no other order."""

    def record(self, sample: int) -> Bytes:
        """Bytes of one sample."""
        return self.records[self.offsets[sample] : self.offsets[sample + 1]]

    def join(self, samples: Sequence[int]) -> Bytes:
        """Bytes of several samples in one new array."""
        return np.concatenate([self.record(sample) for sample in samples])

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Counts what is done inside as writing the packs."""
        started = time.process_time()
        yield
        self.packing_cpu_s += time.process_time() - started


def write_work(folder: Path, records: Sequence[Bytes], packs: Sequence[Sequence[int]]) -> None:
    """Make the folder of a Work."""
    folder.mkdir(parents=True)
    np.save(folder / "offsets.npy", np.cumsum([0, *(len(record) for record in records)]))
    with (folder / "records.bin").open("wb") as file:
        for record in records:
            file.write(record.data)
    (folder / "packs.json").write_text(json.dumps([[int(sample) for sample in pack] for pack in packs]))


def memmap(work: Work) -> Pass:
    """torch DataLoader over a numpy memmap, written for this benchmark: GROUP packs in one buffer."""
    groups = [list(chain(*work.packs[i : i + GROUP])) for i in range(0, len(work.packs), GROUP)]
    return _data_loader(work.join, groups)


def memmap_plain(work: Work) -> Pass:
    """torch DataLoader over a numpy memmap, written for this benchmark: one pack at a time."""
    return _data_loader(work.join, work.packs)


def lance(work: Work) -> Pass:
    """torch DataLoader over `take` of a Lance list column."""
    import lance as lance_files
    import pyarrow as pa

    uri = str(work.folder / "records.lance")
    if not Path(uri).exists():
        column = pa.LargeListArray.from_arrays(pa.array(work.offsets), pa.array(np.asarray(work.records)))
        rows = pa.table({"data": column})
        lance_files.write_dataset(rows, uri, data_storage_version="2.0", max_rows_per_file=LANCE_ROWS)
    return _data_loader(partial(_read_lance, uri), work.packs, context="spawn")


def _read_lance(uri: str, samples: Sequence[int]) -> Bytes:
    column = _lance_rows(uri).take(list(samples), columns=["data"])["data"]
    values: Bytes = column.combine_chunks().flatten().to_numpy()
    return values


@cache
def _lance_rows(uri: str) -> Any:
    """Opened in the process that reads, once."""
    import lance as lance_files

    return lance_files.dataset(uri)


def datasets(work: Work) -> Pass:
    """torch DataLoader over Hugging Face datasets (memory-mapped Arrow), a binary column."""
    import datasets as hf
    import pyarrow as pa

    folder = work.folder / "hf"
    if not folder.exists():
        rows = [work.record(sample).tobytes() for sample in range(len(work.offsets) - 1)]
        hf.Dataset(pa.table({"data": pa.array(rows, pa.large_binary())})).save_to_disk(str(folder))
    return _data_loader(partial(_read_datasets, str(folder)), work.packs, context="spawn")


def _read_datasets(folder: str, samples: Sequence[int]) -> Bytes:
    column = _dataset_rows(folder)[list(samples)]["data"]
    return np.concatenate([np.frombuffer(value.as_buffer(), np.uint8) for value in column])


@cache
def _dataset_rows(folder: str) -> Any:
    import datasets as hf

    return hf.load_from_disk(folder).with_format("arrow")


def webdataset(work: Work) -> Pass:
    """webdataset: packs as members of tar files in their order of use; it cannot follow another order."""
    import io
    import tarfile

    import webdataset as wds

    shards = work.folder / "wds"
    if not shards.exists():
        shards.mkdir()
        with work.packing(), tarfile.open(shards / "packs.tar", "w") as tar:
            for number, pack in enumerate(work.packs):
                body = work.join(pack).tobytes()
                info = tarfile.TarInfo(f"{number:06d}.bin")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    rows = wds.WebDataset(str(shards / "packs.tar"), shardshuffle=False, empty_check=False)
    loader = wds.WebLoader(rows, batch_size=None, num_workers=READERS, persistent_workers=True)
    return lambda: (np.frombuffer(row["bin"], np.uint8) for row in loader)


def litdata(work: Work) -> Pass:
    """litdata: packs as items of an optimized dataset, in their order of use."""
    import litdata as ld
    from litdata.streaming import Cache

    folder = work.folder / "litdata"
    if not folder.exists():
        with work.packing():
            cache = Cache(str(folder), chunk_bytes="64MB")
            for number, pack in enumerate(work.packs):
                cache[number] = work.join(pack).tobytes()
            cache.done()
            cache.merge()
    rows = ld.StreamingDataset(str(folder), shuffle=False)
    loader = ld.StreamingDataLoader(
        rows, batch_size=1, collate_fn=_tensor, num_workers=READERS, persistent_workers=True
    )
    return lambda: (row.numpy() for row in loader)


def streaming(work: Work) -> Pass:
    """mosaicml-streaming: packs as samples of an MDS dataset, in their order of use."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    folder = work.folder / f"mds-{os.getpid()}"  # it refuses a folder that another run on the node reads
    with work.packing(), MDSWriter(out=str(folder), columns={"data": "bytes"}) as writer:
        for pack in work.packs:
            writer.write({"data": work.join(pack).tobytes()})
    rows = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    loader: Any = DataLoader(rows, batch_size=1, collate_fn=_data_tensor, num_workers=READERS, persistent_workers=True)
    return lambda: (row.numpy() for row in loader)


def _tensor(rows: Sequence[Any]) -> Any:
    """The only row of a batch as a tensor, which torch hands over in shared memory."""
    import torch

    return torch.frombuffer(bytearray(rows[0]), dtype=torch.uint8)


def _data_tensor(rows: Sequence[Any]) -> Any:
    return _tensor([rows[0]["data"]])


def ray(work: Work) -> Pass:
    """Ray: an actor puts packs into the object store of the node, this process gets them without a copy."""
    import ray as cluster

    cluster.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    actor = cluster.remote(Work).remote(work.folder)

    def one_pass() -> Iterator[Bytes]:
        left = iter(work.packs)
        coming = [actor.join.remote(pack) for pack in islice(left, GROUP)]
        while coming:
            values: Bytes = cluster.get(coming.pop(0))
            yield values
            coming += [actor.join.remote(pack) for pack in islice(left, 1)]

    return one_pass


def transferqueue(work: Work) -> Pass:
    """TransferQueue with its own storage in other processes' memory: a key per sample, one `kv_batch_get` a pack."""
    import ray as cluster
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    cluster.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    tq.init()
    samples = range(len(work.offsets) - 1)
    for part in (samples[first : first + 256] for first in samples[::256]):
        rows = [torch.from_numpy(np.array(work.record(sample))) for sample in part]
        fields = TensorDict({"data": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])
        tq.kv_batch_put([str(sample) for sample in part], "work", fields)

    def read(pack: list[int]) -> Bytes:
        got = tq.kv_batch_get([str(sample) for sample in pack], "work", "data")["data"]
        joined: Bytes = torch.cat(got.unbind()).numpy()
        return joined

    return lambda: map(read, work.packs)


_ALL = (memmap, memmap_plain, lance, datasets, webdataset, litdata, streaming, ray, transferqueue)
PEERS: dict[str, Callable[[Work], Pass]] = {peer.__name__.replace("_", "-"): peer for peer in _ALL}


def _data_loader(read: Callable[[Sequence[int]], Bytes], packs: Sequence[Sequence[int]], context: str = "") -> Pass:
    from torch.utils.data import DataLoader

    rows: Any = packs
    loader: Any = DataLoader(
        rows, batch_size=None, collate_fn=partial(_read_tensor, read), num_workers=READERS, persistent_workers=True,
        multiprocessing_context=context or "fork",
    )  # fmt: skip
    return lambda: (row.numpy() for row in loader)


def _read_tensor(read: Callable[[Sequence[int]], Bytes], pack: Sequence[int]) -> Any:
    import torch

    return torch.from_numpy(read(pack))


def main() -> None:
    name, folder = sys.argv[1:3]
    work = Work(Path(folder))
    one_pass = PEERS[name](work)

    def measured() -> dict[str, float]:
        started, total = time.perf_counter(), 0
        for pack in one_pass():
            crc32c(pack)
            total += pack.nbytes
        seconds = time.perf_counter() - started
        return {"bytes": total, "seconds": seconds, "packing_cpu_s": work.packing_cpu_s}

    make_passes(measured)


if __name__ == "__main__":
    main()
