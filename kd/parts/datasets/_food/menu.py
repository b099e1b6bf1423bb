"""Paint the twelve dishes of `food_mini`.

Every picture is a pure function of (seed, split, dish, plate, photograph). Tables, crockery and clutter are shared by
all dishes, and palettes overlap, so that neither colour nor background gives the dish away. Pixels may differ between
versions of Pillow, NumPy and the C library's sine, never between numbers of processes.
"""

from collections.abc import Callable
from math import cos, pi, sin
from random import Random

from PIL import Image

from kd.parts.datasets._food import dishes as paint
from kd.parts.datasets._food.scene import Scene, clutter, move_camera, photograph, serve_on, set_table

SUPERSAMPLE = 2  # drawn at twice the size: Pillow's polygons have hard edges, and halving is the cheapest antialiasing

PAINTERS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "burger": (paint.burger, "plate board paper"),
    "curry_rice": (paint.curry_rice, "plate plate bowl"),
    "donut": (paint.donut, "plate plate board paper"),
    "fried_egg": (paint.fried_egg, "plate plate pan pan"),
    "ice_cream": (paint.ice_cream, "plate bowl bowl"),
    "pancakes": (paint.pancakes, "plate plate board pan"),
    "pizza": (paint.pizza, "plate board board pan paper"),
    "ramen": (paint.ramen, "bowl"),
    "risotto": (paint.risotto, "plate bowl pan"),
    "salad": (paint.salad, "plate bowl bowl"),
    "spaghetti": (paint.spaghetti, "plate plate bowl pan"),
    "sushi": (paint.sushi, "board board plate"),
}
"""The painter and the possible surfaces of each dish."""


def render(dish: str, split: str, index: int, seed: int, size: int, shot: int = 0) -> Image.Image:
    """Paint one picture [size, size] of a dish: a pure function of its arguments.

    `dish` is a key of `PAINTERS`; several, joined by "+", stand on one tray. The splits "train" and "val" never share a
    random number. `index` is the plate, `shot` its photograph: later ones have other light and another crop.
    """
    scene = Scene(Random(f"{seed}/{split}/{dish}/{index}"), size * SUPERSAMPLE)
    set_table(scene)
    for _ in range(scene.count(0, 1)):
        clutter(scene)
    dishes = dish.split("+")
    around = scene.number(0, 2 * pi) if len(dishes) > 1 else 0.0
    away, share = ((0.0, 1.0), (0.5, 0.52), (0.56, 0.44), (0.6, 0.4))[len(dishes) - 1]
    for number, one in enumerate(dishes):
        angle = around + 2 * pi * number / len(dishes)
        serve(scene, one, away * cos(angle), away * sin(angle), share)
    if scene.chance(0.2):
        clutter(scene)
    if shot:
        scene.rng = Random(f"{seed}/{split}/{dish}/{index}/{shot}")
        move_camera(scene)
    return photograph(scene, size)


def serve(scene: Scene, dish: str, x: float, y: float, share: float) -> None:
    """Paint a dish about (x, y), with this share of the picture's side."""
    painter, surfaces = PAINTERS[dish]
    x, y = x + share * scene.number(-0.1, 0.1), y + share * scene.number(-0.1, 0.1)
    radius = share * scene.number(0.95, 1.15)
    squash = scene.number(0.85, 1.0)
    scene.place(x, y, radius, squash=squash)
    kinds = surfaces.split()
    inside = serve_on(scene, kinds[scene.count(0, len(kinds) - 1)])
    turn = scene.number(-0.3, 0.3) if dish == "burger" else scene.number(0, 2 * pi)
    scene.place(x, y, radius * inside * scene.number(0.92, 1.0), turn, squash)
    painter(scene)
