/* cli.h - the command line: verbs, flags, help.
 *
 * Uses every part. Begin with command_line().
 *   [1] Verbs and flags    [2] Help    [3] Parsing    [4] Generating    [5] Other verbs */
#ifndef CLI_H
#define CLI_H

// ==== [1] Verbs and flags ===========================================================================================

// gemma4 MODEL [flags] generates text; gemma4 VERB MODEL [flags] does something else. One table describes every flag:
// its names, its value, the field that stores the value, and the text that --help prints.

#define PFLASH_ALPHA 0.1                // value of --pflash without a number: docs/quality.md
#define PFLASH_ALPHA_TEXT "0.1"
#define KV_TYPES "f16|f32|bf16|q8_0|q4_0|tq4|tq3"
#ifdef BACKEND_NAME                     // make BACKEND=parts/NAME.h or .cu
#define BACKENDS "cuda|plain|cpu|reference|" BACKEND_NAME
#else
#define BACKENDS "cuda|plain|cpu|reference"
#endif

typedef enum {
    GENERATE = 1, LOGITS = 2, TOKENIZE = 4, DETOKENIZE = 8, QUANTIZE = 16, BENCH = 32, PLAN = 64, CHECK = 128,
    SERVE = 256, PPL = 512, NIAH = 1024, ANSWERS = GENERATE | SERVE, DRAFTS = ANSWERS | PLAN | BENCH,
    VIEW = 2048, RUNS = GENERATE | LOGITS, PLANS = RUNS | SERVE | PLAN | PPL, ANY = 4095
} Verb;

static const struct { const char *name; Verb verb; } verbs[] = {
    { "logits", LOGITS }, { "tokenize", TOKENIZE }, { "detokenize", DETOKENIZE }, { "quantize", QUANTIZE },
    { "bench", BENCH }, { "plan", PLAN }, { "check", CHECK }, { "serve", SERVE },
    { "ppl", PPL }, { "niah", NIAH }, { "view", VIEW }
};

typedef struct {
    Verb verb;
    const char *grammar, *grammar_file, *schema, *schema_file, *tool_choice;
    const char *model, *prompt, *prompt_file, *system, *tools, *chat_template, *ids, *out, *dump, *kv_layout, *against;
    const char *k_type, *v_type, *ring_type, *history, *session, *drafter, *spec, *force;
    const char *target, *type;                  // quantize: OUT, TYPE
    const char *prompts, *generated, *rows, *depths;      // bench: lists of numbers
    const char *fill, *svg, *scorer, *card, *backend;
    const char *host, *api_key, *api_key_file, *alias, *session_dir, *public_url;            // serve
    double port, parallel, chunk, queue, timeout, max_body, cache_ram, session_disk;
    const char *kld_base, *kld;                 // ppl
    double n_runs, stride, n_chunks;
    double n_predict, n_ctx, n_threads, temperature, top_k, top_p, min_p, repeat, presence, frequency, seed, top_logits;
    double think_budget, memory, tail, draft_max, draft_min_p, tree;
    double pflash, pflash_from, pflash_density, n_needles, compress, last;
    TextList biases, stops, origins;
    bool interactive, shift, verbose, raw, think, show_thoughts, ignore_eos, greedy, check_tensors, plain, special,
        lazy_draft;
    bool log_text, help, version;
} Flags;

// LIST: the flag may be repeated. MAYBE: a number may follow the flag; without one the value is PFLASH_ALPHA.
typedef enum { FLAG_TEXT, FLAG_LIST, FLAG_CHOICE, FLAG_INT, FLAG_REAL, FLAG_MAYBE, FLAG_ON } FlagKind;

typedef struct {
    const char *name, *alias, *value;            // alias: other names, separated by spaces; value: of a CHOICE all
                                                 // allowed words, else a word for --help
    FlagKind    kind;
    int         verbs;        // the verbs that take the flag
    size_t      field;        // offset into Flags
    double      min, max;
    const char *help;
} Flag;

