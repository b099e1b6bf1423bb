"""One painter of `food_mini`: `python -m kd.parts.datasets._food.paint` paints its share of the pictures.

It imports neither torch nor the caller's main module, so that it starts in a fraction of a second and from anywhere.
"""

import json
import sys
from pathlib import Path

from kd.parts.datasets._food.menu import PAINTERS, render

VERSION = 1  # raised whenever equal settings would give other pictures


def main(order: Path, painters: int, number: int) -> None:
    """Paint every `painters`-th picture of the order, from `number` on.

    `order` is a JSON file: folder, seed, size, and for each split a list of (label, dish, plate, photograph).
    """
    work = json.loads(order.read_text())
    dishes = tuple(PAINTERS)
    jobs = [(split, *picture) for split, listed in work["pictures"].items() for picture in listed]
    for split, label, dish, plate, shot in jobs[number::painters]:
        folder = Path(work["folder"]) / split / dishes[label]
        folder.mkdir(parents=True, exist_ok=True)
        image = render(dish, split, plate, work["seed"], work["size"], shot)
        image.save(folder / file_name(dish, plate, shot), quality=90)


def file_name(dish: str, plate: int, shot: int) -> str:
    """Return pizza_0007.jpg for the first photograph of a plate, pizza_0007_1.jpg for the second."""
    return f"{dish}_{plate:04d}{f'_{shot}' if shot else ''}.jpg"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
