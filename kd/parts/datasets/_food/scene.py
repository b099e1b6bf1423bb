"""Paint tables, crockery, ingredients and light with Pillow: the common elements of `food_mini`'s dishes.

Every random choice comes from one `random.Random`, whose stream Python keeps stable. Nothing of kd is imported.
"""

from collections.abc import Sequence
from functools import cache
from math import cos, pi, sin
from random import Random

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

Color = tuple[int, int, int]
Points = list[tuple[float, float]]

# Colours chosen by eye. Dishes share them, so that a colour alone does not give the dish away.
WHITE, CREAM, BLACK = (246, 244, 238), (246, 226, 176), (38, 36, 40)
GREENS: list[Color] = [(64, 124, 44), (92, 158, 58), (134, 186, 76), (44, 96, 44), (166, 202, 104)]
REDS: list[Color] = [(188, 46, 34), (206, 70, 40), (158, 34, 32)]
BROWNS: list[Color] = [(118, 70, 38), (92, 54, 32), (146, 92, 48)]
GOLDS: list[Color] = [(222, 164, 84), (206, 144, 66), (232, 184, 104), (190, 124, 56)]
YELLOWS: list[Color] = [(240, 200, 88), (246, 214, 122), (232, 184, 70)]
SWEETS: list[Color] = [(240, 152, 178), (94, 54, 34), (248, 240, 226), (172, 214, 190), (230, 190, 96), (150, 80, 130)]
WOODS: list[Color] = [(150, 104, 66), (96, 64, 42), (196, 156, 110), (120, 80, 50)]
STONES: list[Color] = [(214, 208, 200), (96, 100, 106), (150, 156, 160), WHITE, (164, 156, 146)]
CLOTHS: list[Color] = [(176, 84, 76), (96, 118, 150), (232, 226, 212), (124, 142, 118), (210, 182, 130), (98, 98, 110)]
DISHES: list[Color] = [(244, 242, 238), (238, 230, 214), (226, 228, 230), (92, 112, 136), (62, 64, 70)]