#define FIELD(name) offsetof(Flags, name)
static const Flag flags[] = {
    { "-m", "--model", "FILE", FLAG_TEXT, ANY, FIELD(model), 0, 0,
      "model file or Hugging Face folder, instead of the first argument" },
    { "-t", "--threads", "N", FLAG_INT, RUNS | SERVE | BENCH | CHECK | QUANTIZE | PPL | NIAH, FIELD(n_threads), 1,
      MAX_THREADS, "CPU threads; default: one per core" },
    { "--check-tensors", NULL, NULL, FLAG_ON, RUNS | SERVE, FIELD(check_tensors), 0, 0,
      "read the whole file before the start and reject NaN or Inf weights; default: off" },
    { "-p", "--prompt", "TEXT", FLAG_TEXT, GENERATE | TOKENIZE, FIELD(prompt), 0, 0,
      "prompt, or with --raw the text to continue; default: -f, standard input, or a chat" },
    { "-f", "--file", "FILE", FLAG_TEXT, GENERATE | TOKENIZE | PPL, FIELD(prompt_file), 0, 0,
      "read the prompt (ppl: the text) from this file, - for standard input; with -p: added after an empty line; "
      "default: none" },
    { "-sys", "--system --system-prompt", "TEXT", FLAG_TEXT, GENERATE, FIELD(system), 0, 0,
      "system prompt; default: none" },
    { "-i", "--interactive -cnv --conversation", NULL, FLAG_ON, GENERATE, FIELD(interactive), 0, 0,
      "chat, even if input or output is not a terminal; -p is the first message; default: on a terminal without a "
      "prompt" },
    { "--history", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(history), 0, 0,
      "chat: keep typed lines in this file for the next chat; default: none" },
    { "--session", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(session), 0, 0,
      "resume the session saved in FILE (tokens and KV cache) and update it; -p is the next message, with --raw "
      "more text; default: none" },
    { "--think", NULL, NULL, FLAG_ON, ANSWERS, FIELD(think), 0, 0,
      "let the model think before it answers; default: off" },
    { "--think-budget", "--reasoning-budget", "N", FLAG_INT, ANSWERS, FIELD(think_budget), -1, INT_MAX,
      "maximum tokens of a thought, which is then closed; 0: no thought; default -1: no limit" },
    { "--tools", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(tools), 0, 0,
      "tools the model may call, a JSON list as in the OpenAI API; a call is printed as a line "
      "{\"name\":..,\"arguments\":{..}}; default: none" },
    { "--tool-choice", NULL, "CHOICE", FLAG_TEXT, GENERATE, FIELD(tool_choice), 0, 0,
      "required: the answer must be tool calls; NAME: calls of this tool; auto (default): the model decides" },
    { "--template", NULL, "large|small", FLAG_CHOICE, ANSWERS, FIELD(chat_template), 0, 0,
      "chat template: large (12B, 26B, 31B) or small (E2B, E4B); default: by the file's template or the model's "
      "dimensions" },
    { "--raw", NULL, NULL, FLAG_ON, GENERATE, FIELD(raw), 0, 0,
      "continue the prompt as plain text, without the chat template; <bos> is added; default: off" },
    { "-n", "--predict --n-predict", "N", FLAG_INT, ANSWERS, FIELD(n_predict), -1, INT_MAX,
      "maximum tokens to generate, in a chat per answer; default -1: until the turn ends or the context is full" },
    { "--temp", "--temperature", "T", FLAG_REAL, ANSWERS, FIELD(temperature), 0, 1000,
      "temperature; 0: greedy; default: the file's value, else 1.0" },
    { "--top-k", NULL, "N", FLAG_INT, ANSWERS, FIELD(top_k), 0, INT_MAX,
      "sample from the N most likely tokens; 0: all; default: the file's value, else 64" },
    { "--top-p", NULL, "P", FLAG_REAL, ANSWERS, FIELD(top_p), 0, 1,
      "sample from the most likely tokens that together have probability P; default: the file's value, else 0.95" },
    { "--min-p", NULL, "P", FLAG_REAL, ANSWERS, FIELD(min_p), 0, 1,
      "drop tokens below P x the top probability; default: the file's value, else 0: off" },
    { "--repeat-penalty", NULL, "R", FLAG_REAL, ANSWERS, FIELD(repeat), 0.001, 1000,
      "divide positive logits of tokens already in the context by R, multiply negative ones; default: the file's "
      "value, else 1: off (llama.cpp: only the last 64 tokens count)" },
    { "--presence-penalty", NULL, "P", FLAG_REAL, ANSWERS, FIELD(presence), -1000, 1000,
      "subtract P from the logits of tokens already in the context; default 0: off" },
    { "--frequency-penalty", NULL, "P", FLAG_REAL, ANSWERS, FIELD(frequency), -1000, 1000,
      "subtract P from the logit of a token once for each time it is in the context; default 0: off" },
    { "-l", "--logit-bias", "ID+B", FLAG_LIST, GENERATE, FIELD(biases), 0, 0,
      "add B to the logit of token ID; ID-B: subtract; ID-inf: never; several: with commas, or repeat the flag; "
      "default: none" },
    { "-s", "--seed", "N", FLAG_INT, ANSWERS, FIELD(seed), 0, 4294967295.0,
      "random seed; default: a new one each time, printed" },
    { "-r", "--stop --reverse-prompt", "TEXT", FLAG_LIST, GENERATE, FIELD(stops), 0, 0,
      "stop string: end the answer before this text, which is not printed; may be repeated; default: none" },
    { "--greedy", NULL, NULL, FLAG_ON, GENERATE, FIELD(greedy), 0, 0,
      "generate with the plain loop of gemma4.c: temperature 0, one token a step; same text as --temp 0, but thoughts "
      "are printed too; default: off" },
    { "--ignore-eos", NULL, NULL, FLAG_ON, GENERATE, FIELD(ignore_eos), 0, 0,
      "continue after the end of the turn; default: off" },
    { "--grammar", NULL, "TEXT", FLAG_TEXT, GENERATE, FIELD(grammar), 0, 0,
      "constrain the answer to this GBNF grammar; default: none" },
    { "--grammar-file", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(grammar_file), 0, 0,
      "read the grammar from this file; default: none" },
    { "-j", "--json-schema", "SCHEMA", FLAG_TEXT, GENERATE, FIELD(schema), 0, 0,
      "constrain the answer to JSON that matches this schema; '{}': any JSON; default: none" },
    { "-jf", "--json-schema-file", "FILE", FLAG_TEXT, GENERATE, FIELD(schema_file), 0, 0,
      "read the schema from this file; default: none" },
    { "-md", "--model-draft --spec-draft-model", "FILE", FLAG_TEXT, DRAFTS, FIELD(drafter), 0, 0,
      "draft model (MTP or DFlash) for speculative decoding; output is unchanged; default: none" },
    { "--spec", "--spec-type", "off|mtp|dflash|ngram|ngram-mod|grammar|auto", FLAG_CHOICE, ANSWERS, FIELD(spec), 0, 0,
      "speculation method: off; mtp, dflash: the draft model, always --draft-max tokens; ngram: what followed the "
      "last tokens earlier in the text; ngram-mod: a table of what followed 12 tokens in any text so far; grammar: "
      "tokens that --grammar or --json-schema leave no choice in; auto: draft model, ngram and grammar, where "
      "they make answers faster; default: auto with -md, else off" },
    { "--draft-max", "--draft --draft-n --spec-draft-n-max",
      "N", FLAG_INT, DRAFTS | BENCH, FIELD(draft_max), 1, DRAFT_MAX,
      "maximum draft tokens per step; default: 16 for ngram, 4 for mtp, the block size for dflash" },
    { "--draft-min-p", "--draft-p-min --spec-draft-p-min", "P", FLAG_REAL, ANSWERS, FIELD(draft_min_p), 0, 1,
      "stop drafting after a token whose draft probability is below P; default 0: off" },
    { "--tree", "--spec-tree", "N", FLAG_INT, ANSWERS, FIELD(tree), 1, DRAFT_MAX,
      "draft a tree of up to N tokens, the most likely ones; default: a chain" },
    { "--lazy-draft", NULL, NULL, FLAG_ON, DRAFTS, FIELD(lazy_draft), 0, 0,
      "load the draft model's weights at first use; its memory is reserved at start; default: off" },
    { "-c", "--ctx-size", "N", FLAG_INT, PLANS, FIELD(n_ctx), 0, MAX_CONTEXT,
      "context size in tokens; 0: what fits in memory, up to the trained length; default: the trained length, at "
      "most 8192; ppl: ids per chunk, 512" },
    { "--context-shift", NULL, NULL, FLAG_ON, GENERATE, FIELD(shift), 0, 0,
      "when the context is full, drop its older half except the system prompt and continue; default: stop" },
    { "-ctk", "--cache-type-k", KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(k_type), 0, 0,
      "KV cache type of K, global layers; default f16, for logits and check f32" },
    { "-ctv", "--cache-type-v", KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(v_type), 0, 0,
      "KV cache type of V, global layers; if K and V are stored as one, another type than K's needs --kv-layout "
      "untied; default: K's type" },
    { "--kv-swa", NULL, KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(ring_type), 0, 0,
      "KV cache type of sliding-window layers; default f16, or f32 with -ctk f32" },
    { "--kv-tail", NULL, "N", FLAG_INT, PLANS | BENCH | CHECK | NIAH, FIELD(tail), 0, MAX_CONTEXT,
      "keep the newest N tokens of quantized global layers in f16 too; default 0" },
    { "--kv-layout", NULL, "tied|untied", FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(kv_layout), 0, 0,
      "tied (default): where V is the K projection, global layers store both once; untied: K and V separately" },
    { "--pflash", NULL, "[ALPHA]", FLAG_MAYBE, ANSWERS | PLAN | PPL | BENCH | NIAH, FIELD(pflash), 0, 1,
      "sparse attention for long prompts, lossy: in global layers, 64 tokens attend to the first, the nearest and "
      "those 128-token blocks that score at least ALPHA x the best; 1: all blocks; default 0: off; without a number "
      PFLASH_ALPHA_TEXT },
    { "--pflash-from", NULL, "N", FLAG_INT, ANSWERS | PLAN | PPL | BENCH | NIAH, FIELD(pflash_from), 0, MAX_CONTEXT,
      "prompts that end before token N stay dense; default 16384" },
    { "--pflash-density", NULL, "PERCENT", FLAG_REAL, PPL | BENCH | NIAH, FIELD(pflash_density), 0, 100,
      "for measurements: attend to this percentage of the blocks, best scores first; default 0: --pflash decides" },
    { "--compress", NULL, "R", FLAG_REAL, GENERATE | NIAH, FIELD(compress), 0.001, 0.999,
      "prompt compression, lossy: keep this fraction of the tokens of a long prompt (chat: message), those its end "
      "attends to most; default: all" },
    { "--scorer", NULL, "FILE", FLAG_TEXT, GENERATE | NIAH, FIELD(scorer), 0, 0,
      "--compress: a small model with the same vocabulary scores the tokens; default: the first layers of the model "
      "itself" },
    { "--against", NULL, "cpu|reference", FLAG_CHOICE, CHECK, FIELD(against), 0, 0,
      "check: compare with this; reference: plain loops, slow on large files; default cpu" },
    { "--backend", NULL, BACKENDS, FLAG_CHOICE, RUNS | PLANS | BENCH | CHECK | PPL | NIAH,
      FIELD(backend), 0, 0,
      "cuda: fast kernels for GPUs; plain: plain kernels, for reading and for older GPUs; cpu; reference: plain loops; "
      "default: the first of cuda, plain and cpu that works here" },
    { "--vram", NULL, "G", FLAG_REAL, PLANS | BENCH | NIAH, FIELD(memory), 0.001, 1e6,
      "plan as if the device had G GiB of memory, and stop if that is not enough; default: free memory" },
    { "--card", NULL, CARD_NAMES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(card), 0, 0,
      "treat the GPU as this one: launch sizes and memory, never more than it has; plan needs no GPU; default: the "
      "GPU as it is" },
    { "--show-thoughts", NULL, NULL, FLAG_ON, GENERATE, FIELD(show_thoughts), 0, 0,
      "print thoughts to stderr; default: off" },
    { "--top-logits", NULL, "N", FLAG_INT, GENERATE, FIELD(top_logits), 0, MAX_VOCAB,
      "print the N most likely candidates of every token: id, text, logit, probability, before bias and penalties; "
      "default 0" },
    { "-v", "--verbose", NULL, FLAG_ON, GENERATE, FIELD(verbose), 0, 0,
      "chat: print statistics after every answer; default: only on /stats" },
    { "-o", "--output", "FILE", FLAG_TEXT, LOGITS, FIELD(out), 0, 0,
      "logits: output file, positions x vocabulary float32; no default" },
    { "--dump", NULL, "DIR", FLAG_TEXT, RUNS, FIELD(dump), 0, 0,
      "write every checkpoint to DIR/NAME-LAYER.f32, rows x width float32; gemma4 view DIR shows them; default: none" },
    { "--ids", NULL, "IDS", FLAG_TEXT, LOGITS | DETOKENIZE, FIELD(ids), 0, 0,
      "logits: a file of token ids, little-endian int32, with <bos>; detokenize: the ids themselves, \"2 105 "
      "2364\"; no default" },
    { "--plain", NULL, NULL, FLAG_ON, TOKENIZE, FIELD(plain), 0, 0,
      "tokenize: parse no special tokens; default: only those around tool calls and thoughts" },
    { "--special", NULL, NULL, FLAG_ON, TOKENIZE | PPL, FIELD(special), 0, 0,
      "tokenize, ppl: parse all special tokens, such as <|turn>; default: as above, for ppl none" },
    { "--last", NULL, "N", FLAG_INT, VIEW, FIELD(last), 1, VIEW_MOST,
      "view: show the last N tokens of the dump; default 64" },
    { "--chunks", NULL, "N", FLAG_INT, PPL, FIELD(n_chunks), 0, INT_MAX,
      "ppl: number of chunks; default 0: the whole text" },
    { "--ppl-stride", NULL, "N", FLAG_INT, PPL, FIELD(stride), 0, MAX_CONTEXT,
      "ppl: chunks start N ids apart and are N/2 ids longer; only the last N ids of each are scored; default 0: the "
      "second half" },
    { "--kld-base", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld_base), 0, 0,
      "ppl: save the token distributions to this file, 2 bytes per scored id and vocabulary entry; default: none" },
    { "--kld", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld), 0, 0,
      "ppl: compare with the --kld-base file of the same text: KL divergence, same top token; default: none" },
    { "-o", "--output", "md|csv|json|jsonl", FLAG_CHOICE, PPL, FIELD(out), 0, 0, "ppl: output format; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, BENCH, FIELD(prompts), 0, 0,
      "bench: prompt tokens; default 512; 0: none" },
    { "-n", "--n-gen", "N,..", FLAG_TEXT, BENCH, FIELD(generated), 0, 0,
      "bench: tokens to generate; default 128; 0: none" },
    { "--rows", NULL, "N,..", FLAG_TEXT, BENCH, FIELD(rows), 0, 0,
      "bench: verification steps of N rows, 1 to 64, repeated at the same depth; default 0: none" },
    { "-d", "--n-depth", "N,..", FLAG_TEXT, BENCH, FIELD(depths), 0, 0,
      "bench: tokens already in the context; default 0" },
    { "--spec-force", NULL, "P,..", FLAG_TEXT, BENCH, FIELD(force), 0, 0,
      "bench: with -md, accept drafts at random with probability P per depth, the last P beyond, to measure the "
      "cost of drafting; default: no drafting" },
    { "--fill", NULL, "prompt|random", FLAG_CHOICE, BENCH, FIELD(fill), 0, 0,
      "bench: how these tokens get there: prompt (default): they are processed; random: random cache rows, which is "
      "quick" },
    { "-r", "--repetitions", "N", FLAG_INT, BENCH, FIELD(n_runs), 1, 1000,
      "bench: repetitions of each test; default 5" },
    { "-o", "--output", "md|csv|json", FLAG_CHOICE, BENCH, FIELD(out), 0, 0, "bench: output format; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, NIAH, FIELD(prompts), 0, 0,
      "niah: prompt tokens; default 1024,2048,4096" },
    { "-d", "--depth", "P,..", FLAG_TEXT, NIAH, FIELD(depths), 0, 0,
      "niah: needle depth, percent of the text before it; default 0,25,50,75,100" },
    { "--needles", NULL, "N", FLAG_INT, NIAH, FIELD(n_needles), 1, MAX_NEEDLES,
      "niah: needles per text, all asked for; default 1" },
    { "-r", "--repetitions", "N", FLAG_INT, NIAH, FIELD(n_runs), 1, 1000,
      "niah: texts per length and depth; default 5" },
    { "-f", "--file", "FILE", FLAG_TEXT, NIAH, FIELD(prompt_file), 0, 0,
      "niah: cut the texts from this file; default: generated text" },
    { "-o", "--output", "md|csv", FLAG_CHOICE, NIAH, FIELD(out), 0, 0, "niah: output format; default md" },
    { "--svg", NULL, "FILE", FLAG_TEXT, NIAH, FIELD(svg), 0, 0, "niah: write a heat map to this file; default: none" },
    { "--host", NULL, "ADDRESS", FLAG_TEXT, SERVE, FIELD(host), 0, 0,
      "serve: address to listen on; default 127.0.0.1: this machine only" },
    { "--port", NULL, "N", FLAG_INT, SERVE, FIELD(port), 0, 65535,
      "serve: port; 0: any free one, printed; default 8080" },
    { "-np", "--parallel", "N", FLAG_INT, SERVE, FIELD(parallel), 1, MAX_SESSIONS,
      "serve: parallel answers, each with its own context; default 1" },
    { "--chunk", NULL, "N", FLAG_INT, SERVE, FIELD(chunk), 1, LARGE_BATCH,
      "serve: prompt tokens between two decoding steps of other answers; default with -np: 512, else what fits in "
      "memory" },
    { "--api-key", NULL, "KEY", FLAG_TEXT, SERVE, FIELD(api_key), 0, 0,
      "serve: key that every request must send; default: none" },
    { "--api-key-file", NULL, "FILE", FLAG_TEXT, SERVE, FIELD(api_key_file), 0, 0,
      "serve: read the key from the first line of this file; default: none" },
    { "--allow-origin", NULL, "ORIGIN", FLAG_LIST, SERVE, FIELD(origins), 0, 0,
      "serve: let web pages of ORIGIN use the API: https://app.example, app://obsidian.md; *: of every site; may be "
      "repeated; default: only the server's own page" },
    { "--public-url", NULL, "URL", FLAG_TEXT, SERVE, FIELD(public_url), 0, 0,
      "serve: address at which a reverse proxy offers this server, for its own page; default: none" },
    { "--alias", NULL, "NAME", FLAG_TEXT, SERVE, FIELD(alias), 0, 0,
      "serve: model name in the API; default: the file name" },
    { "--queue", NULL, "N", FLAG_INT, SERVE, FIELD(queue), 0, 100000,
      "serve: queue length; further requests are refused; default 64" },
    { "--timeout", NULL, "S", FLAG_INT, SERVE, FIELD(timeout), 1, 1e6,
      "serve: maximum seconds per answer; default 3600" },
    { "--max-body", NULL, "M", FLAG_INT, SERVE, FIELD(max_body), 1, 1024,
      "serve: maximum request size in MiB; default 16" },
    { "--cache-ram", "-cram", "M", FLAG_INT, SERVE, FIELD(cache_ram), 0, 1 << 24,
      "serve: MiB of host memory for prefix checkpoints and idle conversations; default: an eighth of free memory" },
    { "--session-dir", NULL, "DIR", FLAG_TEXT, SERVE, FIELD(session_dir), 0, 0,
      "serve: keep conversations in files there, also for the next run; default: in memory only" },
    { "--session-disk", NULL, "M", FLAG_INT, SERVE, FIELD(session_disk), 1, 1 << 24,
      "serve: maximum MiB of these files; default 65536" },
    { "--log-text", NULL, NULL, FLAG_ON, SERVE, FIELD(log_text), 0, 0, "serve: log prompts and answers; default: off" },
    { "-h", "--help", NULL, FLAG_ON, ANY, FIELD(help), 0, 0, "print this help" },
    { "--version", NULL, NULL, FLAG_ON, ANY, FIELD(version), 0, 0, "print version and backend" },
};

