/* cli.h - the command line: what its words mean, and what each command does.
 *
 * Uses every part. Begin with command_line().
 *   [1] Parsing    [2] Generating    [3] Other verbs */
#ifndef CLI_H
#define CLI_H

// ==== [1] Parsing ===================================================================================================

// Dies because the verb does not take this flag. The message names the verbs that take it.
static void refuse_flag(const Flag *flag, Verb verb) {
    char owners[140] = "";
    for (size_t k = 0; k < N_VERBS; k++) {
        if (!(flag->verbs & (int)verbs[k].verb)) continue;
        snprintf(owners + strlen(owners), sizeof owners - strlen(owners), "%s%s", *owners ? ", " : "", verbs[k].name);
    }
    const bool generates = flag->verbs & GENERATE;
    die("%s is not a %s option; it is an option of: %s%s%s", flag->name, verb_name(verb), generates ? "generate" : "",
        generates && *owners ? ", " : "", owners);
}

// If the word is --name=value and --name is a flag, returns the value and writes the name; else NULL.
static const char *split_word(const char *word, char name[64]) {
    const char *equals = word[0] == '-' ? strchr(word, '=') : NULL;
    if (!equals || equals - word >= 64) return NULL;
    snprintf(name, 64, "%.*s", (int)(equals - word), word);
    return find_flag(name, 0) || find_foreign(name) ? equals + 1 : NULL;
}

// Returns the index in argv of the verb: the first word that is neither a flag nor the value of a flag. Returns 0 if
// that word is not a verb. The verb is not known here, so flags with the same name must either all take a value or all
// take none.
static int find_verb(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') return verb_named(argv[i]) ? i : 0;
        i += takes_next(find_flag(argv[i], 0), find_foreign(argv[i]), i + 1 < argc ? argv[i + 1] : NULL);
    }
    return 0;
}

// True if the word does not look like a path and no file has this name.
static bool is_no_file(const char *word) { return *word && !strpbrk(word, "./") && access(word, F_OK); }

