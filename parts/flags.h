/* flags.h - the table of commands and flags, and what is made from it: --help, the manual page, completions for shells.
 *
 * Uses base.h, engine.h (names, limits) and chat.h (its commands). Begin with flags[], print_help() and find_flag().
 *   [1] Verbs and flags    [2] Flags of other programs    [3] Names
 *   [4] Help    [5] Manual page    [6] Completions */
#ifndef FLAGS_H
#define FLAGS_H

#include <ctype.h>

// ==== [1] Verbs and flags ===========================================================================================

// gemma4 MODEL [flags] generates text; gemma4 VERB MODEL [flags] does something else. One table describes every flag:
// its names, its value, the field that stores the value, and the text that --help prints.

#define PFLASH_ALPHA 0.1                // value of --pflash without a number: docs/quality.md
#define PFLASH_ALPHA_TEXT "0.1"
#define KV_TYPES "f16|f32|bf16|q8_0|q4_0|tq4|tq3"
#ifdef USE_CUDA
#define BUILT_BACKENDS "cuda plain cpu reference"
#elif defined(BACKEND_NAME)
#define BUILT_BACKENDS BACKEND_NAME " cpu reference"
#else
#define BUILT_BACKENDS "cpu reference"
#endif
#ifdef BACKEND_NAME                     // make BACKEND=parts/NAME.h or .cu
#define BACKENDS "cuda|plain|cpu|reference|" BACKEND_NAME
#else
#define BACKENDS "cuda|plain|cpu|reference"
#endif

typedef enum {
    GENERATE = 1, LOGITS = 2, TOKENIZE = 4, DETOKENIZE = 8, QUANTIZE = 16, BENCH = 32, PLAN = 64, CHECK = 128,
    SERVE = 256, PPL = 512, NIAH = 1024, VIEW = 2048, SWEEP = 4096, PLOT = 8192, EVAL = 16384,
    ANSWERS = GENERATE | SERVE | EVAL, DRAFTS = ANSWERS | PLAN | BENCH, MEASURES = BENCH | SWEEP,
    RUNS = GENERATE | LOGITS, PLANS = RUNS | SERVE | PLAN | PPL | EVAL, ANY = 32767
} Verb;

static const struct { const char *name; Verb verb; const char *arguments, *help; } verbs[] = {
    { "serve", SERVE, "MODEL.gguf [--port N] [-np N]",
      "OpenAI-compatible HTTP server with a chat page; docs/server.md" },
    { "plan", PLAN, "MODEL.gguf [-c N] [--card NAME]", "memory that each context size needs" },
    { "bench", BENCH, "MODEL.gguf [-p N,..] [-n N,..]", "tokens per second, as llama-bench measures them" },
    { "sweep", SWEEP, "MODEL.gguf [-ctk TYPE,..] [-md FILE,..] [-d N,..] [-o FILE]",
      "times and energy of all combinations of cache types, draft models and contexts, as CSV" },
    { "plot", PLOT, "FILE.csv [-o OUT.svg] [--kind NAME]", "a picture of what sweep or niah -o csv has measured" },
    { "ppl", PPL, "MODEL.gguf -f FILE", "perplexity, as llama-perplexity computes it; --kld: KL divergence" },
    { "niah", NIAH, "MODEL.gguf [-p N,..]", "needle-in-a-haystack test" },
    { "eval", EVAL, "MODEL.gguf --prompts FILE.jsonl [-md FILE]",
      "answer the prompts of a file, greedily, without and with drafts: speeds, same text, right answers" },
    { "check", CHECK, "MODEL.gguf", "compare the GPU with the CPU (--against), checkpoint by checkpoint" },
    { "quantize", QUANTIZE, "IN OUT.gguf TYPE",
      "write a model with smaller weights; TYPE: q8_0 q6_k q5_k_m q4_k_m q4_k_s q4_0 bf16 f16 f32" },
    { "tokenize", TOKENIZE, "MODEL.gguf (-p TEXT | -f FILE)", "token ids of a text; no <bos> is added" },
    { "detokenize", DETOKENIZE, "MODEL.gguf --ids \"2 105 2364\"", "text of token ids" },
    { "logits", LOGITS, "MODEL.gguf (-p TEXT | --ids FILE) -o FILE", "logits of every position, after the soft-cap" },
    { "view", VIEW, "DIR", "the dump of a run (--dump DIR) as an HTML page on stdout" },
};
enum { N_VERBS = sizeof verbs / sizeof *verbs };

typedef struct {
    Verb verb;
    const char *grammar, *grammar_file, *schema, *schema_file, *tool_choice;
    const char *model, *prompt, *prompt_file, *system, *tools, *chat_template, *ids, *out, *dump, *kv_layout, *against;
    const char *k_type, *v_type, *ring_type, *history, *session, *drafter, *spec, *force;
    const char *target, *type;                  // quantize: OUT, TYPE
    const char *prompts, *generated, *rows, *pictures, *depths, *threads;         // bench: lists of numbers
    const char *k_types, *v_types, *drafters;   // bench, sweep: lists of words
    const char *draft_maxes, *trees;            // sweep: lists of numbers
    TextList pairs;
    const char *projector, *image_tokens;
    const char *fill, *svg, *scorer, *card, *backend, *kind;
    const char *prompt_list, *csv;              // eval
    double n_prompts;
    const char *host, *api_key, *api_key_file, *alias, *session_dir, *public_url;      // serve
    double port, parallel, chunk, queue, timeout, max_body, request_memory, cache_ram, session_disk;
    const char *kld_base, *kld;                 // ppl
    double n_runs, stride, n_chunks;
    double n_predict, n_ctx, n_threads, temperature, top_k, top_p, min_p, repeat, presence, frequency, seed, top_logits;
    double think_budget, memory, n_cpu_moe, tail, draft_max, draft_min_p, tree;
    double pflash, pflash_from, pflash_density, n_needles, compress, compress_from, last;
    TextList biases, stops, origins, places, images;
    char *place;              // tensor_places()
    bool cpu_moe;
    bool interactive, shift, verbose, raw, think, show_thoughts, ignore_eos, greedy, check_tensors, plain, special,
        lazy_draft;
    bool log_text, run_code, help, version;
    const char *color, *document;
} Flags;

// LIST: the flag may be repeated. MAYBE: a number may follow the flag; without one the value is PFLASH_ALPHA. WORD: a
// CHOICE that may be left out; then it is the first one.
typedef enum { FLAG_TEXT, FLAG_LIST, FLAG_CHOICE, FLAG_WORD, FLAG_INT, FLAG_REAL, FLAG_MAYBE, FLAG_ON } FlagKind;

