"""Pictures for a model that sees: scenes, questions about them, and their drawing in PyTorch, a whole batch at once.

  python3 tools/pictures.py --out DIR [--n 8] [--seed 1] [--size 96x96] [--kind one] [--unseen]
                                                write pictures (PPM), questions and answers; --unseen: with PAIRS (below)

A scene is a plain description, drawn from a random number generator: one shape, several equal ones, two different ones, a number
or a word. Splits, each decided by a hash and so the same for every seed: eval has the question forms that train leaves out, and
PAIRS are pairs of colour and shape that no training picture has.
"""
import argparse
import math
import os
import random
import zlib

import numpy as np

import text
from stories import pick, with_article

COLORS = {"red": (222, 26, 32), "blue": (32, 64, 224), "green": (26, 158, 52), "yellow": (244, 224, 30), "white": (250, 250, 250),
          "black": (12, 12, 12), "brown": (116, 66, 26), "purple": (132, 32, 174), "orange": (250, 136, 16), "pink": (250, 140, 190)}
SHAPES = "circle square triangle star heart moon cross ring".split()
WORDS = "fox bear owl frog cat dog duck goat lamb mole deer lion ball kite boat drum bell hat key tree".split()
PLACES = {"on the left": (0.22, 0.5), "on the right": (0.78, 0.5), "at the top": (0.5, 0.22), "at the bottom": (0.5, 0.78),
          "in the middle": (0.5, 0.5)}
MOST = 6                                       # shapes of a picture
PAIRS = [(c, s) for c in COLORS for s in SHAPES if zlib.crc32((c + " " + s).encode()) % 10 == 0]
SHARES = {"one": 38, "many": 22, "two": 20, "number": 10, "word": 10}

# 5 x 7 pixels a character, rows from the top, the leftmost pixel is 16.
FONT = {k: [int(x, 16) for x in v.split()] for k, v in (line.split(":") for line in """
0:e 11 13 15 19 11 e|1:4 c 4 4 4 4 e|2:e 11 1 2 4 8 1f|3:1f 2 4 2 1 11 e|4:2 6 a 12 1f 2 2|5:1f 10 1e 1 1 11 e|6:6 8 10 1e 11 11 e
7:1f 1 2 4 8 8 8|8:e 11 11 e 11 11 e|9:e 11 11 f 1 2 c|A:e 11 11 1f 11 11 11|B:1e 11 11 1e 11 11 1e|C:e 11 10 10 10 11 e
D:1e 11 11 11 11 11 1e|E:1f 10 10 1e 10 10 1f|F:1f 10 10 1e 10 10 10|G:e 11 10 17 11 11 f|H:11 11 11 1f 11 11 11|I:e 4 4 4 4 4 e
J:7 2 2 2 2 12 c|K:11 12 14 18 14 12 11|L:10 10 10 10 10 10 1f|M:11 1b 15 15 11 11 11|N:11 11 19 15 13 11 11|O:e 11 11 11 11 11 e
P:1e 11 11 1e 10 10 10|Q:e 11 11 11 15 12 d|R:1e 11 11 1e 14 12 11|S:f 10 10 e 1 1 1e|T:1f 4 4 4 4 4 4|U:11 11 11 11 11 11 e
V:11 11 11 11 11 a 4|W:11 11 11 15 15 15 a|X:11 11 a 4 a 11 11|Y:11 11 11 a 4 4 4|Z:1f 1 2 4 8 10 1f""".strip().replace("\n", "|")
                                                               .split("|"))}
LONGEST = max(map(len, WORDS))
CELLS = 9
GLYPH_W, GLYPH_H = 6 * LONGEST + 1, 9          # of the bitmap of a word, with an empty border


# ---- scenes ----------------------------------------------------------------------------------------------------------

def pair(rnd, held_out=False):
    """-> colour, shape"""
    while True:
        p = pick(rnd, sorted(COLORS)), pick(rnd, SHAPES)
        if (p in PAIRS) == held_out:
            return p


def between(rnd, a, b):
    return a + (b - a) * rnd()


def grid_for(rnd, n):
    grids = [(r, c) for r in (1, 2, 3) for c in (1, 2, 3, 4) if n <= r * c <= max(4, 2 * n) and r * c <= CELLS]
    return pick(rnd, grids)