__attribute__((noreturn)) static void die_no_verb(const char *word) {
    char names[200] = "";
    for (size_t k = 0; k < sizeof foreign_words / sizeof *foreign_words; k++)
        if (is_listed(foreign_words[k].names, word))
            die("there is no command '%s'; type %s", word, foreign_words[k].instead);
    const char *near = near_miss(word, false, 0);
    if (*near) die("unknown command or missing file '%s'; did you mean %s?", word, near);
    for (size_t k = 0; k < N_VERBS; k++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", k ? ", " : "", verbs[k].name);
    die("unknown command or missing file '%s'; commands: %s", word, names);
}

// Dies because a second word follows the model and the verb does not take one.
__attribute__((noreturn)) static void refuse_word(Verb verb, const char *model, const char *word) {
    const char *name = verb == GENERATE ? "" : verb_name(verb), *gap = *name ? " " : "";
    if (is_no_file(model)) die_no_verb(model);
    if (verb_named(word)) die("%s: expected the command before the model; try gemma4 %s %s", word, word, model);
    if (!access(word, F_OK))
        die("%s: a second model file; if it is the draft model of %s, type -md %s", word, model, word);
    if (!(verb & (GENERATE | TOKENIZE | LOGITS)))
        die("unexpected word '%s' after the model %s; try gemma4 %s --help", word, model, name);
    die("unexpected word '%s' after the model %s; a text needs -p: gemma4 %s%s%s -p \"%s%s\"", word, model, name, gap,
        model, word, strchr(word, ' ') ? "" : " ..");
}

// Dies because no flag has this name.
__attribute__((noreturn)) static void die_no_flag(const char *arg, Verb verb) {
    const char *near = near_miss(arg, true, verb), *name = verb_name(verb);
    if (*near) die("%s: unknown flag; did you mean %s?", arg, near);
    die("%s: unknown flag; try gemma4 %s%s--help", arg, verb == GENERATE ? "" : name, verb == GENERATE ? "" : " ");
}

// The flag of this name. llama.cpp's --draft takes a number of tokens, Lucebox's a draft model.
static const Flag *find_given(const char *arg, const char *value, Verb verb) {
    const bool file = !strcmp(arg, "--draft") && value && !is_number(value);
    return find_flag(file ? "-md" : arg, verb);
}

// Stores the value of a flag; NULL: it has none, which a flag of this kind allows.
static void set_flag(Flags *f, const Flag *flag, const char *arg, const char *value) {
    void *field = (char *)f + flag->field;
    if (flag->kind == FLAG_ON) {
        if (value && !is_listed("true|on|1|false|off|0", value)) die("%s: expected no value, got '%s'", arg, value);
        *(bool *)field = !value || is_listed("true|on|1", value);
    } else if (flag->kind == FLAG_LIST) {
        TextList *list = field;
        list->text = realloc(list->text, (size_t)(list->n + 1) * sizeof *list->text);
        if (!list->text) die("%s: out of memory", arg);
        list->text[list->n++] = value;
    } else if (is_choice_flag(flag)) {
        if (value && !is_listed(flag->value, value)) die("%s: expected %s, got '%s'", arg, flag->value, value);
        *(const char **)field = value ? value : "on";
    } else if (flag->kind == FLAG_TEXT) {
        if (is_path_flag(flag) && !*value) die("%s: expected a file name, got an empty one", arg);
        *(const char **)field = value;
    } else if (!value) {
        *(double *)field = PFLASH_ALPHA;
    } else {
        char *end;
        errno = 0;
        const double v = strtod(value, &end);
        const bool whole = v == floor(v);
        if (end == value || *end || errno || !(v >= flag->min && v <= flag->max) || (flag->kind == FLAG_INT && !whole))
            die("%s: expected %s from %.10g to %.10g, got '%s'", arg,
                flag->kind == FLAG_INT ? "an integer" : "a number", flag->min, flag->max, value);
        *(double *)field = v;
    }
}

// A flag of another program: dies if it would change the result; otherwise adds it to the note, one line of stderr.
static void take_foreign(const Flags *f, const Foreign *other, const char *arg, const char *value, char note[600]) {
    const bool harmless = value && is_listed(other->harmless, value);
    if (other->kind == REFUSED && !harmless && has_effect(other, f)) die("%s: %s", arg, other->why);
    const size_t n = strlen(note);
    snprintf(note + n, 600 - n, "%s%s (%s)", n ? ", " : "", arg,
             other->kind == NEEDLESS ? other->why : harmless ? "the default" : "without effect here");
}

// A value as our flag spells it; one that is spelled differently is copied, since flags point to their values.
static const char *keep_value(const Flag *flag, const char *value, char ours[200]) {
    const char *v = our_value(flag, value, ours);
    if (v == value) return value;
    char *copy = alloc_or_die(strlen(v) + 1, 1);
    fprintf(stderr, "# %s: %s is %s here\n", flag->name, value, v);
    return strcpy(copy, v);
}

static void parse_flags(Flags *f, int argc, char **argv) {
    struct { const char *arg, *value; } others[N_FOREIGN] = { { NULL, NULL } };        // the first of each row's flags
    bool given[N_FLAGS] = { false };
    char note[600] = "", name[64], ours[200];
    const char *word = NULL;                           // the model file, if it was given without -m
    const int verb_at = find_verb(argc, argv);
    f->verb = verb_at ? verb_named(argv[verb_at]) : GENERATE;
    for (int i = 1; i < argc; i++) {
        if (i == verb_at) continue;
        const char *value = split_word(argv[i], name), *arg = value ? name : argv[i];
        const Flag *flag = find_given(arg, value ? value : i + 1 < argc ? argv[i + 1] : NULL, f->verb);
        const Foreign *other = flag ? NULL : find_foreign(arg);
        if (!flag && !other) {
            if (arg[0] == '-') die_no_flag(arg, f->verb);
            if (!f->model) f->model = word = arg;
            else if (f->verb == QUANTIZE && !f->target) f->target = arg;
            else if (f->verb == QUANTIZE && !f->type) f->type = arg;
            else refuse_word(f->verb, f->model, arg);
            continue;
        }
        if (!value && takes_next(flag, other, i + 1 < argc ? argv[i + 1] : NULL)) {
            value = argv[++i];
            if (!value) die("%s needs a value: %s", arg, flag ? flag->value : other->value);
        }
        if (other && other->kind == MEANS) {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(other->why, " "), other->why);
            if (value && !strcmp(value, "0")) continue;
            flag = find_flag(name, f->verb), value = other->why + strlen(name) + 1;
        }
        if (flag) {
            if (given[flag - flags] && (flag->field == FIELD(drafter) || flag->field == FIELD(drafters)))
                die("%s %s: a second draft model; expected one -md", arg, value);
            given[flag - flags] = true;
            if (flag->verbs & (int)f->verb) set_flag(f, flag, arg, value ? keep_value(flag, value, ours) : NULL);
        } else if (!others[other - foreign].arg || other->kind == REFUSED) {
            others[other - foreign].arg = arg == name ? argv[i] : arg;
            others[other - foreign].value = value;
        }
    }
    for (size_t k = 0; k < N_FLAGS; k++)
        if (given[k] && !(flags[k].verbs & (int)f->verb)) refuse_flag(&flags[k], f->verb);
    if (f->model && !*f->model) die("expected a model file, got an empty name");
    if (word && is_no_file(word) && f->verb == GENERATE && !f->help) die_no_verb(word);
    if (word && f->model != word) refuse_word(f->verb, f->model, word);
    for (size_t k = 0; k < N_FOREIGN; k++)
        if (others[k].arg) take_foreign(f, &foreign[k], others[k].arg, others[k].value, note);
    if (*note) fprintf(stderr, "# not needed: %s\n", note);
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
    forced.tree = (int)f->tree;
    if (forced.tree && forced.tree < forced.depth)
        die("--tree: expected at least --draft-max, %d, which is its longest path; got %d", forced.depth, forced.tree);
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

// ==== [2] Generating ================================================================================================

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
        { has_penalties(f), "penalties" }, { f->biases.n > 0, "--logit-bias" },
        { f->stops.n > 0, "--stop" }, { f->grammar || f->grammar_file || f->schema || f->schema_file, "a grammar" },
        { f->tools || f->think, "--tools or --think" }, { f->session, "--session" }, { f->shift, "--context-shift" },
        { f->ignore_eos, "--ignore-eos" }, { f->images.n > 0, "--image" }, { f->top_logits > 0, "--top-logits" },
        { f->compress > 0, "--compress" },
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
    if (f->raw && (f->system || f->tools || f->think || f->chat_template || f->images.n || chatting))
        die("%s cannot be used with --raw", f->system ? "--system" : f->tools ? "--tools" : f->think ? "--think" :
            f->chat_template ? "--template" : f->images.n ? "--image" : "a chat");
    if (f->compress && f->images.n) die("--compress cannot be used with --image: only text has scores");
    if (f->think_budget > 0 && !f->think) die("--think-budget needs --think");
    if (f->session) check_session_path(f->session);
    if (!chatting && f->history) die("--history is an option of a chat; try -i");
}

