"""Paint the twelve dishes of `food_mini`.

`python -m kd.parts.datasets._dishes ORDER PAINTERS NUMBER` paints a share. A dish is a list of layers: pieces of some colours and sizes, scattered or arranged.
Tables, crockery and clutter are shared by all dishes, and palettes overlap, so that
neither colour nor background gives the dish away. A picture is a pure function of
(seed, split, dish, plate, photograph). Pixels may differ between versions of Pillow,
NumPy and the C library's sine, never between numbers of processes. A painter imports
nothing of kd but the engine: it starts in a fraction of a second.
"""

import json
import sys
from collections.abc import Sequence
from math import cos, pi, sin
from pathlib import Path
from random import Random

from PIL import Image

from kd.parts.datasets._scene import Group, Layer, Scene, photograph

VERSION = 2  # raised whenever equal settings would give other pictures
# drawn at twice the size: Pillow's polygons have hard edges, and halving is the
# cheapest antialiasing
SUPERSAMPLE = 2

# Colours chosen by eye.
WHITES = [(246, 244, 238)]
CREAMS = [(246, 226, 176), (226, 206, 176)]
BLACKS = [(38, 36, 40), (70, 60, 74)]
GREENS = [(64, 124, 44), (92, 158, 58), (134, 186, 76), (44, 96, 44), (166, 202, 104)]
REDS = [(188, 46, 34), (206, 70, 40), (158, 34, 32)]
BROWNS = [(118, 70, 38), (92, 54, 32), (146, 92, 48)]
GOLDS = [(222, 164, 84), (206, 144, 66), (232, 184, 104), (190, 124, 56)]
YELLOWS = [(240, 200, 88), (246, 214, 122), (232, 184, 70)]
SWEETS = [
    (240, 152, 178),
    (94, 54, 34),
    (248, 240, 226),
    (172, 214, 190),
    (230, 190, 96),
    (150, 80, 130),
]
FISH = [(240, 132, 84), (206, 62, 62), (246, 200, 170), (248, 176, 120)]
SAUCES = [(176, 110, 40), (150, 82, 34), (206, 150, 50), (120, 66, 34), (186, 70, 36)]
TABLES = [
    (150, 104, 66),
    (96, 64, 42),
    (214, 208, 200),
    (96, 100, 106),
    (176, 84, 76),
    (96, 118, 150),
    (124, 142, 118),
]
PLATES = [
    (244, 242, 238),
    (238, 230, 214),
    (226, 228, 230),
    (92, 112, 136),
    (62, 64, 70),
]


