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

    folder = ImageFolder(str(split))
    return counted(
        [
            (folder.classes[label], image)
            for image, label in (folder[i] for i in range(len(folder)))
        ]
    )


def timm(split: Path) -> Read:
    from timm.data import ImageDataset

    images = ImageDataset(str(split))
    names = {label: name for name, label in images.reader.class_to_idx.items()}  # type: ignore[attr-defined]
    return counted(
        [
            (names[label], image)
            for image, label in (images[i] for i in range(len(images)))
        ]
    )


def datasets(split: Path) -> Read:
    hub = importlib.import_module("datasets")
    hub.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        files = {"train": f"{split}/**"}
        loaded = hub.load_dataset(
            "imagefolder", data_files=files, cache_dir=cache, drop_labels=False
        )["train"]
        names = loaded.features["label"].names
        return counted(
            [(names[row["label"]], row["image"].convert("RGB")) for row in loaded]
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
            text
            for path in root.rglob("*")
            for text in (path.name, str(path))
            if len(text) > 4 or "/" in text
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
    table = []
    for case in cases.CASES:
        readers = {"kd": lambda root, case=case: of_kd(case, root)}
        for name, read in (
            PEERS.items() if case.kind == "folder" and case.name not in OWN else ()
        ):
            readers[name] = lambda root, case=case, read=read: outcome(case, read, root)
        for name, run in readers.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "data").mkdir()
                outcome_of_case = run(Path(folder) / "data")
            is_kd = name == "kd"
            group = "folders" if case.kind == "folder" else "tables, shards, parquet"
            row = {
                "cases": group,
                "reader": name,
                "version": version(name) if not is_kd else "here",
                "case": case.name,
            }
            table.append(
                {
                    **row,
                    **{
                        possible: int(possible == outcome_of_case)
                        for possible in OUTCOMES
                    },
                }
            )
            print(f"{case.name:40s} {name:12s} {outcome_of_case}", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = rows()
    if not options.print:
        print(_record.write("zoo", "python benchmarks/zoo.py", table))


if __name__ == "__main__":
    main()
