"""Paint the twelve dishes of `food_mini`."""

from math import cos, pi, sin

from kd.parts.datasets._food.scene import (
    BLACK,
    BROWNS,
    CREAM,
    GOLDS,
    GREENS,
    REDS,
    SWEETS,
    WHITE,
    YELLOWS,
    Points,
    Scene,
    bar,
    blob,
    blobs,
    egg,
    herbs,
    noodles,
    ramp,
    rice,
    shade,
    wreath,
)


def pizza(scene: Scene) -> None:
    """Crust, sauce, cheese, toppings; sometimes a slice is gone."""
    outline = blob(scene, 0, 0, 0.98, 0.025)
    hole: list[Points] = []
    if scene.chance(0.4):
        turn = scene.number(0, 2 * pi)
        hole = [[(0, 0), *((1.3 * cos(turn + a), 1.3 * sin(turn + a)) for a in (0, 0.35, 0.75))]]
    below = scene.image.copy()
    scene.lay(scene.texture(scene.color(GOLDS), 22, 14), scene.mask(outline), 0.09, relief=0.7)
    sauce = scene.color(REDS) if scene.chance(0.6) else scene.color(YELLOWS)
    scene.lay(scene.texture(sauce, 16), scene.mask(blob(scene, 0, 0, 0.82, 0.03)), 0.04, relief=-0.4, shadow=0)
    scene.pieces(blobs(scene, scene.count(9, 16), 0.66, 0.12, 0.3, 0.2), [*YELLOWS, CREAM], 0.03)
    kind = scene.count(0, 3)
    if kind == 0:
        scene.pieces(blobs(scene, scene.count(6, 12), 0.66, 0.12, 0.17, 0.03), REDS)
    elif kind == 1:
        scene.pieces(blobs(scene, scene.count(4, 8), 0.6, 0.1, 0.2, 0.2), GREENS)
        scene.pieces(blobs(scene, scene.count(3, 7), 0.6, 0.09, 0.13), REDS)
    elif kind == 2:
        scene.pieces(blobs(scene, scene.count(6, 12), 0.66, 0.06, 0.1), [BLACK, (70, 60, 74)])
        scene.pieces(blobs(scene, scene.count(5, 10), 0.66, 0.08, 0.16, 0.25), [(226, 206, 176), (200, 176, 140)])
    herbs(scene, scene.count(0, 12))
    for a in range(scene.count(0, 4)):
        turn = a * pi / 4
        scene.stroke([(-cos(turn), -sin(turn)), (cos(turn), sin(turn))], shade(sauce, 0.6), 0.015)
    if hole:
        scene.image.paste(below, mask=scene.mask(*hole))