typedef struct {
    const char *name, *alias, *value;            // alias: other names, separated by spaces; value: of a CHOICE,
                                                 // WORD all allowed words, else a word for --help
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
    { "-t", "--threads", "N", FLAG_INT, RUNS | SERVE | CHECK | QUANTIZE | PPL | NIAH | SWEEP | EVAL, FIELD(n_threads),
      1, MAX_THREADS, "CPU threads; default: one per core" },
    { "--check-tensors", NULL, NULL, FLAG_ON, RUNS | SERVE, FIELD(check_tensors), 0, 0,
      "read the whole file before the start and reject NaN or Inf weights; default: off" },
    { "-p", "--prompt", "TEXT", FLAG_TEXT, GENERATE | TOKENIZE, FIELD(prompt), 0, 0,
      "prompt, or with --raw the text to continue; default: -f, standard input, or a chat" },
    { "-p", "--prompt", "TEXT", FLAG_TEXT, LOGITS, FIELD(prompt), 0, 0,
      "run the tokens of this text after <bos>, instead of --ids; default: none" },
    { "-f", "--file", "FILE", FLAG_TEXT, GENERATE | TOKENIZE | PPL, FIELD(prompt_file), 0, 0,
      "read the prompt (ppl: the text) from this file, - for standard input; with -p: added after an empty line; "
      "default: none" },
    { "--image", NULL, "FILE", FLAG_LIST, GENERATE, FIELD(images), 0, 0,
      "show the model this picture (PNG, JPEG, WebP, PPM) before the prompt; may be repeated; default: none" },
    { "--mmproj", "-mm", "FILE", FLAG_TEXT, GENERATE | SERVE | PLAN | BENCH, FIELD(projector), 0, 0,
      "the model's image tower, a GGUF file (mmproj); a folder: the tower in the model's own Hugging Face folder; "
      "default: with --image that one, else none" },
    { "--image-tokens", NULL, "70|140|280|560|1120", FLAG_CHOICE, GENERATE | SERVE | PLAN, FIELD(image_tokens), 0, 0,
      "tokens that a picture gets at most; more show finer detail; default: 280; with serve, 1120 for detail: high" },
    { "-sys", "--system --system-prompt", "TEXT", FLAG_TEXT, GENERATE | EVAL, FIELD(system), 0, 0,
      "system prompt; default: none" },
    { "-i", "--interactive -cnv --conversation", NULL, FLAG_ON, GENERATE, FIELD(interactive), 0, 0,
      "chat, even if input or output is not a terminal; -p is the first message; default: on a terminal without a "
      "prompt" },
    { "--history", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(history), 0, 0,
      "keep typed lines in this file for the next chat; default: none" },
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
    { "--raw", "-no-cnv --no-conversation", NULL, FLAG_ON, GENERATE, FIELD(raw), 0, 0,
      "continue the prompt as plain text, without the chat template; <bos> is added; default: off" },
    { "-n", "--predict --n-predict", "N", FLAG_INT, GENERATE | SERVE, FIELD(n_predict), -1, INT_MAX,
      "maximum tokens to generate, in a chat per answer; default -1: until the turn ends or the context is full" },
    { "--temp", "--temperature", "T", FLAG_REAL, GENERATE | SERVE, FIELD(temperature), 0, 1000,
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
    { "-s", "--seed", "N", FLAG_INT, GENERATE | SERVE, FIELD(seed), 0, 4294967295.0,
      "random seed; default: a new one each time, printed with -v" },
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
    { "-md", "--model-draft --spec-draft-model", "FILE", FLAG_TEXT, ANSWERS | PLAN, FIELD(drafter), 0, 0,
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
    { "--tree", "--spec-tree", "N", FLAG_INT, ANSWERS | BENCH, FIELD(tree), 1, DRAFT_MAX,
      "draft a tree of up to N tokens, the most likely ones; default: a chain" },
    { "--lazy-draft", NULL, NULL, FLAG_ON, DRAFTS, FIELD(lazy_draft), 0, 0,
      "load the draft model's weights at first use; its memory is reserved at start; default: off" },
    { "-c", "--ctx-size", "N", FLAG_INT, PLANS, FIELD(n_ctx), 0, MAX_CONTEXT,
      "context size in tokens; 0: what fits in memory, up to the trained length; default: the trained length, at "
      "most 8192; ppl: ids per chunk, 512" },
    { "--context-shift", NULL, NULL, FLAG_ON, GENERATE, FIELD(shift), 0, 0,
      "when the context is full, drop its older half except the system prompt and continue; default: stop" },
    { "-ctk", "--cache-type-k", KV_TYPES, FLAG_CHOICE, PLANS | CHECK | NIAH, FIELD(k_type), 0, 0,
      "KV cache type of K, global layers; default f16, for logits and check f32" },
    { "-ctv", "--cache-type-v", KV_TYPES, FLAG_CHOICE, PLANS | CHECK | NIAH, FIELD(v_type), 0, 0,
      "KV cache type of V, global layers; if K and V are stored as one, another type than K's needs --kv-layout "
      "untied; default: K's type" },
    { "--kv-swa", NULL, KV_TYPES, FLAG_CHOICE, PLANS | MEASURES | CHECK | NIAH, FIELD(ring_type), 0, 0,
      "KV cache type of sliding-window layers; default f16, or f32 with -ctk f32" },
    { "--kv-tail", NULL, "N", FLAG_INT, PLANS | MEASURES | CHECK | NIAH, FIELD(tail), 0, MAX_CONTEXT,
      "keep the newest N tokens of quantized global layers in f16 too; default 0" },
    { "--kv-layout", NULL, "tied|untied", FLAG_CHOICE, PLANS | MEASURES | CHECK | NIAH, FIELD(kv_layout), 0, 0,
      "tied (default): where V is the K projection, global layers store both once; untied: K and V separately" },
    { "--pflash", NULL, "[ALPHA]", FLAG_MAYBE, ANSWERS | PLAN | PPL | MEASURES | NIAH, FIELD(pflash), 0, 1,
      "sparse attention for long prompts, lossy: in global layers, 64 tokens attend to the first, the nearest and "
      "those 128-token blocks that score at least ALPHA x the best; 1: all blocks; default 0: off; without a number "
      PFLASH_ALPHA_TEXT },
    { "--pflash-from", NULL, "N", FLAG_INT, ANSWERS | PLAN | PPL | MEASURES | NIAH, FIELD(pflash_from), 0, MAX_CONTEXT,
      "prompts that end before token N stay dense; default 16384" },
    { "--pflash-density", NULL, "PERCENT", FLAG_REAL, PPL | MEASURES | NIAH, FIELD(pflash_density), 0, 100,
      "for measurements: attend to this percentage of the blocks, best scores first; default 0: --pflash decides" },
    { "--compress", NULL, "R", FLAG_REAL, GENERATE | SERVE | NIAH, FIELD(compress), 0.001, 0.999,
      "prompt compression, lossy: keep this fraction of the tokens of a long prompt (chat: message), those its end "
      "attends to most; default: all" },
    { "--compress-from", NULL, "N", FLAG_INT, GENERATE | SERVE | NIAH, FIELD(compress_from), 64, MAX_CONTEXT,
      "shorter prompts (chat: messages) are not compressed; default 512 tokens" },
    { "--scorer", NULL, "FILE", FLAG_TEXT, GENERATE | SERVE | NIAH, FIELD(scorer), 0, 0,
      "--compress: a small model with the same vocabulary scores the tokens; default: the first layers of the model "
      "itself" },
    { "--against", NULL, "cpu|reference", FLAG_CHOICE, CHECK, FIELD(against), 0, 0,
      "compare with this; reference: plain loops, slow on large files; default cpu" },
    { "--backend", NULL, BACKENDS, FLAG_CHOICE, RUNS | PLANS | MEASURES | CHECK | PPL | NIAH,
      FIELD(backend), 0, 0,
      "cuda: fast kernels for GPUs; plain: plain kernels, for reading and for older GPUs; cpu; reference: plain loops; "
      "default: the first of cuda, plain and cpu that works here" },
    { "--vram", NULL, "G", FLAG_REAL, PLANS | MEASURES | NIAH, FIELD(memory), 0.001, 1e6,
      "plan as if the device had G GiB of memory, and stop if that is not enough; default: free memory" },
    { "--cpu-moe", "-cmoe", NULL, FLAG_ON, PLANS | MEASURES | CHECK | NIAH, FIELD(cpu_moe), 0, 0,
      "keep the experts of all layers in host memory, where the GPU reads them; default: those that do not fit on it" },
    { "--n-cpu-moe", "-ncmoe", "N", FLAG_INT, PLANS | MEASURES | CHECK | NIAH, FIELD(n_cpu_moe), 0, 1000,
      "keep the experts of the first N layers in host memory; default: as above" },
    { "--override-tensor", "-ot", "REGEX=CPU|GPU,..", FLAG_LIST, PLANS | MEASURES | CHECK | NIAH, FIELD(places), 0, 0,
      "keep those matrices of layers in host memory, or on the GPU, whose names the regular expression fits; may be "
      "repeated; default: as above" },
    { "--card", NULL, CARD_NAMES, FLAG_CHOICE, PLANS | MEASURES | CHECK | NIAH, FIELD(card), 0, 0,
      "treat the GPU as this one: launch sizes and memory, never more than it has; plan needs no GPU; default: the "
      "GPU as it is" },
    { "--show-thoughts", NULL, NULL, FLAG_ON, GENERATE, FIELD(show_thoughts), 0, 0,
      "print thoughts to stderr; default: off" },
    { "--top-logits", NULL, "N", FLAG_INT, GENERATE, FIELD(top_logits), 0, MAX_VOCAB,
      "print the N most likely candidates of every token: id, text, logit, probability, before bias and penalties; "
      "default 0" },
    { "-v", "--verbose", NULL, FLAG_ON, RUNS, FIELD(verbose), 0, 0,
      "print everything that is known about the model, its memory, sampling and times; default: a line before and a "
      "line after the answer" },
    { "--color", "-co", "on|off|auto", FLAG_WORD, ANY, FIELD(color), 0, 0,
      "dim what is not the answer; auto (default): on a terminal, unless NO_COLOR is set" },
    { "-o", "--output", "FILE", FLAG_TEXT, LOGITS, FIELD(out), 0, 0,
      "output file, positions x vocabulary float32; no default" },
    { "-o", "--output", "FILE", FLAG_TEXT, TOKENIZE, FIELD(out), 0, 0,
      "write the ids to this file, little-endian int32, as logits --ids reads them; default: numbers on stdout" },
    { "--dump", NULL, "DIR", FLAG_TEXT, RUNS, FIELD(dump), 0, 0,
      "write every checkpoint to DIR/NAME-LAYER.f32, rows x width float32; gemma4 view DIR shows them; default: none" },
    { "--ids", NULL, "FILE", FLAG_TEXT, LOGITS, FIELD(ids), 0, 0,
      "a file of token ids, little-endian int32, with <bos>; no default" },
    { "--ids", NULL, "IDS|FILE", FLAG_TEXT, DETOKENIZE, FIELD(ids), 0, 0,
      "the ids, separated by spaces, or a file of them, as tokenize -o writes it; no default" },
    { "--plain", NULL, NULL, FLAG_ON, TOKENIZE, FIELD(plain), 0, 0,
      "parse no special tokens; default: only those around tool calls and thoughts" },
    { "--special", NULL, NULL, FLAG_ON, TOKENIZE | PPL, FIELD(special), 0, 0,
      "parse all special tokens, such as <|turn>; default: as above, for ppl none" },
    { "--last", NULL, "N", FLAG_INT, VIEW, FIELD(last), 1, VIEW_MOST,
      "show the last N tokens of the dump; default 64" },
    { "--chunks", NULL, "N", FLAG_INT, PPL, FIELD(n_chunks), 0, INT_MAX,
      "number of chunks; default 0: the whole text" },
    { "--ppl-stride", NULL, "N", FLAG_INT, PPL, FIELD(stride), 0, MAX_CONTEXT,
      "chunks start N ids apart and are N/2 ids longer; only the last N ids of each are scored; default 0: the "
      "second half" },
    { "--kld-base", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld_base), 0, 0,
      "save the token distributions to this file, 2 bytes per scored id and vocabulary entry; default: none" },
    { "--kld", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld), 0, 0,
      "compare with the --kld-base file of the same text: KL divergence, same top token; default: none" },
    { "-o", "--output", "md|csv|json|jsonl", FLAG_CHOICE, PPL, FIELD(out), 0, 0, "output format; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, BENCH, FIELD(prompts), 0, 0,
      "prompt tokens; default 512; 0: none" },
    { "-n", "--n-gen", "N,..", FLAG_TEXT, BENCH, FIELD(generated), 0, 0,
      "tokens to generate; default 128; 0: none" },
    { "-pg", NULL, "P,G", FLAG_LIST, BENCH, FIELD(pairs), 0, 0,
      "a test of P prompt tokens and then G generated ones; may be repeated; default: none" },
    { "-t", "--threads", "N,..", FLAG_TEXT, BENCH, FIELD(threads), 0, 0,
      "CPU threads; of several values, here and below, all combinations are measured; default: one per core" },
    { "-ctk", "--cache-type-k", "TYPE,..", FLAG_TEXT, MEASURES, FIELD(k_types), 0, 0,
      "KV cache types of K, global layers: " KV_TYPES "; default f16" },
    { "-ctv", "--cache-type-v", "TYPE,..", FLAG_TEXT, MEASURES, FIELD(v_types), 0, 0,
      "KV cache types of V; default: K's type" },
    { "-md", "--model-draft --spec-draft-model", "FILE,..", FLAG_TEXT, BENCH, FIELD(drafters), 0, 0,
      "draft models, for --spec-force; default: none" },
    { "--rows", NULL, "N,..", FLAG_TEXT, BENCH, FIELD(rows), 0, 0,
      "verification steps of N rows, 1 to 64, repeated at the same depth; default 0: none" },
    { "--images", NULL, "N,..", FLAG_TEXT, BENCH, FIELD(pictures), 0, 0,
      "with --mmproj, pictures of N tokens, 1 to 1120, through the image tower alone; 0: none; default 70,280,1120" },
    { "-d", "--n-depth", "N,..", FLAG_TEXT, BENCH, FIELD(depths), 0, 0,
      "tokens already in the context; default 0" },
    { "--spec-force", NULL, "P,..", FLAG_TEXT, MEASURES, FIELD(force), 0, 0,
      "with -md, accept drafts at random with probability P per depth, the last P beyond, to measure the "
      "cost of drafting; default: no drafting; sweep: drafts are verified" },
    { "--fill", NULL, "prompt|random", FLAG_CHOICE, MEASURES, FIELD(fill), 0, 0,
      "how these tokens get there: prompt (default): they are processed; random: random cache rows, which is "
      "quick" },
    { "-d", "--n-depth", "N,..", FLAG_TEXT, SWEEP, FIELD(depths), 0, 0,
      "tokens of the prompt; default 512; 0: none" },
    { "-n", "--n-gen", "N", FLAG_INT, SWEEP, FIELD(n_predict), 1, MAX_CONTEXT, "tokens to generate; default 128" },
    { "-md", "--model-draft --spec-draft-model", "FILE,..", FLAG_TEXT, SWEEP, FIELD(drafters), 0, 0,
      "draft models; the word none adds rows without one; default: none" },
    { "--draft-max", "--draft --draft-n --spec-draft-n-max", "N,..", FLAG_TEXT, SWEEP, FIELD(draft_maxes), 0, 0,
      "draft tokens per step, with -md; default 4" },
    { "--tree", "--spec-tree", "N,..", FLAG_TEXT, SWEEP, FIELD(trees), 0, 0,
      "draft trees of N tokens, with -md; default 0: chains" },
    { "-f", "--file", "FILE", FLAG_TEXT, SWEEP, FIELD(prompt_file), 0, 0,
      "the prompts are the beginning of this text; default: random tokens" },
    { "-o", "--output", "FILE", FLAG_TEXT, SWEEP, FIELD(out), 0, 0,
      "write the rows to this file; rows that it has already are skipped; default: standard output" },
    { "--kind", NULL, CHART_KINDS, FLAG_CHOICE, PLOT, FIELD(kind), 0, 0,
      "what the picture shows; default: the first that the table has data for" },
    { "-o", "--output", "FILE", FLAG_TEXT, PLOT, FIELD(out), 0, 0,
      "write the picture (SVG) to this file; default: standard output" },
    { "-r", "--repetitions", "N", FLAG_INT, BENCH, FIELD(n_runs), 1, 1000,
      "repetitions of each test; default 5" },
    { "-o", "--output", "md|csv|json|jsonl|sql", FLAG_CHOICE, BENCH, FIELD(out), 0, 0, "output format; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, NIAH, FIELD(prompts), 0, 0,
      "prompt tokens; default 1024,2048,4096" },
    { "-d", "--depth", "P,..", FLAG_TEXT, NIAH, FIELD(depths), 0, 0,
      "needle depth, percent of the text before it; default 0,25,50,75,100" },
    { "--needles", NULL, "N", FLAG_INT, NIAH, FIELD(n_needles), 1, MAX_NEEDLES,
      "needles per text, all asked for; default 1" },
    { "-r", "--repetitions", "N", FLAG_INT, NIAH, FIELD(n_runs), 1, 1000,
      "texts per length and depth; default 5" },
    { "-f", "--file", "FILE", FLAG_TEXT, NIAH, FIELD(prompt_file), 0, 0,
      "cut the texts from this file; default: generated text" },
    { "-o", "--output", "md|csv", FLAG_CHOICE, NIAH, FIELD(out), 0, 0, "output format; default md" },
    { "--svg", NULL, "FILE", FLAG_TEXT, NIAH, FIELD(svg), 0, 0, "write a heat map to this file; default: none" },
    { "--prompts", NULL, "FILE", FLAG_TEXT, EVAL, FIELD(prompt_list), 0, 0,
      "JSONL file of prompts, also of HumanEval, GSM8K or MATH as published; docs/eval.md; no default" },
    { "--csv", NULL, "FILE", FLAG_TEXT, EVAL, FIELD(csv), 0, 0,
      "add a row for each prompt to this file at once, and skip prompts whose rows it has already; default: none" },
    { "--limit", NULL, "N", FLAG_INT, EVAL, FIELD(n_prompts), 0, INT_MAX,
      "the first N prompts only; default 0: all" },
    { "-n", "--predict --n-predict", "N", FLAG_INT, EVAL, FIELD(n_predict), 1, INT_MAX,
      "maximum tokens of an answer; default 512" },
    { "--temp", "--temperature", "T", FLAG_REAL, EVAL, FIELD(temperature), 0, 1000, "temperature; default 0: greedy" },
    { "-s", "--seed", "N", FLAG_INT, EVAL, FIELD(seed), 0, 4294967295.0, "random seed; default 1" },
    { "--run-code", NULL, NULL, FLAG_ON, EVAL, FIELD(run_code), 0, 0,
      "run programs that the model wrote, and their tests, with python3 in a child that has limits; default: off" },
    { "-o", "--output", "md|csv|json", FLAG_CHOICE, EVAL, FIELD(out), 0, 0, "output format; default md" },
    { "--host", NULL, "ADDRESS", FLAG_TEXT, SERVE, FIELD(host), 0, 0,
      "address to listen on; default 127.0.0.1: this machine only" },
    { "--port", NULL, "N", FLAG_INT, SERVE, FIELD(port), 0, 65535,
      "port; 0: any free one, printed; default 8080" },
    { "-np", "--parallel", "N", FLAG_INT, SERVE, FIELD(parallel), 1, MAX_SESSIONS,
      "parallel answers, each with its own context; default 1" },
    { "--chunk", NULL, "N", FLAG_INT, SERVE, FIELD(chunk), 1, LARGE_BATCH,
      "prompt tokens between two decoding steps of other answers; default with -np: 512, else what fits in "
      "memory" },
    { "--api-key", NULL, "KEY", FLAG_TEXT, SERVE, FIELD(api_key), 0, 0,
      "key that every request must send; default: none" },
    { "--api-key-file", NULL, "FILE", FLAG_TEXT, SERVE, FIELD(api_key_file), 0, 0,
      "read the key from the first line of this file; default: none" },
    { "--allow-origin", NULL, "ORIGIN", FLAG_LIST, SERVE, FIELD(origins), 0, 0,
      "let web pages of ORIGIN use the API: https://app.example, app://obsidian.md; *: of every site; may be repeated; "
      "default: only the server's own page" },
    { "--public-url", NULL, "URL", FLAG_TEXT, SERVE, FIELD(public_url), 0, 0,
      "address at which a reverse proxy offers this server, for its own page; default: none" },
    { "--alias", "-a", "NAME", FLAG_TEXT, SERVE, FIELD(alias), 0, 0,
      "model name in the API; default: the file name" },
    { "--queue", NULL, "N", FLAG_INT, SERVE, FIELD(queue), 0, 100000,
      "queue length; further requests are refused; default 64" },
    { "--timeout", "-to", "S", FLAG_INT, SERVE, FIELD(timeout), 1, 1e6,
      "maximum seconds per answer; default 3600" },
    { "--max-body", NULL, "M", FLAG_INT, SERVE, FIELD(max_body), 1, 1024,
      "maximum request size in MiB; default 16" },
    { "--request-memory", NULL, "M", FLAG_INT, SERVE, FIELD(request_memory), 16, 1 << 24,
      "MiB of host memory for all requests and answers; default: half of free memory" },
    { "--cache-ram", "-cram", "M", FLAG_INT, SERVE, FIELD(cache_ram), 0, 1 << 24,
      "MiB of host memory for prefix checkpoints and idle conversations; default: an eighth of free memory" },
    { "--session-dir", NULL, "DIR", FLAG_TEXT, SERVE, FIELD(session_dir), 0, 0,
      "keep conversations in files there, also for the next run; default: in memory only" },
    { "--session-disk", NULL, "M", FLAG_INT, SERVE, FIELD(session_disk), 1, 1 << 24,
      "maximum MiB of these files; default 65536" },
    { "--log-text", NULL, NULL, FLAG_ON, SERVE, FIELD(log_text), 0, 0, "log prompts and answers; default: off" },
    { "-h", "--help", NULL, FLAG_ON, ANY, FIELD(help), 0, 0, "print this help; after a command: that of the command" },
    { "--version", NULL, NULL, FLAG_ON, ANY, FIELD(version), 0, 0, "print version, commit, compiler and backends" },
    { "--document", NULL, "man|bash|zsh", FLAG_CHOICE, ANY, FIELD(document), 0, 0,
      "print the manual page, or the completions for a shell, which make install installs; default: none" },
};
enum { N_FLAGS = sizeof flags / sizeof *flags };

