"""The two draft models of gemma4-mini: their training data, training, files and acceptance.

MTP is the Gemma 4 assistant: 4 layers without K and V of their own, which read the caches of the target's last sliding and
last global layer; one pass per id, chained. DFlash drafts a block: the pending id and 15 masks, 4 layers, which read three
layer outputs of the target. The training data are the target's own continuations of prompts, at temperature 0, and generated text.
"""
import math
import multiprocessing
import os
import random

import numpy as np
import torch
import torch.nn.functional as F

import gemma4 as G
import gguf
import network as N
import stories
import text
from network import compiled, linear, rms, rope
from prompts import MEASURED, SHARES, T, prompts
from tokenizer import BOS, MASK, Tokenizer
from train import DECAY_LEAN, Optimiser

B = 64                                         # rows of a step
DT = torch.bfloat16
MTP_STEPS, MTP_CHAIN, MTP_DEPTH = 1100, 5, 8   # trained and measured depth of the chain
MTP_WEIGHTS = (1, .85, .7, .55, .45)           # of the losses per depth
DFLASH_STEPS, ANCHORS = 2600, 24               # blocks per row
MTP = G.Form("gemma4-mini-mtp", "Gemma 4 mini MTP assistant", "2M", dim=128, n_heads=2, sliding=(True, True, True, False),
             window=G.MINI.window, ffn=(512,) * 4, n_ctx=G.MINI.n_ctx, n_shared=4)
BLOCK, TAPS = 16, (0, 2, 4)                    # DFlash: ids of a block; target layers whose outputs are read
D_SLIDING, D_WINDOW, D_HEADS, D_HEAD, D_FFN, D_BASE = (True, True, True, False), 256, 4, 128, 192, 1e6


# ---- rows ------------------------------------------------------------------------------------------------------------

def make_prompts(job):
    """-> ids (n, T), cut (n)"""
    rows = prompts(*job)
    ids, cut = np.zeros((len(rows), T), np.int64), np.zeros(len(rows), np.int64)
    for r, row in enumerate(rows):
        ids[r, :len(row)], cut[r] = row, len(row)
    return ids, cut


def make_text_rows(job):
    """Rows of documents, without the subjects that the draft models must not see -> ids (n, T)"""
    seed, n = job
    stories.LEAN = DECAY_LEAN
    tokenizer, rnd = Tokenizer(), random.Random("text rows " + seed).random
    rows = np.zeros((n, T), np.int64)
    for r in rows:
        ids = []
        while len(ids) < T:
            ids += [BOS] + tokenizer.encode(text.document(rnd, "draft", max_words=120).replace("\x01", ""))
        r[:] = ids[:T]
    return rows


def load_target(path, device, fast=True):
    _, t, _ = gguf.read(path)
    return N.Network(G.MINI, {n: torch.from_numpy(t[n]).to(device) for n in G.shapes(G.MINI)}, T + BLOCK, fast)


def continue_all(target, parts, temperature, device):
    """parts: [(ids (n, T), cut (n))] of prompts -> ids with the target's continuation, cut, last position of each"""
    ids, cut = (torch.from_numpy(np.concatenate(x)).to(device) for x in zip(*parts))
    last = torch.cat([target.generate(ids[i:i + 3072], cut[i:i + 3072], temperature, seed=i)
                      for i in range(0, len(ids), 3072)])
    return ids.cpu().numpy(), cut.cpu().numpy(), last.cpu().numpy()