EGG = [
    Layer([(214, 160, 96), *WHITES], size=(0.9, 1.0), height=0.04, grain=20),
    Layer(WHITES, size=(0.8, 0.9), height=0.04, long=0.85),
    Layer([(244, 170, 40), (236, 140, 32)], size=(0.34, 0.44), reach=0.15, height=0.08),
]
HERBS = Layer(GREENS, (0, 12), (0.03, 0.05), 0.7, 0.04, 0.0)
NOODLES = [*YELLOWS, *CREAMS, GOLDS[2]]
DISHES: dict[str, tuple[str, Sequence[Layer | Group]]] = {
    "burger": ("plate board paper", [
        Layer(GREENS, (7, 12), (0.2, 0.32), 0.85),
        Layer(YELLOWS, size=(0.9, 1.0), long=0.8, chance=0.6),
        Layer(BROWNS, size=(0.84, 0.9), height=0.08, grain=22),
        Layer(GOLDS, size=(0.72, 0.8), height=0.22, grain=12),
        Layer([*CREAMS, *WHITES], (0, 40), (0.03, 0.04), 0.6, 0.04, 0.0),
    ]),
    "curry_rice": ("plate plate bowl", [
        Layer(SAUCES, size=(0.9, 0.94), grain=14),
        Layer([*BROWNS, (226, 130, 50)], (5, 11), (0.1, 0.18), 0.75),
        Layer([*WHITES, *CREAMS], size=(0.5, 0.6), reach=0.5, height=0.12, grain=40, long=0.7),
        HERBS,
    ]),
    "donut": ("plate plate board paper", [
        Group("ring", (1, 3), 0.95, [
            Layer(GOLDS, size=(0.98, 1.0), height=0.2, grain=10),
            Layer([*SWEETS, *GOLDS], size=(0.84, 0.9), height=0.07),
            Layer([*SWEETS, *YELLOWS, *GREENS], (0, 60), (0.04, 0.05), 0.8, 0.05, 0.0, chance=0.6),
            Layer(PLATES, size=(0.28, 0.36), height=-0.1),
        ]),
    ]),
    "fried_egg": ("plate plate pan pan", [
        Layer([(158, 62, 44), (190, 96, 66)], (1, 3), (0.3, 0.35), 0.6, 0.17, 0.05, chance=0.35),
        Group("ring", (1, 3), 0.9, EGG),
        Layer([*BLACKS, *BROWNS], (0, 25), (0.015, 0.02), 0.6, 0.02, 0.0),
        HERBS,
    ]),
    "ice_cream": ("plate bowl bowl", [
        Layer(GOLDS, size=(0.9, 1.1), reach=0.9, grain=30, long=0.3, chance=0.8),
        Group("ring", (1, 4), 0.85, [Layer([*SWEETS, *CREAMS], size=(0.9, 1.0), height=0.2, grain=30)]),
        Layer([BROWNS[1], REDS[0], GOLDS[3]], size=(0.3, 0.4), height=0.04, chance=0.5),
        Layer([*SWEETS, *YELLOWS], (10, 30), (0.03, 0.04), 0.55, 0.03, 0.0, chance=0.4),
    ]),
    "pancakes": ("plate plate board pan", [
        Group("stack", (3, 6), 0.8, [
            Layer(GOLDS, size=(0.98, 1.0), height=0.06),
            Layer(GOLDS[:2], size=(0.9, 0.94), height=0.02, grain=9),
        ]),
        Layer([*BROWNS, *REDS], size=(0.35, 0.5), height=0.04, chance=0.7),
        Layer(YELLOWS, size=(0.14, 0.2), reach=0.1, height=0.08, long=0.8, chance=0.5),
        Layer([(70, 62, 110), *REDS], (4, 10), (0.08, 0.15), 0.5, chance=0.4),
    ]),
    "pizza": ("plate board board pan paper", [
        Layer(GOLDS, size=(0.96, 1.0), height=0.1, grain=22),
        Layer([*REDS, *YELLOWS], size=(0.82, 0.86), height=-0.04, grain=16),
        Layer([*YELLOWS, *CREAMS], (9, 16), (0.12, 0.3), 0.66, height=0.03),
        Layer(REDS, (5, 10), (0.14, 0.18), 0.66, chance=0.7),
        Layer(GREENS, (4, 8), (0.1, 0.2), 0.6, chance=0.3),
        Layer(BLACKS, (5, 10), (0.06, 0.1), 0.66, chance=0.3),
        HERBS,
    ]),
    "ramen": ("bowl", [
        Layer([*SAUCES, *GOLDS], size=(0.98, 1.0), height=-0.08, grain=10),
        Layer(NOODLES, (25, 45), (0.25, 0.35), 0.7, 0.065, 0.0),
        Layer([*SAUCES, *GOLDS], (2, 4), (0.2, 0.35), 0.7, height=0.01),
        Group("ring", (1, 2), 0.42, EGG[1:]),
        Layer([(176, 116, 84)], (1, 3), (0.26, 0.36), 0.55, chance=0.6),
        Layer([(30, 44, 36)], size=(0.3, 0.4), reach=0.8, height=0.04, long=0.8, chance=0.7),
        Layer(GREENS, (4, 18), (0.035, 0.06), 0.6, height=0.02),
    ]),
    "risotto": ("plate bowl pan", [
        Layer([*CREAMS, (226, 190, 110), (214, 150, 96)], size=(0.88, 0.92), height=0.08, grain=14),
        Layer([*CREAMS, *WHITES, (226, 190, 110)], (130, 190), (0.04, 0.05), 0.85, 0.045, 0.0),
        Layer(GREENS, (6, 16), (0.05, 0.08), 0.7, chance=0.5),
        Layer(BROWNS, (4, 9), (0.1, 0.18), 0.7, chance=0.6),
        HERBS,
    ]),
    "salad": ("plate bowl bowl", [
        Layer(GREENS, (20, 34), (0.16, 0.36), 0.75),
        Layer(REDS, (3, 8), (0.11, 0.18), 0.65, chance=0.7),
        Layer(GOLDS, (4, 9), (0.08, 0.1), 0.65, chance=0.5),
        Layer(BLACKS, (3, 8), (0.06, 0.1), 0.65, chance=0.4),
        Layer(WHITES, (1, 3), (0.1, 0.2), 0.5, chance=0.4),
    ]),
    "spaghetti": ("plate plate bowl pan", [
        Layer(GOLDS, size=(0.86, 0.9), height=0.12, grain=14),
        Layer(NOODLES, (40, 60), (0.25, 0.35), 0.7, 0.075, 0.0),
        Layer([*REDS, *BROWNS, *CREAMS], size=(0.34, 0.55), reach=0.15, height=0.06, grain=18),
        Layer(BROWNS, (2, 6), (0.1, 0.17), 0.5, height=0.08, chance=0.5),
        Layer(NOODLES, (5, 14), (0.2, 0.3), 0.6, 0.075, 0.0, chance=0.5),
        HERBS,
    ]),
    "sushi": ("board board plate", [
        Group("rows", (3, 9), 1.5, [
            Layer([*BLACKS, *WHITES], size=(0.5, 0.56), height=0.1, grain=20, long=0.8),
            Layer(WHITES, size=(0.4, 0.44), height=0.02, grain=48, long=0.8),
            Layer([*FISH, *GREENS], size=(0.2, 0.4), height=0.07, long=0.6),
        ]),
        Layer([(150, 184, 90), SWEETS[0]], (0, 2), (0.12, 0.16), 0.9),
    ]),
}  # fmt: skip
"""The possible surfaces, and the layers from below."""


