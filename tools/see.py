"""Training of the image tower with which gemma4-mini sees. The text model does not change: gradients pass through it.

The tower is one of the 26B-A4B form (gemma4v) in small: parts/vision.h has its formulas. It learns first what is in the pictures
(pictures.py), from classes, then from the answers to questions too. The vocabulary of gemma4-mini has no tokens that stand around
a picture, so its rows stand alone.
"""
import collections
import functools
import math
import multiprocessing
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import gemma4 as G
import gguf
import network as N
import pictures as P
import text
import train
from stories import pick
from tokenizer import BOS, PAD, SPACE, Tokenizer

DIM, LAYERS, HEADS, FFN = 128, 4, 4, 288       # of the tower
POSITIONS = 256                                # patches of a side, at most
PATCH, POOL, BASE = 16, 3, 100.0
PATCHES = 36864                                # of all pictures of a step
IDS = 28672                                    # of all conversations of a step, at most
ALONE = 0.15                                   # part of the time in which the tower learns without the text model
TARGET = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models", "gemma4-mini-q8_0.gguf")    # the text model
VECTORS = ("ln1", "attn_post_norm", "ln2", "ffn_post_norm", "attn_q_norm", "attn_k_norm")


# ---- the tower -------------------------------------------------------------------------------------------------------