// ==== [2] Help ======================================================================================================

static const struct { const char *first, *title; } groups[] = {   // headings of --help; first: a group's first flag
    { "-m", "model" }, { "-p", "prompt" }, { "-n", "sampling" }, { "--grammar", "structured output" },
    { "-md", "speculative decoding" }, { "-c", "context and KV cache" },
    { "--pflash", "sparse attention and prompt compression (lossy)" }, { "--against", "device" },
    { "--show-thoughts", "output" },
    { "--ids", "logits, tokenize, detokenize, view, ppl" }, { "-p", "bench" }, { "-p", "niah" },
    { "--host", "serve" }, { "-h", "help" }
};

// Flags of llama.cpp that this program does not have, and what the error message says about them.
static const struct { const char *names, *why; } needless[] = {
    { "-ngl --gpu-layers --n-gpu-layers -nkvo --no-kv-offload -sm --split-mode -mg --main-gpu -ts --tensor-split",
      "the whole model and its KV cache are on the GPU, if there is one; --vram G limits the memory they use, "
      "CUDA_VISIBLE_DEVICES selects the GPU, and make cpu builds without CUDA" },
    { "-fa --flash-attn", "flash attention is always on" },
    { "--mlock --mmap --no-mmap --no-warmup --warmup --numa -dio --direct-io",
      "weights are memory-mapped and read before the first prompt; they are uploaded to a GPU once" },
    { "--jinja --no-jinja --chat-template --chat-template-file",
      "Gemma 4's chat template is built in; --template large or small selects its variant, --raw uses none" },
    { "-b --batch-size -ub --ubatch-size -tb --threads-batch",
      "the batch size of prompts follows from the model and the memory; -t N sets the threads" },
    { "-no-cnv --no-conversation -st --single-turn", "-p gives one answer; -i starts a chat" },
    { "--no-display-prompt --color --simple-io --log-disable --no-perf --perf",
      "stdout carries the answer only, stderr the rest; 2>/dev/null hides it" },
};

// True if arg is one of the names, which are separated by spaces or bars.
static bool is_listed(const char *names, const char *arg) {
    const size_t n = strlen(arg);
    for (const char *at = names; at && *at; at += strspn(at, " |")) {
        const size_t len = strcspn(at, " |");
        if (len == n && !memcmp(at, arg, n)) return true;
        at += len;
    }
    return false;
}