def thing(rnd, color, shape, x, y, r):
    """A shape: centre and radius as parts of the width, the height and of the shorter side of its cell"""
    angle = between(rnd, -0.3, 0.3) if shape != "moon" else between(rnd, -math.pi, math.pi)
    return dict(color=color, shape=shape, x=x, y=y, r=r, angle=angle)


def scene(rnd, kind=None, held_out=False):
    """-> a description of a picture. held_out: with a pair of colour and shape from PAIRS"""
    if kind is None:
        x = rnd() * sum(SHARES.values())
        for kind, share in SHARES.items():
            x -= share
            if x < 0:
                break
    s = dict(kind=kind, grid=(1, 1), things={}, place=None, text="", paper=tuple(rnd() for _ in range(24)))
    if kind == "one":
        color, shape = pair(rnd, held_out)
        x = rnd()
        if x < 0.7:
            s["place"] = pick(rnd, sorted(PLACES))
            px, py = PLACES[s["place"]]
            r = between(rnd, 0.12, 0.2) if x < 0.5 or s["place"] != "in the middle" else between(rnd, 0.2, 0.45)
            s["things"][0] = thing(rnd, color, shape, px + between(rnd, -0.06, 0.06), py + between(rnd, -0.06, 0.06), r)
        else:
            r = between(rnd, 0.1, 0.3)
            s["things"][0] = thing(rnd, color, shape, between(rnd, r, 1 - r), between(rnd, r, 1 - r), r)
    elif kind == "many":
        color, shape = pair(rnd, held_out)
        n = 2 + int(rnd() * (MOST - 1))
        s["grid"] = grid_for(rnd, n)
        cells = list(range(s["grid"][0] * s["grid"][1]))
        size = between(rnd, 0.26, 0.42)
        for _ in range(n):
            r = size * between(rnd, 0.85, 1.05)
            s["things"][cells.pop(int(rnd() * len(cells)))] = thing(rnd, color, shape, between(rnd, r, 1 - r),
                                                                    between(rnd, r, 1 - r), r)
    elif kind == "two":
        color, shape = pair(rnd, held_out)
        while True:
            color2, shape2 = pair(rnd)
            if color2 != color and shape2 != shape:
                break
        s["grid"] = pick(rnd, ((1, 2), (2, 1)))
        both = [(color, shape), (color2, shape2)]
        for cell in (0, 1):
            c = both.pop(int(rnd() * len(both)))
            r = between(rnd, 0.24, 0.42)
            s["things"][cell] = thing(rnd, c[0], c[1], between(rnd, r, 1 - r), between(rnd, r, 1 - r), r)
    else:
        s["color"] = pick(rnd, sorted(COLORS))
        s["text"] = str(int(rnd() * 10)) if kind == "number" else pick(rnd, WORDS)
        s["wide"] = between(rnd, 0.8, 1.25)            # of a pixel of the font
        n = 6 * len(s["text"]) - 1
        most = min(0.9 / (n * s["wide"]), 0.9 / 7)     # height of a pixel as a part of the shorter side
        s["pixel"] = most * between(rnd, 0.45 if kind == "number" else 0.75, 1)
        room = 1 - s["pixel"] * n * s["wide"], 1 - s["pixel"] * 7
        s["x"], s["y"] = (0.5 + between(rnd, -0.4, 0.4) * max(0, r - 0.05) for r in room)
        s["angle"], s["shear"] = between(rnd, -0.15, 0.15), between(rnd, -0.2, 0.2)
        s["level"], s["sharp"] = between(rnd, 0.3, 0.5), between(rnd, 2, 8)
    return s


# ---- questions -------------------------------------------------------------------------------------------------------
# Kind of question: its answer, then its forms; those after || are only in split eval. \x01 marks stand around what counts more, as
# in text.py. $s, $p: the shape, its plural; $c, $n, $w: colour, number, place; $k, $t: number or word, and which.