SURFACES = {
    "plate": [Layer(PLATES, size=(0.98, 1.0)), Layer(PLATES, size=(0.7, 0.85), height=-0.05)],
    "bowl": [Layer(PLATES, size=(0.98, 1.0), height=0.16), Layer(PLATES, size=(0.86, 0.9), height=-0.12)],
    "pan": [Layer([(52, 48, 48)], (1, 1), (0.9, 1.0), 1.2, 0.22), Layer([(84, 82, 84)], size=(0.98, 1.0), height=0.08),
            Layer([(44, 42, 44)], size=(0.88, 0.9), height=-0.06, grain=10)],
    "board": [Layer(TABLES[:2], size=(1.0, 1.1), height=0.06, grain=9)],
    "paper": [Layer([*WHITES, *CREAMS], size=(1.0, 1.1), height=0.03, grain=8)],
}  # fmt: skip
CLUTTER = [
    Layer([(190, 192, 196), (150, 150, 154)], (1, 2), (0.3, 0.4), 1.2, 0.06, 0.05),
    Layer([*REDS, *YELLOWS, *GREENS], (1, 3), (0.1, 0.16), 1.1, height=0.08),
    Layer([*SWEETS, *BROWNS, *PLATES], (1, 1), (0.2, 0.26), 1.1, height=0.06),
]


def paint_dish(scene: Scene, dish: str, x: float, y: float, share: float) -> None:
    """Paint a dish on its surface about (x, y), with this share of the image's side."""
    half = scene.pixels / 2
    surfaces, layers = DISHES[dish]
    scene.x = half * (1 + x + share * scene.uniform(-0.14, 0.14))
    scene.y = half * (1 + y + share * scene.uniform(-0.14, 0.14))
    scene.unit = half * share * scene.uniform(0.88, 1.15)
    scene.squash = scene.uniform(0.8, 1.0)
    surface = scene.rng.choice(surfaces.split())
    for layer in SURFACES[surface]:
        scene.paint(layer)
    scene.unit *= (0.8 if surface == "plate" else 0.86) * scene.uniform(0.92, 1.0)
    for layer in layers:
        if isinstance(layer, Group):
            scene.arrange(layer)
        elif scene.rng.random() < layer.chance:
            scene.paint(layer)


def render(
    dish: str, split: str, plate: int, seed: int, size: int, shot: int = 0
) -> Image.Image:
    """Paint one image [size, size] of a dish, as a pure function of the arguments.

    `dish` is a key of `DISHES`; several, joined by "+", stand on one tray. The splits
    "train" and "val" never share a random number. `shot`: a later photograph of the
    same plate, with other light and another crop.
    """
    scene = Scene(Random(f"{seed}/{split}/{dish}/{plate}"), size * SUPERSAMPLE)
    scene.image = scene.texture(scene.color(TABLES), scene.integer((3, 50)))
    for _ in range(scene.integer((0, 1))):
        scene.paint(scene.rng.choice(CLUTTER))
    dishes = dish.split("+")
    start = scene.uniform(0, 2 * pi)
    away, share = ((0.0, 1.0), (0.5, 0.52), (0.56, 0.44), (0.6, 0.4))[len(dishes) - 1]
    for number, name in enumerate(dishes):
        angle = start + 2 * pi * number / len(dishes)
        paint_dish(scene, name, away * cos(angle), away * sin(angle), share)
    if scene.rng.random() < 0.15:
        scene.paint(scene.rng.choice(CLUTTER))
    if shot:
        scene.rng = Random(f"{seed}/{split}/{dish}/{plate}/{shot}")
        zoom = scene.uniform(0.8, 0.88)
        turn = scene.uniform(-0.1, 0.1)
        scene.image = scene.image.rotate(180 * turn / pi, Image.Resampling.BILINEAR)
        edge = int((1 - zoom) / 2 * scene.pixels)
        left = edge + scene.integer((-edge // 2, edge // 2))
        top = edge + scene.integer((-edge // 2, edge // 2))
        side = scene.pixels - 2 * edge
        scene.image = scene.image.crop((left, top, left + side, top + side))
    return photograph(scene, size)


def file_name(dish: str, plate: int, shot: int) -> str:
    """Return pizza_0007.jpg for a plate's first photograph, pizza_0007_1.jpg for the next."""
    suffix = f"_{shot}" if shot else ""
    return f"{dish}_{plate:04d}{suffix}.jpg"


def main(order: Path, painters: int, number: int) -> None:
    """Paint every `painters`-th picture of the order, from `number` on.

    `order` is a JSON file: folder, seed, size, and for each split a list of (label,
    dish, plate, photograph).
    """
    work = json.loads(order.read_text())
    dishes = tuple(DISHES)
    jobs = [
        (split, *picture)
        for split, listed in work["pictures"].items()
        for picture in listed
    ]
    for split, label, dish, plate, shot in jobs[number::painters]:
        folder = Path(work["folder"]) / split / dishes[label]
        folder.mkdir(parents=True, exist_ok=True)
        image = render(dish, split, plate, work["seed"], work["size"], shot)
        image.save(folder / file_name(dish, plate, shot), quality=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