def burger(scene: Scene) -> None:
    """A bun with sesame from above, what is in it looking out; or the whole tower from the side."""
    bun = scene.color(GOLDS)
    if scene.chance(0.45):
        scene.pieces(blobs(scene, scene.count(7, 12), 0.85, 0.2, 0.32, 0.3), GREENS)
        scene.lay(scene.color(BROWNS), scene.mask(blob(scene, 0.03, 0.05, 0.86, 0.05)), 0.06)
        if scene.chance(0.7):
            scene.lay(scene.color(YELLOWS), scene.mask(bar(0, 0, 1.45, 1.45, scene.number(0, pi))), 0.03)
        scene.lay(scene.texture(bun, 12, 8), scene.mask(blob(scene, 0, 0, 0.78, 0.02)), 0.22, relief=0.6)
        scene.crumbs([CREAM, WHITE], scene.count(0, 40), 0.6, 0.07, 0.04)
        return
    y = 0.72
    scene.lay(scene.texture(bun, 8), scene.mask(blob(scene, 0, y - 0.08, 0.82, 0.02, 0.24)), 0.08)
    y -= 0.2
    for _ in range(scene.count(1, 2)):
        scene.lay(scene.texture(scene.color(BROWNS), 22), scene.mask(blob(scene, 0, y, 0.88, 0.03, 0.2)), 0.06)
        if scene.chance(0.8):
            drip = [(-0.85, y - 0.14), (0.85, y - 0.14), (0.5, y), (0.25, y + 0.14), (0, y), (-0.5, y + 0.06)]
            scene.lay(scene.color(YELLOWS), scene.mask(drip), 0.03)
        y -= 0.24
    if scene.chance(0.7):
        scene.pieces([bar(u, y + 0.03, 0.6, 0.11, 0) for u in (-0.45, 0.4)], REDS)
        y -= 0.08
    if scene.chance(0.8):
        wave = [
            (u, y + 0.08 * (-1) ** k + scene.number(0, 0.08)) for k, u in enumerate(0.95 - 0.17 * k for k in range(12))
        ]
        scene.lay(scene.color(GREENS), scene.mask([(-0.9, y - 0.12), (0.9, y - 0.12), *wave]), 0.04)
        y -= 0.08
    dome = [(0.86 * cos(a * pi / 24), y - 0.62 * sin(a * pi / 24)) for a in range(25)]
    scene.lay(scene.texture(bun, 12, 8), scene.mask(dome), 0.14, relief=0.7, shadow=0.3)
    for _ in range(scene.count(0, 18)):
        u, v = scene.number(-0.6, 0.6), scene.number(0.2, 0.5)
        scene.stroke([(u, y - v), (u + 0.06, y - v)], CREAM, 0.04)


def salad(scene: Scene) -> None:
    """Leaves upon leaves, with this and that between them."""
    for _ in range(2):
        scene.pieces(blobs(scene, scene.count(10, 18), 0.75, 0.16, 0.36, 0.3), GREENS)
        for _ in range(6):
            x, y = scene.spot(0.7)
            scene.stroke([(x, y), (x + 0.2, y + scene.number(-0.2, 0.2))], GREENS[4], 0.02)
    if scene.chance(0.7):
        scene.pieces(blobs(scene, scene.count(3, 8), 0.65, 0.11, 0.18), REDS)
    if scene.chance(0.5):
        scene.pieces(blobs(scene, scene.count(3, 7), 0.65, 0.13, 0.18), [(198, 218, 150), (214, 226, 180)])
    if scene.chance(0.5):
        shapes = [bar(*scene.spot(0.65), 0.15, 0.15, scene.number(0, pi)) for _ in range(scene.count(4, 9))]
        scene.pieces(shapes, GOLDS if scene.chance(0.5) else [WHITE])
    if scene.chance(0.4):
        scene.pieces(blobs(scene, scene.count(3, 8), 0.65, 0.06, 0.1), [BLACK, (120, 50, 90)])
    if scene.chance(0.25):
        egg(scene, *scene.spot(0.4), 0.3)


def spaghetti(scene: Scene) -> None:
    """A nest of noodles with a sauce on it."""
    sauce = scene.color([*REDS, *REDS, *BROWNS, CREAM, GREENS[1]])
    nest = scene.mask(blob(scene, 0, 0, 0.88, 0.06))
    scene.lay(scene.texture(shade(scene.color(GOLDS), 0.75), 14), nest, 0.12)
    noodles(scene, [*YELLOWS, CREAM, GOLDS[2]], scene.count(45, 65), 0.94, 0.075)
    spread = blob(scene, *scene.spot(0.15), scene.number(0.34, 0.55), 0.2)
    scene.lay(scene.texture(sauce, 26, 18), scene.mask(spread), 0.06, shadow=0.3)
    if scene.chance(0.5):
        scene.pieces(blobs(scene, scene.count(2, 6), 0.5, 0.1, 0.17, 0.08), BROWNS, 0.08)
    if scene.chance(0.5):
        noodles(scene, YELLOWS, scene.count(5, 14), 0.8, 0.075)
    if scene.chance(0.6):
        scene.crumbs([CREAM, WHITE], scene.count(10, 30), 0.5, 0.06, 0.03)
    herbs(scene, scene.count(0, 10), 0.5)