class Scene:
    """A square picture being painted, in the coordinates of the thing that is being painted (its radius is 1)."""

    def __init__(self, rng: Random, pixels: int) -> None:
        self.rng, self.pixels = rng, pixels
        self.canvas(Image.new("RGB", (pixels, pixels)))
        turn = self.number(0, 2 * pi)
        self.light = (cos(turn), sin(turn))
        self.place(0.0, 0.0, 1.0)

    def canvas(self, image: Image.Image) -> None:
        self.image, self.pen = image, ImageDraw.Draw(image)

    def place(self, x: float, y: float, radius: float, turn: float = 0.0, squash: float = 1.0) -> None:
        """Move the origin to (x, y) of the picture (-1 to 1); `squash` below 1 looks at the table from the side."""
        half = self.pixels / 2
        self.origin = ((x + 1) * half, (y + 1) * half)
        self.unit = radius * half
        self.axes = (cos(turn) * self.unit, sin(turn) * self.unit)
        self.squash = squash

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def count(self, low: int, high: int) -> int:
        """Draw a whole number, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))

    def color(self, palette: Sequence[Color], jitter: float = 10.0) -> Color:
        """Draw a colour of the palette with a small variation."""
        red, green, blue = palette[int(self.rng.random() * len(palette))]
        gauss, side = self.rng.gauss, jitter * 0.6
        light = gauss(0, jitter)
        return clip(red + light + gauss(0, side), green + light + gauss(0, side), blue + light + gauss(0, side))

    def spot(self, radius: float) -> tuple[float, float]:
        """Draw a point in the disc of `radius`."""
        r, turn = radius * self.rng.random() ** 0.5, self.number(0, 2 * pi)
        return r * cos(turn), r * sin(turn)

    def onto(self, points: Points) -> Points:
        (x0, y0), (c, s) = self.origin, self.axes
        return [(x0 + c * x - s * y, y0 + (s * x + c * y) * self.squash) for x, y in points]

    def noise(self, cells: int, rows: int | None = None) -> Image.Image:
        """Return smooth grey noise, `cells` cells across."""
        rows = rows or cells
        grid = Image.frombytes("L", (cells, rows), self.rng.randbytes(cells * rows))
        return grid.resize((self.pixels, self.pixels), Image.Resampling.BICUBIC)

    def texture(self, color: Color, spread: float = 12.0, cells: int = 24, rows: int | None = None) -> Image.Image:
        """Return a picture of one colour with noise: up to 1.5 times `spread` lighter or darker."""
        reach = 1.5 * spread
        light, dark = (clip(color[0] + d, color[1] + d, color[2] + d) for d in (reach, -reach))
        size = self.image.size
        return Image.composite(Image.new("RGB", size, light), Image.new("RGB", size, dark), self.noise(cells, rows))

    def mask(self, *shapes: Points) -> Image.Image:
        mask = Image.new("L", self.image.size)
        draw = ImageDraw.Draw(mask)
        for shape in shapes:
            draw.polygon(self.onto(shape), fill=255)
        return mask

    def lay(
        self, layer: Image.Image | Color, mask: Image.Image, height: float, relief: float = 0.5, shadow: float = 0.5
    ) -> None:
        """Draw a raised shape onto the picture: lit from one side, darker on the other, with a shadow.

        `height`, in radii, rounds the edge and moves the shadow; a negative `relief` is a hollow.
        """
        box = mask.getbbox()
        if box is None:
            return
        reach = max(1.0, height * self.unit)
        margin = int(3 * reach) + 1
        left, top = box[0] - margin, box[1] - margin
        box = (left, top, box[2] + margin, box[3] + margin)
        mask = mask.crop(box)  # only its bounding box is computed: small things cost little
        layer = Image.new("RGB", mask.size, layer) if isinstance(layer, tuple) else layer.crop(box)
        soft = mask.filter(ImageFilter.BoxBlur(reach * 0.7))
        dx, dy = (round(side * reach) for side in self.light)
        before, behind = ImageChops.offset(soft, -dx, -dy), ImageChops.offset(soft, dx, dy)
        if shadow:
            dark = before.point(ramp(shadow))
            self.image.paste(Image.new("RGB", mask.size, (14, 10, 8)), (left, top), dark)
        # The slope of the blurred mask along the light; 128 is level.
        slope = ImageChops.subtract(before, behind, scale=2.0, offset=128)
        layer.paste(ImageChops.add(layer, layer, scale=1.25), mask=slope.point(ramp(-2 * relief, 128)))
        layer.paste((0, 0, 0), mask=slope.point(ramp(2 * relief, 128)))
        self.image.paste(layer, (left, top), mask)

    def stroke(self, points: Points, color: Color, width: float) -> None:
        self.pen.line(self.onto(points), fill=color, width=max(1, round(width * self.unit)), joint="curve")

    def fill(self, shape: Points, color: Color) -> None:
        self.pen.polygon(self.onto(shape), fill=color)

    def crumbs(self, palette: Sequence[Color], number: int, reach: float, length: float, width: float) -> None:
        """Scatter short strokes over the disc of radius `reach`: grains, sprinkles, seeds, herbs."""
        for _ in range(number):
            (x, y), turn = self.spot(reach), self.number(0, pi)
            dx, dy = length * cos(turn) / 2, length * sin(turn) / 2
            self.stroke([(x - dx, y - dy), (x + dx, y + dy)], self.color(palette), width)

    def pieces(self, shapes: Sequence[Points], palette: Sequence[Color], height: float = 0.05) -> None:
        """Draw small things with common light and shadow, each with its own colour: toppings, leaves."""
        layer = Image.new("RGB", self.image.size)
        mask = Image.new("L", self.image.size)
        paint, cut = ImageDraw.Draw(layer), ImageDraw.Draw(mask)
        for shape in shapes:
            pixels, color = self.onto(shape), self.color(palette)
            paint.polygon(pixels, fill=color, outline=shade(color, 0.7))
            cut.polygon(pixels, fill=255)
        self.lay(layer, mask, height, relief=0.6, shadow=0.45)


@cache
def ramp(slope: float, start: int = 0) -> list[int]:
    """Return a table for `Image.point`: 0 at `start`, rising by `slope`, within 0 to 255."""
    return [int(min(255, max(0, (k - start) * slope))) for k in range(256)]


def clip(red: float, green: float, blue: float) -> Color:
    return int(min(255, max(0, red))), int(min(255, max(0, green))), int(min(255, max(0, blue)))


def shade(color: Color, factor: float) -> Color:
    """Return the colour darker (below 1) or lighter."""
    return clip(color[0] * factor, color[1] * factor, color[2] * factor)


def blob(
    scene: Scene, x: float, y: float, radius: float, wobble: float = 0.0, aspect: float = 1.0, turn: float = 0.0
) -> Points:
    """Return a round shape; `wobble` makes its edge uneven, `aspect` below 1 makes it long."""
    steps = 12 if radius < 0.15 else 36
    waves = [(n, wobble * scene.rng.gauss(0, 1) / n**0.5, scene.number(0, 2 * pi)) for n in (2, 3, 5, 7)]
    c, s, points = cos(turn), sin(turn), []
    for k in range(steps):
        angle = 2 * pi * k / steps
        r = radius
        if wobble:
            r *= 1 + sum([height * cos(n * angle + phase) for n, height, phase in waves])
        along, across = r * cos(angle), r * sin(angle) * aspect
        points.append((x + c * along - s * across, y + s * along + c * across))
    return points


def bar(x: float, y: float, length: float, width: float, turn: float) -> Points:
    c, s, a, b = cos(turn), sin(turn), length / 2, width / 2
    return [(x + c * u - s * v, y + s * u + c * v) for u, v in ((-a, -b), (a, -b), (a, b), (-a, b))]


def blobs(scene: Scene, number: int, reach: float, low: float, high: float, wobble: float = 0.1) -> list[Points]:
    shapes = []
    for _ in range(number):
        x, y = scene.spot(reach)
        shapes.append(blob(scene, x, y, scene.number(low, high), wobble, scene.number(0.6, 1), scene.number(0, pi)))
    return shapes


def wreath(scene: Scene, number: int, away: float) -> Points:
    """Return positions for `number` equal things: the centre for one, else on a circle of radius `away`."""
    start, away = scene.number(0, 2 * pi), away if number > 1 else 0.0
    turns = (start + 2 * pi * k / number for k in range(number))
    return [(away * cos(turn), away * sin(turn)) for turn in turns]


def noodles(scene: Scene, palette: Sequence[Color], number: int, reach: float, width: float) -> None:
    for _ in range(number):
        (x, y), turn = scene.spot(reach * 0.85), scene.number(0, 2 * pi)
        bend, points = scene.number(-0.5, 0.5), [(x, y)]
        for _ in range(7):
            turn += bend
            x, y = x + 0.14 * cos(turn), y + 0.14 * sin(turn)
            if x * x + y * y > reach * reach:
                break
            points.append((x, y))
        if len(points) > 2:
            color = scene.color(palette)
            scene.stroke(points, shade(color, 0.62), width * 1.5)
            scene.stroke(points, color, width)


def egg(scene: Scene, x: float, y: float, size: float) -> None:
    scene.lay(scene.color([WHITE], 5), scene.mask(blob(scene, x, y, size, 0.12, 0.85, scene.number(0, pi))), 0.04)
    x, y = x + size * scene.number(-0.15, 0.15), y + size * scene.number(-0.15, 0.15)
    yolk = scene.color([(244, 170, 40), (236, 140, 32), (248, 192, 60)])
    scene.lay(yolk, scene.mask(blob(scene, x, y, size * scene.number(0.36, 0.48))), 0.06, relief=0.7, shadow=0.2)
    scene.fill(blob(scene, x + size * 0.14 * scene.light[0], y + size * 0.14 * scene.light[1], size * 0.08), WHITE)


def herbs(scene: Scene, number: int, reach: float = 0.7) -> None:
    scene.crumbs(GREENS, number, reach, scene.number(0.05, 0.1), 0.04)


def rice(scene: Scene, palette: Sequence[Color], number: int, reach: float, x: float = 0.0, y: float = 0.0) -> None:
    for _ in range(number):
        (u, v), turn = scene.spot(reach), scene.number(0, pi)
        if (x + u) ** 2 + (y + v) ** 2 > 0.9:
            continue
        color, du, dv = scene.color(palette, 8), 0.045 * cos(turn), 0.045 * sin(turn)
        scene.stroke([(x + u - du, y + v - dv + 0.02), (x + u + du, y + v + dv + 0.02)], shade(color, 0.75), 0.05)
        scene.stroke([(x + u - du, y + v - dv), (x + u + du, y + v + dv)], color, 0.045)


def set_table(scene: Scene) -> None:
    kind = scene.count(0, 3)
    scene.place(0, 0, 1, scene.number(0, pi))
    if kind == 0:  # planks
        base = scene.color(WOODS)
        planks = scene.texture(base, 22, 3, 50)
        seams = [bar(0, -1.2 + k * scene.number(0.4, 0.6), 4, 0.02, 0) for k in range(7)]
        scene.place(0, 0, 1)
        planks.paste(shade(base, 0.55), mask=scene.mask(*seams))
        scene.canvas(planks.rotate(scene.number(0, 360), Image.Resampling.BILINEAR, fillcolor=base))
    elif kind == 1:
        scene.canvas(scene.texture(scene.color(STONES), 22, scene.count(5, 14)))
        scene.image.paste(BLACK, mask=scene.noise(60).point(ramp(0.1)))
    else:
        scene.canvas(scene.texture(scene.color(CLOTHS), 10, 60))
        stripe, gap = scene.color([*CLOTHS, WHITE]), scene.number(0.2, 0.45)
        for turn in ((), (0.0,), (0.0, pi / 2))[scene.count(0, 2)]:
            at = [-1.6 + k * gap for k in range(int(3.2 / gap))]
            lines = [bar(-sin(turn) * a, cos(turn) * a, 4, gap / 2, turn) for a in at]
            scene.image.paste(stripe, mask=scene.mask(*lines).point(ramp(0.5)))


def serve_on(scene: Scene, kind: str) -> float:
    """Paint the plate below the dish, radius 1; return the radius that is left for the dish."""
    color = scene.color(DISHES)
    if kind == "board":
        wood = scene.texture(scene.color(WOODS), 18, 9)
        scene.lay(wood, scene.mask(bar(0, 0, 2.1, scene.number(1.7, 2.0), scene.number(0, pi))), 0.06)
        return 0.82
    if kind == "paper":
        sheet = bar(0, 0, scene.number(1.7, 2), scene.number(1.7, 2), scene.number(0, pi))
        scene.lay(scene.texture(scene.color([WHITE, *CLOTHS]), 8), scene.mask(sheet), 0.03)
        return 0.8
    if kind == "pan":
        turn = scene.number(0, 2 * pi)
        scene.lay((52, 48, 48), scene.mask(bar(1.4 * cos(turn), 1.4 * sin(turn), 1.2, 0.22, turn)), 0.05)
        scene.lay((84, 82, 84), scene.mask(blob(scene, 0, 0, 1.0)), 0.08)
        scene.lay(scene.texture((44, 42, 44), 10), scene.mask(blob(scene, 0, 0, 0.9)), 0.06, relief=-0.6, shadow=0)
        return 0.82
    depth = 0.16 if kind == "bowl" else 0.06
    scene.lay(color, scene.mask(blob(scene, 0, 0, 1.0)), depth, relief=0.4)
    if scene.chance(0.35):
        scene.lay(scene.color(CLOTHS), scene.mask(blob(scene, 0, 0, 0.95)), 0.02, shadow=0)
        scene.lay(color, scene.mask(blob(scene, 0, 0, scene.number(0.86, 0.92))), 0.02, shadow=0)
    well = 0.88 if kind == "bowl" else scene.number(0.68, 0.85)
    scene.lay(shade(color, 0.95), scene.mask(blob(scene, 0, 0, well)), depth, relief=-0.6, shadow=0)
    return well * (0.98 if kind == "bowl" else 1.0)


def clutter(scene: Scene) -> None:
    """Paint one object on the table: cutlery, a glass, a napkin, a small bowl, a tomato."""
    kind, turn = scene.count(0, 5), scene.number(0, 2 * pi)
    away = scene.number(0.75, 1.05)
    scene.place(away * cos(turn), away * sin(turn), 0.3, turn + pi / 2 + scene.number(-0.4, 0.4))
    steel = scene.color([(190, 192, 196), (150, 150, 154), (196, 160, 90)])
    if kind == 0:
        tines = [bar(0.9, k, 0.7, 0.07, 0) for k in (-0.12, 0, 0.12)]
        scene.lay(steel, scene.mask(bar(-0.4, 0, 2.2, 0.12, 0), blob(scene, 0.6, 0, 0.2), *tines), 0.05, 0.8)
    elif kind == 1:
        scene.lay(steel, scene.mask(bar(-0.5, 0, 1.6, 0.12, 0), blob(scene, 0.6, 0, 0.4, 0, 0.6)), 0.06, 0.8)
    elif kind == 2:
        scene.pieces([bar(0, -0.1, 4, 0.08, 0.03), bar(0, 0.1, 4, 0.08, -0.03)], [BROWNS[0], REDS[2], GOLDS[0]])
    elif kind == 3:
        scene.lay(scene.texture(scene.color(CLOTHS), 12, 20), scene.mask(bar(0, 0, 1.8, 1.5, 0.2)), 0.05)
    elif kind == 4:
        scene.lay(scene.color(DISHES), scene.mask(blob(scene, 0, 0, 0.75)), 0.1)
        filling = scene.color([*SWEETS, *BROWNS, *REDS, *GREENS, *YELLOWS])
        scene.lay(filling, scene.mask(blob(scene, 0, 0, 0.58)), 0.08, -0.5, 0)
    else:
        scene.pieces(blobs(scene, scene.count(1, 3), 0.6, 0.25, 0.4, 0.05), [*REDS, *YELLOWS, *GREENS], 0.15)


def move_camera(scene: Scene) -> None:
    """Zoom into the same table a little, rotated and shifted."""
    size, zoom, turn = scene.image.width, scene.number(0.8, 0.88), scene.number(-0.1, 0.1)
    c, s, middle = zoom * cos(turn), zoom * sin(turn), size / 2
    reach = middle * (1 - c - abs(s))
    x, y = middle + scene.number(-reach, reach), middle + scene.number(-reach, reach)
    place = (c, -s, x - (c - s) * middle, s, c, y - (s + c) * middle)
    scene.canvas(scene.image.transform((size, size), Image.Transform.AFFINE, place, Image.Resampling.BILINEAR))


def photograph(scene: Scene, size: int) -> Image.Image:
    """Take the picture: light from a window, a wrong white balance, a soft lens, a grainy sensor."""
    image = scene.image
    if scene.chance(0.15):
        image = image.filter(ImageFilter.GaussianBlur(scene.number(0.5, 1.5)))
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BOX), dtype=np.float32) / 255
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    window = scene.light[0] * axis[None, :] + scene.light[1] * axis[:, None]
    vignette = 1 - scene.number(0, 0.3) * (axis[None, :] ** 2 + axis[:, None] ** 2) / 2
    light = (1 + scene.number(0, 0.3) * window) * vignette * scene.number(0.85, 1.15)
    cast = np.asarray([1 + scene.rng.gauss(0, 0.04) for _ in range(3)], dtype=np.float32)
    pixels = pixels * light[:, :, None] * cast
    grey = pixels.mean(axis=2, keepdims=True)
    pixels = grey + (pixels - grey) * scene.number(0.8, 1.15)
    pixels = 0.45 + (pixels - 0.45) * scene.number(0.85, 1.15)
    grain = np.random.default_rng(scene.rng.getrandbits(64)).standard_normal(pixels.shape, dtype=np.float32)
    pixels = pixels + grain * scene.number(0, 0.02)
    return Image.fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8))