// Prints words in lines of at most `width` columns; later lines begin after `indent` spaces.
static void print_wrapped(const char *text, int indent, int width) {
    for (int column = 0; *text; ) {
        const int n = (int)strcspn(text, " ");
        if (column && column + 1 + n > width) {
            printf("\n%*s", indent, "");
            column = 0;
        }
        column += printf(column ? " %.*s" : "%.*s", n, text);
        text += n + (text[n] == ' ');
    }
    printf("\n");
}

static void print_help(void) {
    printf("gemma4 " VERSION " - runs Gemma 4 text models from GGUF files\n\n"
           "  gemma4 MODEL.gguf -p TEXT [flags]                answer a prompt: text on stdout, statistics on stderr\n"
           "  gemma4 MODEL.gguf [flags]                        chat on a terminal; otherwise standard input is the "
           "prompt\n"
           "  gemma4 serve MODEL.gguf [--port N] [-np N]       OpenAI-compatible HTTP server; docs/server.md\n"
           "  gemma4 plan MODEL.gguf [-c N] [--card NAME]      memory that each context size needs\n"
           "  gemma4 logits MODEL.gguf --ids FILE -o FILE      logits of every position, after the soft-cap\n"
           "  gemma4 tokenize MODEL.gguf (-p TEXT | -f FILE)   token ids of a text; no <bos> is added\n"
           "  gemma4 detokenize MODEL.gguf --ids \"2 105 2364\"  text of token ids\n"
           "  gemma4 view DIR                                  the dump of a run (--dump DIR) as an HTML page on "
           "stdout\n"
           "  gemma4 bench MODEL.gguf [flags]                  tokens per second, as llama-bench measures them\n"
           "  gemma4 ppl MODEL.gguf -f TEXT [flags]            perplexity, as llama-perplexity computes it; --kld: KL "
           "divergence\n"
           "  gemma4 niah MODEL.gguf [flags]                   needle-in-a-haystack test\n"
           "  gemma4 check MODEL.gguf                          compare the GPU with the CPU (--against), checkpoint "
           "by checkpoint\n"
           "  gemma4 quantize IN OUT.gguf TYPE                 q8_0 q6_k q5_k_m q4_k_m q4_k_s q4_0 bf16 f16 f32\n");
    for (size_t i = 0, group = 0; i < sizeof flags / sizeof *flags; i++) {
        char left[80];
        const Flag *f = &flags[i];
        if (group < sizeof groups / sizeof *groups && !strcmp(groups[group].first, f->name))
            printf("\n%s\n", groups[group++].title);
        int n = snprintf(left, sizeof left, "%s", f->name);
        for (const char *at = f->alias; at && *at; at += strspn(at, " ")) {
            n += snprintf(left + n, sizeof left - (size_t)n, ", %.*s", (int)strcspn(at, " "), at);
            at += strcspn(at, " ");
        }
        if (f->value) snprintf(left + n, sizeof left - (size_t)n, " %s", f->value);
        printf("  %-28s%s", left, strlen(left) > 28 ? "\n                               " : " ");
        print_wrapped(f->help, 31, 81);
    }
}

// ==== [3] Parsing ===================================================================================================

static bool is_named(const Flag *f, const char *arg) {
    return !strcmp(arg, f->name) || is_listed(f->alias, arg);
}

static Verb verb_named(const char *name) {
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++)
        if (!strcmp(name, verbs[k].name)) return verbs[k].verb;
    return 0;
}

// Dies because the verb does not take this flag. The message names the verbs that take it.
static void refuse_flag(const Flag *flag, Verb verb) {
    char owners[90] = "";
    const char *own = "generate";
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++) {
        if (verbs[k].verb == verb) own = verbs[k].name;
        if (!(flag->verbs & (int)verbs[k].verb)) continue;
        snprintf(owners + strlen(owners), sizeof owners - strlen(owners), "%s%s", *owners ? ", " : "", verbs[k].name);
    }
    const bool generates = flag->verbs & GENERATE;
    die("%s is not a %s option; it is an option of: %s%s%s", flag->name, own, generates ? "generate" : "",
        generates && *owners ? ", " : "", owners);
}

// Returns the flag of this name that the verb takes. If the verb takes none, returns the first flag of this name, which
// refuse_flag() then refuses. Returns NULL if no flag has this name.
static const Flag *find_flag(const char *arg, Verb verb) {
    const Flag *flag = NULL;
    for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
        if (is_named(&flags[k], arg) && (!flag || flags[k].verbs & (int)verb)) flag = &flags[k];
    return flag;
}

static bool is_number(const char *word) {
    char *end;
    strtod(word, &end);
    return end != word && !*end;
}

// Returns the index in argv of the verb: the first word that is neither a flag nor the value of a flag. Returns 0 if
// that word is not a verb. The verb is not known here, so flags with the same name must either all take a value or all
// take none.
static int find_verb(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const Flag *flag = find_flag(argv[i], 0);
        if (!flag && argv[i][0] != '-') return verb_named(argv[i]) ? i : 0;
        i += flag && (flag->kind == FLAG_MAYBE ? i + 1 < argc && is_number(argv[i + 1]) : flag->kind != FLAG_ON);
    }
    return 0;
}

// True if the word does not look like a path and no file has this name.
static bool is_no_file(const char *word) { return !strpbrk(word, "./") && access(word, F_OK); }

__attribute__((noreturn)) static void die_no_verb(const char *word) {
    char names[120] = "";
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", k ? ", " : "", verbs[k].name);
    die("unknown command or missing file '%s'; commands: %s", word, names);
}

// Dies because a second word follows the model and the verb does not take one.
__attribute__((noreturn)) static void refuse_word(const char *model, const char *word) {
    if (is_no_file(model)) die_no_verb(model);
    if (verb_named(word)) die("%s: expected the command before the model; try gemma4 %s %s", word, word, model);
    die("%s: expected a flag, got a second model file; the first is %s", word, model);
}

static void parse_flags(Flags *f, int argc, char **argv) {
    bool given[sizeof flags / sizeof *flags] = { false };
    const char *word = NULL;                           // the model file, if it was given without -m
    const int verb_at = find_verb(argc, argv);
    f->verb = verb_at ? verb_named(argv[verb_at]) : GENERATE;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const Flag *flag = find_flag(arg, f->verb);
        if (i == verb_at) continue;
        if (!flag) {
            for (size_t k = 0; k < sizeof needless / sizeof *needless; k++)
                if (is_listed(needless[k].names, arg)) die("%s: not needed: %s", arg, needless[k].why);
            if (arg[0] == '-') die("%s: unknown flag; try --help", arg);
            if (!f->model) f->model = word = arg;
            else if (f->verb == QUANTIZE && !f->target) f->target = arg;
            else if (f->verb == QUANTIZE && !f->type) f->type = arg;
            else refuse_word(f->model, arg);
            continue;
        }
        given[flag - flags] = true;
        void *field = (char *)f + flag->field;
        if (flag->kind == FLAG_ON) {
            *(bool *)field = true;
            continue;
        }
        if (flag->kind == FLAG_MAYBE && !(i + 1 < argc && is_number(argv[i + 1]))) {
            *(double *)field = PFLASH_ALPHA;
            continue;
        }
        if (++i == argc) die("%s needs a value: %s", arg, flag->value);
        if (flag->kind == FLAG_CHOICE && !is_listed(flag->value, argv[i]))
            die("%s: expected %s, got '%s'", arg, flag->value, argv[i]);
        if (flag->kind == FLAG_TEXT || flag->kind == FLAG_CHOICE) {
            *(const char **)field = argv[i];
            continue;
        }
        if (flag->kind == FLAG_LIST) {
            TextList *list = field;
            list->text = realloc(list->text, (size_t)(list->n + 1) * sizeof *list->text);
            if (!list->text) die("%s: out of memory", arg);
            list->text[list->n++] = argv[i];
            continue;
        }
        char *end;
        errno = 0;
        const double v = strtod(argv[i], &end);
        const bool whole = v == floor(v);
        if (end == argv[i] || *end || errno || !(v >= flag->min && v <= flag->max) ||
            (flag->kind == FLAG_INT && !whole))
            die("%s: expected %s from %.10g to %.10g, got '%s'", arg,
                flag->kind == FLAG_INT ? "an integer" : "a number", flag->min, flag->max, argv[i]);
        *(double *)field = v;
    }
    for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
        if (given[k] && !(flags[k].verbs & (int)f->verb)) refuse_flag(&flags[k], f->verb);
    if (word && is_no_file(word) && f->verb == GENERATE && !f->help) die_no_verb(word);
    if (word && f->model != word) refuse_word(f->model, word);
}