def make_rows(path, target_file, device, log, n_train=12288, n_text=4096, workers=14):
    """Writes the training data of both draft models: prompts with the target's continuations, and documents."""
    some = [k for k, n in SHARES.items() for _ in range(n)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        prompts = pool.map(make_prompts, [("%d" % i, n_train // 48, "draft", some) for i in range(48)], 1)
        rows = {"text": np.concatenate(pool.map(make_text_rows, [("%d" % i, n_text // 16) for i in range(16)], 1))}
    rows["ids"], rows["cut"], rows["last"] = continue_all(load_target(target_file, device), prompts, 0.0, device)
    log("rows: %d ids of the target's own" % (rows["last"] - rows["cut"] + 1).sum())
    np.savez(path, **rows)


class Rows:
    """Batches: three of the target's own continuations, then one of text."""

    def __init__(self, rows, device, seed=3):
        self.ids, self.cut, self.last, self.text = (torch.from_numpy(rows[n]).to(device)
                                                    for n in ("ids", "cut", "last", "text"))
        self.device, self.g = device, torch.Generator(device=device).manual_seed(seed)

    def batch(self, step):
        """-> ids (B, T), first and last position of a label in each row, own: the labels are the target's choice"""
        own = step % 4 != 3
        i = torch.randint(len(self.ids if own else self.text), (B,), device=self.device, generator=self.g)
        if own:
            return self.ids[i], self.cut[i], self.last[i], True
        return self.text[i], torch.ones_like(i), torch.full_like(i, T - 1), False


# ---- used by both ----------------------------------------------------------------------------------------------------

def matrix(rows, cols, device):
    return (torch.randn(rows, cols) / math.sqrt(cols)).to(device).requires_grad_(True)


def vector(n, value, device):
    return torch.full((n,), float(value), device=device).requires_grad_(True)


def optimise(w, n_steps, loss_of_step, log, name):
    optimiser = Optimiser(w, fast=False)
    for step in range(n_steps):
        loss = loss_of_step(step)
        loss.backward()
        optimiser.step(min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / n_steps)))
        if (step + 1) % 200 == 0 or step + 1 == n_steps:
            log("%s: step %d  loss %.4f" % (name, step + 1, loss.item()))


def accepted_per_round(right, cut, last, most):
    """right (n, T): ids drafted right after each position. -> ids per target step when `most` are drafted"""
    ids = rounds = 0
    for r in range(len(right)):
        at, end = int(cut[r]), int(last[r])            # the id at `at` is pending: it has been sampled
        while at < end:
            n = min(int(right[r, at]), most, end - at)
            ids += n + 1 if at + n < end else n
            rounds += 1
            at += n + 1
    return ids / max(rounds, 1)


def measure(rows, right_of, depth, lengths, device):
    """rows: {(kind, temperature): ids, cut, last} of prompts that are not in the training data; right_of(ids (B, T)) -> (B, T) ids
    drafted right after each position. -> {(kind, temperature): acceptance per depth, {drafted: ids per target step}}"""
    out = {}
    pos = torch.arange(T, device=device)
    for key, row in rows.items():
        ids, cut, last = (torch.from_numpy(x).to(device) for x in row)
        padded = torch.cat((ids, ids[:1].expand(-len(ids) % B, -1)))
        right = torch.cat([right_of(padded[i:i + B]) for i in range(0, len(padded), B)])[:len(ids)]
        room = (last[:, None] - pos).clamp(0)
        right = torch.minimum(right, room)
        share = []
        for d in range(1, depth + 1):
            there = (pos >= cut[:, None]) & (room >= d)
            share.append(((right >= d) & there).sum().item() / max(1, there.sum().item()))
        right, cut, last = right.cpu().numpy(), cut.cpu().numpy(), last.cpu().numpy()
        out[key] = share, {n: accepted_per_round(right, cut, last, n) for n in lengths}
    return out


def measure_files(target_file, mtp_file, dflash_file, device, n=96, workers=14, fast=True):
    """The acceptance of both draft models for each kind of text at temperature 0 and 1 -> Markdown: a table per draft model."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        prompts = pool.map(make_prompts, [(k, n, "draft-eval", [k]) for k in MEASURED], 1)
    target, rows = load_target(target_file, device, fast), {}
    for temperature in (0, 1):
        all_rows = continue_all(target, prompts, float(temperature), device)
        rows.update({(kind, temperature): [x[i * n:(i + 1) * n] for x in all_rows] for i, kind in enumerate(MEASURED)})
    page = []
    for name, file, form, depth, lengths in (("MTP", mtp_file, Mtp, MTP_DEPTH, (1, 2, 3, 4, 6, 8)),
                                             ("DFlash", dflash_file, DFlash, BLOCK - 1, (1, 3, 7, 15))):
        weights = {k: torch.from_numpy(x).to(device) for k, x in gguf.read(file)[1].items()}
        measured = measure(rows, form(weights, target, device, fast).right, depth, lengths, device)
        head = ["%s, temperature" % name] + ["%d drafted" % k for k in lengths] + ["%d" % d for d in range(1, depth + 1)]
        page += ["| %s |" % " | ".join(head), "|---" * len(head) + "|"]
        for (kind, temperature), (share, ids_per_pass) in measured.items():
            page.append("| %s | %s |" % (
                " | ".join(["%s, %d" % (kind.replace("_", " "), temperature)] + ["%.2f" % x for x in ids_per_pass.values()]),
                " | ".join(("%.2f" % x).lstrip("0") for x in share)))
        page.append("")
    return "\n".join(page)


# ---- MTP -------------------------------------------------------------------------------------------------------------

MTP_LAYER = ["attn_norm", "attn_q", "attn_q_norm", "attn_output", "post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up",
             "ffn_down", "post_ffw_norm", "layer_output_scale"]


class Mtp:
    def __init__(self, w, target, device, fast=True):
        self.w, self.target = w, target
        self.layers = N.layer_weights(w, MTP.n_layers)
        row, key = torch.arange(T, device=device)[:, None], torch.arange(T, device=device)[None]
        self.mask = {False: key < row, True: (key < row) & (key > row - MTP.window)}
        self.layer = compiled(self.layer_rows) if fast else self.layer_rows

    @staticmethod
    def fresh(device):
        d, width = MTP.dim, G.MINI.dim
        w = {"token_embd.weight": matrix(G.N_VOCAB, d, device), "output_norm.weight": vector(d, 1, device),
             "nextn.pre_projection.weight": matrix(d, 2 * width, device),
             "nextn.post_projection.weight": matrix(width, d, device)}
        for i in range(MTP.n_layers):
            head, q = MTP.head_dim(i), MTP.n_heads * MTP.head_dim(i)
            parts = [vector(d, 1, device), matrix(q, d, device), vector(head, head ** -0.25, device), matrix(d, q, device),
                     vector(d, .5, device), vector(d, 1, device), matrix(MTP.ffn[i], d, device),
                     matrix(MTP.ffn[i], d, device), matrix(d, MTP.ffn[i], device), vector(d, .5, device),
                     vector(1, 1, device)]
            w.update({"blk.%d.%s.weight" % (i, n): t for n, t in zip(MTP_LAYER, parts)})
        return w

    @staticmethod
    def layer_rows(w, u, cos, sin, k, v, mask):
        n, t = u.shape[:2]
        q = linear(rms(u, w["attn_norm.weight"]), w["attn_q.weight"], DT).view(n, t, -1, len(w["attn_q_norm.weight"]))
        q = rope(rms(q, w["attn_q_norm.weight"]), cos[:, None], sin[:, None]).to(DT)
        o = N.attend(q, k, v, mask).reshape(n, t, -1)
        u = u + rms(linear(o, w["attn_output.weight"], DT), w["post_attention_norm.weight"])
        z = rms(u, w["ffn_norm.weight"])
        f = linear(N.gelu(linear(z, w["ffn_gate.weight"], DT)) * linear(z, w["ffn_up.weight"], DT), w["ffn_down.weight"], DT)
        return (u + rms(f, w["post_ffw_norm.weight"])) * w["layer_output_scale.weight"]

    def step(self, ids, r, keep):
        """One draft step at every position. ids (n, T): the id there; r (n, T, width): the target's normed output before it,
        or this drafter's own. -> rows before the head, r of the next step"""
        e = F.embedding(ids, self.target.p["token_embd.weight"]) * math.sqrt(G.MINI.dim)
        u = linear(torch.cat((e, r), -1), self.w["nextn.pre_projection.weight"], DT).float()
        for w, sliding in zip(self.layers, MTP.sliding):
            _, k, v = keep[G.MINI.n_layers - 2 if sliding else G.MINI.n_layers - 1]
            cos, sin = (t[:T] for t in self.target.angles[sliding])
            u = self.layer(w, u, cos, sin, k, v, self.mask[sliding])
        h = rms(u, self.w["output_norm.weight"])
        return h, linear(h, self.w["nextn.post_projection.weight"], DT).float()

    def run_target(self, ids):
        keep = []
        with torch.no_grad():
            h, _ = self.target.forward(ids, DT, keep)
            return h, torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1), keep

    @torch.no_grad()
    def right(self, ids):
        _, r, keep = self.run_target(ids)
        alive, n = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)
        for k in range(MTP_DEPTH):
            h, r = self.step(later(ids, k), r, keep)
            alive &= linear(h, self.w["token_embd.weight"], DT).argmax(-1) == later(ids, k + 1)
            n += alive
        return n


def later(x, k):
    """x at k positions further, zeros beyond the end"""
    return torch.cat((x[:, k:], torch.zeros_like(x[:, :k])), 1)


def mtp_loss(h, table, labels, soft, there):
    """Cross entropy with the labels, or with the target's distribution (soft: its logits)."""
    z = linear(h, table, DT).float()
    if soft is None:
        each = F.cross_entropy(z.view(-1, z.shape[-1]), labels.reshape(-1), reduction="none").view(labels.shape)
    else:
        each = -(torch.softmax(soft, -1) * torch.log_softmax(z, -1)).sum(-1)
    return (each * there).sum() / there.sum().clamp_min(1)


def train_mtp(out, rows_file, target_file, device, log, n_steps=MTP_STEPS, fast=True):
    torch.manual_seed(7)
    rows = np.load(rows_file)
    target, batches = load_target(target_file, device, fast), Rows(rows, device)
    w = Mtp.fresh(device)
    drafter, loss_of = Mtp(w, target, device, fast), compiled(mtp_loss) if fast else mtp_loss
    pos = torch.arange(T, device=device)

    def loss_of_step(step):
        ids, first, last, own = batches.batch(step)
        h, r, keep = drafter.run_target(ids)
        with torch.no_grad():
            soft = None if own else target.logits(h)
        total = 0
        for k in range(MTP_CHAIN):
            rows_, r = drafter.step(later(ids, k), r, keep)
            label = pos + k + 1
            there = ((label >= first[:, None]) & (label <= last[:, None]) & (pos >= 1)).float()
            total = total + MTP_WEIGHTS[k] * loss_of(rows_, w["token_embd.weight"], later(ids, k + 1),
                                                     None if own else later(soft, k), there)
        return total
    optimise(w, n_steps, loss_of_step, log, "mtp")
    keys = gguf.Keys()
    a = "gemma4-assistant."
    G.general_keys(keys, "gemma4-assistant", MTP.name, MTP.size, "drafter for gemma4-mini")
    G.model_keys(keys, a, MTP, MTP.ffn[0], [1] * MTP.n_layers)
    keys.u32(a + "embedding_length_out", G.MINI.dim)
    keys.u32(a + "nextn_predict_layers", MTP.n_layers)
    G.tokenizer_keys(keys, True)
    tensors = dict({n: x.detach().cpu().numpy() for n, x in w.items()}, **{"rope_freqs.weight": G.rope_freqs()})
    gguf.write(out, keys, tensors, gguf.Q8_0, G.type_of)


# ---- DFlash ----------------------------------------------------------------------------------------------------------

D_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm", "ffn_gate",
           "ffn_up", "ffn_down"]


class DFlash:
    def __init__(self, w, target, device, fast=True):
        self.w, self.target, self.device = w, target, device
        self.layers = N.layer_weights(w, len(D_SLIDING))
        angle = torch.arange(T + BLOCK, device=device, dtype=torch.float64)[:, None] * \
            D_BASE ** (-torch.arange(D_HEAD // 2, device=device, dtype=torch.float64) * 2 / D_HEAD)
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        self.layer = compiled(self.layer_rows) if fast else self.layer_rows

    @staticmethod
    def fresh(device):
        d, q = G.MINI.dim, D_HEADS * D_HEAD
        w = {"fc.weight": matrix(d, len(TAPS) * d, device), "enc.output_norm.weight": vector(d, 1, device),
             "output_norm.weight": vector(d, 1, device)}
        for i in range(len(D_SLIDING)):
            parts = [vector(d, 1, device), matrix(q, d, device), matrix(D_HEAD, d, device), matrix(D_HEAD, d, device),
                     matrix(d, q, device), vector(D_HEAD, 1, device), vector(D_HEAD, 1, device), vector(d, 1, device),
                     matrix(D_FFN, d, device), matrix(D_FFN, d, device), matrix(d, D_FFN, device)]
            w.update({"blk.%d.%s.weight" % (i, n): t for n, t in zip(D_LAYER, parts)})
        return w

    @staticmethod
    def layer_rows(w, u, context, cos_q, sin_q, cos_c, sin_c, mask):
        """u (n, rows, dim): the rows of all blocks; context (n, T, dim): from the target's outputs. Keys: context, then rows."""
        n, t = u.shape[:2]
        z = rms(u, w["attn_norm.weight"])
        q = rms(linear(z, w["attn_q.weight"], DT).view(n, t, D_HEADS, D_HEAD), w["attn_q_norm.weight"])
        q = (rope(q, cos_q[:, :, None], sin_q[:, :, None]) / math.sqrt(D_HEAD)).to(DT)
        k = torch.cat((rope(rms(linear(context, w["attn_k.weight"], DT), w["attn_k_norm.weight"]), cos_c, sin_c),
                       rope(rms(linear(z, w["attn_k.weight"], DT), w["attn_k_norm.weight"]), cos_q, sin_q)), 1).to(DT)
        v = linear(torch.cat((context, z), 1), w["attn_v.weight"], DT)
        u = u + linear(N.attend(q, k, v, mask).reshape(n, t, -1), w["attn_output.weight"], DT).float()
        z = rms(u, w["ffn_norm.weight"])
        return u + linear(F.silu(linear(z, w["ffn_gate.weight"], DT)) * linear(z, w["ffn_up.weight"], DT),
                          w["ffn_down.weight"], DT).float()

    def blocks(self, ids, taps, anchors):
        """Drafts after the anchors (n, A), positions of pending ids -> normed rows (n, A, BLOCK - 1, dim)"""
        (n, A), d = anchors.shape, G.MINI.dim
        context = rms(linear(torch.cat(taps, -1), self.w["fc.weight"], DT), self.w["enc.output_norm.weight"])
        at = (anchors[:, :, None] + torch.arange(BLOCK, device=self.device)).view(n, -1)
        block = torch.full((n, A, BLOCK), MASK, device=self.device)
        block[:, :, 0] = ids.gather(1, anchors)
        u = F.embedding(block.view(n, -1), self.target.p["token_embd.weight"]) * math.sqrt(d)
        row, key = torch.arange(A * BLOCK, device=self.device), torch.arange(T, device=self.device)
        same = row[:, None] // BLOCK == row[None] // BLOCK
        seen = key < anchors.repeat_interleave(BLOCK, 1)[:, :, None]
        near = seen & (at[:, :, None] - key < D_WINDOW)
        mask = {False: torch.cat((seen, same.expand(n, -1, -1)), 2),                     # bidirectional inside the block
                True: torch.cat((near, (same & (row[None] <= row[:, None])).expand(n, -1, -1)), 2)}
        for w, sliding in zip(self.layers, D_SLIDING):
            u = self.layer(w, u, context, self.cos[at], self.sin[at], self.cos[:T], self.sin[:T], mask[sliding])
        return rms(u, self.w["output_norm.weight"]).view(n, A, BLOCK, d)[:, :, 1:]

    def run_target(self, ids):
        keep = []
        with torch.no_grad():
            self.target.forward(ids, DT, keep)
        return [keep[i][0] for i in TAPS]

    @torch.no_grad()
    def right(self, ids):
        taps, n = self.run_target(ids), torch.zeros_like(ids)
        padded = F.pad(ids, (0, BLOCK))
        for s in range(0, T, ANCHORS):
            anchors = torch.arange(s, s + ANCHORS, device=self.device).expand(len(ids), -1).contiguous()
            z = linear(self.blocks(ids, taps, anchors), self.target.p["token_embd.weight"], DT).float()
            z[..., MASK] = -1e9
            at = anchors[:, :, None] + torch.arange(1, BLOCK, device=self.device)
            wanted = padded.gather(1, at.view(len(ids), -1)).view(at.shape)
            n[:, s:s + ANCHORS] = (z.argmax(-1) == wanted).long().cumprod(-1).sum(-1)
        return n


def dflash_loss(h, table, labels, weight):
    z = linear(h, table, DT).float()
    z = G.LOGIT_CAP * torch.tanh(z / G.LOGIT_CAP)
    each = F.cross_entropy(z.view(-1, z.shape[-1]), labels.reshape(-1), reduction="none").view(labels.shape)
    return (each * weight).sum() / weight.sum().clamp_min(1e-6)


def train_dflash(out, rows_file, target_file, device, log, n_steps=DFLASH_STEPS, fast=True):
    torch.manual_seed(8)
    rows = np.load(rows_file)
    target, batches = load_target(target_file, device, fast), Rows(rows, device, 4)
    w = DFlash.fresh(device)
    drafter, loss_of = DFlash(w, target, device, fast), compiled(dflash_loss) if fast else dflash_loss
    ahead = torch.arange(1, BLOCK, device=device)
    fade = torch.exp(-(ahead - 1) / 6.0)                # earlier ids count more: a wrong one ends the draft

    def loss_of_step(step):
        ids, first, last, _ = batches.batch(step)
        lo, hi = first.clamp(min=1), (last - 1).clamp(min=2)
        share = torch.rand(B, ANCHORS, device=device, generator=batches.g)
        anchors = (lo[:, None] + share * (hi - lo + 1)[:, None].clamp(min=1)).long().clamp(1, T - 2)
        h = drafter.blocks(ids, drafter.run_target(ids), anchors)
        at = anchors[:, :, None] + ahead
        labels = ids.gather(1, at.clamp(max=T - 1).view(B, -1)).view(at.shape)
        return loss_of(h, target.p["token_embd.weight"], labels, (at <= last[:, None, None]).float() * fade)
    optimise(w, n_steps, loss_of_step, log, "dflash")
    keys = gguf.Keys()
    G.general_keys(keys, "dflash", "Gemma 4 mini DFlash", "2M", "block drafter for gemma4-mini")
    for key, v in (("block_count", len(D_SLIDING)), ("context_length", G.MINI.n_ctx), ("embedding_length", G.MINI.dim),
                   ("feed_forward_length", D_FFN), ("attention.head_count", D_HEADS), ("attention.head_count_kv", 1),
                   ("attention.key_length", D_HEAD), ("attention.value_length", D_HEAD), ("block_size", BLOCK),
                   ("attention.sliding_window", D_WINDOW), ("vocab_size", G.N_VOCAB)):
        keys.u32("dflash." + key, v)
    keys.f32("dflash.rope.freq_base", D_BASE)
    keys.f32("dflash.attention.layer_norm_rms_epsilon", G.EPS)
    keys.f32("dflash.final_logit_softcapping", G.LOGIT_CAP)
    keys.f32("dflash.embedding_scale", math.sqrt(G.MINI.dim))
    keys.i32s("dflash.target_layers", [i + 1 for i in TAPS])          # "input of layer i + 1" is the output of layer i
    keys.flags("dflash.attention.sliding_window_pattern", D_SLIDING)
    G.tokenizer_keys(keys, True)
    gguf.write(out, keys, {n: x.detach().cpu().numpy() for n, x in w.items()}, gguf.Q8_0, G.type_of)