def shapes(text_dim):
    """-> {tensor name: shape}, rows first. The patch matrix has its columns in the order channel, y, x."""
    s = {"v.patch_embd.weight": (DIM, 3 * PATCH * PATCH), "v.position_embd.weight": (2, POSITIONS, DIM)}
    for i in range(LAYERS):
        t = {n: (DIM // HEADS if n.startswith("attn_q") or n.startswith("attn_k") else DIM,) for n in VECTORS}
        t.update({"attn_q": (DIM, DIM), "attn_k": (DIM, DIM), "attn_v": (DIM, DIM), "attn_out": (DIM, DIM),
                  "ffn_gate": (FFN, DIM), "ffn_up": (FFN, DIM), "ffn_down": (DIM, FFN)})
        s.update({"v.blk.%d.%s.weight" % (i, n): shape for n, shape in t.items()})
    s["mm.input_projection.weight"] = (text_dim, DIM)
    return s


def init(text_dim, device, scale):
    """-> {tensor name: parameter}. scale: of the values of a soft row at the start, as embeddings have it"""
    g, p = torch.Generator().manual_seed(1), {}
    for name, shape in shapes(text_dim).items():
        if len(shape) > 1:
            w = torch.randn(shape, generator=g) / math.sqrt(shape[-1])
            w = w * (scale if name.startswith("mm.") else 1)
            if "position" in name:                 # waves: the column in one half of the values, the row in the other
                t = torch.arange(POSITIONS)[:, None] * 200 ** -(torch.arange(DIM // 4) / (DIM // 4))
                t = 0.3 * torch.cat((t.sin(), t.cos()), 1)
                w = torch.stack((F.pad(t, (0, DIM // 2)), F.pad(t, (DIM // 2, 0))))
        elif "attn_q_norm" in name or "attn_k_norm" in name:
            w = torch.full(shape, shape[0] ** -0.25)
        else:
            w = torch.full(shape, 0.4 if "post_norm" in name else 1.0)
        p[name] = w.to(device).requires_grad_(True)
    return p


def rotated(x, cos, sin):
    """x (B, n, heads, head): one half of a head by the column of the patch, the other by its row; cos, sin (n, 1, 2, head / 4)"""
    a, b = x.unflatten(-1, (2, 2, -1)).unbind(-2)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -2).flatten(-3)


def before(x, t, cos, sin, dt):
    """The part of a layer before attention. x (n, DIM) -> q, k, v (n, heads, head)"""
    a, head = N.rms(x, t["ln1"]), DIM // HEADS
    q, k, v = [N.linear(a, t["attn_" + n], dt).view(len(x), HEADS, head) for n in ("q", "k", "v")]
    q, k = rotated(N.rms(q, t["attn_q_norm"]), cos, sin), rotated(N.rms(k, t["attn_k_norm"]), cos, sin)
    return (q * math.sqrt(head)).to(dt), k.to(dt), N.rms(v).to(dt)


def after(x, o, t, dt):
    x = x + N.rms(N.linear(o, t["attn_out"], dt), t["attn_post_norm"])
    b = N.rms(x, t["ln2"])
    b = N.gelu(N.linear(b, t["ffn_gate"], dt)) * N.linear(b, t["ffn_up"], dt)
    return x + N.rms(N.linear(b, t["ffn_down"], dt), t["ffn_post_norm"])


@functools.lru_cache(None)
def pieces(fast):
    """-> the functions that are most of a step, compiled if fast"""
    return [N.compiled(f) if fast else f for f in (before, after, N.project, N.finish)]


def lengthened(x, n):
    """x (m, ..) -> (n, ..), zeros from m on: compiled pieces get rows of one number"""
    return F.pad(x, [0] * (2 * x.dim() - 1) + [n - len(x)]) if n > len(x) else x


class Tower:
    def __init__(self, p, dt=torch.bfloat16, fast=False):
        self.p, self.dt, self.n_rows = p, dt, PATCHES if fast else 0
        self.layers = [{n.split(".")[3]: v for n, v in p.items() if n.startswith("v.blk.%d." % i)} for i in range(LAYERS)]
        self.before, self.after = pieces(fast)[:2]

    def features(self, pictures):
        """pictures (B, 3, h, w): levels 0 .. 255 -> (B, h / 48 * w / 48, DIM)"""
        B, _, h, w = pictures.shape
        h, w, dev, head, dt = h // PATCH, w // PATCH, pictures.device, DIM // HEADS, self.dt
        x = pictures.view(B, 3, h, PATCH, w, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, -1)
        columns, rows = self.p["v.position_embd.weight"]
        x = N.linear(2 * (x / 255 - 0.5), self.p["v.patch_embd.weight"], dt).float()
        x = lengthened((x + (columns[None, :w] + rows[:h, None]).reshape(h * w, -1)).view(-1, DIM), self.n_rows)
        at = torch.stack(torch.meshgrid(torch.arange(h, device=dev), torch.arange(w, device=dev), indexing="ij")[::-1], -1)
        angle = at.view(h * w, 1, 2, 1) * BASE ** (-4.0 * torch.arange(head // 4, device=dev, dtype=torch.float64) / head)
        cos, sin = (lengthened(a.float().repeat(B, 1, 1, 1), self.n_rows) for a in (angle.cos(), angle.sin()))
        for t in self.layers:
            qkv = (y[:B * h * w].view(B, h * w, HEADS, head).transpose(1, 2) for y in self.before(x, t, cos, sin, dt))
            o = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(B * h * w, DIM)
            x = self.after(x, lengthened(o, self.n_rows), t, dt)
        y = x[:B * h * w].view(B, h // POOL, POOL, w // POOL, POOL, DIM).mean((2, 4)).reshape(B, -1, DIM) * math.sqrt(DIM)
        return N.rms(y)

    def soft_rows(self, features):
        return N.linear(features, self.p["mm.input_projection.weight"], self.dt).float()


def write(path, p, text_dim):
    keys = gguf.Keys()
    keys.str("general.architecture", "clip")
    keys.str("general.type", "mmproj")
    keys.str("general.name", "Gemma 4 mini image tower")
    keys.str("general.license", "mit")
    keys.str("general.description", "an image tower for gemma4-mini, trained on generated pictures")
    keys.flag("clip.has_vision_encoder", True)
    keys.str("clip.vision.projector_type", "gemma4v")
    for key, v in (("projection_dim", text_dim), ("image_size", 224), ("patch_size", PATCH), ("embedding_length", DIM),
                   ("feed_forward_length", FFN), ("block_count", LAYERS), ("attention.head_count", HEADS)):
        keys.u32("clip.vision." + key, v)
    keys.f32("clip.vision.attention.layer_norm_epsilon", G.EPS)
    keys.f32s("clip.vision.image_mean", [0.0] * 3)
    keys.f32s("clip.vision.image_std", [1.0] * 3)
    tensors = {n: w.detach().float().cpu().numpy() for n, w in p.items()}
    tensors["v.patch_embd.weight"] = tensors["v.patch_embd.weight"].reshape(DIM, 3, PATCH, PATCH)
    return gguf.write(path, keys, tensors, gguf.F16, lambda name, a, kind: gguf.F32 if a.ndim < 2 else kind)


def read(path, device):
    return {n: torch.from_numpy(a.reshape(DIM, -1) if "patch_embd" in n else a).to(device) for n, a in gguf.read(path)[1].items()}


# ---- the text model --------------------------------------------------------------------------------------------------

class Reader:
    """The text model, which does not learn."""

    def __init__(self, path, device, dt=torch.bfloat16, fast=False):
        self.form, self.dt, self.n_rows = G.MINI, dt, IDS if fast else 0
        p = {n: torch.from_numpy(a).to(device) for n, a in gguf.read(path)[1].items()}
        self.p = {n: a.to(dt) if a.dim() > 1 and "ffn_gate_inp" not in n and "token_embd" not in n else a for n, a in p.items()}
        self.table = p["token_embd.weight"].to(dt)
        self.layers = N.layer_weights(self.p, self.form.n_layers)
        self.angles = N.angles(4096, device)
        self.project, self.finish = pieces(fast)[2:]

    def rows(self, ids, soft, first):
        """ids (S, T), soft (S, n, dim) for the places from first on -> rows (S * T, dim)"""
        f, (S, T), n = self.form, ids.shape, soft.shape[1]
        x = N.embed(self.p, f, ids.reshape(-1))[0].view(S, T, -1)
        x = lengthened(torch.cat((x[:, :first], soft, x[:, first + n:]), 1).view(S * T, -1), self.n_rows)
        i = torch.arange(T, device=ids.device)
        picture = (i >= first) & (i < first + n)
        past = i[:, None] >= i
        mask = {False: past, True: (past | (picture[:, None] & picture)) & (i > i[:, None] - f.window)}
        turn = {s: [lengthened(t[:T].repeat(S, 1), self.n_rows) for t in self.angles[s]] for s in mask}
        for w, sliding in zip(self.layers, f.sliding):
            q, k, v = self.project(w, x, *turn[sliding], self.dt)
            k, v = (t[:S * T].view(S, T, -1) for t in (k, v))
            o = N.attend(q[:S * T].view(S, T, f.n_heads, -1), k, v, mask[sliding]).reshape(S * T, -1)
            x, _ = self.finish(w, x, lengthened(o, self.n_rows), None, f.n_used, self.dt)
        return x[:S * T]

    def logits(self, x):
        z = N.linear(N.rms(x, self.p["output_norm.weight"]), self.table, self.dt).float()
        return G.LOGIT_CAP * torch.tanh(z / G.LOGIT_CAP)


# ---- conversations ---------------------------------------------------------------------------------------------------

tokenizer = Tokenizer()


@functools.lru_cache(None)
def encoded(part):
    """-> ids and marks of a text"""
    return tokenizer.encode_marked(part)


@functools.lru_cache(None)
def said():
    """-> the ids that the text model can say. Those that its training text lacked have all the same row in its table, so none of
    them is ever the most likely one."""
    t = gguf.read(TARGET)[1]["token_embd.weight"]
    t = t - t.mean(0)
    t /= np.sqrt(np.square(t).sum(1, keepdims=True))
    return set((t @ t[PAD] < 0.99).nonzero()[0])


@functools.lru_cache(None)
def spelled(part):
    """As encoded(), in ids that the text model can say: a word with another id is spelled with the fewest of them"""
    ids, marks = [], []
    for i, piece in enumerate(part.split("\x01")):
        for word in tokenizer.words(piece):
            usual = tokenizer.encode(word)
            if not said().issuperset(usual):
                s, best = word.replace(" ", SPACE), [[]]
                for end in range(1, len(s) + 1):
                    tails = [(best[a], tokenizer.id.get(s[a:end])) for a in range(end)]
                    best.append(min((h + [t] for h, t in tails if h is not None and t in said()), key=len, default=None))
                usual = best[-1]
            ids += usual
            marks += [i & 1] * len(usual)
    return ids, marks


def turn(question, answer):
    """-> ids of a turn, and for each: how much it counts in the loss"""
    ask, (ids, marked) = encoded(question)[0] + encoded(text.END + text.MODEL + text.EMPTY_THOUGHT)[0], spelled(answer)
    end = encoded(text.END)[0][:1]
    return ask + ids + end, [0] * len(ask) + [1 + 3 * m for m in marked] + [1]


def earlier_turn(question, answer):
    return encoded(question + text.END + text.MODEL + answer.replace("\x01", "") + text.END + text.USER)[0]


def conversations(rnd, s, n):
    """-> n conversations about a scene: kind, ids after the picture, weights. Sometimes with an earlier turn, sometimes with a
    question that is not about the picture."""
    out, kinds = [], []
    for _ in range(n):
        kinds = kinds or sorted(P.kinds(s), key=lambda k: rnd() * (1 if k == "what" else 2))
        kind = "other" if rnd() < 0.02 else kinds.pop()
        talk = turn(*(pick(rnd, text.SMALL_TALK) if kind == "other" else P.ask(rnd, s, kind)))
        if rnd() < 0.1:
            before = earlier_turn(*P.ask(rnd, s, pick(rnd, P.kinds(s))))
            talk = before + talk[0], [0] * len(before) + talk[1]
        out.append((kind,) + talk)
    return out


def head_of(system):
    return [BOS] + encoded((text.SYSTEM + system + text.END if system else "") + text.USER)[0]


def pad(rows, fill):
    a = np.full((len(rows), max(map(len, rows))), fill)
    for i, r in enumerate(rows):
        a[i, :len(r)] = r
    return a


def laid_out(talks, head, n):
    """talks: (ids, weights) after a picture of n rows -> ids (S, T), and of each id that counts: its conversation, the id, its
    weight and the row that should tell it"""
    ids, weight = pad([head + [0] * n + t[0] for t in talks], 0), pad([[0] * (len(head) + n) + t[1] for t in talks], 0)
    of, at = weight.nonzero()
    return dict(ids=ids, of=of, wanted=ids[of, at], counts=weight[of, at].astype(np.float32), rows=of * ids.shape[1] + at - 1)


def judged(reader, soft, t, first):
    """soft (B, n, dim), t: laid_out(), as many conversations for each picture as for the others -> loss of each id that counts,
    whether it is the most likely one"""
    S, (B, n, dim) = len(t["ids"]), soft.shape
    soft = soft[:, None].expand(-1, S // B, -1, -1).reshape(S, n, dim)
    z = reader.logits(reader.rows(t["ids"], soft, first)[t["rows"]])
    return F.cross_entropy(z, t["wanted"], reduction="none"), z.argmax(-1) == t["wanted"]


def whole(hit, of, n):
    """-> for each conversation 1 if all of its ids are the most likely ones, else 0"""
    return torch.ones(n, device=hit.device).scatter_reduce(0, of, hit.float(), "amin").tolist()


# ---- batches ---------------------------------------------------------------------------------------------------------

LABELS = {"kind": list(P.SHARES), "color": sorted(P.COLORS), "shape": P.SHAPES, "place": sorted(P.PLACES),
          "count": list(range(1, P.MOST + 1)), "number": list("0123456789"), "word": P.WORDS, "grid": [(1, 2), (2, 1)],
          "color 0": sorted(P.COLORS), "shape 0": P.SHAPES, "color 1": sorted(P.COLORS), "shape 1": P.SHAPES}


def labels(s):
    """-> what the tower should tell of a scene without the text model: a number for each of LABELS, -100 if it has none"""
    things = [s["things"][i] for i in sorted(s["things"])]
    seen = {"kind": s["kind"], "place": s["place"]}
    if s["text"]:
        seen.update({"color": s["color"], s["kind"]: s["text"]})
    elif s["kind"] == "two":
        seen["grid"] = s["grid"]
        seen.update({"%s %d" % (k, i): t[k] for i, t in enumerate(things) for k in ("color", "shape")})
    else:
        seen.update(color=things[0]["color"], shape=things[0]["shape"], count=len(things))
    return [v.index(seen[k]) if seen.get(k) is not None else -100 for k, v in LABELS.items()]


def label_loss(z, wanted):
    z = z.split([len(v) for v in LABELS.values()], -1)
    return sum(F.cross_entropy(a, w, ignore_index=-100, reduction="sum") for a, w in zip(z, wanted.unbind(1))) / len(wanted)


def size(rnd, budget):
    """-> size of a picture's file, size in which the tower sees it"""
    short = P.between(rnd, 64, 128) if rnd() < 0.4 else P.between(rnd, 128, 384)
    wide = 1.0 if rnd() < 0.5 else P.between(rnd, 0.55, 1.8)
    w, h = (int(max(short, short * x) / 16) * 16 for x in (wide, 1 / wide))
    return (w, h), P.fit(w, h, budget)


def batch(step, done):
    """-> what a step trains on. done: part of the time that has passed"""
    rnd = random.Random("see %d" % step).random
    file, seen = size(rnd, 280 if rnd() < (0.4 if done < 0.75 else 0.6) else 70)
    n = seen[0] * seen[1] // 48 ** 2
    scenes = [P.scene(rnd, "one" if rnd() < (0.4 if done < 0.4 else 0.1) else None) for _ in range(PATCHES // (POOL ** 2 * n))]
    out = dict(file=file, seen=seen, tables=P.tables(scenes, *file), labels=np.array([labels(s) for s in scenes]))
    if done >= ALONE:
        head, asked = head_of(pick(rnd, text.PERSONAS) if rnd() < 0.1 else ""), 3 if n <= 70 else 5
        talks = [conversations(rnd, s, asked) for s in scenes]
        while True:
            flat = [t for some in talks for t in some[:asked]]
            if len(flat) * (len(head) + n + max(len(t[1]) for t in flat)) <= IDS:
                break
            asked -= 1
        out.update(first=len(head), names=[t[0] for t in flat], talks=laid_out([t[1:] for t in flat], head, n))
    return out


class Feed:
    """Makes batches in other processes, AHEAD of them before they are asked for."""
    AHEAD = 40

    def __init__(self, workers):
        self.pool, self.made, self.n = multiprocessing.get_context("fork").Pool(workers), collections.deque(), 0

    def next(self, done):
        while len(self.made) <= self.AHEAD:
            self.made.append(self.pool.apply_async(batch, (self.n, done)))
            self.n += 1
        return self.made.popleft().get(60)

    def forget(self):
        """Drops the batches made ahead."""
        self.made.clear()


@functools.lru_cache(None)
def resampler(n, m, device):
    """-> (m, n): the antialiased bicubic filter from n levels to m"""
    return F.interpolate(torch.eye(n)[None, None], (m, n), mode="bicubic", antialias=True, align_corners=False)[0, 0].to(device)


def views(t, file, seen, device, seed):
    """t: tables() -> the pictures as the tower gets them, without what engines round between two passes"""
    a = P.paint(t, *file, device, seed)
    if file != seen:
        across, down = (resampler(n, m, device) for n, m in zip(file, seen))
        a = (down @ a @ across.T).clamp(0, 255).round()
    return a


def moved(t, device):
    return {k: torch.from_numpy(v).to(device, non_blocking=True) for k, v in t.items()}


# ---- training --------------------------------------------------------------------------------------------------------

TESTS = {"forms of training": ("train", False, 70, (128, 128)), "70 tokens": ("eval", False, 70, (128, 128)),
         "280 tokens": ("eval", False, 280, (128, 128)), "280 tokens, wide": ("eval", False, 280, (320, 200)),
         "unseen pairs": ("eval", True, 280, (128, 128))}


@torch.no_grad()
def measure(tower, reader, device, log, n=256, titles=TESTS):
    """Logs for each kind of question the part of the answers that are right in every id: other pictures and other forms of the
    questions than in training."""
    for title in titles:
        (split, held_out, budget, file), right = TESTS[title], {}
        seen, head = P.fit(*file, budget), head_of("")
        for scene_kind in P.SHARES:
            if held_out and scene_kind in ("number", "word"):
                continue
            rnd = random.Random("measure %s %s" % (title, scene_kind)).random
            for start in range(0, n, 64):
                scenes = [P.scene(rnd, scene_kind, held_out) for _ in range(min(64, n - start))]
                soft = tower.soft_rows(tower.features(views(P.tables(scenes, *file), file, seen, device, start)))
                asked = [(s, k if k in P.kinds(s) else "what") for s in scenes for k in P.KINDS[scene_kind]]
                talks = moved(laid_out([turn(*P.ask(rnd, s, k, split)) for s, k in asked], head, soft.shape[1]), device)
                _, hit = judged(reader, soft, talks, len(head))
                for (s, k), good in zip(asked, whole(hit, talks["of"], len(asked))):
                    right.setdefault("%s (%s)" % (k, scene_kind) if k == "what" else k, []).append(good)
        log("right, %s: %s" % (title, ", ".join("%s %.3f" % (k, sum(v) / len(v)) for k, v in right.items())))


class Training:
    """Of the tower, towards answers of the text model."""

    def __init__(self, device, feed, fast, lr=0.02, adam_lr=2.5e-3, dt=torch.bfloat16, old=None):
        """old: path of a tower to continue from"""
        self.device, self.feed, self.steps, self.sums = device, feed, 0, {}
        self.reader, self.plain_reader = (Reader(TARGET, device, dt, f) for f in (fast, False))
        dim = self.reader.form.dim
        scale = (self.reader.p["token_embd.weight"].square().mean() * dim).sqrt().item()
        self.p = {n: w.requires_grad_(True) for n, w in read(old, device).items()} if old else init(dim, device, scale)
        self.tower, self.plain_tower = (Tower(self.p, dt, f) for f in (fast, False))
        self.teller = torch.zeros(sum(map(len, LABELS.values())), DIM, device=device, requires_grad=True)
        self.optimiser = train.Optimiser(dict(self.p, teller=self.teller), lr, adam_lr, fast=False)

    def gradients(self, done):
        """One batch forward and back."""
        b = self.feed.next(done)
        features = self.tower.features(views(b["tables"], b["file"], b["seen"], self.device, self.steps))
        told = label_loss(features.mean(1) @ self.teller.T, torch.from_numpy(b["labels"]).to(self.device))
        if "talks" in b:
            t = moved(b["talks"], self.device)
            loss, hit = judged(self.reader, self.tower.soft_rows(features), t, b["first"])
            ((loss * t["counts"]).sum() / t["counts"].sum() + told).backward()
        else:
            (told + 0 * self.p["mm.input_projection.weight"].sum()).backward()
        if self.steps % 20 == 0:
            self.sums.setdefault("told", []).append((told.item(), 0))
            if "talks" in b:
                each = torch.zeros(len(b["names"]), device=self.device).index_add_(0, t["of"], loss.detach()).tolist()
                for k, l, g in zip(b["names"], each, whole(hit, t["of"], len(each))):
                    self.sums.setdefault(k, []).append((l, g))

    def step(self, done, warm):
        """warm: share of the full rate that the number of steps allows"""
        self.gradients(done)
        self.optimiser.step(min(warm, (1 - done) / 0.6))
        self.steps += 1

    def summary(self):
        out = ", ".join("%s %.2f %.2f" % ((k,) + tuple(np.mean(v, 0))) for k, v in sorted(self.sums.items()))
        self.sums = {}
        return out

    def save(self, path):
        """Writes the file, unless a value is not a number. -> whether it did"""
        if not all(w.isfinite().all() for w in self.optimiser.p.values()):
            return False
        write(path + ".part", self.p, self.reader.form.dim)
        os.replace(path + ".part", path)
        return True


def train_tower(path, device, log, feed, seconds, fast=True, every=30, dt=torch.bfloat16, old=None):
    """Trains the tower for a time and writes its file, now and then and at the end. old: path of a tower to continue from, at
    half the rate and without the time alone"""
    rate, first, begin = 0.5 if old else 1.0, ALONE if old else 0, time.time()
    t = Training(device, feed, fast, 0.02 * rate, 2.5e-3 * rate, dt, old)
    log("tower: %d parameters" % sum(w.numel() for w in t.p.values()))
    for done in (0, 0, 1, 1):                      # the first steps compile; what they find is not used
        feed.forget()
        t.gradients(done)
        for w in t.optimiser.p.values():
            w.grad = None
    feed.forget()
    t.summary()
    start, shown, joined = time.time(), (time.time(), 0), None
    log("ready to train after %.0f s" % (start - begin))
    good = [w.detach().clone() for w in t.optimiser.p.values()]
    seconds -= start - begin
    while True:
        done = first + (1 - first) * (time.time() - start) / seconds
        if done >= 1:
            break
        if done >= ALONE and joined is None:
            joined = t.steps
        t.step(done, min(1, (t.steps - (joined or 0) + 1) / 100))
        now = time.time()
        if now - shown[0] >= every:
            each = 1e3 * (now - shown[0]) / (t.steps - shown[1])
            log("step %d  %.1f ms each  done %.2f  %s" % (t.steps, each, done, t.summary()))
            if t.save(path):
                good = [w.detach().clone() for w in t.optimiser.p.values()]
            else:
                log("not a number: back to the last good state")
                for w, g in zip(t.optimiser.p.values(), good):
                    w.data.copy_(g)
                t.optimiser = train.Optimiser(t.optimiser.p, t.optimiser.lr / 2, fast=False)
            if done > ALONE:
                measure(t.plain_tower, t.plain_reader, device, log, 48, ("70 tokens", "280 tokens"))
            shown = time.time(), t.steps
    t.save(path)
    log("%d steps" % t.steps)
    return t


def make(path, device, log, seconds, old=None):
    """Trains a tower, writes its file and logs what it sees. Forks, so nothing may have used the GPU before."""
    said()
    feed = Feed(max(2, (os.cpu_count() or 4) - 4))
    t = train_tower(path, device, log, feed, seconds, device == "cuda", old=old)
    feed.pool.terminate()
    measure(t.plain_tower, t.plain_reader, device, log)
    return t