// Parses integers separated by commas. If text is NULL, the list has one number, `otherwise`.
static IntList parse_list(const char *flag, const char *text, int otherwise) {
    IntList list = { .n = { otherwise }, .count = 1 };
    for (const char *at = text; at; at++) {
        char *end;
        errno = 0;
        const long v = *at >= '0' && *at <= '9' ? strtol(at, &end, 10) : -1;
        if (at == text) list.count = 0;
        if (v < 0 || v > MAX_CONTEXT || errno || (*end && *end != ',') || list.count == 32)
            die("%s: expected at most 32 integers from 0 to %d, separated by commas, got '%s'", flag, MAX_CONTEXT,
                text);
        list.n[list.count++] = (int)v;
        if (!*end) break;
        at = end;
    }
    return list;
}

// Parses --spec-force: the acceptance rate of each draft depth. --draft-max sets the number of depths; without it there
// is one depth per rate. Depths beyond the last rate use the last rate.
static Forced parse_forced(const Flags *f) {
    Forced forced = { .depth = 0 };
    int n = 0;
    if (!f->force) return forced;
    if (!f->drafter) die("--spec-force: expected a draft model; try -md FILE");
    for (const char *at = f->force; ; at++) {
        char *end;
        const float rate = strtof(at, &end);
        if (end == at || !(rate >= 0 && rate <= 1) || n == DRAFT_MAX || (*end && *end != ','))
            die("--spec-force: expected numbers from 0 to 1, separated by commas, got '%s'", f->force);
        forced.accept_rate[n++] = rate;
        if (!*end) break;
        at = end;
    }
    forced.depth = f->draft_max ? (int)f->draft_max : n;
    for (; n < forced.depth; n++) forced.accept_rate[n] = forced.accept_rate[n - 1];
    return forced;
}

// Returns the index of the choice in names, which must contain it. If choice is NULL, returns `otherwise`.
static int number_of(const char *choice, const char *const *names, int otherwise) {
    int n = 0;
    if (!choice) return otherwise;
    while (strcmp(choice, names[n])) n++;
    return n;
}

static bool is_choice(const char *choice, const char *name) { return choice && !strcmp(choice, name); }

// Returns a sampling parameter: the command line's value, else the file's, else `otherwise`, which is Gemma's default.
static double sampling_value(Gguf *g, double given, const char *key, double max, double otherwise) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!isnan(given) || !kv) return isnan(given) ? otherwise : given;
    double v = 0;
    int64_t i = 0;
    const bool is_float = kv->type == GGUF_V_F32 || kv->type == GGUF_V_F64;
    if (is_float ? gguf_get_float(g, key, &v) < 0 : gguf_get_int(g, key, -1, INT_MAX, &i) < 0) die_gguf(g);
    if (!is_float) v = (double)i;
    if (v == -1 && max == INT_MAX) v = 0;              // top-k -1, as 0: off
    if (!(v >= 0 && v <= max)) die("%s: key '%s': expected 0 to %.10g, got %g (E_META_RANGE)", g->path, key, max, v);
    return v;
}

// Parses biases "ID+VALUE" and "ID-VALUE", separated by commas. Returns one bias per token (vocab). If an id occurs
// more than once, its biases are added.
static float *parse_biases(const TextList *list, int vocab) {
    float *bias = alloc_or_die(vocab, sizeof *bias);
    for (int i = 0; i < list->n; i++)
        for (const char *at = list->text[i]; ; at++) {
            char *sign, *end = NULL;
            const long id = *at >= '0' && *at <= '9' ? strtol(at, &sign, 10) : -1;
            const float value = id >= 0 && (*sign == '+' || *sign == '-') ? strtof(sign, &end) : 0;
            if (!end || end == sign || (*end && *end != ',') || !(value < INFINITY))
                die("--logit-bias: expected ID+VALUE or ID-VALUE, several separated by commas, got '%s'",
                    list->text[i]);
            if (id >= vocab)
                die("--logit-bias: '%s': expected ids from 0 to %d, got %ld", list->text[i], vocab - 1, id);
            bias[id] += value;
            at = end;
            if (!*at) break;
        }
    return bias;
}

// Prints the sampling steps that are switched on, in the order in which they run.
static void print_sampling(const Model *m, const SampleParams *p) {
    fprintf(stderr, "# sampling: ");
    if (m->n_suppressed) fprintf(stderr, "%d tokens suppressed, ", m->n_suppressed);
    if (m->s.bias) fprintf(stderr, "logit bias, ");
    if (m->s.counts && (p->repeat != 1 || p->frequency != 0 || p->presence != 0))
        fprintf(stderr, "penalties (repeat %g, frequency %g, presence %g), ", (double)p->repeat, (double)p->frequency,
                (double)p->presence);
    if (p->temperature <= 0) {
        fprintf(stderr, "greedy (temperature 0)\n");
        return;
    }
    fprintf(stderr, "temperature %g, ", (double)p->temperature);
    if (p->top_k > 0) fprintf(stderr, "top-k %d, ", (int)p->top_k);
    if (p->top_p < 1) fprintf(stderr, "top-p %g, ", (double)p->top_p);
    if (p->min_p > 0) fprintf(stderr, "min-p %g, ", (double)p->min_p);
    fprintf(stderr, "then sample, seed %" PRIu64 "\n", p->seed);
}

// Reads the prompt: the text of -p, the file of -f, or both separated by an empty line. If neither flag is given, reads
// standard input, unless it is a terminal or a chat reads its messages from it. Returns NULL if there is no prompt. The
// caller frees the text.
static char *read_prompt(const Flags *f, size_t *n) {
    const bool typed = isatty(0);
    const char *path = f->prompt_file;
    *n = f->prompt ? strlen(f->prompt) : 0;
    if (!path && !f->prompt) {
        if (typed || f->interactive) return NULL;
        path = "-";
    }
    if (path && !strcmp(path, "-") && f->interactive)
        die("-f: expected a file, got -: a chat reads its messages from standard input");
    size_t n_file = 0;
    char *file = path ? read_text(strcmp(path, "-") ? path : NULL, &n_file, "-f") : NULL;
    if (!f->prompt && !f->prompt_file && !n_file) {
        free(file);
        return NULL;
    }
    char *text = alloc_or_die(*n + n_file + 3, 1);
    if (*n) memcpy(text, f->prompt, *n);
    if (*n && n_file) *n += (size_t)sprintf(text + *n, "\n\n");
    if (n_file) memcpy(text + *n, file, n_file);
    *n += n_file;
    free(file);
    return text;
}

__attribute__((noreturn)) static void die_without_prompt(const Flags *f) {
    die("-p: expected a prompt, got none, and standard input is empty; try gemma4 %sMODEL.gguf -p \"Hello\"%s",
        f->verb == TOKENIZE ? "tokenize " : "", f->verb == TOKENIZE ? "" : ", or -i for a chat");
}

// Prints which chat template the file has, if it is not the one that we render.
static void print_template(const Tokenizer *t) {
    static const char *const names[] = { [TOK_TEMPLATE_SPRING] = "Google's of spring 2026",
        [TOK_TEMPLATE_LAUNCH] = "Google's of the release", [TOK_TEMPLATE_OTHER] = "not one of Google's" };
    if (t->chat_template != TOK_TEMPLATE_NONE && t->chat_template != TOK_TEMPLATE_CANONICAL)
        fprintf(stderr, "# chat template of the file: %s; using Google's of 2026-07-09 instead, %s variant\n",
                names[t->chat_template], t->large_variant ? "large" : "small");
}

// ==== [4] Generating ================================================================================================

// Dies if the session file cannot be written, so that the user learns it before the answer and not after it.
static void check_session_path(const char *path) {
    struct stat st;
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + (slash == path) : 1;
    char *folder = alloc_or_die(n + 1, 1);
    memcpy(folder, slash ? path : ".", n);
    if (!*path) die("--session: expected a file name, got an empty one");
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        die("--session: %s: expected a regular file, got a device, a pipe or a directory", path);
    if (access(folder, W_OK | X_OK)) die("--session: %s: cannot write to %s: %s", path, folder, strerror(errno));
    free(folder);
}

// --greedy runs the plain loop of gemma4.c, which only generates. Dies if another flag asks for more.
static void check_greedy_flags(const Flags *f, bool chatting) {
    const struct { bool given; const char *name; } others[] = {
        { chatting, "a chat" }, { f->temperature > 0, "--temp" },
            { f->drafter || f->spec, "-md or --spec" },
        { f->repeat < 1 || f->repeat > 1 || f->presence != 0 || f->frequency != 0, "penalties" },
        { f->biases.n > 0, "--logit-bias" },
        { f->stops.n > 0, "--stop" }, { f->grammar || f->grammar_file || f->schema || f->schema_file, "a grammar" },
        { f->tools || f->think, "--tools or --think" }, { f->session, "--session" }, { f->shift, "--context-shift" },
        { f->ignore_eos, "--ignore-eos" }, { f->top_logits > 0, "--top-logits" }, { f->compress > 0, "--compress" },
        { f->n_predict == 0, "-n 0" } };
    for (size_t i = 0; f->greedy && i < sizeof others / sizeof *others; i++)
        if (others[i].given) die("--greedy cannot be used with %s; try --temp 0", others[i].name);
}