static Compressor compressor_of(const Flags *f) {
    return (Compressor){ .ratio = (float)f->compress, .from = (int)f->compress_from, .file = f->scorer };
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
        if (c->shown.n < raw->n) p.n_original = (int)raw->n;
        p.ids = c->shown.ids, p.n = (int)c->shown.n, p.score_seconds = c->compressor.seconds;
    }
    const bool failed = !c->raw && !answer(c);
    if (failed && interrupted) return;                 // while a picture was read
    if (failed) die("%s%s%s", *c->err == '-' ? "" : from, *c->err == '-' ? "" : ": ", c->err);
    if (c->raw && !(session_start(s, &p, &c->options) && print_answer(s, &c->show)))
        die("%s: %s", from, session_error(s));
    if (!c->raw && count_messages(&c->messages, NULL) == n) keep_messages(&c->messages, true, n - 1);  // no answer
    print_after(c);
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
// newline: end the text with a line break
static void answer_greedy(Model *m, Tokenizer *t, const TokIds *ids, int n_predict, bool newline) {
    const size_t vocab = (size_t)m->config.vocab;
    float *logits = alloc_or_die(vocab, sizeof *logits);
    const double start = seconds();
    const int made = generate_greedy(m, t, ids->ids, (int)ids->n, n_predict, logits);
    if (newline && made > 1) write_text("\n", 1);
    fprintf(stderr, "# %d tokens generated after %zu of the prompt, %.3f s; last logits %016" PRIx64 "\n", made, ids->n,
            seconds() - start, hash_bytes(logits, vocab * sizeof *logits));
    free(logits);
}

static void set_biases(Session *s, const TextList *list) {
    float *bias = parse_biases(list, model_shape(session_model(s)).vocab);
    session_set_bias(s, bias);
    free(bias);
}