FORMS = {
    "color": """The $s is\x01 $c\x01. | What color is the $s? | What is the color of the $s? | Which color does the $s have?
    | Tell me the color of the $s. | What color is the shape? | What color is it? | Which color is it? | Name the color. | What color?
    | What is the color? | What color does it have? | What color can you see? | Tell me its color.
    || Which color is the $s? | What color does the $s have?""",
    "shape": """It is a\x01 $s\x01. | What shape is it? | What shape is this? | Which shape is in the picture? | What is the shape?
    | Name the shape. | Which shape is it? | What shape does it have? | What shape? | Tell me the shape. | What shape do you see?
    | What kind of shape is this? | Which shape can you see? | What $c shape is this?
    || Which shape is this? | What shape is in the picture?""",
    "where": """The $s is\x01 $w\x01. | Where is the $s? | Where is the shape? | Tell me where the $s is. | Where is it?
    | Where do you see the $s? | Where can you see it? | Where is the $c $s? | In which part of the picture is the $s? | Where?
    | Where is the $s in the picture? | Which side is the $s on? | Where in the picture do you see the $s? | Tell me where it is.
    || Where in the picture is the $s?""",
    "one": """There is\x01 one\x01 $s. | How many shapes are there? | How many $p are there? | How many $p are in the picture?
    | How many do you see? | How many $p do you see? | How many shapes can you see? | How many? | Count the shapes. | Count the $p.
    | What is the number of shapes? | How many $p can you see? | Tell me how many shapes there are. | How many are there?
    || How many shapes are in the picture?""",
    "what": """There is $a. | What is in this picture? | What is in the picture? | What do you see? | Describe the picture.
    | What is this? | What is it? | Describe this picture. | Describe it. | What do you see in the picture? | What is there?
    | Tell me what you see. | What does the picture show? | What is on the picture? | Tell me about the picture. | What is that?
    | Say what you see. | Look at the picture. What is in it? | What can you see here? | What is here? | Can you see the picture?
    || What can you see? | Tell me what is in the picture.""",
    "count": """There are\x01 $n\x01 $p. | How many shapes are there? | How many $p are there? | How many $p are in the picture?
    | Count the $p. | How many do you see? | How many $p do you see? | How many shapes can you see? | How many? | Count the shapes.
    | What is the number of shapes? | How many $p can you see? | Tell me how many shapes there are. | How many are there?
    || How many shapes are in the picture? | Tell me how many $p there are.""",
    "color of many": """The $p are\x01 $c\x01. | What color are the $p? | What is the color of the $p? | Which color do the $p have?
    | What color are the shapes? | Which color are they? | What color do they have? | Tell me the color of the $p. | Name the color.
    | What color do the $p have? | Which color are the shapes? || Which color are the $p? | What color are they?""",
    "shape of many": """They are\x01 $p\x01. | What shapes are these? | Which shapes are in the picture? | Name the shapes.
    | What shapes are they? | Which shapes are these? | What shapes do you see? | Tell me which shapes these are. | What are they?
    | What shapes are there? | What kind of shapes are these? || What shapes are in the picture?""",
    "color of two": """The $s is\x01 $c\x01. | What color is the $s? | What is the color of the $s? | Which color does the $s have?
    | Tell me the color of the $s. | What color do you see on the $s? | Name the color of the $s. || Which color is the $s?""",
    "shape of two": """The\x01 $s\x01 is $c. | Which shape is $c? | What shape is $c? | What is $c? | Which of the shapes is $c?
    | Which one is $c? | Name the $c shape. | What is the $c shape? | Tell me which shape is $c. || Name the shape that is $c.""",
    "where of two": """The $s is\x01 $w\x01. | Where is the $s? | Tell me where the $s is. | Where do you see the $s?
    | Where is the $c $s? | In which part of the picture is the $s? | Where is the $s in the picture? | Which side is the $s on?
    || Where in the picture is the $s?""",
    "number": """The number is \x01$t\x01. | What number is this? | Which number is in the picture? | What is the number?
    | Read the number. | What number do you see? | Which number is it? | What number? | Which number can you see? | What number is it?
    | Tell me the number. | What does the picture say? | Read it. || Which number is this? | What number is in the picture?""",
    "word": """The word is\x01 $t\x01. | What word is this? | Which word is in the picture? | What is the word? | Read the word.
    | What word do you see? | Which word is it? | What word? | Which word can you see? | What word is it? | Tell me the word.
    | What does the picture say? | Read it. || Which word is this? | What word is in the picture?""",
    "color of text": """The $k is\x01 $c\x01. | What color is the $k? | What is the color of the $k? | Which color does the $k have?
    | Tell me the color of the $k. | What color is it? | Which color is it? | Name the color. | What is the color? | What color?
    || Which color is the $k?"""}