// Dies if flags contradict each other.
static void check_generate_flags(const Flags *f, bool chatting) {
    check_greedy_flags(f, chatting);
    if (f->compress && (f->session || f->shift || f->dump))
        die("--compress cannot be used with %s: the model sees only a part of the text",
            f->session ? "--session" : f->shift ? "--context-shift" : "--dump");
    for (int i = 0; i < f->stops.n; i++)
        if (!*f->stops.text[i]) die("--stop: expected a text, got an empty one");
    if (f->raw && (f->system || f->tools || f->think || f->chat_template || chatting))
        die("%s cannot be used with --raw", f->system ? "--system" : f->tools ? "--tools" : f->think ? "--think" :
            f->chat_template ? "--template" : "a chat");
    if (f->think_budget >= 0 && !f->think) die("--think-budget needs --think");
    if (f->session) check_session_path(f->session);
    if (!chatting && (f->history || f->verbose))
        die("%s is an option of a chat; try -i", f->history ? "--history" : "--verbose");
#ifndef EDITS_LINES
    if (f->history) die("--history: this build has no line editing: libedit and readline were missing");
#endif
}

static SampleParams sampling_params(const Flags *f, Gguf *g) {
    const uint64_t clock_seed = ((uint64_t)time(NULL) * 1000003u ^ (uint64_t)getpid()) & 0xffffffff;
    const double seed = isnan(f->seed) ? (double)clock_seed : f->seed;
    return (SampleParams){
        .seed = (uint64_t)seed,
        .temperature = (float)sampling_value(g, f->temperature, "general.sampling.temp", 1000, 1.0),
        .top_k = (int32_t)sampling_value(g, f->top_k, "general.sampling.top_k", INT_MAX, 64),
        .top_p = (float)sampling_value(g, f->top_p, "general.sampling.top_p", 1, 0.95),
        .min_p = (float)sampling_value(g, f->min_p, "general.sampling.min_p", 1, 0),
        .repeat = (float)sampling_value(g, f->repeat, "general.sampling.penalty_repeat", 1000, 1),
        .presence = (float)f->presence, .frequency = (float)f->frequency
    };
}

// Makes the ids of a --raw prompt: the tokens of the session, or <bos> if it has none, and then those of the text. If
// they exceed the context and --context-shift is given, drops the session's oldest tokens, as shift_context() does
// during generation.
static void raw_prompt(Chat *c, const char *text, size_t n, TokIds *ids) {
    const Model *m = session_model(c->s);
    Tokenizer *t = session_tokenizer(c->s);
    const size_t n_ctx = (size_t)model_options(m)->n_ctx, held = session_held(c->s)->n, half = (n_ctx - 1) / 2;
    if (t->bos < 0)
        die("%s: key 'tokenizer.ggml.bos_token_id': missing, and the vocabulary has no token <bos>", model_path(m));
    for (size_t i = 0; i < held; i++) push_id(t, ids, session_held(c->s)->ids[i]);
    for (size_t i = 0; i < c->pending.n; i++) push_id(t, ids, c->pending.ids[i]);
    if (!ids->n) push_id(t, ids, t->bos);
    if (tok_encode(t, text, n, TOK_PLAIN, ids) < 0) die("-p: %s", t->err);
    if (ids->n <= n_ctx || !c->options.shift || half + 1 > held || ids->n - held > half) return;
    memmove(ids->ids + 1, ids->ids + held - half, (ids->n - held + half) * sizeof *ids->ids);
    ids->n -= held - half - 1;
    fprintf(stderr, "# context full: %zu tokens dropped; kept the first 1 and the newest %zu\n", held - half - 1, half);
}

// Prints the one answer of a run that is not a chat. Dies if it fails. from: where the prompt came from, for the error
static void answer_once(Chat *c, const TokIds *raw, const char *from) {
    Session *s = c->s;
    const size_t n = count_messages(&c->messages, NULL);
    Prompt p = { .ids = raw->ids, .n = (int)raw->n, .n_head = 1 };
    if (c->raw && c->compressor.ratio > 0) {
        if (!compress_prompt(&c->compressor, s, raw->ids, (int)raw->n, max_int((int)session_held(s)->n, 1), &c->shown))
            die("%s", c->compressor.err);
        print_compressed((int)c->shown.n, (int)raw->n);
        p.ids = c->shown.ids, p.n = (int)c->shown.n;
    }
    if (!c->raw && !answer(c)) die("%s%s%s", *c->err == '-' ? "" : from, *c->err == '-' ? "" : ": ", c->err);
    if (c->raw && !(session_start(s, &p, &c->options) && print_answer(s, &c->show)))
        die("%s: %s", from, session_error(s));
    if (!c->raw && count_messages(&c->messages, NULL) == n) keep_messages(&c->messages, true, n - 1);  // no answer
    print_turn(session_turn(s));
    if (session_turn(s)->end == END_CONTEXT)
        fprintf(stderr, "# the context of %d tokens is full; try a larger -c, or --context-shift\n",
                model_options(session_model(s))->n_ctx);
    if (c->session && !keep_session(c)) die("%s", c->err);
}

// Tells the plan about the draft model, if there is one. width: candidates per draft token
static void plan_drafting(const Flags *f, ModelOptions *o, int width) {
    if (!f->drafter) return;
    o->drafter = f->drafter;
    o->draft_width = width;
    o->draft_depth = (int)f->draft_max;
    o->lazy_draft = f->lazy_draft;
}

// Reads --spec and the flags that belong to it. Tells the plan what drafting needs.
static Drafting drafting_of(const Flags *f, const Ops *ops, ModelOptions *o) {
    Drafting d = { .kind = (SpecKind)number_of(f->spec, spec_names, f->drafter ? SPEC_AUTO : SPEC_OFF),
                   .tree = (int)f->tree, .p_min = (float)f->draft_min_p };
    if ((d.kind == SPEC_MTP || d.kind == SPEC_DFLASH) && !f->drafter)
        die("--spec %s needs a draft model; try -md FILE, or --spec ngram, which needs none", f->spec);
    if (d.tree && !(f->drafter && uses_drafter(&d)))
        die("--tree needs a draft model; try -md FILE");
    if (d.kind != SPEC_OFF && !ops->verify_walk) die("--spec: the %s backend cannot verify drafts", ops->name);
    d.n_max = f->draft_max ? (int)f->draft_max : d.kind == SPEC_MTP ? 4 : d.kind == SPEC_OFF ? 0 : 16;
    if (uses_drafter(&d)) plan_drafting(f, o, d.tree ? DRAFT_WIDTH : 1);
    o->n_logits = max_int(o->n_logits, min_int(STEP_ROWS, o->n_seqs * (1 + max_int(d.n_max, d.tree))));
    return d;
}

// Dies if --spec asks for another kind of draft model than the file has.
static void check_drafting(const Model *m, const Drafting *d) {
    if ((d->kind == SPEC_MTP || d->kind == SPEC_DFLASH) && drafter_of(m) != d->kind)
        die("--spec %s: %s: expected a draft model of this kind, got one for --spec %s", spec_names[d->kind],
            m->drafter->gguf.path,
            spec_names[drafter_of(m)]);
}

// Makes the grammar that constrains the answers, from --grammar, --json-schema or --tool-choice. Returns NULL if none
// of them is given, else a pointer to a static variable.
static Grammar *read_grammar(const Flags *f, const Tokenizer *t, TokStr tools) {
    const struct { const char *name, *text; bool is_file, is_schema; } from[] = {
        { "--grammar", f->grammar, false, false }, { "--grammar-file", f->grammar_file, true, false },
        { "--json-schema", f->schema, false, true }, { "--json-schema-file", f->schema_file, true, true } };
    static GrammarVocab vocab;
    static Grammar g;
    const char *name = NULL, *choice = f->tool_choice && strcmp(f->tool_choice, "auto") ? f->tool_choice : NULL;
    char *file = NULL;
    TokStr text = { NULL, 0 };
    bool is_schema = false, ok;
    for (size_t i = 0; i < sizeof from / sizeof *from; i++) {
        if (!from[i].text) continue;
        if (name) die("%s: expected either %s or %s", from[i].name, name, from[i].name);
        name = from[i].name;
        size_t n = strlen(from[i].text);
        file = from[i].is_file ? read_text(from[i].text, &n, name) : NULL;
        text = (TokStr){ file ? file : from[i].text, n };
        is_schema = from[i].is_schema;
    }
    if (choice && name) die("--tool-choice cannot be used with %s: the answer is a tool call", name);
    if (choice && !tools.n) die("--tool-choice needs --tools");
    if (!choice && !name) return NULL;
    if (f->ignore_eos)
        die("--ignore-eos cannot be used with %s: such an answer has an end", name ? name : "--tool-choice");
    if (!grammar_vocab_init(&vocab, t)) die("out of memory for the token tree of the grammar");
    if (name && !is_schema) ok = grammar_from_gbnf(&g, &vocab, text);
    else if (tools.n)
        ok = grammar_from_tools(&g, &vocab, tools, is_choice(choice, "required") ? NULL : choice, true, text, false);
    else ok = grammar_from_schema(&g, &vocab, text, false);
    if (!ok) die("%s: %s", name ? name : "--tool-choice", g.err);
    if (*g.warnings) fprintf(stderr, "# not enforced: %s\n", g.warnings);
    free(file);
    return &g;
}

