"""The two small models: sizes, tensors, metadata. Every fact about the Gemma 4 format that the recipe needs is here or in
network.py, which holds the arithmetic. numpy only.

MINI is a miniature of the 26B-A4B: experts and a dense FFN in every layer, global layers whose V is the K projection.
MINI_E is a miniature of the E2B: per-layer embeddings, K and V shared by the last layers, a double-wide FFN there.
"""
from dataclasses import dataclass

import numpy as np

import gguf
from tokenizer import N_VOCAB, Tokenizer

HEAD_SLIDING, HEAD_GLOBAL = 256, 512           # head sizes of all Gemma 4 models
BASE_SLIDING, BASE_GLOBAL = 1e4, 1e6           # of the rotary angles
GLOBAL_PAIRS = 64                              # RoPE rotates only the first 64 of the 256 pairs (i, i + 256) of a global head
EPS, LOGIT_CAP = 1e-6, 30.0


@dataclass(frozen=True)
class Form:
    file: str                                  # stem of the file name
    name: str
    size: str
    dim: int
    n_heads: int                               # query heads; there is one KV head
    sliding: tuple                             # per layer: sliding window or global
    window: int
    ffn: tuple                                 # per layer: width of the dense FFN
    n_ctx: int
    k_is_v: bool = False                       # global layers have no attn_v
    n_shared: int = 0                          # the number of last layers that read the K and V of an earlier layer
    n_experts: int = 0
    n_used: int = 0
    expert_dim: int = 0
    ple_dim: int = 0                           # width of per-layer embeddings

    @property
    def n_layers(self):
        return len(self.sliding)

    def head_dim(self, i):
        return HEAD_SLIDING if self.sliding[i] else HEAD_GLOBAL

    def owns_kv(self, i):
        return i < self.n_layers - self.n_shared

    def donor(self, i):
        """The layer whose K and V layer i reads: itself, or the last owner of the same kind."""
        return i if self.owns_kv(i) else max(j for j in range(self.n_layers)
                                             if self.owns_kv(j) and self.sliding[j] == self.sliding[i])


S, G = True, False
MINI = Form("gemma4-mini", "Gemma 4 mini", "7M", dim=256, n_heads=2, sliding=(S, S, G, S, S, G), window=128, ffn=(192,) * 6,
            n_ctx=16384, k_is_v=True, n_experts=8, n_used=2, expert_dim=64)
MINI_E = Form("gemma4-mini-e", "Gemma 4 mini E", "3M", dim=96, n_heads=2, sliding=(S, S, S, S, G, S, G), window=128,
              ffn=(160,) * 5 + (320,) * 2, n_ctx=16384, n_shared=2, ple_dim=32)
FORMS = {f.file: f for f in (MINI, MINI_E)}


def shapes(f):
    """-> {tensor name: shape}, rows first, in the order of the file"""
    s = {"token_embd.weight": (N_VOCAB, f.dim)}
    if f.ple_dim:
        s["per_layer_token_embd.weight"] = (N_VOCAB, f.n_layers * f.ple_dim)
        s["per_layer_model_proj.weight"] = (f.n_layers * f.ple_dim, f.dim)
        s["per_layer_proj_norm.weight"] = (f.ple_dim,)
    for i in range(f.n_layers):
        head, q = f.head_dim(i), f.n_heads * f.head_dim(i)
        t = {"attn_norm.weight": (f.dim,), "attn_q.weight": (q, f.dim), "attn_q_norm.weight": (head,)}
        if f.owns_kv(i):
            t.update({"attn_k.weight": (head, f.dim), "attn_k_norm.weight": (head,)})
            if f.sliding[i] or not f.k_is_v:
                t["attn_v.weight"] = (head, f.dim)
        t.update({"attn_output.weight": (f.dim, q), "post_attention_norm.weight": (f.dim,), "ffn_norm.weight": (f.dim,),
                  "ffn_gate.weight": (f.ffn[i], f.dim), "ffn_up.weight": (f.ffn[i], f.dim),
                  "ffn_down.weight": (f.dim, f.ffn[i]), "post_ffw_norm.weight": (f.dim,), "layer_output_scale.weight": (1,)})
        if f.n_experts:
            t.update({"pre_ffw_norm_2.weight": (f.dim,), "post_ffw_norm_1.weight": (f.dim,),
                      "post_ffw_norm_2.weight": (f.dim,), "ffn_gate_inp.weight": (f.n_experts, f.dim),
                      "ffn_gate_inp.scale": (f.dim,), "ffn_gate_up_exps.weight": (f.n_experts, 2 * f.expert_dim, f.dim),
                      "ffn_down_exps.weight": (f.n_experts, f.dim, f.expert_dim), "ffn_down_exps.scale": (f.n_experts,)})
        if f.ple_dim:
            t.update({"inp_gate.weight": (f.ple_dim, f.dim), "proj.weight": (f.dim, f.ple_dim), "post_norm.weight": (f.dim,)})
        s.update({"blk.%d.%s" % (i, n): shape for n, shape in t.items()})
    s["output_norm.weight"] = (f.dim,)
    return s