FORMS = {kind: [[f.strip() for f in part.split("|")] for part in forms.replace("\n", " ").split("||")]
         for kind, forms in FORMS.items()}
KINDS = {"one": ["color", "shape", "where", "one", "what"], "many": ["count", "color of many", "shape of many", "what"],
         "two": ["color of two", "shape of two", "where of two", "what"], "number": ["number", "color of text", "what"],
         "word": ["word", "color of text", "what"]}


def many(shape):
    return shape + ("es" if shape.endswith("s") else "s")


def kinds(s):
    """The kinds of question that a scene has an answer to"""
    return [k for k in KINDS[s["kind"]] if k != "where" or s["place"]]


def marked(color, shape):
    a, _, _ = with_article(color).partition(" ")
    return "%s\x01 %s %s\x01" % (a, color, shape)


def ask(rnd, s, kind, split="train"):
    """-> question, answer"""
    answer, forms, held = FORMS[kind][0][0], FORMS[kind][0][1:], FORMS[kind][1]
    slots = {"$k": s["kind"], "$t": s["text"], "$w": s["place"], "$n": text.NUMBERS[len(s["things"])]}
    things = [s["things"][i] for i in sorted(s["things"])]
    if s["text"]:
        slots["$c"], slots["$a"] = s["color"], "the %s\x01 %s\x01 in\x01 %s\x01" % (s["kind"], s["text"], s["color"])
    else:
        i = int(rnd() * 2) if s["kind"] == "two" else 0
        color, shape = things[i]["color"], things[i]["shape"]
        slots.update({"$c": color, "$s": shape, "$p": many(shape), "$a": marked(color, shape)})
        if s["kind"] == "two":
            slots["$w"] = (("on the left", "on the right") if s["grid"] == (1, 2) else ("at the top", "at the bottom"))[i]
            slots["$a"] = " and ".join(marked(t["color"], t["shape"]) for t in things)
        if s["kind"] == "many" and kind == "what":
            answer = "There are\x01 $n $c $p\x01."
    question = pick(rnd, held if split == "eval" else forms)
    for name, value in slots.items():
        question, answer = question.replace(name, str(value)), answer.replace(name, str(value))
    if split != "eval":                                # as people write, too
        x = rnd()
        if x < 0.05:
            question = pick(rnd, ("Look at the picture. ", "Please look. ", "Here is a picture. ", "Hello! ")) + question
        elif x < 0.1:
            question = question[0].lower() + question[1:]
        elif x < 0.15:
            question = question.rstrip("?.")
    return question, answer


# ---- drawing ---------------------------------------------------------------------------------------------------------

