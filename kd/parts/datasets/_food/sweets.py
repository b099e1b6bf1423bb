"""Paint the three sweet dishes of `food_mini`."""

from __future__ import annotations

from math import cos, pi, sin

from kd.parts.datasets._food.scene import (
    BROWNS,
    CREAM,
    GOLDS,
    GREENS,
    REDS,
    SWEETS,
    WHITE,
    YELLOWS,
    Scene,
    bar,
    blob,
    blobs,
    ramp,
    shade,
    wreath,
)


def pancakes(scene: Scene) -> None:
    """Paint a stack, seen a little from the side; butter, syrup, fruit."""
    layers, lean = scene.count(3, 6), scene.number(0, 2 * pi)
    step, brown = scene.number(0.06, 0.11), scene.color(GOLDS)
    size = scene.number(0.72, 0.84)
    x = y = 0.0
    for layer in range(layers):
        x, y = (layer * step * side + scene.number(-0.05, 0.05) for side in (cos(lean), sin(lean)))
        edge = blob(scene, x, y, size, 0.03)
        scene.lay(scene.texture(shade(brown, 1.2), 8), scene.mask(edge), 0.06)
        top = scene.texture(scene.color([brown], 8), 20, 9)
        scene.lay(top, scene.mask(blob(scene, x, y, size * 0.92, 0.03)), 0.03, shadow=0.1)
    kind = scene.count(0, 3)
    if kind != 3:
        syrup = scene.color(BROWNS if scene.chance(0.7) else REDS)
        drips = [blob(scene, x, y, size * 0.5, 0.22)]
        for _ in range(4):
            turn = scene.number(0, 2 * pi)
            drips.append(bar(x + 0.3 * cos(turn), y + 0.3 * sin(turn), 0.7, 0.12, turn))
        scene.lay(syrup, scene.mask(*drips), 0.04, relief=0.8, shadow=0.2)
    if kind in (0, 3):
        butter = bar(x, y, scene.number(0.22, 0.36), scene.number(0.2, 0.3), scene.number(0, pi))
        scene.lay(scene.color(YELLOWS), scene.mask(butter), 0.06, relief=0.7)
    if kind == 1:
        scene.pieces(blobs(scene, scene.count(4, 10), 0.5, 0.08, 0.15, 0.05), [(70, 62, 110), *REDS], 0.06)
    if kind == 2:
        cream = blob(scene, x, y, scene.number(0.2, 0.3), 0.12)
        scene.lay(WHITE, scene.mask(cream), 0.08)
        scene.pieces(blobs(scene, scene.count(1, 4), 0.4, 0.1, 0.15), REDS, 0.06)


def donut(scene: Scene) -> None:
    """One to three rings with glaze and sprinkles."""
    number = (1, 1, 2, 3)[scene.count(0, 3)]
    size = (0.95, 0.6, 0.52)[number - 1]
    for x, y in wreath(scene, number, 0.54):
        below = scene.image.copy()
        hole = blob(scene, x, y, size * scene.number(0.27, 0.36), 0.05)
        scene.lay(scene.texture(scene.color(GOLDS), 10), scene.mask(blob(scene, x, y, size, 0.02)), 0.14, relief=0.8)
        glaze = scene.color(SWEETS if scene.chance(0.75) else GOLDS)
        icing = scene.mask(blob(scene, x, y, size * 0.86, 0.05))
        scene.lay(scene.texture(glaze, 6), icing, 0.07, relief=0.7, shadow=0.15)
        rim = blob(scene, x, y, size * 0.42, 0.06)
        scene.lay(shade(glaze, 0.8), scene.mask(rim), 0.05, relief=-0.6, shadow=0)
        if scene.chance(0.6):
            palette = [scene.color([*SWEETS, *YELLOWS, *GREENS, WHITE]) for _ in range(scene.count(1, 5))]
            for _ in range(int(60 * size)):
                turn, r = scene.number(0, 2 * pi), size * scene.number(0.48, 0.8)
                u, v, t = x + r * cos(turn), y + r * sin(turn), scene.number(0, pi)
                scene.stroke([(u, v), (u + 0.07 * cos(t), v + 0.07 * sin(t))], scene.color(palette, 8), 0.035)
        scene.image.paste(below, mask=scene.mask(hole))
        dark = scene.mask(hole)
        scene.lay(scene.image.point(ramp(0.72) * 3), dark, 0.06, relief=-0.8, shadow=0)


def ice_cream(scene: Scene) -> None:
    """Scoops, with sauce, nuts, a wafer, a cherry."""
    number = scene.count(1, 4)
    size = (0.75, 0.56, 0.48, 0.44)[number - 1]
    if scene.chance(0.8):
        t = scene.number(0, 2 * pi)
        cone = [
            (1.25 * cos(t), 1.25 * sin(t)),
            (0.5 * cos(t + 1.2), 0.5 * sin(t + 1.2)),
            (0.5 * cos(t - 1.2), 0.5 * sin(t - 1.2)),
        ]
        scene.lay(scene.texture(GOLDS[0], 18, 30), scene.mask(cone), 0.05)
    for x, y in wreath(scene, number, 0.4):
        flavour = scene.color([*SWEETS, CREAM, WHITE])
        scene.lay(scene.texture(flavour, 16, 30), scene.mask(blob(scene, x, y, size, 0.06)), 0.2, relief=0.6)
        scene.crumbs([shade(flavour, 0.8), shade(flavour, 1.15)], 10, 0.3, 0.08, 0.03)
    if scene.chance(0.5):
        sauce = scene.color([BROWNS[1], REDS[0], GOLDS[3]])
        scene.lay(sauce, scene.mask(blob(scene, 0, 0, 0.38, 0.35)), 0.04, relief=0.8, shadow=0.1)
    if scene.chance(0.4):
        scene.crumbs([*SWEETS, *YELLOWS, BROWNS[0]], 30, 0.55, 0.06, 0.03)
    if scene.chance(0.4):
        scene.lay(REDS[0], scene.mask(blob(scene, *scene.spot(0.3), 0.13)), 0.08, relief=0.8)