def ramen(scene: Scene) -> None:
    """Noodles under a broth, and what floats on it."""
    broth = scene.color([(206, 150, 80), (168, 100, 52), (226, 190, 136), (190, 84, 44), *GOLDS])
    scene.lay(scene.texture(broth, 10, 8), scene.mask(blob(scene, 0, 0, 0.99)), 0.08, relief=-0.5, shadow=0)
    noodles(scene, [*YELLOWS, CREAM, GOLDS[2]], scene.count(30, 55), scene.number(0.7, 0.9), 0.065)
    pool = scene.mask(*blobs(scene, scene.count(3, 5), 0.8, 0.2, 0.4, 0.2))
    scene.image.paste(broth, mask=pool.point(ramp(0.7)))
    if scene.chance(0.75):
        for _ in range(scene.count(1, 2)):
            egg(scene, *scene.spot(0.6), scene.number(0.24, 0.32))
    if scene.chance(0.6):
        scene.pieces(blobs(scene, scene.count(1, 3), 0.55, 0.26, 0.36, 0.08), [(176, 116, 84), (198, 148, 112)])
    if scene.chance(0.75):
        turn = scene.number(0, 2 * pi)
        scene.lay((30, 44, 36), scene.mask(bar(0.7 * cos(turn), 0.7 * sin(turn), 0.6, 0.5, turn)), 0.04)
    if scene.chance(0.3):
        x, y = scene.spot(0.6)
        scene.lay(WHITE, scene.mask(blob(scene, x, y, 0.2, 0.05)), 0.04)
        scene.stroke(
            [(x + 0.09 * cos(a), y + 0.02 * a * sin(a)) for a in (0, 0.7, 1.4, 2.1, 2.8, 3.5, 4.2, 5)], SWEETS[0], 0.04
        )
    scene.pieces(blobs(scene, scene.count(4, 18), 0.6, 0.035, 0.06), GREENS, 0.02)


def curry_rice(scene: Scene) -> None:
    """Rice on one side, curry with chunks on the other."""
    sauce = scene.color([(176, 110, 40), (150, 82, 34), (206, 150, 50), (120, 66, 34), (186, 70, 36), (150, 150, 60)])
    scene.lay(scene.texture(sauce, 14, 12), scene.mask(blob(scene, 0, 0, 0.92, 0.05)), 0.06, relief=0.4)
    chunks = [(226, 130, 50), (226, 190, 110), *BROWNS]
    scene.pieces(blobs(scene, scene.count(5, 11), 0.75, 0.1, 0.18, 0.2), chunks, 0.06)
    turn = scene.number(0, 2 * pi)
    x, y = 0.5 * cos(turn), 0.5 * sin(turn)
    grain = [WHITE, CREAM] if scene.chance(0.75) else [*YELLOWS]
    heap = blob(scene, x, y, scene.number(0.45, 0.6), 0.1, 0.8, turn + pi / 2)
    scene.lay(scene.texture(shade(grain[0], 0.9), 10, 40), scene.mask(heap), 0.12)
    rice(scene, grain, 90, 0.45, x, y)
    if scene.chance(0.1):
        egg(scene, *scene.spot(0.3), 0.36)
    herbs(scene, scene.count(0, 10))


def risotto(scene: Scene) -> None:
    """Rice all over, in cream, saffron or tomato, with peas or mushrooms."""
    base = scene.color([CREAM, (226, 190, 110), (222, 208, 166), (214, 150, 96)])
    scene.lay(scene.texture(shade(base, 0.85), 14, 14), scene.mask(blob(scene, 0, 0, 0.9, 0.07)), 0.08)
    rice(scene, [base, shade(base, 1.1), shade(base, 0.9)], 190, 0.9)
    if scene.chance(0.5):
        scene.pieces(blobs(scene, scene.count(6, 16), 0.7, 0.05, 0.08), GREENS, 0.04)
    if scene.chance(0.6):
        scene.pieces(blobs(scene, scene.count(4, 9), 0.7, 0.1, 0.18, 0.25), [*BROWNS, (206, 180, 146), (226, 130, 50)])
    if scene.chance(0.4):
        scene.pieces([bar(*scene.spot(0.5), 0.3, 0.08, scene.number(0, pi)) for _ in range(5)], [CREAM], 0.02)
    herbs(scene, scene.count(0, 14))