// Makes the ids of the prompt of a conversation: its messages and, in a run that is not a chat, the text (n).
static void conversation_prompt(Chat *c, const Flags *f, const char *text, size_t n, const char *from, TokIds *ids) {
    Tokenizer *t = session_tokenizer(c->s);
    GgufJson id;
    if (f->system) set_system(c, (TokStr){ f->system, strlen(f->system) });
    if (!c->chatting && calls_waiting(&c->messages, &id))
        die("--session: %s: the model called a tool; answer with /tool RESULT in a chat; try -i", f->session);
    for (int i = 0; i < f->images.n; i++) if (!add_image(c, f->images.text[i])) die("--image: %s", c->err);
    if (!c->chatting) add_user_message(c, (TokStr){ text, n });
    if (render(c, 0, 1, true, ids, NULL) == 0) return;
    if (!strncmp(t->err, "tools", 5)) die("--tools: %s: %s", f->tools, t->err);
    die("%s: %s", from, t->err);
}

// Prints what is known before the answer: a line, or with -v all of it.
static void print_before(Model *m, const Flags *f, const Tokenizer *t, const SampleParams *sampling) {
    if (!f->verbose) {
        print_model(m);
        return;
    }
    print_plan(m);
    if (!f->raw) print_template(t);
    print_sampling(m, sampling);
}

static int verb_generate(const Flags *f, const Ops *ops, ModelOptions o) {
    size_t n_text = 0, n_tools = 0;
    char *text = read_prompt(f, &n_text);
    const bool chatting = f->interactive || (!text && isatty(0) && isatty(1));
    if (!text && !chatting) die_without_prompt(f);
    const char *const from = chatting ? "-i" : f->prompt ? "-p" : f->prompt_file ? "-f" : "standard input";
    check_generate_flags(f, chatting);
    char *tools = f->tools ? read_text(f->tools, &n_tools, "--tools") : NULL;
    o.penalties = has_penalties(f);
    o.bias = f->biases.n > 0;
    const Drafting drafting = drafting_of(f, ops, &o);
    Tokenizer tok;
    TokIds ids = { 0 };
    Model *m = model_open(f->model, ops, o, f->dump);
    check_drafting(m, &drafting);
    model_tokenizer(m, &tok);
    if (f->scorer) scorer_check(f->scorer, m);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    if (f->think && f->think_budget >= 0 && tok.channel_close < 0)
        die("--think-budget: %s: expected a token <channel|>, got none", model_path(m));
    Chat c = { .tools = { tools, n_tools }, .think = f->think, .verbose = f->verbose, .chatting = chatting,
               .raw = f->raw, .session = f->session, .compressor = compressor_of(f),
               .show = { (int)f->top_logits, f->show_thoughts, .newline = chatting, .exact = f->raw } };
    c.options = (AnswerOptions){ .n_predict = (int)f->n_predict, .ignore_eos = f->ignore_eos, .stops = f->stops,
                                 .keep_logits = f->top_logits > 0, .think_budget = (int)f->think_budget,
                                 .shift = f->shift, .grammar = read_grammar(f, &tok, c.tools), .may_think = f->think };
    c.options.sampling = sampling_params(f, &m->gguf);
    if (f->greedy) c.options.sampling.temperature = 0, c.options.sampling.repeat = 1;      // as the plain loop does
    c.options.drafting = drafting;
    if (chatting) measure_pace(m, &tok, &drafting);    // one answer is too short to repay this
    c.s = session_open(m, &tok, 0);
    if (f->session && !resume(&c, !isnan(f->seed))) die("--session: %s", c.err);
    if (f->raw) raw_prompt(&c, text, n_text, &ids);
    else conversation_prompt(&c, f, text, n_text, from, &ids);
    const int n_ctx = model_options(m)->n_ctx;
    if (ids.n > (size_t)n_ctx && !f->compress)         // in a chat: the system prompt and old messages
        die("%s: the prompt has %zu tokens, but the context only %d; try -c %zu", from, ids.n, n_ctx, ids.n + 512);

    if (o.bias) set_biases(c.s, &f->biases);
    print_before(m, f, &tok, &c.options.sampling);
    read_weights(m, f->check_tensors);                 // before stop_on(): Ctrl-C ends the process at once
    if (!f->greedy) stop_on(SIGINT);                   // the plain loop is ended by the signal itself
    int status = 0;
    if (f->greedy) {
        answer_greedy(m, &tok, &ids, (int)f->n_predict, !f->raw || isatty(1));
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

// ==== [3] Other verbs ===============================================================================================

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

static const char *const format_names[] = { "md", "csv", "json", "jsonl", "sql" };      // indexed by Format

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
        .compressor = compressor_of(f) });
    free(hay);
}

