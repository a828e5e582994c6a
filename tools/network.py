"""The forward pass of both architectures in PyTorch, in functions that training, generation and the draft models combine.

Parameters carry their GGUF tensor names, so that export is a copy. Rows of all sequences are concatenated, (n, dim),
except inside attention. dt is the type of matrix products (bfloat16 in training); everything else is float32.
"""
import math

import torch
import torch.nn.functional as F

import gemma4 as G

torch.set_float32_matmul_precision("high")


def compiled(function):
    torch._dynamo.config.recompile_limit = 64      # one version for each shape
    return torch.compile(function, dynamic=False)


def init(form, device, seed=1):
    """-> {tensor name: parameter}: matrices of unit gain, vectors 1, except where a smaller start value is known to train well"""
    g = torch.Generator().manual_seed(seed)
    p = {}
    for name, shape in G.shapes(form).items():
        if len(shape) > 1:
            fan_in = form.ple_dim if name == "per_layer_token_embd.weight" else shape[-1]
            w = torch.randn(shape, generator=g) / math.sqrt(fan_in)
        elif "attn_q_norm" in name or "attn_k_norm" in name:
            w = torch.full(shape, shape[0] ** -0.25)
        elif name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight", "post_norm.weight")):
            w = torch.full(shape, 0.4)
        else:
            w = torch.full(shape, math.sqrt(shape[0]) if name.endswith("ffn_gate_inp.scale") else 1.0)
        p[name] = w.to(device).requires_grad_(True)
    return p


def layer_weights(p, n_layers):
    """-> for each layer {name within the layer: parameter}"""
    return [{n.split(".", 2)[2]: w for n, w in p.items() if n.startswith("blk.%d." % i)} for i in range(n_layers)]


def rms(x, w=None):
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + G.EPS)
    return x if w is None else x * w.float()


def gelu(x):
    return F.gelu(x, approximate="tanh")


def linear(x, w, dt):
    return F.linear(x.to(dt), w.to(dt))


