"""Training rows and the training of a model.

Rows: whole documents one after the other, cut at the row's length. The batch of step s is a function of s and of the number
of steps, so training can stop and resume.
"""
import math
import multiprocessing
import os
import random
import time

import numpy as np

import stories
import text
from tokenizer import BOS, Tokenizer

BATCH_IDS = 65536
SHORT, LONG, LONGEST = 1024, 4096, 8192        # ids of a row
DECAY = 0.7        # fraction of steps at full rate; then the rate falls to 0, rows get longer and the text prefers first choices
DECAY_LEAN = 2.0   # stories.LEAN from then on
MARK = 1 << 15     # in a stored id: counts more in the loss


# ---- rows ------------------------------------------------------------------------------------------------------------

def row_length(step, n_steps):
    return (SHORT, SHORT, SHORT, LONG)[step % 4] if step < DECAY * n_steps else (SHORT, LONG, SHORT, LONGEST)[step % 4]


def row(tokenizer, rnd, T):
    """T + 1 marked ids. Rows longer than SHORT start with planted keys in a long text."""
    ids, marked = [], []
    while len(ids) <= T:
        if ids or T == SHORT:
            d = text.document(rnd)
        else:
            d = text.long_document(rnd, T * 0.7)
        a, b = tokenizer.encode_marked(d)
        if not ids and T > SHORT and len(a) >= T:
            continue                                   # the questions would be cut off
        ids += [BOS] + a
        marked += [0] + b
    return np.array(ids[:T + 1], np.uint16) | np.array(marked[:T + 1], np.uint16) * MARK