static int run_eval(const Flags *f, const Ops *ops, ModelOptions o) {
    EvalOptions e = { .prompts = f->prompt_list, .csv = f->csv, .system = f->system, .limit = (int)f->n_prompts,
                      .run_code = f->run_code, .think = f->think,
                      .format = (EvalFormat)number_of(f->out, format_names, EVAL_MD),
                      .answer = { .n_predict = f->n_predict < 0 ? 512 : (int)f->n_predict, .may_think = f->think,
                                  .think_budget = (int)f->think_budget } };
    Tokenizer tok;
    if (!e.prompts) die("--prompts: expected a file; try gemma4 eval %s --prompts FILE.jsonl", f->model);
    if (access(e.prompts, R_OK)) die("--prompts: %s: %s", e.prompts, strerror(errno));      // before the model is read
    o.penalties = has_penalties(f);
    e.answer.drafting = drafting_of(f, ops, &o);
    Model *m = model_open(f->model, ops, o, NULL);
    check_drafting(m, &e.answer.drafting);
    model_tokenizer(m, &tok);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    e.answer.sampling = sampling_params(f, &m->gguf);
    if (isnan(f->temperature)) e.answer.sampling.temperature = 0;
    if (isnan(f->seed)) e.answer.sampling.seed = 1;
    read_weights(m, false);
    const int status = eval_prompts(m, &tok, &e);
    tok_free(&tok);
    model_close(m);
    return status;
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
                       .max_body = (size_t)f->max_body << 20, .memory = (size_t)f->request_memory << 20,
                       .n_predict = (int)f->n_predict,
                       .think_budget = (int)f->think_budget, .think = f->think, .fixed_seed = !isnan(f->seed),
                       .chunk = (int)f->chunk, .session_dir = f->session_dir,
                       .session_disk = (size_t)f->session_disk << 20, .log_text = f->log_text,
                       .origins = f->origins, .public_url = f->public_url, .compress = (float)f->compress,
                       .compress_from = (int)f->compress_from, .scorer = f->scorer,
                       .cache_ram = f->cache_ram < 0 ? free_bytes / 8 : (size_t)f->cache_ram << 20 };
    if (s.cache_ram > free_bytes) {
        fprintf(stderr, "# warning: --cache-ram %.0f exceeds the available memory; %zu MiB are used\n", f->cache_ram,
                free_bytes >> 20);
        s.cache_ram = free_bytes;
    }
    if (s.api_key && !*s.api_key) die("%s: expected a key, got an empty one", key ? "--api-key-file" : "--api-key");
    check_origins(&s);
    Server *srv = server_open(&s);
    o.n_seqs = (int)f->parallel;
    o.image_most = o.projector && !o.image_tokens ? MAX_IMAGE_TOKENS : 0;           // detail: high
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
    serve(srv, m, &tok, &s);
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
        verb_tokenize(f->model, text, n, f->plain ? TOK_PLAIN : f->special ? TOK_SPECIAL : TOK_USER_DEFINED,
                      f->out);
        free(text);
    } else if (f->verb == DETOKENIZE) {
        if (!f->ids) die("--ids: expected token ids; try --ids \"2 105 2364\"");
        verb_detokenize(f->model, f->ids);
    } else if (f->verb == VIEW) {
        verb_view(f->model, (int)f->last);
    } else if (f->verb == PLOT) {
        verb_plot(f->model, f->kind, f->out);
    } else if (f->verb == QUANTIZE) {
        if (!f->type) die("quantize: expected three arguments: IN OUT.gguf TYPE");
        verb_quantize(f->model, f->target, f->type);
    } else return false;
    return true;
}

// -ot, --cpu-moe and -ncmoe as one list of patterns; NULL: none of them is given. In memory of its own.
static char *tensor_places(const Flags *f) {
    char *list = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&list, &n);
    if (!out) die("-ot: out of memory");
    for (int i = 0; i < f->places.n; i++) fprintf(out, "%s,", f->places.text[i]);
    if (f->n_cpu_moe > 0) {
        fprintf(out, "blk\\.(0");
        for (int l = 1; l < f->n_cpu_moe; l++) fprintf(out, "|%d", l);
        fprintf(out, ")\\..*exps=CPU,");
    }
    if (f->cpu_moe) fprintf(out, "exps=CPU,");
    if (fclose(out)) die("-ot: out of memory");
    if (n) return list;
    free(list);
    return NULL;
}