static const struct { const char *first, *title; } groups[] = {   // headings; first: a group's first flag
    { "-m", "model" }, { "-p", "prompt" }, { "-n", "sampling" }, { "--grammar", "structured output" },
    { "-md", "speculative decoding" }, { "-c", "context and KV cache" },
    { "--pflash", "sparse attention and prompt compression (lossy)" }, { "--against", "device" },
    { "--show-thoughts", "output" },
    { "--ids", "ids, special tokens, dumps, perplexity" }, { "-p", "measurement" }, { "-p", "needles" },
    { "--prompts", "prompts of a file" },
    { "--host", "server" }, { "-h", "help" }
};
enum { N_GROUPS = sizeof groups / sizeof *groups };

// ==== [2] Flags of other programs ===================================================================================
// Commands written for llama.cpp and its forks, Lucebox, Ollama or vLLM work if they ask for nothing that this program
// does differently. One table says so for each flag; docs/commands.md shows whole commands.

typedef enum {
    NEEDLESS,                 // accepted with a note: `why` says who does it instead
    REFUSED,                  // the result would be another one: `why` says what to use instead
    RENAMED,                  // our flag `why`
    MEANS                     // our flag and its value, `why`; a value 0 means nothing
} ForeignKind;

typedef struct {
    ForeignKind kind;
    const char *names;        // separated by spaces
    const char *value;        // NULL: none follows; "[a|b]": one of these may follow, N is any number; else one follows
    const char *harmless;     // REFUSED: values that change nothing, separated by bars; NULL: none
    const char *why;
} Foreign;

