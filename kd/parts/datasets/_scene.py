"""Paint layers of pieces with light and shadow, for the dishes of `food_mini`.

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
    """Describe pieces of one sort."""

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
    """Arrange several equal things."""

    layout: str  # "ring": beside each other; "rows"; "stack": upon each other
    number: tuple[int, int]
    size: float  # of one thing; of several, this over the root of their number
    layers: Sequence[Layer]


class Scene:
    """Paint a square picture in coordinates where the painted thing has radius 1."""

    def __init__(self, rng: Random, pixels: int) -> None:
        self.rng = rng
        self.pixels = pixels
        self.image = Image.new("RGB", (pixels, pixels))
        turn = self.uniform(0, 2 * pi)
        self.light = cos(turn), sin(turn)
        self.x = self.y = self.unit = pixels / 2
        self.squash = 1.0

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def integer(self, limits: tuple[int, int]) -> int:
        low, high = limits
        return low + int(self.rng.random() * (high - low + 1))

    def color(self, palette: Sequence[Color], jitter: float = 11.0) -> Color:
        """Draw a colour of the palette with a small variation."""
        light = self.rng.gauss(0, jitter)
        red, green, blue = (
            clip(value + light + self.rng.gauss(0, jitter * 0.6))
            for value in self.rng.choice([*palette])
        )
        return red, green, blue

    def point(self, reach: float) -> tuple[float, float]:
        """Draw a point in the disc of radius `reach`."""
        radius = reach * self.rng.random() ** 0.5
        turn = self.uniform(0, 2 * pi)
        return radius * cos(turn), radius * sin(turn)

    def blob(self, x: float, y: float, radius: float, long: float) -> Points:
        """Return a round shape in pixels; a small one is uneven."""
        wobble = 0.015 if radius > 0.8 else 0.07
        turn = self.uniform(0, pi)
        waves = [
            (n, wobble * self.rng.gauss(0, 1) / n**0.5, self.uniform(0, 2 * pi))
            for n in (2, 3, 5)
        ]
        points = []
        steps = 12 if radius * self.unit < 10 else 32
        for step in range(steps):
            angle = 2 * pi * step / steps
            length = radius * (
                1 + sum(height * cos(n * angle + phase) for n, height, phase in waves)
            )
            along = length * cos(angle)
            across = length * sin(angle) * long
            u = x + along * cos(turn) - across * sin(turn)
            v = y + along * sin(turn) + across * cos(turn)
            points.append(self.to_pixels(u, v))
        return points

    def strand(self, x: float, y: float, length: float) -> Points:
        """Return a bent line of that half length in pixels."""
        turn = self.uniform(0, 2 * pi)
        bend = self.uniform(-0.5, 0.5)
        points = [self.to_pixels(x, y)]
        for _ in range(5 if length > 0.1 else 1):
            x += 0.4 * length * cos(turn)
            y += 0.4 * length * sin(turn)
            turn += bend
            points.append(self.to_pixels(x, y))
        return points

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        return self.x + self.unit * x, self.y + self.unit * y * self.squash

    def texture(self, color: Color, cells: int) -> Image.Image:
        """Return one colour, lighter and darker in cells of smooth noise."""
        light = tuple(clip(value + 22) for value in color)
        dark = tuple(clip(value - 22) for value in color)
        noise = Image.frombytes("L", (cells, cells), self.rng.randbytes(cells * cells))
        size = self.image.size
        mask = noise.resize(size, Image.Resampling.BICUBIC)
        return Image.composite(
            Image.new("RGB", size, light),  # type: ignore[arg-type]
            Image.new("RGB", size, dark),  # type: ignore[arg-type]
            mask,
        )

    def draw_raised(self, layer: Image.Image, mask: Image.Image, height: float) -> None:
        """Draw a raised shape, lit on one side and dark on the other, with a shadow."""
        box = mask.getbbox()
        if box is None:
            return
        reach = max(1.0, abs(height) * self.unit)
        margin = int(3 * reach) + 1
        box = (box[0] - margin, box[1] - margin, box[2] + margin, box[3] + margin)
        # Only its bounding box is computed: small things cost little.
        mask = mask.crop(box)
        layer = layer.crop(box)
        soft = mask.filter(ImageFilter.BoxBlur(reach * 0.7))
        direction = 1 if height > 0 else -1
        dx, dy = (round(side * reach * direction) for side in self.light)
        before = ImageChops.offset(soft, -dx, -dy)
        behind = ImageChops.offset(soft, dx, dy)
        if height > 0:
            shadow = Image.new("RGB", mask.size, (14, 10, 8))
            self.image.paste(shadow, box[:2], before.point(ramp(0.5)))
        # along the light; 128 is level
        slope = ImageChops.subtract(before, behind, scale=2.0, offset=128)
        layer.paste(
            ImageChops.add(layer, layer, scale=1.25), mask=slope.point(ramp(-1.2, 128))
        )
        layer.paste((0, 0, 0), mask=slope.point(ramp(1.2, 128)))
        self.image.paste(layer, box[:2], mask)

    def paint(self, layer: Layer) -> None:
        """Draw a layer's pieces in their own colours, with common light and shadow."""
        colors = Image.new("RGB", self.image.size)
        mask = Image.new("L", self.image.size)
        color_pen = ImageDraw.Draw(colors)
        mask_pen = ImageDraw.Draw(mask)
        for _ in range(self.integer(layer.number)):
            color = self.color(layer.colors)
            size = self.uniform(*layer.size)
            x, y = self.point(layer.reach)
            dark = tuple(clip(0.7 * value) for value in color)
            if layer.width:
                points = self.strand(x, y, size)
                width = max(1, round(layer.width * self.unit))
                color_pen.line(points, dark, width + 2)  # type: ignore[arg-type]
                color_pen.line(points, color, width, "curve")
                mask_pen.line(points, 255, width + 1)
            else:
                long = layer.long * (1.0 if layer.grain else self.uniform(0.7, 1))
                points = self.blob(x, y, size, long)
                fill = self.color([color], 4)
                outline = None if layer.grain else dark
                color_pen.polygon(points, fill, outline)  # type: ignore[arg-type]
                mask_pen.polygon(points, 255)
            if layer.grain:
                colors.paste(self.texture(color, layer.grain), mask=mask)
        if layer.height:
            self.draw_raised(colors, mask, layer.height)
        else:
            self.image.paste(colors, mask=mask)

    def arrange(self, group: Group) -> None:
        """Paint equal things in their places."""
        number = self.integer(group.number)
        x = self.x
        y = self.y
        unit = self.unit
        size = group.size / (1 if group.layout == "stack" else number**0.5)
        start = self.uniform(0, 2 * pi)
        columns = min(3, number)
        step = self.uniform(0.06, 0.11)
        for place in range(number):
            if group.layout == "rows":
                row, column = divmod(place, columns)
                dx = (column - (columns - 1) / 2) * size
                dy = (row - (number // columns - 1) / 2) * size
            else:
                distance = place * step
                angle = start
                if group.layout == "ring":
                    distance = 0.0 if number == 1 else 0.95 * size
                    angle = start + 2 * pi * place / number
                dx = distance * cos(angle)
                dy = distance * sin(angle)
            self.x = x + unit * dx
            self.y = y + unit * dy * self.squash
            self.unit = unit * size
            for layer in group.layers:
                if self.rng.random() < layer.chance:
                    self.paint(layer)
        self.x = x
        self.y = y
        self.unit = unit


def photograph(scene: Scene, size: int) -> Image.Image:
    """Photograph the scene with a soft lens, window light, a colour cast and noise."""
    image = scene.image
    if scene.rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(scene.uniform(0.5, 1.5)))
    image = image.resize((size, size), Image.Resampling.BOX)
    pixels = np.asarray(image, dtype=np.float32) / 255
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    window = scene.light[0] * axis[None, :] + scene.light[1] * axis[:, None]
    light = (1 + scene.uniform(0, 0.35) * window) * scene.uniform(0.8, 1.15)
    balance = [1 + scene.rng.gauss(0, 0.05) for _ in range(3)]
    pixels = pixels * light[:, :, None] * np.asarray(balance, dtype=np.float32)
    pixels = 0.45 + (pixels - 0.45) * scene.uniform(0.8, 1.15)
    noise_rng = np.random.default_rng(scene.rng.getrandbits(64))
    noise = noise_rng.standard_normal(pixels.shape, dtype=np.float32)
    pixels = np.clip(pixels + noise * scene.uniform(0, 0.02), 0, 1)
    return Image.fromarray((pixels * 255).astype(np.uint8))


@cache
def ramp(slope: float, start: int = 0) -> list[int]:
    """Return a table for `Image.point` that rises by `slope` from 0 at `start`."""
    return [clip((level - start) * slope) for level in range(256)]


def clip(value: float) -> int:
    return int(min(255, max(0, value)))
