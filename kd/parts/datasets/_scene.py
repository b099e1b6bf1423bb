"""Paint layers of pieces with light and shadow: the engine of `food_mini`'s dishes.

Every random choice comes from one `random.Random`, whose stream Python keeps stable.
Nothing of kd is imported.
"""

from collections.abc import Sequence
from functools import cache
from math import cos, pi, sin
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

Color = tuple[int, int, int]
Points = list[tuple[float, float]]


class Layer(NamedTuple):
    """Pieces of one sort."""

    colors: Sequence[Color]
    number: tuple[int, int] = (1, 1)
    size: tuple[float, float] = (0.1, 0.2)  # radius; half the length of a strand
    reach: float = 0.0  # radius of the disc over which they are scattered
    width: float = 0.0  # of a strand; 0: pieces are round
    height: float = 0.05  # of the pieces above what is below; negative: a hollow
    grain: int = 0  # cells of the texture's noise; 0: one colour
    long: float = 1.0  # shorter over longer side of a piece
    chance: float = 1.0


class Group(NamedTuple):
    """Several equal things beside each other ("ring"), in rows ("rows") or upon each
    other ("stack").
    """

    layout: str
    number: tuple[int, int]
    size: float  # of one thing; of several, this over the root of their number
    layers: Sequence[Layer]