static const Foreign foreign[] = {
    { NEEDLESS, "-ngl --gpu-layers --n-gpu-layers", "[N|auto|all]", NULL,
      "the whole model is on the GPU, if there is one" },
    { NEEDLESS, "-sm --split-mode -mg --main-gpu -ts --tensor-split -dev --device", "V", NULL,
      "CUDA_VISIBLE_DEVICES selects the GPU" },
    { NEEDLESS, "-nkvo --no-kv-offload -kvo --kv-offload --no-op-offload --op-offload --no-host -nopo -embd", "[0|1]",
      NULL, "the KV cache is where the weights are" },
    { NEEDLESS, "-nr --no-repack --repack --swa-full -kvu --kv-unified -no-kvu --offline", NULL, NULL,
      "the memory plan decides" },
    { NEEDLESS, "-fitt --fit-target -fitc --fit-ctx", "N", NULL,
      "the memory plan decides" },
    { NEEDLESS, "-fit --fit", "[on|off]", NULL, "the memory plan decides" },
    { NEEDLESS, "-fa --flash-attn", "[on|off|auto|0|1|0,1|1,0]", NULL, "flash attention is always on" },
    { NEEDLESS, "--mlock --mmap --no-mmap --no-warmup --warmup -dio --direct-io -ndio", NULL, NULL,
      "weights are mapped, and read before the prompt" },
    { NEEDLESS, "-mmp", "[0|1|0,1]", NULL, "weights are mapped" },
    { NEEDLESS, "--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict -tb --threads-batch --threads-http "
      "--prio-batch --poll-batch --delay", "V", NULL, "-t N sets the threads" },
    { NEEDLESS, "--jinja --no-jinja", NULL, NULL, "Gemma 4's chat template is built in" },
    { NEEDLESS, "-b --batch-size -ub --ubatch-size", "N", NULL, "the plan chooses the batch size of prompts" },
    { NEEDLESS, "-st --single-turn", NULL, NULL, "-p gives one answer" },
    { NEEDLESS, "-no-mli --no-mmproj --no-escape --no-context-shift -cb --cont-batching --cache-prompt --slots "
      "--metrics --props --nowordwrap --hidethinking --webui", NULL, NULL, "it is so without the flag" },
    { NEEDLESS, "--no-webui", NULL, NULL, "nobody has to open the page" },
    { NEEDLESS, "--cache-reuse --keepalive --dtype --draft-min --draft-n-min --spec-draft-n-min --defrag-thold -dt",
      "V", NULL, "nothing depends on it here" },
    { NEEDLESS, "-ngld --gpu-layers-draft --n-gpu-layers-draft -cd --ctx-size-draft -devd --device-draft -td "
      "--threads-draft -tbd -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft", "V", NULL,
      "the draft model runs where the model does" },
    { NEEDLESS, "--no-display-prompt --display-prompt --simple-io --log-disable --no-perf --perf --no-show-timings "
      "--show-timings --log-prefix --log-timestamps --progress --no-log-prefix", NULL, NULL,
      "stdout carries the answer only, stderr the rest; -v shows more" },
    { NEEDLESS, "--log-colors", "[on|off|auto]", NULL, "--color is the flag here" },
    { NEEDLESS, "-lv --verbosity --log-verbosity", "N", NULL, "-v shows more" },
    { RENAMED, "--max-tokens --num-predict --max-new-tokens --n-gen", "N", NULL, "-n" },
    { RENAMED, "--n-ctx --num-ctx --max-model-len --max-seq-len --context --max-ctx", "N", NULL, "-c" },
    { RENAMED, "--verbose-prompt", NULL, NULL, "-v" },
    { RENAMED, "--served-model-name --model-name", "NAME", NULL, "--alias" },
    { RENAMED, "--draft-model --mtp --mtp-head", "FILE", NULL, "-md" },
    { RENAMED, "--draft-method", "NAME", NULL, "--spec" },
    { RENAMED, "--gamma", "N", NULL, "--draft-max" },
    { RENAMED, "--ddtree-budget --budget", "N", NULL, "--tree" },
    { RENAMED, "--kv-k --ctk", "TYPE", NULL, "-ctk" },
    { RENAMED, "--kv-v --ctv", "TYPE", NULL, "-ctv" },
    { RENAMED, "--pflash-alpha", "ALPHA", NULL, "--pflash" },
    { RENAMED, "--prefill-keep-ratio --pflash-keep-ratio --keep-ratio", "R", NULL, "--compress" },
    { RENAMED, "--prefill-drafter --pflash-scorer", "FILE", NULL, "--scorer" },
    { RENAMED, "--prefill-threshold --pflash-min-tokens", "N", NULL, "--compress-from" },
    { MEANS, "--kv-tq3", "[0|1]", NULL, "-ctk tq3" },
    { MEANS, "--kv-q4", "[0|1]", NULL, "-ctk q4_0" },
    { MEANS, "--kv-f16", "[0|1]", NULL, "-ctk f16" },
    { RENAMED, "--parallel-sequences --max-num-seqs", "N", NULL, "-np" },
    { RENAMED, "-bf --binary-file", "FILE", NULL, "-f" },
    { RENAMED, "-sp", NULL, NULL, "--special" },
    { NEEDLESS, "--no-thinking", NULL, NULL, "thoughts are off without --think" },
    { NEEDLESS, "--ddtree --fast-rollback --ddtree-no-chain-seed --no-chain-seed", NULL, NULL,
      "--tree N, or --ddtree-budget N, drafts a tree; it begins with the most likely chain, and drops cost nothing" },
    { NEEDLESS, "--draft-max-adaptive --spec-dm-adaptive", NULL, NULL,
      "--spec auto, the default with -md, adapts the number of drafts" },
    { NEEDLESS, "--no-spec-dm-adaptive", NULL, NULL, "--spec mtp and --spec dflash draft a fixed number of tokens" },
    { NEEDLESS, "--draft-kv-cap --draft-swa --draft-ctx-max --spec-draft-ctx-size --spec-dflash-cross-ctx "
      "--spec-draft-ngl", "N", NULL, "the plan sizes and places the draft model and its cache" },
    { NEEDLESS, "--draft-swa-trunc --mem-diag", NULL, NULL, "the memory plan decides, and -v prints it" },
    { NEEDLESS, "--gpu --target-device --target-devices --draft-device", "V", NULL,
      "CUDA_VISIBLE_DEVICES selects the GPU" },
    { REFUSED, "--fa-window", "N", "0",
      "global layers attend to all tokens; --pflash ALPHA makes long prompts faster, --pflash-from N says from where" },
    { REFUSED, "--ddtree-temp", "T", "1|1.0", "trees use the draft model's own probabilities; --tree N" },
    { REFUSED, "--draft-block-size --verify-width", "N", NULL,
      "a block of N tokens holds N - 1 drafts; use --draft-max with that number" },
    { REFUSED, "--spec-draft-temp", "T", "auto|0|0.0", "drafts are the most likely tokens" },
    { REFUSED, "--speculative-config", "JSON", NULL, "use -md FILE, --spec NAME and --draft-max N" },
    { REFUSED, "--kv-cache-dtype", "TYPE", "auto", "use -ctk TYPE, one of " KV_TYPES },
    { REFUSED, "--mtp-pos-mode", "MODE", "const", "positions in an MTP chain are constant, as in Google's reference" },
    { REFUSED, "--prefill-compression", "MODE", "off", "--compress R shows the model a part of long prompts" },
    { REFUSED, "--tokens --tokens-file", "V", NULL, "prompts are texts: -p or -f FILE; logits --ids FILE runs ids" },
    { REFUSED, "--bench", NULL, NULL, "gemma4 bench MODEL.gguf measures speed" },
    { REFUSED, "--daemon", NULL, NULL, "gemma4 serve MODEL.gguf is a server" },
    { REFUSED, "--stream-fd", "N", NULL, "gemma4 serve MODEL.gguf is a server" },
    { REFUSED, "-hf -hfr --hf-repo -hff --hf-file -hfd --hf-repo-draft -mu --model-url -dr --docker-repo", "V", NULL,
      "gemma4 opens files only; ./run.sh --fetch NAME downloads a model" },
    { REFUSED, "--lora --lora-scaled --control-vector --control-vector-scaled", "V", NULL,
      "adapters are not supported; merge the adapter into the model, then convert that" },
    { REFUSED, "-mmu --mmproj-url", "V", NULL,
      "gemma4 opens files only; download it, then --mmproj FILE" },
    { NEEDLESS, "--no-mmproj --mmproj-auto --no-mmproj-auto", NULL, NULL,
      "an image tower is loaded only with --mmproj or --image" },
    { NEEDLESS, "--mmproj-offload --no-mmproj-offload", NULL, NULL,
      "the image tower runs where the model does" },
    { REFUSED, "--image-min-tokens --image-max-tokens", "N", NULL,
      "a picture has one of five sizes: --image-tokens 70, 140, 280, 560 or 1120" },
    { REFUSED, "--audio", "V", NULL, "sound is not supported" },
    { REFUSED, "--mirostat", "N", "0",
      "not supported; --temp, --top-k, --top-p and --min-p shape the sampling" },
    { NEEDLESS, "--mirostat-lr --mirostat-ent --dry-base --dry-allowed-length --dry-penalty-last-n "
      "--dry-sequence-breaker --xtc-threshold --dynatemp-exp", "V", NULL,
      "it has no effect without the flag that is refused" },
    { REFUSED, "--dry-multiplier", "N", "0|0.0",
      "not supported; --repeat-penalty and --frequency-penalty act against repetition" },
    { REFUSED, "--xtc-probability --dynatemp-range", "N", "0|0.0",
      "not supported; --temp and --min-p shape the sampling" },
    { REFUSED, "--typical --typical-p", "P", "1|1.0", "not supported; --top-p and --min-p shape the sampling" },
    { REFUSED, "--top-n-sigma --top-nsigma", "N", "-1|0", "not supported; --min-p shapes the sampling" },
    { REFUSED, "--repeat-last-n", "N", "-1", "penalties count the whole text, as --repeat-last-n -1 would" },
    { REFUSED, "--samplers --sampler-seq --sampling-seq", "V", NULL,
      "the order is fixed: penalties, temperature, top-k, top-p, min-p" },
    { REFUSED, "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
      "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast", "V", "none|1|1.0",
      "the model's own RoPE is used; -c may exceed the trained length" },
    { REFUSED, "-gan --grp-attn-n -gaw --grp-attn-w", "N", "1", "self-extend is not supported" },
    { REFUSED, "--override-kv", "V", NULL, "the file's metadata counts" },
    { REFUSED, "--keep", "N", "0", "--context-shift keeps <bos> and the system prompt" },
    { REFUSED, "-e --escape", NULL, NULL, "\\n in -p stays \\n; in bash, -p $'a\\nb' has a line break" },
    { REFUSED, "--chat-template --chat-template-file", "V", "gemma|gemma4",
      "Gemma 4's is built in; --template selects its variant, --raw uses none" },
    { REFUSED, "--chat-template-kwargs", "V", "{\"enable_thinking\":false}|{\"enable_thinking\": false}",
      "--think lets the model think" },
    { REFUSED, "-rea --reasoning", "V", "off|auto", "--think lets the model think" },
    { REFUSED, "--reasoning-format", "V", "auto|deepseek",
      "thoughts are never part of the text; --show-thoughts shows them" },
    { REFUSED, "-sysf --system-prompt-file", "FILE", NULL, "use -sys \"$(cat FILE)\"" },
    { REFUSED, "--prompt-cache --slot-save-path", "FILE", NULL,
      "--session FILE keeps a session, serve --session-dir DIR all of them" },
    { REFUSED, "--prompt-cache-all --prompt-cache-ro", NULL, NULL, "--session FILE keeps a session" },
    { REFUSED, "--in-prefix --in-suffix --in-prefix-bos", "V", NULL,
      "the chat template does this; --raw continues any text" },
    { REFUSED, "-mli --multiline-input", NULL, NULL, "\"\"\" begins and ends a message of several lines" },
    { REFUSED, "--log-file", "FILE", NULL, "use 2>FILE" },
    { REFUSED, "--format", "V", NULL, "-j '{}' constrains the answer to JSON, -j SCHEMA to a schema" },
    { REFUSED, "--embedding --embeddings --rerank --reranking", NULL, NULL, "not supported: Gemma 4 generates text" },
    { REFUSED, "--ssl-key-file --ssl-cert-file --path --api-prefix", "V", NULL, "use a proxy such as nginx or caddy" },
    { REFUSED, "--tensor-parallel-size -tp --pipeline-parallel-size", "N", "1", "one GPU is used" },
    { REFUSED, "--gpu-memory-utilization", "P", NULL, "--vram G plans for G GiB" },
    { REFUSED, "--list-devices --completion-bash", NULL, NULL, "see --version and --document" },
};
enum { N_FOREIGN = sizeof foreign / sizeof *foreign };