static ModelOptions plan_options(const Flags *f) {
    ModelOptions o = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1, .memory = (size_t)(f->memory * (1 << 30)) };
    if (f->scorer && !f->compress) die("--scorer needs --compress; try --compress 0.2");
    if (f->compress_from != COMPRESS_FROM && !f->compress)
        die("--compress-from needs --compress; try --compress 0.2");
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
    o.place = f->place;
    struct stat st;
    const bool own = f->projector ? !stat(f->projector, &st) && S_ISDIR(st.st_mode) : f->images.n > 0;
    o.projector = own ? "" : f->projector;
    o.image_tokens = f->image_tokens ? atoi(f->image_tokens) : 0;
    if (f->image_tokens && !o.projector) die("--image-tokens needs --mmproj or --image");
    return o;
}

// Splits words separated by commas; if text is NULL, the list has one word, NULL. choices: what they may be, or NULL.
// The caller frees list.text, which holds the words too.
static TextList split_words(const char *flag, const char *text, const char *choices) {
    const size_t most = text ? strlen(text) + 1 : 1;   // words, and bytes of text
    TextList list = { alloc_or_die(most, sizeof *list.text + 1), 1 };
    if (!text) return list;
    char *rest = memcpy(list.text + most, text, most);
    list.n = 0;
    for (char *word; (word = strsep(&rest, ",")); ) {
        if (!*word || (choices && !is_listed(choices, word)))
            die("%s: expected %s, several separated by commas, got '%s'", flag, choices ? choices : "file names", text);
        list.text[list.n++] = word;
    }
    return list;
}

static bool has_test(const IntList *list) {            // 0: none
    for (int i = 0; i < list->count; i++) if (list->n[i]) return true;
    return false;
}

// The tokens of the pictures that bench measures.
static IntList parse_pictures(const Flags *f) {
    const IntList list = parse_list("--images", f->pictures || !f->projector ? f->pictures : "70,280,1120", 0);
    if (f->pictures && !f->projector) die("--images needs --mmproj; try --mmproj FILE");
    for (int i = 0; i < list.count; i++)
        if (list.n[i] > MAX_IMAGE_TOKENS)
            die("--images: expected at most %d tokens per picture, got %d", MAX_IMAGE_TOKENS, list.n[i]);
    return list;
}

// Measures all combinations of the values of -t, -ctk, -ctv and -md. All threads are started already.
static void run_bench(const Flags *f, const Ops *ops) {
    BenchOptions b = { .prompts = parse_list("-p", f->prompts, 512), .generated = parse_list("-n", f->generated, 128),
                       .rows = parse_list("--rows", f->rows, 0), .images = parse_pictures(f),
                       .depths = parse_list("-d", f->depths, 0),
                       .n_runs = (int)f->n_runs, .random_fill = is_choice(f->fill, "random"),
                       .shows_types = f->k_types || f->v_types,
                       .format = (Format)number_of(f->out, format_names, FORMAT_MD) };
    const IntList threads = parse_list("-t", f->threads, count_threads());
    const TextList k = split_words("-ctk", f->k_types, KV_TYPES), v = split_words("-ctv", f->v_types, KV_TYPES);
    const TextList drafters = split_words("-md", f->drafters, NULL);
    for (int i = 0; i < f->pairs.n; i++) {
        const IntList pair = parse_list("-pg", f->pairs.text[i], 0);
        if (pair.count != 2 || !pair.n[0] || !pair.n[1] || b.pair_prompts.count == 32)
            die("-pg: expected at most 32 pairs P,G of integers from 1, got '%s'", f->pairs.text[i]);
        b.pair_prompts.n[b.pair_prompts.count++] = pair.n[0];
        b.pair_generated.n[b.pair_generated.count++] = pair.n[1];
    }
    if (!has_test(&b.prompts) && !has_test(&b.generated) && !has_test(&b.rows) && !has_test(&b.images) &&
        !b.pair_prompts.count)
        die("bench: nothing to measure: -p and -n are 0; try -p 512 -n 128");
    if (f->tree && !f->force) die("--tree needs --spec-force; try --spec-force 0.7 -md FILE");
    const int n = threads.count * k.n * v.n * drafters.n;
    for (int i = 0; i < n; i++) {
        Flags one = *f;
        const int t = threads.n[i % threads.count];
        one.k_type = k.text[i / threads.count % k.n];
        one.v_type = v.text[i / threads.count / k.n % v.n];
        one.drafter = drafters.text[i / threads.count / k.n / v.n];
        ModelOptions o = plan_options(&one);
        plan_drafting(&one, &o, f->tree ? DRAFT_WIDTH : 1);
        b.forced = parse_forced(&one);
        b.is_last = i + 1 == n;
        if (f->force) o.draft_depth = b.forced.depth;
        use_threads(t);
        if (n > 1)
            fprintf(stderr, "# -t %d -ctk %s -ctv %s%s%s\n", t, kv_names[o.k_type], kv_names[o.v_type],
                    one.drafter ? " -md " : "", one.drafter ? one.drafter : "");
        b.n_printed = verb_bench(f->model, ops, o, &b);
    }
    free(k.text);
    free(v.text);
    free(drafters.text);
}