// Generates the one answer of --greedy, then prints a hash of the last logits, by which two runs can be compared.
static void answer_greedy(Model *m, Tokenizer *t, const TokIds *ids, int n_predict) {
    const size_t vocab = (size_t)m->config.vocab;
    float *logits = alloc_or_die(vocab, sizeof *logits);
    const double start = seconds();
    const int made = generate_greedy(m, t, ids->ids, (int)ids->n, n_predict, logits);
    flush_output();
    fprintf(stderr, "# %d tokens generated after %zu of the prompt, %.3f s; last logits %016" PRIx64 "\n", made, ids->n,
            seconds() - start, hash_bytes(logits, vocab * sizeof *logits));
    free(logits);
}

static int verb_generate(const Flags *f, const Ops *ops, ModelOptions o) {
    size_t n_text = 0, n_tools = 0;
    char *text = read_prompt(f, &n_text);
    const bool chatting = f->interactive || (!text && isatty(0) && isatty(1));
    if (!text && !chatting) die_without_prompt(f);
    const char *const from = chatting ? "-i" : f->prompt ? "-p" : f->prompt_file ? "-f" : "standard input";
    check_generate_flags(f, chatting);
    char *tools = f->tools ? read_text(f->tools, &n_tools, "--tools") : NULL;
    o.penalties = f->repeat < 1 || f->repeat > 1 || f->presence != 0 || f->frequency != 0;
    o.bias = f->biases.n > 0;
    const Drafting drafting = drafting_of(f, ops, &o);
    Tokenizer tok;
    TokIds ids = { 0 };
    GgufJson id;
    Model *m = model_open(f->model, ops, o, f->dump);
    check_drafting(m, &drafting);
    model_tokenizer(m, &tok);
    if (f->scorer) scorer_check(f->scorer, m);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    if (f->think_budget >= 0 && tok.channel_close < 0)
        die("--think-budget: %s: expected a token <channel|>, got none", model_path(m));
    Chat c = { .tools = { tools, n_tools }, .think = f->think, .verbose = f->verbose, .chatting = chatting,
               .raw = f->raw, .session = f->session, .compressor = { .ratio = (float)f->compress, .file = f->scorer },
               .show = { (int)f->top_logits, f->show_thoughts, .newline = chatting } };
    c.options = (AnswerOptions){ .n_predict = (int)f->n_predict, .ignore_eos = f->ignore_eos, .stops = f->stops,
                                 .keep_logits = f->top_logits > 0, .think_budget = (int)f->think_budget,
                                 .shift = f->shift, .grammar = read_grammar(f, &tok, c.tools), .may_think = f->think };
    c.options.sampling = sampling_params(f, &m->gguf);
    if (f->greedy) c.options.sampling.temperature = 0, c.options.sampling.repeat = 1;      // as the plain loop does
    c.options.drafting = drafting;
    if (chatting) measure_pace(m, &tok, &drafting);    // one answer is too short to repay this
    c.s = session_open(m, &tok, 0);
    if (f->session && !resume(&c, !isnan(f->seed))) die("--session: %s", c.err);
    if (f->raw) {
        raw_prompt(&c, text, n_text, &ids);
    } else {
        if (f->system) set_system(&c, (TokStr){ f->system, strlen(f->system) });
        if (!chatting && calls_waiting(&c.messages, &id))
            die("--session: %s: the model called a tool; answer with /tool RESULT in a chat; try -i", f->session);
        if (!chatting && tok_add_message(&c.messages, "user", (TokStr){ text, n_text }) < 0)
            die("%s: out of memory for a prompt of %zu bytes", from, n_text);
        if (render(&c, 0, 1, true, &ids) < 0) {
            if (!strncmp(tok.err, "tools", 5)) die("--tools: %s: %s", f->tools, tok.err);
            die("%s: %s", from, tok.err);
        }
    }
    const int n_ctx = model_options(m)->n_ctx;
    if (ids.n > (size_t)n_ctx && !f->compress)         // in a chat: the system prompt and old messages
        die("%s: the prompt has %zu tokens, but the context only %d; try -c %zu", from, ids.n, n_ctx, ids.n + 512);

    if (o.bias) {
        float *bias = parse_biases(&f->biases, model_shape(m).vocab);
        session_set_bias(c.s, bias);
        free(bias);
    }
    print_plan(m);
    if (!f->raw) print_template(&tok);
    print_sampling(m, &c.options.sampling);
    read_weights(m, f->check_tensors);                 // before stop_on(): Ctrl-C ends the process at once
    if (!f->greedy) stop_on(SIGINT);                   // the plain loop is ended by the signal itself
    int status = 0;
    if (f->greedy) {
        answer_greedy(m, &tok, &ids, (int)f->n_predict);
    } else if (chatting) {
        status = chat_loop(&c, (TokStr){ text, n_text }, f->history);
    } else {
        answer_once(&c, &ids, from);
        status = interrupted ? 130 : 0;
    }
    if (c.options.grammar) grammar_free(c.options.grammar);
    chat_free(&c);
    tok_ids_free(&ids);
    tok_free(&tok);
    free(text);
    free(tools);
    model_close(m);
    return status;
}

// ==== [5] Other verbs ===============================================================================================

// Returns the first line of a file without its line break. The caller frees it.
static char *read_key(const char *path) {
    size_t n;
    char *text = read_file(path, &n, "--api-key-file");
    char *key = alloc_or_die(n + 1, 1);
    memcpy(key, text, n);
    key[strcspn(key, "\r\n")] = 0;
    free(text);
    return key;
}

static const char *const format_names[] = { "md", "csv", "json", "jsonl" };      // indexed by Format

static int run_ppl(const Flags *f, const Ops *ops, ModelOptions o) {
    PplOptions p = { .n_ctx = f->n_ctx < 0 ? 512 : (int)f->n_ctx, .stride = (int)f->stride,
                     .n_chunks = (int)f->n_chunks, .base = f->kld_base, .compare = f->kld,
                     .format = (Format)number_of(f->out, format_names, FORMAT_MD) };
    size_t n;
    if (!f->prompt_file) die("-f: expected a text file; try gemma4 ppl %s -f text.txt", f->model);
    if (p.n_ctx < 4) die("-c: expected at least 4 ids per chunk, got %d", p.n_ctx);
    if (p.stride >= p.n_ctx) die("--ppl-stride: expected less than -c (%d), got %d", p.n_ctx, p.stride);
    if (ppl_chunk(&p) > MAX_CONTEXT) die("-c: expected at most %d ids per chunk, got %d", MAX_CONTEXT, ppl_chunk(&p));
    if (p.base && p.compare) die("--kld: expected either --kld-base or --kld, got both");
    char *text = read_prompt(f, &n);
    const int status = verb_ppl(f->model, ops, o, &p, text, n, f->special ? TOK_SPECIAL : TOK_PLAIN);
    free(text);
    return status;
}

static void run_niah(const Flags *f, const Ops *ops, ModelOptions o) {
    size_t n = 0;
    char *hay = f->prompt_file ? read_prompt(f, &n) : NULL;
    if (hay && !n) die("-f: %s: expected a text, got an empty file", f->prompt_file);
    verb_niah(f->model, ops, o, &(NiahOptions){
        .lengths = parse_list("-p", f->prompts ? f->prompts : "1024,2048,4096", 0), .n_needles = (int)f->n_needles,
        .depths = parse_list("-d", f->depths ? f->depths : "0,25,50,75,100", 0), .n_runs = (int)f->n_runs,
        .csv = is_choice(f->out, "csv"), .svg = f->svg, .hay = hay, .n_hay = n,
        .compressor = { .ratio = (float)f->compress, .file = f->scorer } });
    free(hay);
}