// Values of our flags as other programs spell them. The types with 3 and 4 bits differ from ours in the order of their
// bits and the size of their groups, not in kind.
static const struct { const char *flags, *names, *ours; } foreign_values[] = {
    { "-ctk -ctv --kv-swa", "tq3_0 turbo3 turbo3_0 tbq3 tbq3_0 k3 v3", "tq3" },
    { "-ctk -ctv --kv-swa", "tq4_0 turbo4 turbo4_0 tbq4 tbq4_0 k4 v4", "tq4" },
    { "--spec", "none", "off" }, { "--spec", "draft-mtp", "mtp" }, { "--spec", "draft-dflash", "dflash" },
    { "--spec", "ngram-simple", "ngram" } };

static bool has_penalties(const Flags *f) {             // given by flags; the file may have some too
    return f->repeat < 1 || f->repeat > 1 || f->presence != 0 || f->frequency != 0;
}
static bool shifts_context(const Flags *f) { return f->shift; }

// Refused flags that have no effect without other flags.
static const struct { const char *names; bool (*matters)(const Flags *f); } conditions[] = {
    { "--repeat-last-n", has_penalties }, { "--keep", shifts_context } };

static bool has_effect(const Foreign *other, const Flags *f) {
    for (size_t k = 0; k < sizeof conditions / sizeof *conditions; k++)
        if (!strcmp(conditions[k].names, other->names)) return conditions[k].matters(f);
    return true;
}