// The numbers of a list, each from 1 on, or 0 if that is allowed, and at most DRAFT_MAX.
static IntList parse_drafts(const char *flag, const char *text, int otherwise, int least) {
    const IntList list = parse_list(flag, text, otherwise);
    for (int i = 0; i < list.count; i++)
        if (list.n[i] < least || list.n[i] > DRAFT_MAX)
            die("%s: expected integers from %d to %d, got '%s'", flag, least, DRAFT_MAX, text);
    return list;
}

// What the flags say of all rows of a sweep, in a column of its file: " cpu t=2 vram=24". The caller frees it.
static char *sweep_settings(const Flags *f, const Ops *ops) {
    const struct { const char *name; double value; } numbers[] = {
        { "t", ops->on_host ? count_threads() : 0 }, { "vram", f->memory }, { "kv_tail", f->tail },
        { "pflash", f->pflash }, { "pflash_density", f->pflash_density },
        { "pflash_from", (f->pflash > 0) * f->pflash_from } };
    const char *const words[][2] = { { "kv_swa", f->ring_type }, { "kv_layout", f->kv_layout },
                                     { "place", f->place },
                                     { "text", f->prompt_file ? base_name(f->prompt_file) : NULL } };
    char *text = NULL;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    if (!out) die("out of memory for the flags");
    fprintf(out, " %s", ops->name);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value > 0) fprintf(out, " %s=%g", numbers[i].name, numbers[i].value);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i][1]) fprintf(out, " %s=%s", words[i][0], words[i][1]);
    if (*card_name(ops)) fputc(' ', out);
    for (const char *c = card_name(ops); *c; c++) fputc(*c == ' ' ? '_' : *c, out);
    if (fclose(out)) die("out of memory for the flags");
    return text;
}

static void run_sweep(const Flags *f, const Ops *ops, ModelOptions o) {
    Flags first = *f;                                  // of the lists, the first words
    size_t n = 0;
    char *text = f->prompt_file ? read_prompt(f, &n) : NULL, *settings = sweep_settings(f, ops);
    SweepOptions s = { .k_types = split_words("-ctk", f->k_types ? f->k_types : "f16", KV_TYPES),
                       .v_types = split_words("-ctv", f->v_types, KV_TYPES),
                       .drafters = split_words("-md", f->drafters, NULL), .depths = parse_list("-d", f->depths, 512),
                       .draft_max = parse_drafts("--draft-max", f->draft_maxes, 4, 1),
                       .trees = parse_drafts("--tree", f->trees, 0, 0), .force = f->force, .out = f->out,
                       .n = f->n_predict < 0 ? 128 : (int)f->n_predict, .random_fill = is_choice(f->fill, "random"),
                       .text = text, .n_text = n, .settings = settings };
    if ((f->draft_maxes || f->trees) && !f->drafters)
        die("%s needs a draft model; try -md FILE", f->draft_maxes ? "--draft-max" : "--tree");
    for (int i = 0; i < s.drafters.n; i++)
        if (s.drafters.text[i] && !strcmp(s.drafters.text[i], "none")) s.drafters.text[i] = NULL;
    for (int i = 0; i < s.depths.count; i++)
        if (s.depths.n[i] > MAX_CONTEXT - s.n - 2 * STEP_ROWS)
            die("-d: expected at most %d tokens, got %d", MAX_CONTEXT - s.n - 2 * STEP_ROWS, s.depths.n[i]);
    first.drafter = f->drafters;
    first.draft_max = DRAFT_MAX;
    s.forced = parse_forced(&first);
    verb_sweep(f->model, ops, o, &s);
    free(s.k_types.text);
    free(s.v_types.text);
    free(s.drafters.text);
    free(settings);
    free(text);
}

