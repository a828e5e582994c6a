"""Compares the engine's logits with Hugging Face transformers, both in float32 on the same f16 file.

  python3 tools/check_transformers.py MODEL-f16.gguf [--ids N] [--gemma4 ./gemma4]

The ids are N ids of held-out documents, in chunks of 1024. Prints the largest KL divergence of a position and the largest
difference of a logit; exit status 1 when a KL is above 1e-5.
"""
import argparse
import os
import random
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

import gemma4 as G
import gguf
import text
from tokenizer import BOS, N_VOCAB, Tokenizer

LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
         "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
         "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
         "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
         "post_ffw_norm_2": "post_feedforward_layernorm_2", "ffn_gate_inp": "router.proj", "inp_gate": "per_layer_input_gate",
         "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
BARE = {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj"}
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "per_layer_token_embd": "embed_tokens_per_layer",
       "per_layer_model_proj": "per_layer_model_projection", "per_layer_proj_norm": "per_layer_projection_norm"}


def their_name(name):
    if not name.startswith("blk."):
        return "model.%s.weight" % TOP[name[:-len(".weight")]]
    _, i, rest = name.split(".", 2)
    return "model.layers.%s.%s" % (i, BARE.get(rest) or LAYER[rest[:-len(".weight")]] + ".weight")


def their_model(f, tensors):
    config = Gemma4TextConfig(
        vocab_size=N_VOCAB, vocab_size_per_layer_input=N_VOCAB, hidden_size=f.dim, intermediate_size=f.ffn[0],
        num_hidden_layers=f.n_layers, num_attention_heads=f.n_heads, num_key_value_heads=1, num_global_key_value_heads=1,
        head_dim=G.HEAD_SLIDING, global_head_dim=G.HEAD_GLOBAL, max_position_embeddings=f.n_ctx, sliding_window=f.window,
        layer_types=["sliding_attention" if s else "full_attention" for s in f.sliding], attention_k_eq_v=f.k_is_v,
        num_kv_shared_layers=f.n_shared, use_double_wide_mlp=f.n_shared > 0, hidden_size_per_layer_input=f.ple_dim,
        enable_moe_block=f.n_experts > 0, num_experts=f.n_experts or None, top_k_experts=f.n_used or None,
        moe_intermediate_size=f.expert_dim or None, final_logit_softcapping=G.LOGIT_CAP, tie_word_embeddings=True)
    config._attn_implementation = "eager"
    model = Gemma4ForCausalLM(config).float().eval()
    state = {their_name(n): torch.from_numpy(t) for n, t in tensors.items() if n != "rope_freqs.weight"}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [n for n in missing if n != "lm_head.weight"]
    print("tensors that only transformers has: %s; that it does not know: %s" % (missing, unexpected))
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--ids", type=int, default=3072)
    ap.add_argument("--gemma4", default="./gemma4")
    a = ap.parse_args()
    keys, tensors, _ = gguf.read(a.model)
    form = next(f for f in G.FORMS.values() if f.name == keys["general.name"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer, rnd = their_model(form, tensors).to(device), Tokenizer(), random.Random("compare").random
    worst_kl = worst = n = same = 0
    with tempfile.TemporaryDirectory() as folder:
        ids_file, out_file = os.path.join(folder, "ids"), os.path.join(folder, "logits")
        while n < a.ids:
            ids = []
            while len(ids) < 1024:
                ids += [BOS] + tokenizer.encode(text.document(rnd, "eval").replace("\x01", ""))
            np.array(ids[:1024], "<i4").tofile(ids_file)
            subprocess.run([a.gemma4, "logits", a.model, "--ids", ids_file, "-o", out_file], check=True,
                           stderr=subprocess.DEVNULL)
            ours = torch.from_numpy(np.fromfile(out_file, "<f4").reshape(1024, -1)).double()
            with torch.no_grad():
                theirs = model(torch.tensor([ids[:1024]], device=device), use_cache=False).logits[0].double().cpu()
            kl = (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1)
            worst_kl, worst = max(worst_kl, kl.max().item()), max(worst, (ours - theirs).abs().max().item())
            same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
            n += 1024
    print("%s: %d positions: largest KL %.2e, largest logit difference %.2e, same first choice %d" % (
        os.path.basename(a.model), n, worst_kl, worst, same))
    sys.exit(worst_kl > 1e-5)


if __name__ == "__main__":
    main()