// Words that other programs have in the place of a command, and what to type instead.
static const struct { const char *names, *instead; } foreign_words[] = {
    { "run chat", "gemma4 MODEL.gguf for a chat, or gemma4 MODEL.gguf -p TEXT" },
    { "generate cli completion complete llama-cli", "gemma4 MODEL.gguf -p TEXT" },
    { "help", "gemma4 --help, or gemma4 COMMAND --help" },
    { "version", "gemma4 --version" },
    { "pull list ls rm cp ps stop create push",
      "./run.sh --fetch for a list of models to download; models are files here" },
    { "show info", "gemma4 plan MODEL.gguf" },
    { "server api llama-server", "gemma4 serve MODEL.gguf" },
    { "perplexity llama-perplexity", "gemma4 ppl MODEL.gguf -f FILE" },
    { "convert quantise llama-quantize", "gemma4 quantize IN OUT.gguf TYPE" },
    { "benchmark llama-bench", "gemma4 bench MODEL.gguf" },
    { "ollama vllm", "gemma4 --help for the list of commands" },
};

// ==== [3] Names =====================================================================================================

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

static bool is_number(const char *word) {
    char *end;
    strtod(word, &end);
    return end != word && !*end;
}

static bool is_named(const Flag *f, const char *arg) {
    return !strcmp(arg, f->name) || is_listed(f->alias, arg);
}

static const char *verb_name(Verb verb) {
    for (size_t k = 0; k < N_VERBS; k++)
        if (verbs[k].verb == verb) return verbs[k].name;
    return "generate";
}

static Verb verb_named(const char *name) {
    for (size_t k = 0; k < N_VERBS; k++)
        if (!strcmp(name, verbs[k].name)) return verbs[k].verb;
    return 0;
}

static const Foreign *find_foreign(const char *arg) {
    for (size_t k = 0; k < N_FOREIGN; k++)
        if (is_listed(foreign[k].names, arg)) return &foreign[k];
    return NULL;
}