static void verb_serve(const Flags *f, const Ops *ops, ModelOptions o) {
    need_http();
    Tokenizer tok;
    char *key = f->api_key_file ? read_key(f->api_key_file) : NULL;
    if (key && f->api_key) die("--api-key: expected either --api-key or --api-key-file, got both");
    size_t free_bytes, total;
    cpu_ops()->memory(&free_bytes, &total);
    ServeOptions s = { .host = f->host ? f->host : "127.0.0.1", .alias = f->alias, .api_key = key ? key : f->api_key,
                       .port = (int)f->port, .max_queue = (int)f->queue, .timeout = (int)f->timeout,
                       .max_body = (size_t)f->max_body << 20, .n_predict = (int)f->n_predict,
                       .think_budget = (int)f->think_budget, .think = f->think, .fixed_seed = !isnan(f->seed),
                       .chunk = (int)f->chunk, .session_dir = f->session_dir,
                       .session_disk = (size_t)f->session_disk << 20, .log_text = f->log_text,
                       .origins = f->origins, .public_url = f->public_url,
                       .cache_ram = f->cache_ram < 0 ? free_bytes / 8 : (size_t)f->cache_ram << 20 };
    if (s.cache_ram > free_bytes) {
        fprintf(stderr, "# warning: --cache-ram %.0f exceeds the available memory; %zu MiB are used\n", f->cache_ram,
                free_bytes >> 20);
        s.cache_ram = free_bytes;
    }
    if (s.api_key && !*s.api_key) die("%s: expected a key, got an empty one", key ? "--api-key-file" : "--api-key");
    check_origins(&s);
    o.n_seqs = (int)f->parallel;
    o.host_memory = s.cache_ram;
    s.drafting = drafting_of(f, ops, &o);
    o.penalties = o.bias = true;
    o.interleave = o.n_seqs > 1;                          // a decode step waits for at most one layer of a prompt
    if (o.interleave) o.n_batch = SMALL_BATCH;
    if (f->chunk) o.n_batch = max_int((int)f->chunk, STEP_ROWS);
    Model *m = model_open(f->model, ops, o, NULL);
    check_drafting(m, &s.drafting);
    model_tokenizer(m, &tok);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    s.sampling = sampling_params(f, &m->gguf);
    print_plan(m);
    print_template(&tok);
    read_weights(m, f->check_tensors);
    serve(m, &tok, &s);
    tok_free(&tok);
    free(key);
    model_close(m);
}

// Runs a verb that needs neither a backend nor a plan. Returns false if the verb needs them.
static bool run_file_verb(const Flags *f) {
    if (f->verb == TOKENIZE) {
        size_t n;
        char *text = read_prompt(f, &n);
        if (!text) die_without_prompt(f);
        if (f->plain && f->special) die("--special: expected either --plain or --special, got both");
        verb_tokenize(f->model, text, n, f->plain ? TOK_PLAIN : f->special ? TOK_SPECIAL : TOK_USER_DEFINED);
        free(text);
    } else if (f->verb == DETOKENIZE) {
        if (!f->ids) die("--ids: expected token ids; try --ids \"2 105 2364\"");
        verb_detokenize(f->model, f->ids);
    } else if (f->verb == VIEW) {
        verb_view(f->model, (int)f->last);
    } else if (f->verb == QUANTIZE) {
        if (!f->type) die("quantize: expected three arguments: IN OUT.gguf TYPE");
        verb_quantize(f->model, f->target, f->type);
    } else return false;
    return true;
}

static ModelOptions plan_options(const Flags *f) {
    ModelOptions o = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1, .memory = (size_t)(f->memory * (1 << 30)) };
    if (f->scorer && !f->compress) die("--scorer needs --compress; try --compress 0.2");
    if (f->scorer && access(f->scorer, R_OK)) die("--scorer: %s: %s", f->scorer, strerror(errno));    // loaded later
    o.can_score = f->compress && !f->scorer;
    o.n_ctx = f->n_ctx < 0 ? 0 : f->n_ctx > 0 ? (int)f->n_ctx : CTX_FIT;
    o.k_type = (KvType)number_of(f->k_type, kv_names, f->verb == LOGITS || f->verb == CHECK ? KV_F32 : KV_F16);
    o.v_type = (KvType)number_of(f->v_type, kv_names, (int)o.k_type);
    o.ring_type = (KvType)number_of(f->ring_type, kv_names, KV_F32);
    if (f->ring_type && o.ring_type == KV_F32 && o.k_type != KV_F32)
        die("--kv-swa: expected f32 only with -ctk f32, got -ctk %s; try --kv-swa f16", kv_names[o.k_type]);
    o.tail = (int)f->tail;
    o.pflash = (float)f->pflash;
    o.pflash_density = (float)f->pflash_density / 100;
    o.pflash_from = o.pflash_density ? 0 : (int)f->pflash_from;
    o.untied = is_choice(f->kv_layout, "untied");
    return o;
}

static void run_bench(const Flags *f, const Ops *ops, ModelOptions o) {
    BenchOptions b = { .prompts = parse_list("-p", f->prompts, 512), .generated = parse_list("-n", f->generated, 128),
                       .rows = parse_list("--rows", f->rows, 0), .depths = parse_list("-d", f->depths, 0),
                       .n_runs = (int)f->n_runs, .forced = parse_forced(f), .random_fill = is_choice(f->fill, "random"),
                       .format = (Format)number_of(f->out, format_names, FORMAT_MD) };
    if (f->force) o.draft_depth = b.forced.depth;
    verb_bench(f->model, ops, o, &b);
}

static void run_logits(const Flags *f, const Ops *ops, ModelOptions o) {
    if (!f->ids) die("--ids: expected a file of token ids");
    if (!f->out) die("-o: expected an output file for the logits");
    verb_logits(f->model, ops, o, f->ids, f->out, f->dump, f->check_tensors);
}

// Returns the operations that --backend names, else those of the GPU if this program can use one, else those of the
// CPU. --card NAME: the GPU is treated as that card.
static const Ops *choose_ops(const Flags *f) {
    const Card *card = f->card ? find_card(f->card) : NULL;
    const bool plain = is_choice(f->backend, "plain"), named = plain || is_choice(f->backend, "cuda");
    const Ops *ops = NULL;
    const char *advice = "this build has no CUDA; build with make cuda", *missing = advice;
    if (card && f->backend && (plain || !named)) die("--card: expected --backend cuda, got %s", f->backend);
#ifdef BACKEND_OPS                                     // make BACKEND=FILE
    if (!card && (!f->backend || is_choice(f->backend, BACKEND_NAME))) {
        ops = BACKEND_OPS();
        if (!ops && f->backend) die("--backend: %s: it found no device that it can use", f->backend);
        return ops ? ops : cpu_ops();
    }
#endif
    if (f->backend && !named) return is_choice(f->backend, "cpu") ? cpu_ops() : reference_ops();
#ifdef USE_CUDA
    cuda_pretend(card);
    ops = plain ? plain_ops() : cuda_ops();
    if (!ops && !plain && f->verb == PLAN) ops = cuda_plan_ops();
    if (!ops && !named && !card) ops = plain_ops();    // a GPU that the fast kernels do not support, as cuda_ops() said
    advice = "no GPU found; without one, only gemma4 plan works";
    missing = "no GPU found that it can use";
#endif
    if (card && !ops) die("--card: %s: %s", card->name, advice);
    if (named && !ops) die("--backend: %s: %s", f->backend, missing);
    return ops ? ops : cpu_ops();
}

// Does what the command line asks for. Returns the exit status.
static int command_line(int argc, char **argv) {
    Flags f = { .n_predict = -1, .n_ctx = -1, .think_budget = -1, .temperature = NAN, .top_k = NAN, .top_p = NAN,
                .min_p = NAN, .repeat = NAN, .seed = NAN, .n_runs = 5, .port = 8080, .parallel = 1, .queue = 64,
                .timeout = 3600, .max_body = 16, .cache_ram = -1, .session_disk = 65536,
                .pflash_from = 16384, .n_needles = 1, .last = VIEW_ROWS };
    int status = 0;
    parse_flags(&f, argc, argv);
    if (f.help) {
        print_help();
        flush_output();
        return 0;
    }
    if (f.version) {
        printf("gemma4 " VERSION " (%s)\n", choose_ops(&f)->name);
        flush_output();
        return 0;
    }
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) die("gemma4 needs a little-endian machine");
    if (!f.model && f.verb == VIEW) die("expected the folder of a dump; try gemma4 view DIR >page.html");
    if (!f.model) die("expected a model file; try gemma4 MODEL.gguf -p \"Hello\", or --help");
    if (!(f.verb & (TOKENIZE | DETOKENIZE | PLAN | VIEW))) start_threads((int)f.n_threads);
    if (run_file_verb(&f)) return 0;

    const Ops *ops = choose_ops(&f);
    ModelOptions o = plan_options(&f);
    const Ops *judge = is_choice(f.against, "reference") ? reference_ops() : cpu_ops();
    if (f.verb & (PLAN | BENCH)) plan_drafting(&f, &o, 1);
    switch (f.verb) {
    case SERVE: verb_serve(&f, ops, o); break;
    case PLAN:  verb_plan(f.model, ops, o); break;
    case BENCH: run_bench(&f, ops, o); break;
    case NIAH:  run_niah(&f, ops, o); break;
    case CHECK: status = verb_check(f.model, ops, judge, o); break;
    case PPL:   status = run_ppl(&f, ops, o); break;
    case LOGITS: run_logits(&f, ops, o); break;
    default:    status = verb_generate(&f, ops, o);
    }
    free(f.stops.text);
    free(f.biases.text);
    return status;
}
#endif
