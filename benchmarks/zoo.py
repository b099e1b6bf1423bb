"""Run the zoo of tests/zoo through kd and through other readers, and count what each
does with a case.

    python benchmarks/zoo.py            # every case, in a temporary folder
    python benchmarks/zoo.py --print    # print the rows instead of writing the CSV

right: the images of each class that are to be read, with the right pixels. refused: an
error that names the file, the folder or the class at fault. traceback: an error that
does not. silently_wrong: another result, without a word. Others read folders of
classes; a case of a table, shards or parquet is kd's alone. Their order of classes is
not compared.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

sys.path += [
    str(Path(__file__).parents[1] / "tests" / folder) for folder in ("zoo", "")
]

import cases  # type: ignore[import-not-found]

import _record

OWN = (
    "nested classes",
    "a palette with transparency",
    "an MPO of 2,000 scans",
    "a JPEG of 2,000 scans",
)
"""Cases in which what is right is a convention of kd. Others are not compared: theirs
are as good.
"""
OUTCOMES = ("right", "refused", "traceback", "silently_wrong")
Read = tuple[dict[str, int], Image.Image | None]


def torchvision(split: Path) -> Read:
    from torchvision.datasets import ImageFolder

    found = ImageFolder(str(split))
    return counted(
        [
            (found.classes[label], image)
            for image, label in (found[i] for i in range(len(found)))
        ]
    )


def timm(split: Path) -> Read:
    from timm.data import ImageDataset

    found = ImageDataset(str(split))
    names = {label: name for name, label in found.reader.class_to_idx.items()}  # type: ignore[attr-defined]
    return counted(
        [
            (names[label], image)
            for image, label in (found[i] for i in range(len(found)))
        ]
    )


def datasets(split: Path) -> Read:
    hub = importlib.import_module("datasets")
    hub.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        files = {"train": f"{split}/**"}
        found = hub.load_dataset(
            "imagefolder", data_files=files, cache_dir=cache, drop_labels=False
        )["train"]
        names = found.features["label"].names
        return counted(
            [(names[row["label"]], row["image"].convert("RGB")) for row in found]
        )


def counted(pairs: list[tuple[str, Any]]) -> Read:
    return dict(Counter(name for name, _ in pairs)), pairs[0][1] if pairs else None


PEERS: dict[str, Callable[[Path], Read]] = {
    "torchvision": torchvision,
    "timm": timm,
    "datasets": datasets,
}


def outcome(case: Any, read: Callable[[Path], Read], root: Path) -> str:
    """Return what another reader does with a case of folders."""
    case.make(root)
    try:
        counts, first = read(root / "train")
        val = set(read(root / "val")[0]) if (root / "val").is_dir() else set()
    except Exception as error:
        named = [
            part
            for path in root.rglob("*")
            for part in (path.name, str(path))
            if len(part) > 4 or "/" in part
        ]
        return (
            "refused"
            if any(name in str(error) for name in [*named, "train"])
            else "traceback"
        )
    wrong = counts != dict(case.right) or val - set(counts) or first is None
    return (
        "silently_wrong"
        if wrong or (case.pixels and not case.pixels(first))
        else "right"
    )


def of_kd(case: Any, root: Path) -> str:
    import test_data  # type: ignore[import-not-found]

    try:
        return test_data.outcome(case, root).replace(" ", "_")
    except AssertionError:  # neither right nor refused with a remedy that helps
        return "silently_wrong"


def rows() -> list[dict[str, Any]]:
    """Return a row for each reader and case."""
    made = []
    for case in cases.CASES:
        readers = {"kd": lambda root, case=case: of_kd(case, root)}
        for name, read in (
            PEERS.items() if case.kind == "folder" and case.name not in OWN else ()
        ):
            readers[name] = lambda root, case=case, read=read: outcome(case, read, root)
        for name, run in readers.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "data").mkdir()
                found = run(Path(folder) / "data")
            is_kd = name == "kd"
            group = "folders" if case.kind == "folder" else "tables, shards, parquet"
            row = {
                "cases": group,
                "reader": name,
                "version": version(name) if not is_kd else "here",
                "case": case.name,
            }
            made.append({**row, **{one: int(one == found) for one in OUTCOMES}})
            print(f"{case.name:40s} {name:12s} {found}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = rows()
    if not options.print:
        print(_record.write("zoo", "python benchmarks/zoo.py", found))


if __name__ == "__main__":
    main()