// Returns the flag of this name, or of another program's name for it, that the verb takes. If the verb takes none,
// returns the first flag of this name, which refuse_flag() then refuses. Returns NULL if no flag has this name.
static const Flag *find_flag(const char *arg, Verb verb) {
    const Flag *flag = NULL;
    for (size_t k = 0; k < N_FLAGS; k++)
        if (is_named(&flags[k], arg) && (!flag || flags[k].verbs & (int)verb)) flag = &flags[k];
    const Foreign *other = flag && flag->verbs & (int)verb ? NULL : find_foreign(arg);
    const Flag *ours = other && other->kind == RENAMED ? find_flag(other->why, verb) : NULL;
    return ours && (!flag || ours->verbs & (int)verb) ? ours : flag;
}

// A value, or values separated by commas, as our flag spells them, in `out`.
static const char *our_value(const Flag *flag, const char *value, char out[200]) {
    size_t n = 0;
    if (strlen(value) >= 100) return value;
    for (const char *at = value; ; at++) {
        const int len = (int)strcspn(at, ",");
        const char *ours = NULL;
        char word[100];
        for (int i = 0; i < len; i++) word[i] = (char)tolower((unsigned char)at[i]);
        word[len] = 0;
        for (size_t k = 0; k < sizeof foreign_values / sizeof *foreign_values; k++)
            if (is_listed(foreign_values[k].flags, flag->name) && is_listed(foreign_values[k].names, word))
                ours = foreign_values[k].ours;
        n += (size_t)snprintf(out + n, 200 - n, "%.*s", ours ? (int)strlen(ours) : len, ours ? ours : at);
        at += len;
        if (!*at) break;
        out[n++] = ',';
    }
    return strcmp(out, value) ? out : value;
}

// True if the word after a flag belongs to it. next: NULL if there is none.
static bool takes_next(const Flag *flag, const Foreign *other, const char *next) {
    if (!next) return flag ? flag->kind < FLAG_WORD || flag->kind == FLAG_INT || flag->kind == FLAG_REAL :
                      other && other->value && *other->value != '[';
    if (flag && flag->kind == FLAG_WORD) return is_listed(flag->value, next);
    if (flag && flag->kind == FLAG_MAYBE) return is_number(next);
    if (flag) return flag->kind != FLAG_ON;
    if (!other || !other->value) return false;
    char values[64];
    snprintf(values, sizeof values, "%.*s", (int)strcspn(other->value + 1, "]"), other->value + 1);
    return *other->value != '[' || is_listed(values, next) || (is_listed(values, "N") && is_number(next));
}