// The most threads that any run needs; 0: one per core.
static int threads_to_start(const Flags *f) {
    const IntList list = parse_list("-t", f->threads, 0);
    int most = (int)f->n_threads;
    for (int i = 0; i < list.count; i++) {
        if (f->threads && (list.n[i] < 1 || list.n[i] > MAX_THREADS))
            die("-t: expected integers from 1 to %d, got '%s'", MAX_THREADS, f->threads);
        most = max_int(most, list.n[i]);
    }
    return most;
}

static void run_logits(const Flags *f, const Ops *ops, ModelOptions o) {
    if (!f->ids == !f->prompt)
        die("%s; try -p \"Hello\", or --ids FILE", f->ids ? "expected either --ids or -p, got both" :
            "--ids: expected a file of token ids");
    if (!f->out) die("-o: expected an output file for the logits");
    verb_logits(f->model, ops, o, f->ids, f->prompt, f->out, f->dump, f->check_tensors, f->verbose);
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
    // static: what a flag holds lives until the program ends
    static Flags f = { .n_predict = -1, .n_ctx = -1, .think_budget = -1, .temperature = NAN, .top_k = NAN,
                       .top_p = NAN, .min_p = NAN, .repeat = NAN, .seed = NAN, .n_runs = 5, .port = 8080,
                       .parallel = 1, .queue = 64, .timeout = 3600, .max_body = 16, .cache_ram = -1,
                       .session_disk = 65536, .pflash_from = 16384, .n_needles = 1, .compress_from = COMPRESS_FROM,
                       .last = VIEW_ROWS };
    int status = 0;
    signal(SIGXFSZ, SIG_IGN);                          // a file size limit is an error like a full disk
    parse_flags(&f, argc, argv);
    if (f.color && strcmp(f.color, "auto") ? is_choice(f.color, "on") : wants_colors(2))
        style.dim = "\033[2m", style.normal = "\033[0m";
    if (f.help) {
        print_help(f.verb);
        flush_output();
        return 0;
    }
    if (f.document) {
        print_document(f.document);
        flush_output();
        return 0;
    }
    if (f.version) {
        printf("gemma4 " VERSION " (commit " COMMIT ", " COMPILER "; backends: " BUILT_BACKENDS "; uses %s)\n",
               choose_ops(&f)->name);
        flush_output();
        return 0;
    }
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) die("gemma4 needs a little-endian machine");
    if (!f.model && f.verb == VIEW) die("expected the folder of a dump; try gemma4 view DIR >page.html");
    if (!f.model && f.verb == PLOT) die("expected a table of measurements; try gemma4 plot FILE.csv -o out.svg");
    for (size_t k = 0; k < N_VERBS && !f.model; k++)
        if (verbs[k].verb == f.verb)
            die("expected a model file; try gemma4 %s %s, or gemma4 %s --help", verbs[k].name, verbs[k].arguments,
                verbs[k].name);
    if (!f.model) die("expected a model file; try gemma4 MODEL.gguf -p \"Hello\", or --help");
    if (!(f.verb & (TOKENIZE | DETOKENIZE | PLAN | VIEW | PLOT))) start_threads(threads_to_start(&f));
    if (run_file_verb(&f)) return 0;

    const Ops *ops = choose_ops(&f);
    f.place = tensor_places(&f);
    ModelOptions o = plan_options(&f);
    const Ops *judge = is_choice(f.against, "reference") ? reference_ops() : cpu_ops();
    if (f.verb == PLAN) plan_drafting(&f, &o, 1);
    switch (f.verb) {
    case SERVE: verb_serve(&f, ops, o); break;
    case PLAN:  verb_plan(f.model, ops, o); break;
    case BENCH: run_bench(&f, ops); break;
    case SWEEP: run_sweep(&f, ops, o); break;
    case NIAH:  run_niah(&f, ops, o); break;
    case EVAL:  status = run_eval(&f, ops, o); break;
    case CHECK: status = verb_check(f.model, ops, judge, o); break;
    case PPL:   status = run_ppl(&f, ops, o); break;
    case LOGITS: run_logits(&f, ops, o); break;
    default:    status = verb_generate(&f, ops, o);
    }
    return status;
}
#endif
