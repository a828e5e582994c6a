"""Training of the image tower with which gemma4-mini sees. The text model does not change: gradients pass through it.

The tower is one of the 26B-A4B form (gemma4v) in small: parts/vision.h has its formulas. It learns from the answers to questions
about pictures alone (pictures.py). The vocabulary of gemma4-mini has no tokens that stand around a picture, so its rows stand alone.
"""
import functools
import math
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
from tokenizer import BOS, Tokenizer

DIM, LAYERS, HEADS, FFN = 128, 4, 4, 288       # of the tower
POSITIONS = 256                                # patches of a side, at most
PATCH, POOL, BASE = 16, 3, 100.0
ROWS = 12288                                   # rows of pictures in a step
ASKED = 2                                      # questions about each picture of a step
NAME = "gemma4-mini-mmproj-f16.gguf"
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
            w = w * (0.1 if "position" in name else scale if name.startswith("mm.") else 1)
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


def soft_rows(p, pictures, dt=torch.bfloat16):
    """pictures (B, 3, h, w): levels 0 .. 255 -> (B, h / 48 * w / 48, dim of the text model)"""
    B, _, h, w = pictures.shape
    h, w, dev, head = h // PATCH, w // PATCH, pictures.device, DIM // HEADS
    x = pictures.view(B, 3, h, PATCH, w, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, -1)
    columns, rows = p["v.position_embd.weight"]
    x = N.linear(2 * (x / 255 - 0.5), p["v.patch_embd.weight"], dt).float()
    x = x + (columns[None, :w] + rows[:h, None]).reshape(h * w, -1)
    at = torch.stack(torch.meshgrid(torch.arange(h, device=dev), torch.arange(w, device=dev), indexing="ij")[::-1], -1)
    f = BASE ** (-4.0 * torch.arange(head // 4, device=dev, dtype=torch.float64) / head)
    angle = at.view(h * w, 1, 2, 1) * f
    cos, sin = angle.cos().float(), angle.sin().float()
    for i in range(LAYERS):
        t = {n.split(".")[3]: v for n, v in p.items() if n.startswith("v.blk.%d." % i)}
        a = N.rms(x, t["ln1"])
        q, k, v = (N.linear(a, t["attn_" + n], dt).view(B, h * w, HEADS, head) for n in "qkv")
        q, k = (rotated(N.rms(y, t[n]), cos, sin) for y, n in ((q, "attn_q_norm"), (k, "attn_k_norm")))
        o = F.scaled_dot_product_attention(*(y.transpose(1, 2).to(dt) for y in (q * math.sqrt(head), k, N.rms(v))))
        x = x + N.rms(N.linear(o.transpose(1, 2).reshape(B, h * w, DIM), t["attn_out"], dt), t["attn_post_norm"])
        b = N.rms(x, t["ln2"])
        b = N.gelu(N.linear(b, t["ffn_gate"], dt)) * N.linear(b, t["ffn_up"], dt)
        x = x + N.rms(N.linear(b, t["ffn_down"], dt), t["ffn_post_norm"])
    y = x.view(B, h // POOL, POOL, w // POOL, POOL, DIM).mean((2, 4)).reshape(B, -1, DIM) * math.sqrt(DIM)
    return N.linear(N.rms(y), p["mm.input_projection.weight"], dt).float()


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

    def __init__(self, path, device, dt=torch.bfloat16):
        self.form, self.dt = G.MINI, dt
        p = {n: torch.from_numpy(a).to(device) for n, a in gguf.read(path)[1].items()}
        self.p = {n: a.to(dt) if a.dim() > 1 and "ffn_gate_inp" not in n and "token_embd" not in n else a for n, a in p.items()}
        self.table = p["token_embd.weight"].to(dt)
        self.layers = N.layer_weights(self.p, self.form.n_layers)
        self.angles = N.angles(4096, device)

    def rows(self, ids, soft, first):
        """ids (S, T), soft (S, n, dim) for the places from first on -> normed rows (S, T, dim)"""
        f, (S, T), n = self.form, ids.shape, soft.shape[1]
        x = N.embed(self.p, f, ids.reshape(-1))[0].view(S, T, -1)
        x = torch.cat((x[:, :first], soft, x[:, first + n:]), 1).view(S * T, -1)
        i = torch.arange(T, device=ids.device)
        picture = (i >= first) & (i < first + n)
        past = i[:, None] >= i
        mask = {False: past, True: (past | (picture[:, None] & picture)) & (i > i[:, None] - f.window)}
        kv = {}
        for l, w in enumerate(self.layers):
            cos, sin = (t[None, :T].expand(S, -1, -1).reshape(S * T, -1) for t in self.angles[f.sliding[l]])
            q, k, v = N.project(w, x, cos, sin, self.dt)
            kv[l] = k.view(S, T, -1), v.view(S, T, -1)
            o = N.attend(q.view(S, T, f.n_heads, -1), *kv[l], mask[f.sliding[l]])
            x, _ = N.finish(w, x, o.reshape(S * T, -1), None, f.n_used, self.dt)
        return N.rms(x, self.p["output_norm.weight"]).view(S, T, -1)

    def logits(self, h):
        z = N.linear(h, self.table, self.dt).float()
        return G.LOGIT_CAP * torch.tanh(z / G.LOGIT_CAP)


# ---- batches ---------------------------------------------------------------------------------------------------------

tokenizer = Tokenizer()


@functools.lru_cache(None)
def encoded(part):
    """-> ids and marks of a text"""
    return tokenizer.encode_marked(part)


def turn(question, answer):
    """-> ids of a turn, and for each: how much it counts in the loss"""
    ask, (ids, marked) = encoded(question)[0] + encoded(text.END + text.MODEL + text.EMPTY_THOUGHT)[0], encoded(answer)
    end = encoded(text.END)[0][:1]
    return ask + ids + end, [0] * len(ask) + [1 + 3 * m for m in marked] + [1]


def earlier_turn(question, answer):
    return encoded(question + text.END + text.MODEL + answer.replace("\x01", "") + text.END + text.USER)[0]


def conversation(rnd, s, kind, split):
    """-> ids after the picture, weights. Sometimes an earlier turn, in training also a question that is not about the picture."""
    before, x = [], rnd()
    if x < 0.2:
        before = earlier_turn(*P.ask(rnd, s, pick(rnd, P.kinds(s)), split))
    if kind == "other":
        question, answer = pick(rnd, text.SMALL_TALK)
    else:
        question, answer = P.ask(rnd, s, kind, split)
    ids, weight = turn(question, answer)
    return before + ids, [0] * len(before) + weight


def pad(rows, fill):
    a = np.full((len(rows), max(map(len, rows))), fill)
    for i, r in enumerate(rows):
        a[i, :len(r)] = r
    return a


def size(rnd, budget):
    """-> size of a picture's file, size in which the tower sees it"""
    short = int(P.between(rnd, 64, 128) if rnd() < 0.4 else P.between(rnd, 128, 384))
    wide = 1.0 if rnd() < 0.5 else P.between(rnd, 0.55, 1.8)
    w, h = max(short, int(short * wide)), max(short, int(short / wide))
    return (w, h), P.fit(w, h, budget)


def views(scenes, file, seen, device, seed):
    """The pictures of scenes as the tower gets them, without what engines round between two passes"""
    a = P.draw(scenes, *file, device, seed)
    if file != seen:
        a = F.interpolate(a, seen[::-1], mode="bicubic", antialias=True, align_corners=False).clamp(0, 255).round()
    return a


def run(p, reader, a, talks, system, device, dt):
    """a: pictures; talks: conversations, as many for each picture as for the others -> loss of each that counts, its weight, whether
    it is the most likely id, and the conversation it is in"""
    soft = soft_rows(p, a, dt).repeat_interleave(len(talks) // len(a), 0)
    n = soft.shape[1]
    head = [BOS] + encoded((text.SYSTEM + system + text.END if system else "") + text.USER)[0]
    ids, weight = pad([head + [0] * n + t[0] for t in talks], 0), pad([[0] * (len(head) + n) + t[1] for t in talks], 0)
    of, at = weight.nonzero()
    wanted, counts, rows = ids[of, at], weight[of, at].astype(np.float32), of * ids.shape[1] + at - 1
    ids, of, wanted, counts, rows = (torch.from_numpy(t).to(device, non_blocking=True) for t in (ids, of, wanted, counts, rows))
    z = reader.logits(reader.rows(ids, soft, len(head)).flatten(0, 1)[rows])
    return F.cross_entropy(z, wanted, reduction="none"), counts, z.argmax(-1) == wanted, of


def whole(hit, of, n):
    """-> for each conversation 1 if all of its ids are the most likely ones, else 0"""
    return torch.ones(n, device=hit.device).scatter_reduce(0, of, hit.float(), "amin").tolist()


# ---- training --------------------------------------------------------------------------------------------------------

def batch(step):
    """-> what a step trains on"""
    rnd = random.Random("see %d" % step).random
    file, seen = size(rnd, 280 if rnd() < 0.45 else 70)
    n = max(8, ROWS // (seen[0] * seen[1] // 48 ** 2))
    scenes = [P.scene(rnd) for _ in range(n)]
    system = pick(rnd, text.PERSONAS) if rnd() < 0.15 else ""
    talks, names = [], []
    for s in scenes:
        for _ in range(ASKED):
            kind = "other" if rnd() < 0.06 else pick(rnd, P.kinds(s))
            talks.append(conversation(rnd, s, kind, "train"))
            names.append(kind)
    return scenes, file, seen, talks, names, system


@torch.no_grad()
def measure(p, reader, device, log, n=256, dt=torch.bfloat16):
    """Logs for each kind of question the part of the answers that are right in every id: other pictures and other forms of the
    questions than in training. -> {row: part}"""
    out = {}
    for title, split, held_out, budget, file in (
            ("forms of training", "train", False, 70, (128, 128)), ("70 tokens", "eval", False, 70, (128, 128)),
            ("280 tokens", "eval", False, 280, (128, 128)), ("280 tokens, wide", "eval", False, 280, (320, 200)),
            ("unseen pairs", "eval", True, 280, (128, 128))):
        seen, right = P.fit(*file, budget), {}
        for scene_kind in P.SHARES:
            if held_out and scene_kind in ("number", "word"):
                continue
            rnd = random.Random("measure %s %s" % (title, scene_kind)).random
            for start in range(0, n, 64):
                scenes = [P.scene(rnd, scene_kind, held_out) for _ in range(min(64, n - start))]
                a = views(scenes, file, seen, device, start)
                asked = [(s, k if k in P.kinds(s) else "what") for s in scenes for k in P.KINDS[scene_kind]]
                talks = [turn(*P.ask(rnd, s, k, split)) for s, k in asked]
                _, _, hit, of = run(p, reader, a, talks, "", device, dt)
                for (s, k), good in zip(asked, whole(hit, of, len(talks))):
                    right.setdefault("%s (%s)" % (k, scene_kind) if k == "what" else k, []).append(good)
        for k, v in right.items():
            out[title, k] = sum(v) / len(v)
        log("right, %s: %s" % (title, ", ".join("%s %.3f" % (k, sum(v) / len(v)) for k, v in right.items())))
    return out


def train_tower(path, target, device, log, n_steps=4000, lr=0.02, adam_lr=2.5e-3, dt=torch.bfloat16, every=200):
    """Trains the tower and writes its file."""
    reader = Reader(target, device, dt)
    scale = (reader.p["token_embd.weight"].square().mean() * reader.form.dim).sqrt().item()
    p = init(reader.form.dim, device, scale)
    log("tower: %d parameters, start scale %.2f" % (sum(w.numel() for w in p.values()), scale))
    optimiser = train.Optimiser(p, lr, adam_lr, fast=False)
    start, sums = time.time(), {}
    for step in range(n_steps):
        scenes, file, seen, talks, names, system = batch(step)
        loss, counts, hit, of = run(p, reader, views(scenes, file, seen, device, step), talks, system, device, dt)
        ((loss * counts).sum() / counts.sum()).backward()
        optimiser.step(min(1.0, (step + 1) / 100, (n_steps - step) / (n_steps * 0.5)))
        if step % 10 == 0:
            each = torch.zeros(len(talks), device=device).index_add_(0, of, loss.detach()).tolist()
            for k, l, g in zip(names, each, whole(hit, of, len(talks))):
                sums.setdefault(k, []).append((l, g))
        if (step + 1) % every == 0 or step in (0, 9) or step + 1 == n_steps:
            log("step %d  %.0f s  %s  %s" % (step + 1, time.time() - start, "%dx%d" % seen, ", ".join(
                "%s %.2f %.2f" % (k, np.mean([x[0] for x in v]), np.mean([x[1] for x in v])) for k, v in sorted(sums.items()))))
            sums = {}
            write(path + ".part", p, reader.form.dim)
            os.replace(path + ".part", path)
    return p, reader