def make_batch(job):
    path, step, n_steps = job
    if os.path.exists(path):
        return
    stories.LEAN = 1.0 if step < DECAY * n_steps else DECAY_LEAN
    tokenizer, rnd, T = make_batch.tokenizer, random.Random("batch %d" % step).random, row_length(step, n_steps)
    np.save(path + ".tmp.npy", np.stack([row(tokenizer, rnd, T) for _ in range(BATCH_IDS // T)]))
    os.replace(path + ".tmp.npy", path)


def batch_path(folder, step, n_steps):
    return os.path.join(folder, "%d-%05d.npy" % (n_steps, step))


def make_text(folder, n_steps, workers):
    """Writes the batches of all steps, in order."""
    os.makedirs(folder, exist_ok=True)
    make_batch.tokenizer = Tokenizer()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        jobs = ((batch_path(folder, s, n_steps), s, n_steps) for s in range(n_steps))
        for _ in pool.imap_unordered(make_batch, jobs, 8):
            pass


def load_batch(folder, step, n_steps):
    """Waits for the batch if it does not exist yet. -> ids (rows, T + 1) int64, weights float32"""
    path = batch_path(folder, step, n_steps)
    while not os.path.exists(path):
        time.sleep(0.05)
    a = np.load(path)
    return (a & (MARK - 1)).astype(np.int64), 1 + 3 * (a >= MARK).astype(np.float32)


# ---- optimiser -------------------------------------------------------------------------------------------------------

class Optimiser:
    """Muon for matrices: momentum, made orthogonal by Newton-Schulz steps, those of one shape together. AdamW for the rest:
    vectors, routers and tables of embeddings."""

    def __init__(self, p, lr=0.02, adam_lr=2.5e-3, fast=True):
        import torch
        from network import compiled
        self.torch, self.p, self.lr = torch, p, lr
        self.groups = {}
        for n, w in p.items():
            if w.dim() > 1 and not any(t in n for t in ("token_embd", "position_embd", "ffn_gate_inp")):
                self.groups.setdefault(tuple(w.shape[-2:]), []).append(n)
        self.momentum = {n: torch.zeros_like(p[n]) for names in self.groups.values() for n in names}
        rest = [n for n in p if n not in self.momentum]
        tables = [p[n] for n in rest if p[n].dim() > 1]
        scales = [p[n] for n in rest if n.endswith("ffn_gate_inp.scale")]
        vectors = [p[n] for n in rest if p[n].dim() == 1 and not n.endswith("ffn_gate_inp.scale")]
        groups = [dict(params=w, lr=lr, weight_decay=decay) for w, lr, decay in
                  ((tables, adam_lr, 0.01), (scales, 4 * adam_lr, 0.0), (vectors, adam_lr, 0.0)) if w]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.97), eps=1e-10)
        self.base = [g["lr"] for g in self.adam.param_groups]
        self.orthogonal = compiled(self.newton_schulz) if fast else self.newton_schulz

    @staticmethod
    def newton_schulz(x):
        x = x.bfloat16()
        wide = x.shape[-2] <= x.shape[-1]
        x = x if wide else x.transpose(-1, -2)
        x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
        for _ in range(5):
            a = x @ x.transpose(-1, -2)
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return (x if wide else x.transpose(-1, -2)).float()

    def step(self, rate):
        """rate: share of the full learning rate"""
        t, momentum, decay = self.torch, 0.95, 0.02
        for (rows, cols), names in self.groups.items():
            w, g, m = [self.p[n].data for n in names], [self.p[n].grad for n in names], [self.momentum[n] for n in names]
            t._foreach_mul_(m, momentum)
            t._foreach_add_(m, g)
            u = t._foreach_mul(m, momentum)
            t._foreach_add_(u, g)
            u = self.orthogonal(t.cat([x.reshape(-1, rows, cols) for x in u]))
            lr = self.lr * rate
            t._foreach_mul_(w, 1 - lr * decay)
            u = u.split([x.numel() // (rows * cols) for x in w])
            t._foreach_add_(w, [a.reshape(b.shape) for a, b in zip(u, w)], alpha=-lr * max(1, rows / cols) ** 0.5)
        for g, lr in zip(self.adam.param_groups, self.base):
            g["lr"] = lr * rate
        self.adam.step()
        for w in self.p.values():
            w.grad = None

    def state(self):
        return dict(momentum=self.momentum, adam=self.adam.state_dict())

    def restore(self, state):
        for n, m in state["momentum"].items():
            self.momentum[n].copy_(m)
        self.adam.load_state_dict(state["adam"])


# ---- a model ---------------------------------------------------------------------------------------------------------

def train(form, folder, n_steps, device, log, fast=True):
    """Trains one model on the batches in folder/text. Resumes from folder/<form>.pt. -> {tensor name: float32 array}"""
    import torch
    import torch.nn.functional as F
    import network as N

    def losses(h, table, wanted, weight):
        z = N.linear(h, table, torch.bfloat16).float()
        z = N.G.LOGIT_CAP * torch.tanh(z / N.G.LOGIT_CAP)
        each = F.cross_entropy(z.view(-1, z.shape[-1]), wanted.reshape(-1), reduction="none")
        weight = weight.reshape(-1)
        return (each * weight).sum() / weight.sum(), each.mean()

    p = N.init(form, device)
    log("%s: %d parameters" % (form.file, sum(w.numel() for w in p.values())))
    net, optimiser = N.Network(form, p, LONGEST, fast), Optimiser(p, fast=fast)
    losses = N.compiled(losses) if fast else losses
    saved, first = os.path.join(folder, form.file + ".pt"), 0
    if os.path.exists(saved):
        state = torch.load(saved, map_location=device, weights_only=False)
        for n, w in p.items():
            w.data.copy_(state["p"][n])
        optimiser.restore(state["optimiser"])
        first = state["step"]
    start = time.time()
    for step in range(first, n_steps):
        ids, weight = load_batch(os.path.join(folder, "text"), step, n_steps)
        ids, weight = torch.from_numpy(ids).to(device), torch.from_numpy(weight).to(device)
        h, balance = net.forward(ids[:, :-1].contiguous())
        loss, plain = losses(h, p["token_embd.weight"], ids[:, 1:], weight[:, 1:])
        (loss + 0.01 * balance).backward()
        optimiser.step(min(1.0, (step + 1) / 150, (n_steps - step) / (n_steps * (1 - DECAY))))
        if (step + 1) % 100 == 0 or step + 1 == n_steps or step < 2:
            log("%s: step %d  %.0f s  loss %.4f (plain %.4f, rows of %d)" % (
                form.file, step + 1, time.time() - start, loss.item(), plain.item(), ids.shape[1] - 1))
        if (step + 1) % 1000 == 0 and step + 1 < n_steps:
            torch.save(dict(p=p, optimiser=optimiser.state(), step=step + 1), saved)
    return {n: w.detach().float().cpu().numpy() for n, w in p.items()}
