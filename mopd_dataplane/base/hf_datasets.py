"""Rows of a Hugging Face dataset: by its name on the hub, a folder of files, or a folder that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

from mopd_dataplane.base.extras import require
from mopd_dataplane.errors import InputError, ResourceError, UnknownNameError, require_known

_SAVED = ("dataset_dict.json", "state.json")
"""Files by which a folder of `save_to_disk` is known."""


def dataset_rows(
    dataset: str, *, split: str = "train", name: str | None = None, revision: str | None = None
) -> list[dict[str, Any]]:
    """Every row of one split, in the dataset's order.

    dataset: `owner/name` on the hub, or a folder. split: as `datasets` writes it, so `train[:1000]` is one too (but for
    a folder of `save_to_disk`). name: configuration. revision: branch, tag or commit on the hub.
    Raises InputError without the package, UnknownNameError for a dataset, configuration or split that is not there,
    ResourceError when the hub does not answer. No code of a dataset is run.
    """
    if not dataset:
        raise InputError('source = "datasets" needs `dataset`: a name on the Hugging Face hub, or a folder')
    require(["datasets"])
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    folder = Path(dataset)
    if any((folder / file).is_file() for file in _SAVED):
        return _saved(folder, split)
    try:
        found = datasets.load_dataset(dataset, name, split=split, revision=revision)
    except (HfHubHTTPError, OfflineModeIsEnabled, ConnectionError) as error:
        raise ResourceError(
            f"dataset {dataset!r}: the hub does not answer ({error!s:.160}); run the same again"
        ) from None
    except (FileNotFoundError, ValueError) as error:
        raise UnknownNameError(f"dataset {dataset!r}, split {split!r}: {error!s:.300}") from None
    rows: list[dict[str, Any]] = found.to_list()
    return rows


def _saved(folder: Path, split: str) -> list[dict[str, Any]]:
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        require_known(split, found, f"dataset {folder}: no split")
        found = found[split]
    elif split != "train":
        raise UnknownNameError(f"dataset {folder} was saved without splits; leave `split` out, not {split!r}")
    rows: list[dict[str, Any]] = found.to_list()
    return rows