def fried_egg(scene: Scene) -> None:
    """One to three eggs with brown edges; pepper, bacon."""
    number = scene.count(1, 3)
    if scene.chance(0.35):
        for side in range(scene.count(1, 3)):
            y = -0.6 + 0.25 * side
            wave = [(-0.7 + k / 8, y + 0.05 * sin(9 * k / 8 + side)) for k in range(12)]
            scene.stroke(wave, scene.color([(158, 62, 44), (190, 96, 66)]), 0.17)
            scene.stroke(wave, scene.color([(232, 190, 150)]), 0.05)
    for x, y in wreath(scene, number, 0.42):
        size = scene.number(0.62, 0.85) if number == 1 else scene.number(0.42, 0.52)
        lace = scene.texture(scene.color([(214, 160, 96), (232, 206, 160)]), 20)
        scene.lay(lace, scene.mask(blob(scene, x, y, size * 1.06, 0.16)), 0.03)
        egg(scene, x, y, size)
    scene.crumbs([BLACK, BROWNS[1]], scene.count(0, 25), 0.6, 0.03, 0.02)
    herbs(scene, scene.count(0, 8), 0.6)


def sushi(scene: Scene) -> None:
    """Rolls and hand-pressed pieces in rows, wasabi and ginger beside them."""
    turn, columns, rows = scene.number(-0.3, 0.3), scene.count(2, 4), scene.count(1, 3)
    gap = 1.7 / max(columns, rows + 0.5)
    fish = [(240, 132, 84), (206, 62, 62), (246, 200, 170), (248, 176, 120), YELLOWS[0]]
    rolls = scene.number(0, 1)
    for row in range(rows):
        nigiri, top = scene.chance(rolls), scene.color(fish)
        for column in range(columns):
            x = (column - (columns - 1) / 2) * gap + scene.number(-0.03, 0.03)
            y = (row - (rows - 1) / 2) * gap * 1.15 + scene.number(-0.03, 0.03)
            if nigiri:
                upright = pi / 2 + turn
                grain = scene.texture(WHITE, 14, 48)
                scene.lay(grain, scene.mask(blob(scene, x, y, gap * 0.5, 0.04, 0.55, upright)), 0.08)
                scene.lay(top, scene.mask(blob(scene, x, y, gap * 0.47, 0.03, 0.45, upright)), 0.07, relief=0.7)
                for k in (-0.22, 0, 0.22):
                    scene.stroke([(x - 0.1, y + k * gap), (x + 0.1, y + k * gap + 0.08)], shade(top, 1.25), 0.025)
            else:
                scene.lay((32, 42, 38), scene.mask(blob(scene, x, y, gap * 0.42, 0.03)), 0.1)
                inner = scene.mask(blob(scene, x, y, gap * 0.34, 0.04))
                scene.lay(scene.texture(WHITE, 14, 48), inner, 0.02, shadow=0)
                core = blobs(scene, 2, 0.03, gap * 0.1, gap * 0.16)
                scene.pieces([[(u + x, v + y) for u, v in shape] for shape in core], [*fish, *GREENS], 0.02)
    if scene.chance(0.5):
        scene.lay(scene.color([(150, 184, 90)]), scene.mask(blob(scene, 0.75, -0.7, 0.14, 0.15)), 0.06)
        scene.pieces([blob(scene, -0.75, 0.72, 0.16, 0.25)], [SWEETS[0]])


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