class Scene:
    """A square picture being painted, in the coordinates of the thing that is being
    painted (its radius is 1).
    """

    def __init__(self, rng: Random, pixels: int) -> None:
        self.rng, self.pixels = rng, pixels
        self.image = Image.new("RGB", (pixels, pixels))
        turn = self.number(0, 2 * pi)
        self.light = cos(turn), sin(turn)
        self.x, self.y, self.unit, self.squash = pixels / 2, pixels / 2, pixels / 2, 1.0

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def count(self, number: tuple[int, int]) -> int:
        return number[0] + int(self.rng.random() * (number[1] - number[0] + 1))

    def color(self, palette: Sequence[Color], jitter: float = 11.0) -> Color:
        """Draw a colour of the palette with a small variation."""
        light = self.rng.gauss(0, jitter)
        red, green, blue = (
            clip(value + light + self.rng.gauss(0, jitter * 0.6))
            for value in self.rng.choice([*palette])
        )
        return red, green, blue

    def spot(self, reach: float) -> tuple[float, float]:
        """Draw a point in the disc of radius `reach`."""
        radius, turn = reach * self.rng.random() ** 0.5, self.number(0, 2 * pi)
        return radius * cos(turn), radius * sin(turn)

    def blob(self, x: float, y: float, radius: float, long: float) -> Points:
        """Return a round shape in pixels; a small one is uneven."""
        wobble, turn = 0.015 if radius > 0.8 else 0.07, self.number(0, pi)
        waves = [
            (n, wobble * self.rng.gauss(0, 1) / n**0.5, self.number(0, 2 * pi))
            for n in (2, 3, 5)
        ]
        points, steps = [], 12 if radius * self.unit < 10 else 32
        for step in range(steps):
            angle = 2 * pi * step / steps
            length = radius * (
                1 + sum(height * cos(n * angle + phase) for n, height, phase in waves)
            )
            along, across = length * cos(angle), length * sin(angle) * long
            points.append(
                (
                    x + along * cos(turn) - across * sin(turn),
                    y + along * sin(turn) + across * cos(turn),
                )
            )
        return [
            (self.x + self.unit * u, self.y + self.unit * v * self.squash)
            for u, v in points
        ]

    def strand(self, x: float, y: float, length: float) -> Points:
        """Return a bent line of that half length in pixels."""
        turn, bend, points = self.number(0, 2 * pi), self.number(-0.5, 0.5), [(x, y)]
        for _ in range(5 if length > 0.1 else 1):
            x, y, turn = (
                x + 0.4 * length * cos(turn),
                y + 0.4 * length * sin(turn),
                turn + bend,
            )
            points.append((x, y))
        return [
            (self.x + self.unit * u, self.y + self.unit * v * self.squash)
            for u, v in points
        ]

    def texture(self, color: Color, cells: int) -> Image.Image:
        """Return a picture of one colour, lighter and darker in cells of
        smooth noise.
        """
        light, dark = (
            tuple(clip(value + change) for value in color) for change in (22, -22)
        )
        noise = Image.frombytes("L", (cells, cells), self.rng.randbytes(cells * cells))
        size = self.image.size
        mask = noise.resize(size, Image.Resampling.BICUBIC)
        return Image.composite(
            Image.new("RGB", size, light), Image.new("RGB", size, dark), mask
        )  # type: ignore[arg-type]

    def lay(self, layer: Image.Image, mask: Image.Image, height: float) -> None:
        """Draw a raised shape onto the picture: lit from one side, darker on the other,
        with a shadow.
        """
        box = mask.getbbox()
        if box is None:
            return
        reach = max(1.0, abs(height) * self.unit)
        margin = int(3 * reach) + 1
        box = (box[0] - margin, box[1] - margin, box[2] + margin, box[3] + margin)
        mask, layer = (
            mask.crop(box),
            layer.crop(box),
        )  # only its bounding box is computed: small things cost little
        soft = mask.filter(ImageFilter.BoxBlur(reach * 0.7))
        dx, dy = (
            round(side * reach * (1 if height > 0 else -1)) for side in self.light
        )
        before, behind = (
            ImageChops.offset(soft, -dx, -dy),
            ImageChops.offset(soft, dx, dy),
        )
        if height > 0:
            self.image.paste(
                Image.new("RGB", mask.size, (14, 10, 8)),
                box[:2],
                before.point(ramp(0.5)),
            )
        slope = ImageChops.subtract(
            before, behind, scale=2.0, offset=128
        )  # along the light; 128 is level
        layer.paste(
            ImageChops.add(layer, layer, scale=1.25), mask=slope.point(ramp(-1.2, 128))
        )
        layer.paste((0, 0, 0), mask=slope.point(ramp(1.2, 128)))
        self.image.paste(layer, box[:2], mask)

    def paint(self, layer: Layer) -> None:
        """Draw the pieces of a layer with common light and shadow, each in its own
        colour.
        """
        colors = Image.new("RGB", self.image.size)
        mask = Image.new("L", self.image.size)
        pens = ImageDraw.Draw(colors), ImageDraw.Draw(mask)
        for _ in range(self.count(layer.number)):
            color, size, (x, y) = (
                self.color(layer.colors),
                self.number(*layer.size),
                self.spot(layer.reach),
            )
            dark = tuple(clip(0.7 * value) for value in color)
            if layer.width:
                points, width = (
                    self.strand(x, y, size),
                    max(1, round(layer.width * self.unit)),
                )
                pens[0].line(points, dark, width + 2)  # type: ignore[arg-type]
                pens[0].line(points, color, width, "curve")
                pens[1].line(points, 255, width + 1)
            else:
                points = self.blob(
                    x,
                    y,
                    size,
                    layer.long * (1.0 if layer.grain else self.number(0.7, 1)),
                )
                pens[0].polygon(
                    points, self.color([color], 4), None if layer.grain else dark
                )  # type: ignore[arg-type]
                pens[1].polygon(points, 255)
            if layer.grain:
                colors.paste(self.texture(color, layer.grain), mask=mask)
        if layer.height:
            self.lay(colors, mask, layer.height)
        else:
            self.image.paste(colors, mask=mask)

    def arrange(self, group: Group) -> None:
        """Paint equal things in their places."""
        number, x, y, unit = self.count(group.number), self.x, self.y, self.unit
        size, start = (
            group.size / (1 if group.layout == "stack" else number**0.5),
            self.number(0, 2 * pi),
        )
        columns = min(3, number)
        step = self.number(0.06, 0.11)
        for place in range(number):
            if group.layout == "rows":
                row, column = divmod(place, columns)
                dx, dy = (
                    (column - (columns - 1) / 2) * size,
                    (row - (number // columns - 1) / 2) * size,
                )
            elif group.layout == "stack":
                dx, dy = place * step * cos(start), place * step * sin(start)
            else:
                away = 0.0 if number == 1 else 0.95 * size
                dx, dy = (
                    away * cos(start + 2 * pi * place / number),
                    away * sin(start + 2 * pi * place / number),
                )
            self.x, self.y, self.unit = (
                x + unit * dx,
                y + unit * dy * self.squash,
                unit * size,
            )
            for layer in group.layers:
                if self.rng.random() < layer.chance:
                    self.paint(layer)
        self.x, self.y, self.unit = x, y, unit


def photograph(scene: Scene, size: int) -> Image.Image:
    """Take the picture: light from a window, a wrong white balance, a soft lens, a
    grainy sensor.
    """
    image = scene.image
    if scene.rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(scene.number(0.5, 1.5)))
    pixels = (
        np.asarray(image.resize((size, size), Image.Resampling.BOX), dtype=np.float32)
        / 255
    )
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    window = scene.light[0] * axis[None, :] + scene.light[1] * axis[:, None]
    light = (1 + scene.number(0, 0.35) * window) * scene.number(0.8, 1.15)
    cast = np.asarray(
        [1 + scene.rng.gauss(0, 0.05) for _ in range(3)], dtype=np.float32
    )
    pixels = pixels * light[:, :, None] * cast
    pixels = 0.45 + (pixels - 0.45) * scene.number(0.8, 1.15)
    grain = np.random.default_rng(scene.rng.getrandbits(64)).standard_normal(
        pixels.shape, dtype=np.float32
    )
    return Image.fromarray(
        (np.clip(pixels + grain * scene.number(0, 0.02), 0, 1) * 255).astype(np.uint8)
    )


@cache
def ramp(slope: float, start: int = 0) -> list[int]:
    """Return a table for `Image.point`: 0 at `start`, rising by `slope`, within 0 to
    255.
    """
    return [clip((level - start) * slope) for level in range(256)]


def clip(value: float) -> int:
    return int(min(255, max(0, value)))