def rope_freqs():
    """The divisors of the RoPE frequencies in global layers."""
    return np.array([1.0] * GLOBAL_PAIRS + [1e30] * (HEAD_GLOBAL // 2 - GLOBAL_PAIRS), np.float32)


# ---- metadata --------------------------------------------------------------------------------------------------------

def general_keys(keys, architecture, name, size, description):
    keys.str("general.architecture", architecture)
    keys.str("general.type", "model")
    keys.i32("general.sampling.top_k", 64)
    keys.f32("general.sampling.top_p", 0.95)
    keys.f32("general.sampling.temp", 1.0)
    keys.str("general.name", name)
    keys.str("general.size_label", size)
    keys.str("general.license", "mit")
    keys.str("general.description", description)


def model_keys(keys, a, f, ffn, heads_kv):
    """The keys that a model and an MTP drafter share; a: their prefix; ffn, heads_kv: one number, or one per layer."""
    def per_layer(key, v):
        keys.u32(key, v) if isinstance(v, int) else keys.i32s(key, v)
    keys.u32(a + "block_count", f.n_layers)
    keys.u32(a + "context_length", f.n_ctx)
    keys.u32(a + "embedding_length", f.dim)
    per_layer(a + "feed_forward_length", ffn)
    keys.u32(a + "attention.head_count", f.n_heads)
    per_layer(a + "attention.head_count_kv", heads_kv)
    keys.f32(a + "rope.freq_base", BASE_GLOBAL)
    keys.f32(a + "rope.freq_base_swa", BASE_SLIDING)
    keys.f32(a + "attention.layer_norm_rms_epsilon", EPS)
    keys.u32(a + "attention.key_length", HEAD_GLOBAL)
    keys.u32(a + "attention.value_length", HEAD_GLOBAL)
    keys.u32(a + "attention.key_length_swa", HEAD_SLIDING)
    keys.u32(a + "attention.value_length_swa", HEAD_SLIDING)
    keys.u32(a + "attention.sliding_window", f.window)
    keys.flags(a + "attention.sliding_window_pattern", f.sliding)
    keys.u32(a + "attention.shared_kv_layers", f.n_shared)
    keys.u32(a + "embedding_length_per_layer_input", f.ple_dim)
    keys.u32(a + "rope.dimension_count", HEAD_GLOBAL)
    keys.u32(a + "rope.dimension_count_swa", HEAD_SLIDING)


# Chat turns only; engines that support Gemma 4 render tools and thoughts themselves. As in the published templates, the larger
# models get an empty thought when thinking is off, the E form gets nothing.
TEMPLATE = ("{{ bos_token }}{%- if enable_thinking -%}{{ '<|turn>system\\n<|think|>\\n<turn|>\\n' }}{%- endif -%}"
            "{%- for m in messages -%}{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
            "{{ '<|turn>' + role + '\\n' + (m['content'] | trim) + '<turn|>\\n' }}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}EMPTY{%- endif -%}")
TEMPLATE_EMPTY = "{%- if not enable_thinking -%}{{ '<|channel>thought\\n<channel|>' }}{%- endif -%}"


def tokenizer_keys(keys, empty_thought):
    t = Tokenizer()
    keys.str("tokenizer.ggml.model", "gemma4")
    keys.strs("tokenizer.ggml.tokens", t.tokens)
    keys.f32s("tokenizer.ggml.scores", [-1000.0] * N_VOCAB)
    keys.i32s("tokenizer.ggml.token_type", t.types)
    keys.strs("tokenizer.ggml.merges", ["%s %s" % m for m in t.merges])
    for name, i in (("bos", 2), ("eos", 1), ("unknown", 3), ("padding", 0), ("mask", 4)):
        keys.u32("tokenizer.ggml.%s_token_id" % name, i)
    keys.flag("tokenizer.ggml.add_bos_token", True)
    keys.flag("tokenizer.ggml.add_space_prefix", False)
    keys.str("tokenizer.chat_template", TEMPLATE.replace("EMPTY", TEMPLATE_EMPTY if empty_thought else ""))


def type_of(name, a, matrix_type):
    """Tensor types as in published files: vectors and the router F32, the projection of per-layer embeddings BF16. Where
    matrices are Q8_0, the table of per-layer embeddings is Q4_0: it is a third of the weights and read row by row."""
    if a.ndim < 2 or "ffn_gate_inp" in name or not name.endswith(".weight"):
        return gguf.F32
    if name == "per_layer_model_proj.weight":
        return gguf.BF16
    return gguf.Q4_0 if name == "per_layer_token_embd.weight" and matrix_type == gguf.Q8_0 else matrix_type


def write_model(path, f, tensors, matrix_type):
    keys = gguf.Keys()
    general_keys(keys, "gemma4", f.name, f.size, "a small model of the Gemma 4 form, trained on generated text")
    model_keys(keys, "gemma4.", f, f.ffn[0] if f.n_experts else f.ffn, [1] * f.n_layers if f.k_is_v else 1)
    keys.f32("gemma4.final_logit_softcapping", LOGIT_CAP)
    if f.n_experts:
        keys.u32("gemma4.expert_count", f.n_experts)
        keys.u32("gemma4.expert_used_count", f.n_used)
        keys.u32("gemma4.expert_feed_forward_length", f.expert_dim)
    tokenizer_keys(keys, not f.ple_dim)
    return gguf.write(path, keys, dict(tensors, **{"rope_freqs.weight": rope_freqs()}), matrix_type, type_of)
