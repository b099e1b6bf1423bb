"""Lay the pictures of food_mini out on one sheet, a dish a row: docs/food_mini.jpg.

Run: python tools/contact_sheet.py [--columns 12] [--pixels 64] [--to docs/food_mini.jpg]
"""

from __future__ import annotations

import argparse

from PIL import Image

from kd.parts.datasets._dishes import DISHES, render


def main() -> None:
    """Paint and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=14)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--to", default="docs/food_mini.jpg")
    args = parser.parse_args()
    side = args.pixels
    sheet = Image.new("RGB", (args.columns * side, len(DISHES) * side))
    for row, dish in enumerate(DISHES):
        for column in range(args.columns):
            sheet.paste(
                render(dish, "train", column, 0, side), (column * side, row * side)
            )
    sheet.save(args.to, quality=85)


if __name__ == "__main__":
    main()