// The number of letters to insert, delete, replace or swap with their neighbour to turn one word into the other.
static int edit_distance(const char *a, const char *b) {
    enum { MOST = 32 };
    int d[MOST + 1][MOST + 1];
    const int n = (int)strlen(a), m = (int)strlen(b);
    if (n > MOST || m > MOST) return MOST;
    for (int i = 0; i <= n; i++)
        for (int j = 0; j <= m; j++) {
            d[i][j] = i && j ? d[i - 1][j - 1] + (a[i - 1] != b[j - 1]) : max_int(i, j);
            if (!i || !j) continue;
            d[i][j] = min_int(d[i][j], min_int(d[i - 1][j], d[i][j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = min_int(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[n][m];
}

// Replaces *best by the name in a list that is closest to the word, if it is closer. Dashes at the front do not count.
static void closest(const char *names, const char *word, char best[40], int *distance) {
    char name[40];
    for (const char *at = names; at && *at; at += strspn(at, " ")) {
        const int n = (int)strcspn(at, " ");
        snprintf(name, sizeof name, "%.*s", n, at);
        at += n;
        const int d = edit_distance(name + strspn(name, "-"), word + strspn(word, "-"));
        if (d >= *distance) continue;
        *distance = d;
        memcpy(best, name, sizeof name);
    }
}

// The flag of this verb, or if is_flag is false the command, whose name is nearly the word. Returns "" if none is.
static const char *near_miss(const char *word, bool is_flag, Verb verb) {
    static char best[40];
    const int n = (int)strlen(word + strspn(word, "-"));
    int distance = n < 3 ? 1 : n < 6 ? 2 : 3;          // and less than that many letters
    best[0] = 0;
    for (size_t k = 0; !is_flag && k < N_VERBS; k++) closest(verbs[k].name, word, best, &distance);
    for (size_t k = 0; is_flag && k < N_FLAGS; k++) {
        if (!(flags[k].verbs & (int)verb)) continue;
        closest(flags[k].name, word, best, &distance);
        closest(flags[k].alias, word, best, &distance);
    }
    return best;
}

// ==== [4] Help ======================================================================================================

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

// Prints an entry of a list: a name of `n` columns at most next to its text, or above it where that leaves no room.
static void print_entry(const char *name, const char *text, int n, int columns) {
    const bool beside = columns - n - 3 >= 40;
    const int indent = beside ? n + 3 : 6;
    printf("  %s", name);
    if (beside && (int)strlen(name) <= n) printf("%*s", indent - 2 - (int)strlen(name), "");
    else printf("\n%*s", indent, "");
    print_wrapped(text, indent, columns - indent);
}

static const char *flag_text(char out[200], const Flag *f) {           // "-c, --ctx-size N"
    int n = snprintf(out, 200, "%s", f->name);
    for (const char *at = f->alias; at && *at; at += strspn(at, " ")) {
        n += snprintf(out + n, 200 - (size_t)n, ", %.*s", (int)strcspn(at, " "), at);
        at += strcspn(at, " ");
    }
    if (f->value) snprintf(out + n, 200 - (size_t)n, f->kind == FLAG_WORD ? " [%s]" : " %s", f->value);
    return out;
}

// The title of the group that begins with flag k, *group being the number of groups so far; NULL: none begins there.
static const char *group_at(size_t k, size_t *group) {
    const bool begins = *group < N_GROUPS && !strcmp(groups[*group].first, flags[k].name);
    return begins ? groups[(*group)++].title : NULL;
}

// Prints the help of one command, in lines that fit the terminal.
static void print_help(Verb verb) {
    static const char *const uses[][2] = {
        { "gemma4 MODEL.gguf [flags]", "chat on a terminal; otherwise standard input is the prompt" },
        { "gemma4 MODEL.gguf -p TEXT [flags]", "answer a prompt: text on stdout, the rest on stderr" },
        { "gemma4 COMMAND MODEL.gguf [flags]", "one of these; gemma4 COMMAND --help lists its flags" } };
    const int columns = min_int(terminal_columns(1), 120);
    const char *title = NULL;
    char text[200];
    if (verb == GENERATE) {
        printf("gemma4 " VERSION " - runs Gemma 4 text models from GGUF files\n\n");
        for (size_t k = 0; k < sizeof uses / sizeof *uses; k++) print_entry(uses[k][0], uses[k][1], 34, columns);
        printf("\ncommands\n");
        for (size_t k = 0; k < N_VERBS; k++) print_entry(verbs[k].name, verbs[k].help, 10, columns);
    }
    for (size_t k = 0; k < N_VERBS; k++) {
        if (verbs[k].verb != verb) continue;
        printf("gemma4 %s %s\n\n  ", verbs[k].name, verbs[k].arguments);
        print_wrapped(verbs[k].help, 2, columns - 2);
    }
    for (size_t k = 0, group = 0; k < N_FLAGS; k++) {
        const char *begins = group_at(k, &group);
        if (begins) title = begins;
        if (!(flags[k].verbs & (int)verb)) continue;
        if (title) printf("\n%s\n", title);
        title = NULL;
        print_entry(flag_text(text, &flags[k]), flags[k].help, 28, columns);
    }
}

// ==== [5] Manual page ===============================================================================================

static void print_roff(const char *text) {             // plain text as troff reads it
    for (; *text; text++)
        if (*text == '-') printf("\\-");
        else if (*text == '\\') printf("\\e");
        else if (*text == '\'') printf("\\(aq");
        else putchar(*text);
}

static void print_item(const char *name, const char *text, const char *more) {         // more: after it, or NULL
    printf(".TP\n.B ");
    print_roff(name);
    printf("\n");
    print_roff(text);
    if (more) printf("\n.I (%s)", more);
    printf("\n");
}

static void print_man(void) {
    static const char *const kinds[] = { "accepted, not needed", "refused", "same as", "same as" };
    char text[200], owners[200];
    printf(".TH GEMMA4 1 \"\" \"gemma4 " VERSION "\" \"User Commands\"\n"
           ".SH NAME\ngemma4 \\- runs Gemma 4 text models from GGUF files\n"
           ".SH SYNOPSIS\n.B gemma4\n.I MODEL.gguf\n[\\fB\\-p\\fR \\fITEXT\\fR] [\\fIflags\\fR]\n"
           ".br\n.B gemma4\n.I COMMAND MODEL.gguf\n[\\fIflags\\fR]\n"
           ".SH DESCRIPTION\nWith \\fB\\-p\\fR gemma4 answers a prompt: the text goes to standard output, everything "
           "else to standard error. Without it, on a terminal, it chats. Other uses are commands:\n.SH COMMANDS\n");
    for (size_t k = 0; k < N_VERBS; k++) {
        snprintf(text, sizeof text, "%s %s", verbs[k].name, verbs[k].arguments);
        print_item(text, verbs[k].help, NULL);
    }
    for (size_t k = 0, group = 0; k < N_FLAGS; k++) {
        const char *title = group_at(k, &group);
        if (title) printf(".SH FLAGS: %s\n", title);
        owners[0] = 0;
        for (size_t i = 0; i < N_VERBS && !(flags[k].verbs & GENERATE); i++)
            if (flags[k].verbs & (int)verbs[i].verb)
                snprintf(owners + strlen(owners), sizeof owners - strlen(owners), "%s%s", *owners ? ", " : "",
                         verbs[i].name);
        print_item(flag_text(text, &flags[k]), flags[k].help, *owners ? owners : NULL);
    }
    printf(".SH COMMANDS OF THE CHAT\n");
    for (size_t k = 0; k < N_COMMANDS; k++) {
        snprintf(text, sizeof text, "%s %s", commands[k].name, commands[k].value ? commands[k].value : "");
        print_item(text, commands[k].help, NULL);
    }
    printf(".SH FLAGS OF OTHER PROGRAMS\n");
    for (size_t k = 0; k < N_FOREIGN; k++) print_item(foreign[k].names, foreign[k].why, kinds[foreign[k].kind]);
}

// ==== [6] Completions ===============================================================================================

static void print_names(const Flag *f) {               // all names, separated by spaces
    printf(" %s%s%s", f->name, f->alias ? " " : "", f->alias ? f->alias : "");
}

static void print_words(const char *choices) {         // a|b as words
    for (; *choices; choices++) putchar(*choices == '|' ? ' ' : *choices);
}

static bool is_choice_flag(const Flag *f) { return f->kind == FLAG_CHOICE || f->kind == FLAG_WORD; }
static bool is_path_flag(const Flag *f) { return f->value && (!strcmp(f->value, "FILE") || !strcmp(f->value, "DIR")); }

static void print_bash(void) {
    printf("# bash completion for gemma4, made from its table of flags by gemma4 --document bash\n_gemma4() {\n"
           "    local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} verb=generate w words\n"
           "    for w in \"${COMP_WORDS[@]:1}\"; do case $w in");
    for (size_t k = 0; k < N_VERBS; k++) printf("%s%s", k ? "|" : " ", verbs[k].name);
    printf(") verb=$w; break;; esac; done\n    COMPREPLY=()\n    case $verb:$last in\n");
    for (size_t v = 0; v <= N_VERBS; v++) {
        const Verb verb = v < N_VERBS ? verbs[v].verb : GENERATE;
        for (size_t k = 0; k < N_FLAGS; k++) {
            if (!(flags[k].verbs & (int)verb) || !is_choice_flag(&flags[k])) continue;
            printf("    %s:%s", verb_name(verb), flags[k].name);
            for (const char *at = flags[k].alias; at && *at; at += strcspn(at, " "), at += strspn(at, " "))
                printf("|%s:%.*s", verb_name(verb), (int)strcspn(at, " "), at);
            printf(") words=\"");
            print_words(flags[k].value);
            printf("\"; COMPREPLY=($(compgen -W \"$words\" -- \"$word\")); return;;\n");
        }
    }
    printf("    esac\n    case $verb in\n");
    for (size_t v = 0; v <= N_VERBS; v++) {
        const Verb verb = v < N_VERBS ? verbs[v].verb : GENERATE;
        printf("    %s) words=\"", verb_name(verb));
        for (size_t k = 0; k < N_FLAGS; k++) if (flags[k].verbs & (int)verb) print_names(&flags[k]);
        printf("\";;\n");
    }
    printf("    esac\n    if [[ $word == -* ]]; then COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
           "    else COMPREPLY=($(compgen -f -- \"$word\")); [[ $COMP_CWORD -gt 1 ]] || COMPREPLY+=($(compgen -W \"");
    for (size_t k = 0; k < N_VERBS; k++) printf("%s%s", k ? " " : "", verbs[k].name);
    printf("\" -- \"$word\")); fi\n}\ncomplete -o filenames -F _gemma4 gemma4\n");
}

// Prints the flag for _arguments of zsh: '-c[context size in tokens]:N: '. A quote, bracket or colon in the help would
// end a part of that.
static void print_zsh_flag(const Flag *f) {
    const char *const names[] = { f->name, f->alias };
    for (int i = 0; i < 2; i++)
        for (const char *at = names[i]; at && *at; at += strcspn(at, " "), at += strspn(at, " ")) {
            printf("      '%s%.*s[", f->kind == FLAG_LIST ? "*" : "", (int)strcspn(at, " "), at);
            for (const char *c = f->help; *c && *c != ';'; c++) {
                if (*c == '[' || *c == ']' || *c == ':' || *c == '\\') putchar('\\');
                if (*c == '\'') printf("'\\''");
                else putchar(*c);
            }
            printf("]");
            if (is_choice_flag(f)) {
                printf("%s:value:(", f->kind == FLAG_WORD ? ":" : "");
                print_words(f->value);
                printf(")");
            } else if (f->value && !strcmp(f->value, "DIR")) printf(":folder:_files -/");
            else if (is_path_flag(f)) printf(":file:_files");
            else if (f->kind == FLAG_MAYBE) printf("::number: ");
            else if (f->value) printf(":value: ");
            printf("'\n");
        }
}

static void print_zsh(void) {
    printf("#compdef gemma4\n# zsh completion, made from the table of flags by gemma4 --document zsh\n_gemma4() {\n"
           "  local verb=generate w\n  local -a spec\n  for w in $words; do case $w in (");
    for (size_t k = 0; k < N_VERBS; k++) printf("%s%s", k ? "|" : "", verbs[k].name);
    printf(") verb=$w; break;; esac; done\n  case $verb in\n");
    for (size_t v = 0; v <= N_VERBS; v++) {
        const Verb verb = v < N_VERBS ? verbs[v].verb : GENERATE;
        printf("    (%s) spec=(\n", verb_name(verb));
        for (size_t k = 0; k < N_FLAGS; k++) if (flags[k].verbs & (int)verb) print_zsh_flag(&flags[k]);
        printf("    );;\n");
    }
    printf("  esac\n  _arguments -S $spec '1:model or command:->first' '*:file:_files' && return\n"
           "  [[ $state == first ]] && { _files; compadd");
    for (size_t k = 0; k < N_VERBS; k++) printf(" %s", verbs[k].name);
    printf("; }\n}\n_gemma4 \"$@\"\n");
}

// Prints the manual page ("man"), or the completions for a shell ("bash", "zsh").
static void print_document(const char *name) {
    if (!strcmp(name, "man")) print_man();
    else if (!strcmp(name, "bash")) print_bash();
    else print_zsh();
}

#endif