def angles(n, device):
    """-> {sliding: (cos, sin)} of positions 0..n-1, each (n, head / 2)"""
    pos = torch.arange(n, device=device, dtype=torch.float64)[:, None]
    out = {}
    for sliding, head, base in ((True, G.HEAD_SLIDING, G.BASE_SLIDING), (False, G.HEAD_GLOBAL, G.BASE_GLOBAL)):
        f = base ** (-torch.arange(head // 2, device=device, dtype=torch.float64) * 2 / head)
        if not sliding:
            f[G.GLOBAL_PAIRS:] = 0
        out[sliding] = ((pos * f).cos().float(), (pos * f).sin().float())
    return out


def rope(x, cos, sin):
    """Rotates pairs (i, i + head / 2); cos and sin broadcast against the halves of x."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def embed(p, form, tokens):
    """tokens (n) -> rows (n, dim), per-layer inputs (n, layers, ple_dim) or None"""
    x = F.embedding(tokens, p["token_embd.weight"]).float() * math.sqrt(form.dim)
    if not form.ple_dim:
        return x, None
    a = F.embedding(tokens, p["per_layer_token_embd.weight"]).float() * math.sqrt(form.ple_dim)
    c = F.linear(x, p["per_layer_model_proj.weight"]) / math.sqrt(form.dim)
    shape = (len(tokens), form.n_layers, form.ple_dim)
    return x, (rms(c.view(shape), p["per_layer_proj_norm.weight"]) + a.view(shape)) / math.sqrt(2)


def project(w, x, cos, sin, dt):
    """The first part of a layer. -> q (n, heads, head), k, v (n, head) or None in layers that read an earlier layer's"""
    h = rms(x, w["attn_norm.weight"])
    q = linear(h, w["attn_q.weight"], dt).view(len(x), -1, len(w["attn_q_norm.weight"]))
    q = rope(rms(q, w["attn_q_norm.weight"]), cos[:, None], sin[:, None]).to(dt)
    if "attn_k.weight" not in w:
        return q, None, None
    k = linear(h, w["attn_k.weight"], dt)
    v = linear(h, w["attn_v.weight"], dt) if "attn_v.weight" in w else k
    return q, rope(rms(k, w["attn_k_norm.weight"]), cos, sin).to(dt), rms(v).to(dt)


def attend(q, k, v, mask):
    """q (B, T, H, D), k, v (B, S, D), mask (T, S) or (B, T, S), true: visible -> (B, T, H, D). The scale is 1."""
    B, T, H, D = q.shape
    s = (q.transpose(1, 2).reshape(B, H * T, D) @ k.transpose(1, 2)).view(B, H, T, -1).float()
    mask = mask if mask.dim() == 2 else mask[:, None]
    weight = torch.softmax(s.masked_fill(~mask, -1e30), -1).to(q.dtype)
    return (weight.view(B, H * T, -1) @ v).view(B, H, T, D).transpose(1, 2)


def attend_global(q, k, v):
    T = q.shape[1]
    return attend(q, k, v, torch.ones(T, T, dtype=torch.bool, device=q.device).tril())


def attend_sliding(q, k, v, window):
    """As attend, with the last `window` keys of each row; T a multiple of it. Each block of rows sees two blocks of keys."""
    B, T, H, D = q.shape
    n = T // window
    q = q.reshape(B * n, window, H, D)
    k, v = (t.view(B, n, window, D) for t in (k, v))
    k, v = (torch.cat((F.pad(t, (0, 0, 0, 0, 1, 0))[:, :n], t), 2).view(B * n, 2 * window, D) for t in (k, v))
    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device)[None]
    block = torch.arange(B * n, device=q.device)[:, None, None] % n
    return attend(q, k, v, (j > i) & (j <= i + window) & ((block > 0) | (j >= window))).reshape(B, T, H, D)


def finish(w, x, o, u, n_used, dt):
    """The rest of a layer. o (n, heads * head): attention; u (n, ple_dim) or None -> rows (n, dim), balance of the experts"""
    d = x.shape[1]
    x = x + rms(linear(o, w["attn_output.weight"], dt), w["post_attention_norm.weight"])
    z = rms(x, w["ffn_norm.weight"])
    m = linear(gelu(linear(z, w["ffn_gate.weight"], dt)) * linear(z, w["ffn_up.weight"], dt), w["ffn_down.weight"], dt)
    balance = 0
    if n_used:                                                 # all experts are computed, the chosen ones weighted
        g = F.linear(rms(x) * (w["ffn_gate_inp.scale"] / math.sqrt(d)), w["ffn_gate_inp.weight"])
        P = torch.softmax(g, -1)
        chosen = (g >= g.topk(n_used, -1).values[:, -1:]).float()
        share = P * chosen
        share = share / share.sum(-1, keepdim=True) * w["ffn_down_exps.scale"]
        gate_up, down = w["ffn_gate_up_exps.weight"], w["ffn_down_exps.weight"]
        E = gate_up.shape[0]
        y = linear(rms(x, w["pre_ffw_norm_2.weight"]), gate_up.reshape(-1, d), dt).view(len(x), E, 2, -1)
        a = gelu(y[:, :, 0]) * y[:, :, 1] * share[..., None].to(dt)
        e = linear(a.reshape(len(x), -1), down.permute(1, 0, 2).reshape(d, -1), dt)
        m = rms(m, w["post_ffw_norm_1.weight"]) + rms(e, w["post_ffw_norm_2.weight"])
        balance = E * (chosen.mean(0) / n_used * P.mean(0)).sum()          # 1 when all experts are used equally
    x = x + rms(m, w["post_ffw_norm.weight"])
    if u is not None:
        x = x + rms(linear(gelu(linear(x, w["inp_gate.weight"], dt)) * u, w["proj.weight"], dt), w["post_norm.weight"])
    return x * w["layer_output_scale.weight"], balance


class Network:
    """A model: its parameters and the compiled pieces."""

    def __init__(self, form, p, n_ctx, fast=True):
        self.form, self.p = form, p
        self.layers = layer_weights(p, form.n_layers)
        self.angles = angles(n_ctx, p["token_embd.weight"].device)
        pieces = (project, attend_global, attend_sliding, finish)
        self.project, self.attend_global, self.attend_sliding, self.finish = map(compiled, pieces) if fast else pieces

    def forward(self, tokens, dt=torch.bfloat16, keep=None):
        """tokens (B, T), T a multiple of the window -> normed rows (B, T, dim), balance of the experts.
        keep: a list that receives (output, k, v) of every layer, (B, T, ..)."""
        f, (B, T) = self.form, tokens.shape
        turn = {s: [t[None, :T].expand(B, -1, -1).reshape(B * T, -1) for t in self.angles[s]] for s in set(f.sliding)}
        x, u = embed(self.p, f, tokens.reshape(-1))
        balance, kv = 0, {}
        for i, w in enumerate(self.layers):
            q, k, v = self.project(w, x, *turn[f.sliding[i]], dt)
            if k is not None:
                kv[i] = k.view(B, T, -1), v.view(B, T, -1)
            q, (k, v) = q.view(B, T, f.n_heads, -1), kv[f.donor(i)]
            o = self.attend_sliding(q, k, v, f.window) if f.sliding[i] else self.attend_global(q, k, v)
            x, b = self.finish(w, x, o.reshape(B * T, -1), None if u is None else u[:, i], f.n_used, dt)
            balance = balance + b / f.n_layers
            if keep is not None:
                keep.append((x.view(B, T, -1), k, v))
        return rms(x, self.p["output_norm.weight"]).view(B, T, -1), balance

    def logits(self, h, dt=torch.bfloat16):
        return G.LOGIT_CAP * torch.tanh(linear(h, self.p["token_embd.weight"], dt).float() / G.LOGIT_CAP)

    @torch.no_grad()
    def generate(self, tokens, cut, temperature=0.0, seed=1, stop=(1, 50, 106), dt=torch.bfloat16):
        """Continues row r of tokens (n, T) from position cut[r] in place, all rows in step. -> last position of each"""
        f, (n, T), dev = self.form, tokens.shape, tokens.device
        g = torch.Generator(device=dev).manual_seed(seed)
        weights = [{m: t.detach().to(dt) if t.dim() > 1 and "ffn_gate_inp" not in m else t.detach() for m, t in w.items()}
                   for w in self.layers]
        kv = {i: torch.zeros(2, n, T, f.head_dim(i), device=dev, dtype=dt) for i in range(f.n_layers) if f.owns_kv(i)}
        done = torch.zeros(n, dtype=torch.bool, device=dev)
        last = torch.full((n,), T - 1, device=dev)
        for pos in range(T - 1):
            x, u = embed(self.p, f, tokens[:, pos])
            for i, w in enumerate(weights):
                q, k, v = project(w, x, *(t[pos:pos + 1] for t in self.angles[f.sliding[i]]), dt)
                cache = kv[f.donor(i)]
                if k is not None:
                    cache[0, :, pos], cache[1, :, pos] = k, v
                first = max(0, pos - f.window + 1) if f.sliding[i] else 0
                weight = torch.softmax((q @ cache[0, :, first:pos + 1].transpose(1, 2)).float(), -1).to(dt)
                o = (weight @ cache[1, :, first:pos + 1]).reshape(n, -1)
                x, _ = finish(w, x, o, None if u is None else u[:, i], f.n_used, dt)
            z = self.logits(rms(x, self.p["output_norm.weight"]), dt)
            if temperature:
                uniform = torch.rand(z.shape, device=dev, generator=g).clamp(1e-20, 1 - 1e-7)
                z = z / temperature - torch.log(-torch.log(uniform))
            own = (pos + 1 >= cut) & ~done
            after = torch.where(done, torch.zeros_like(cut), tokens[:, pos + 1])
            tokens[:, pos + 1] = torch.where(own, z.argmax(-1), after)
            ended = own & torch.isin(tokens[:, pos + 1], torch.tensor(stop, device=dev))
            last = torch.where(ended, torch.full_like(last, pos + 1), last)
            done |= ended
        return last