def fit(w, h, budget):
    """-> width, height in pixels in which the model sees a picture: image_fit() of parts/image.h"""
    f = math.sqrt(budget * 48 * 48 / (h * w))
    rows, columns = int(f * h / 48), int(f * w / 48)
    if not rows:
        rows, columns = 1, min(w // h, budget)
    if not columns:
        rows, columns = min(h // w, budget), 1
    return 48 * columns, 48 * rows


def glyphs(word):
    """-> (GLYPH_H, GLYPH_W) array of 0 and 1, the word in its middle"""
    a = np.zeros((GLYPH_H, GLYPH_W), np.float32)
    first = (GLYPH_W - (6 * len(word) - 1)) // 2
    for i, c in enumerate(word.upper()):
        for y, row in enumerate(FONT[c]):
            for x in range(5):
                a[1 + y, first + 6 * i + x] = row >> (4 - x) & 1
    return a


def text_turn(s, width, height):
    """-> (2, 3): from places in the picture to places in the bitmap of its text, both -1 .. 1 from edge to edge"""
    c, d = math.cos(s["angle"]), math.sin(s["angle"])
    a = np.array([[1, s["shear"]], [0, 1]]) @ np.array([[c, d], [-d, c]])
    a = np.array([[2 / (GLYPH_W * s["pixel"] * s["wide"])], [2 / (GLYPH_H * s["pixel"])]]) * a
    to = np.array([width / 2, height / 2])
    return np.concatenate((a * to, (a @ (to - (s["x"] * width, s["y"] * height)))[:, None]), 1)


def tables(scenes, w, h):
    """-> what draw() needs of all scenes, as arrays; lengths in parts of the shorter side"""
    n, width, height = len(scenes), w / min(w, h), h / min(w, h)
    t = {k: np.zeros((n, CELLS), np.float32) for k in ("x", "y", "r", "cos", "sin", "there")}
    t.update({k: np.zeros((n, 3), np.float32) for k in ("ink", "base", "across", "down")})
    t.update({k: np.ones(n, np.float32) for k in ("level", "sharp", "cloud", "noise")})
    t.update(shape=np.zeros((n, CELLS), np.int64), rgb=np.zeros((n, CELLS, 3), np.float32), grid=np.ones((n, 2), np.int64),
             bitmap=np.zeros((n, 1, GLYPH_H, GLYPH_W), np.float32), turn=np.zeros((n, 2, 3), np.float32))
    for i, s in enumerate(scenes):
        p = s["paper"]

        def ink(color):
            return [min(1, max(0, c / 255 + (d - 0.5) * 0.1)) for c, d in zip(COLORS[color], p)]

        t["grid"][i] = rows, columns = s["grid"]
        cw, ch = width / columns, height / rows
        for cell, o in s["things"].items():
            r = o["r"] * min(cw, ch)
            x, y = (min(1 - 1.05 * r / c, max(1.05 * r / c, at)) for c, at in ((cw, o["x"]), (ch, o["y"])))
            t["x"][i, cell], t["y"][i, cell], t["r"][i, cell] = (cell % columns + x) * cw, (cell // columns + y) * ch, r
            t["cos"][i, cell], t["sin"][i, cell], t["there"][i, cell] = math.cos(o["angle"]), math.sin(o["angle"]), 1
            t["shape"][i, cell], t["rgb"][i, cell] = SHAPES.index(o["shape"]), ink(o["color"])
        if s["text"]:
            t["bitmap"][i, 0], t["turn"][i], t["ink"][i] = glyphs(s["text"]), text_turn(s, width, height), ink(s["color"])
            t["level"][i], t["sharp"][i] = s["level"], s["sharp"]
        used = [ink(o["color"]) for o in s["things"].values()] or [ink(s["color"])]
        papers = [p[3 + 3 * k:6 + 3 * k] for k in range(5)]            # the first that no colour is close to
        far = [min(sum((a - b) ** 2 for a, b in zip(c, u)) for u in used) for c in papers]
        t["base"][i] = next((c for c, f in zip(papers, far) if f > 0.25), papers[far.index(max(far))])
        t["across"][i], t["down"][i] = 0.2 * (p[18] - 0.5), 0.2 * (p[19] - 0.5)
        t["cloud"][i], t["noise"][i] = 0.05 * p[20], 0.08 * p[21] ** 3
    return t


def distance(u, v, shape):
    """Signed distances of places (u, v) from the edges of shapes (numbers) around (0, 0), outside positive; v points down."""
    import torch
    rho, au = torch.sqrt(u * u + v * v), u.abs()
    sector = 2 * math.pi / 5
    a = (torch.remainder(torch.atan2(u, -v) + sector / 2, sector) - sector / 2).abs()
    heart = torch.minimum((au + v.abs()) / math.sqrt(2) - 0.62,
                          torch.sqrt((au - 0.438) ** 2 + (v + 0.438) ** 2) - 0.62)
    each = {"circle": rho - 1,
            "square": torch.maximum(au, v.abs()) - 0.8,
            "triangle": torch.maximum(v, 0.866 * au - 0.5 * v) - 0.5,
            "star": ((rho * torch.cos(a) - 1) * 0.2645 + rho * torch.sin(a) * 0.636) / 0.6888,
            "heart": heart,
            "moon": torch.maximum(rho - 1, 0.85 - torch.sqrt((u - 0.5) ** 2 + v * v)),
            "cross": torch.minimum(torch.maximum(au - 1, v.abs() - 0.3), torch.maximum(au - 0.3, v.abs() - 1)),
            "ring": (rho - 0.72).abs() - 0.26}
    d = each["circle"]
    for i, name in enumerate(SHAPES):
        d = torch.where(shape == i, each[name], d)
    return d


def draw(scenes, w, h, device="cpu", seed=0):
    """-> (n, 3, h, w) levels 0 .. 255, float32"""
    return paint(tables(scenes, w, h), w, h, device, seed)


def paint(t, w, h, device, seed):
    """As draw(); t: tables()"""
    import torch
    import torch.nn.functional as F
    n, short = len(t["level"]), min(w, h)
    g = torch.Generator(device=device).manual_seed(seed)
    t = {k: torch.from_numpy(v).to(device, non_blocking=True) for k, v in t.items()}
    x, y = ((torch.arange(k, device=device) + 0.5) / short for k in (w, h))
    rows, columns = t["grid"][:, 0, None], t["grid"][:, 1, None]
    row = torch.minimum((y * short / h * rows).long(), rows - 1)
    column = torch.minimum((x * short / w * columns).long(), columns - 1)
    cell = (row * columns)[:, :, None] + column[:, None]               # of each pixel

    def of(name):
        return t[name].gather(1, cell.view(n, -1)).view(n, h, w)

    dx, dy, r, cos, sin = x - of("x"), y[:, None] - of("y"), of("r").clamp_min(1e-3), of("cos"), of("sin")
    d = distance((cos * dx + sin * dy) / r, (cos * dy - sin * dx) / r, of("shape"))
    cover = ((0.5 - d * r * short).clamp(0, 1) * of("there"))[:, None]
    rgb = t["rgb"].gather(1, cell.view(n, -1, 1).expand(-1, -1, 3)).view(n, h, w, 3).permute(0, 3, 1, 2)
    across, down = x / x[-1] - 0.5, (y / y[-1] - 0.5)[:, None]
    cloud = F.interpolate(torch.randn(n, 1, 4, 4, device=device, generator=g), (h, w), mode="bicubic", align_corners=False)

    def wide(name):
        return t[name].view(n, -1, 1, 1)

    paper = wide("base") + wide("across") * across + wide("down") * down + wide("cloud") * cloud
    picture = paper + cover * (rgb - paper)
    s = F.grid_sample(t["bitmap"], F.affine_grid(t["turn"], (n, 1, h, w), align_corners=False), align_corners=False)
    cover = ((s - wide("level")) * wide("sharp") + 0.5).clamp(0, 1)
    picture = picture + cover * (wide("ink") - picture)
    picture = picture + wide("noise") * torch.randn(n, 3, h, w, device=device, generator=g)
    return (picture.clamp(0, 1) * 255).round()


def write_ppm(path, picture):
    """picture (3, h, w): levels"""
    with open(path, "wb") as f:
        f.write(b"P6\n%d %d\n255\n" % (picture.shape[2], picture.shape[1]))
        f.write(picture.permute(1, 2, 0).contiguous().byte().cpu().numpy().tobytes())


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--n", type=int, default=8)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--size", default="96x96")
    ap.add_argument("--kind", choices=SHARES, help="of all pictures; default: by their shares in training")
    ap.add_argument("--unseen", action="store_true")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    rnd = random.Random("pictures %d" % a.seed).random
    scenes = [scene(rnd, a.kind, a.unseen) for _ in range(a.n)]
    w, h = map(int, a.size.split("x"))
    with open(os.path.join(a.out, "questions.txt"), "w") as f:
        for i, (s, picture) in enumerate(zip(scenes, draw(scenes, w, h, seed=a.seed))):
            write_ppm(os.path.join(a.out, "%03d.ppm" % i), picture)
            for kind in kinds(s):
                question, answer = ask(rnd, s, kind, "eval")
                if kind == "what":
                    kind = "what (%s)" % s["kind"]
                f.write("%03d.ppm|%s|%s|%s\n" % (i, kind, question, answer.replace("\x01", "")))
