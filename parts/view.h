/* view.h - gemma4 view DIR: one static HTML page about the run whose intermediate results --dump wrote to DIR.
 *
 * Uses base.h, gguf.h (JSON) and tokenizer.h (UTF-8, texts), and the files that dump.h describes; no model. Begin with
 * verb_view(). The page needs nothing but itself: its style, its SVG and its texts are inside. It is XML as well as
 * HTML, so that a parser can check it.
 *   [1] Reading a dump    [2] What the numbers say    [3] Texts and heat maps    [4] The page */
#ifndef VIEW_H
#define VIEW_H

// ==== [1] Reading a dump ============================================================================================

enum { VIEW_ROWS = 64, VIEW_MOST = 512, LENS_MOST = 16 };  // rows shown without --last, and at most; candidates

typedef struct {
    int    window;            // tokens that a row of the layer sees, its own included; 0: all before it
    int    head_dim, n_kv_heads;
    int    kv_layer;          // the layer whose K and V it reads
    double scale;             // the whole stream is multiplied by it at the end of the layer
} ViewLayer;

typedef struct {
    const char *dir;
    TokStr name;
    int dim, n_heads, n_experts, n_used, ple_dim, sparse, n_lens, n_layers;
    ViewLayer *layer;         // (n_layers)
    int vocab;                // texts; 0: the model had no tokenizer
    TokStr *text;             // (vocab)
    int n_rows, n_out;        // of the dump: rows, output rows
    int first, n;             // the rows that the page shows
    int32_t *token;           // (n_rows)
    int *out;                 // (n_rows) index among the output rows; -1: the row is none
} View;

// Dies because the dump cannot be used.
__attribute__((noreturn, format(printf, 3, 4)))
static void die_dump(const View *v, const char *file, const char *fmt, ...) {
    char what[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    die("view: %s/%s: %s; make a dump with: gemma4 MODEL -p TEXT -n 1 --dump %s", v->dir, file, what, v->dir);
}

// Opens DIR/NAME-LAYER.f32 (layer -1: DIR/NAME.f32). rows: how many rows of `cols` values it has to have; -1: any.
// Returns the number of rows.
static int open_values(const View *v, const char *name, int layer, int rows, int cols, FILE **f) {
    char path[4096], file[64];
    struct stat st;
    const long long row = (long long)cols * (long long)sizeof(float);
    snprintf(file, sizeof file, layer < 0 ? "%s.f32" : "%s-%d.f32", name, layer);
    if (snprintf(path, sizeof path, "%s/%s", v->dir, file) >= (int)sizeof path) die_dump(v, file, "path too long");
    if (stat(path, &st)) die_dump(v, file, "%s", strerror(errno));
    if (!S_ISREG(st.st_mode)) die_dump(v, file, "expected a regular file");
    *f = fopen(path, "rb");
    if (!*f) die_dump(v, file, "%s", strerror(errno));
    const long long size = (long long)st.st_size;
    if (rows < 0 && (size < row || size % row || size / row > MAX_CONTEXT))
        die_dump(v, file, "expected rows of %lld bytes, got %lld bytes in all", row, size);
    if (rows >= 0 && size != rows * row) die_dump(v, file, "expected %lld bytes, got %lld", rows * row, size);
    return (int)(size / row);
}

// Reads n rows of a file, from row `first` on -> (n, cols); the caller frees them. rows, cols: of the whole file.
static float *read_values(const View *v, const char *name, int layer, int rows, int cols, int first, int n) {
    FILE *f;
    const size_t count = (size_t)n * (size_t)cols;
    open_values(v, name, layer, rows, cols, &f);
    float *values = alloc_or_die(count, sizeof *values);
    const off_t start = (off_t)first * cols * (off_t)sizeof *values;
    if (fseeko(f, start, SEEK_SET) || fread(values, sizeof *values, count, f) != count)
        die_dump(v, name, "cannot be read");
    fclose(f);
    return values;
}

static int view_int(const View *v, const GgufJson *object, const char *key, int min, int max) {
    GgufJson value;
    int64_t n = 0;
    if (!gguf_json_get(object, key, &value) || !gguf_json_int(&value, min, max, &n))
        die_dump(v, "model.json", "%s: expected an integer from %d to %d", key, min, max);
    return (int)n;
}

// Decodes a string of the JSON; any other value gives an empty text. The caller frees its bytes.
static TokStr view_text(const GgufJson *string) {
    char *text = alloc_or_die(string->n, 1);
    return (TokStr){ text, string->type == GGUF_J_STRING ? gguf_json_string(string, text) : 0 };
}

static void read_view_layer(View *v, const GgufJson *object) {
    const int l = v->n_layers++;
    GgufJson scale;
    v->layer = realloc(v->layer, (size_t)v->n_layers * sizeof *v->layer);
    if (!v->layer) die("view: out of memory");
    ViewLayer *layer = &v->layer[l];
    *layer = (ViewLayer){ .window = view_int(v, object, "window", 0, MAX_CONTEXT),
                          .head_dim = view_int(v, object, "head_dim", 1, 1 << 16),
                          .n_kv_heads = view_int(v, object, "n_kv_heads", 1, v->n_heads),
                          .kv_layer = view_int(v, object, "kv_layer", 0, l), .scale = 1 };
    const ViewLayer *owner = &v->layer[layer->kv_layer];
    if (v->n_heads % layer->n_kv_heads || owner->head_dim != layer->head_dim ||
        owner->n_kv_heads != layer->n_kv_heads || !gguf_json_get(object, "scale", &scale) ||
        !gguf_json_float(&scale, &layer->scale))
        die_dump(v, "model.json", "layer %d: its sizes contradict each other", l);
}

// Reads DIR/model.json.
static void read_view_model(View *v) {
    char path[4096];
    size_t n = 0, at = 0;
    const char *err = NULL;
    GgufJson json, list, item;
    const int length = snprintf(path, sizeof path, "%s/model.json", v->dir);
    if (length >= (int)sizeof path) die_dump(v, "model.json", "path too long");
    if (access(path, R_OK)) die_dump(v, "model.json", "%s", strerror(errno));
    char *text = read_file(path, &n, "view");
    if (gguf_json_parse(text, n, &json, &at, &err)) die_dump(v, "model.json", "byte %zu: expected %s", at, err);
    if (json.type != GGUF_J_OBJECT) die_dump(v, "model.json", "expected an object");
    v->dim = view_int(v, &json, "dim", 1, 1 << 20);
    v->n_heads = view_int(v, &json, "n_heads", 1, 1 << 12);
    v->n_experts = view_int(v, &json, "n_experts", 0, 1 << 16);
    v->n_used = view_int(v, &json, "n_experts_used", 0, v->n_experts);
    v->ple_dim = view_int(v, &json, "ple_dim", 0, 1 << 16);
    v->sparse = view_int(v, &json, "sparse", 0, 1);
    v->n_lens = view_int(v, &json, "lens", 1, LENS_MOST);
    gguf_json_get(&json, "name", &item);               // absent: null
    v->name = view_text(&item);
    if (!gguf_json_get(&json, "layers", &list) || list.type != GGUF_J_ARRAY) die_dump(v, "model.json", "no layers");
    while (gguf_json_next(&list, NULL, &item) && v->n_layers < 4096) read_view_layer(v, &item);
    if (!v->n_layers) die_dump(v, "model.json", "no layers");
    if (!gguf_json_get(&json, "tokens", &list) || list.type != GGUF_J_ARRAY) die_dump(v, "model.json", "no tokens");
    GgufJson rest = list;
    while (gguf_json_next(&rest, NULL, &item)) v->vocab++;
    v->text = alloc_or_die((size_t)v->vocab, sizeof *v->text);
    for (int i = 0; gguf_json_next(&list, NULL, &item); i++) v->text[i] = view_text(&item);
    free(text);
}

// A token id that was saved as a float; -1: the value is none.
static int32_t view_id(const View *v, float value) {
    const float most = (float)(v->vocab ? v->vocab : 1 << 24);
    return value >= 0 && value < most ? (int32_t)value : -1;
}

// Reads DIR/rows.f32: which tokens ran, and which of them are output rows.
static void read_view_rows(View *v, int last) {
    FILE *f;
    v->n_rows = open_values(v, "rows", -1, -1, 3, &f);
    fclose(f);
    float *rows = read_values(v, "rows", -1, v->n_rows, 3, 0, v->n_rows);
    v->token = alloc_or_die((size_t)v->n_rows, sizeof *v->token);
    v->out = alloc_or_die((size_t)v->n_rows, sizeof *v->out);
    for (int r = 0; r < v->n_rows; r++) {
        const float *row = rows + (size_t)r * 3;
        v->token[r] = view_id(v, row[0]);
        if (v->token[r] < 0) die_dump(v, "rows.f32", "row %d: expected a token id", r);
        if (row[1] != (float)r)
            die_dump(v, "rows.f32", "row %d: expected position %d, got %g: the run resumed a session, drafted, or went "
                     "back", r, r, (double)row[1]);
        v->out[r] = row[2] > 0 ? v->n_out++ : -1;
    }
    free(rows);
    v->n = min_int(last, v->n_rows);
    v->first = v->n_rows - v->n;
}

static void check_values(const View *v, const char *name, int layer, int rows, int cols) {
    FILE *f;
    open_values(v, name, layer, rows, cols, &f);
    fclose(f);
}

// Dies if a file that the page needs is missing or has another size, before a byte of the page is written.
static void check_dump(const View *v) {
    check_values(v, "inp_scaled", -1, v->n_rows, v->dim);
    for (int l = 0; l < v->n_layers; l++) {
        const ViewLayer *layer = &v->layer[l];
        check_values(v, "Qcur_pos", l, v->n_rows, v->n_heads * layer->head_dim);
        check_values(v, "Kcur_pos", layer->kv_layer, v->n_rows, layer->n_kv_heads * layer->head_dim);
        check_values(v, "attn_post_norm", l, v->n_rows, v->dim);
        check_values(v, "ffn_post_norm", l, v->n_rows, v->dim);
        if (v->n_experts) check_values(v, "ffn_moe_logits", l, v->n_rows, v->n_experts);
        if (v->ple_dim) check_values(v, "per_layer_embd_out", l, v->n_rows, v->dim);
        check_values(v, "l_out", l, v->n_rows, v->dim);
        check_values(v, "lens", l, v->n_out, v->n_lens * 3);
    }
}

// ==== [2] What the numbers say ======================================================================================

// Length of a vector: the root of the sum of the squares of its values.
static double vector_length(const float *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

// Lengths of the shown rows' vectors in a checkpoint -> (n); the caller frees them.
static double *view_lengths(const View *v, const char *name, int layer) {
    float *x = read_values(v, name, layer, v->n_rows, v->dim, v->first, v->n);
    double *out = alloc_or_die((size_t)v->n, sizeof *out);
    for (int i = 0; i < v->n; i++) out[i] = vector_length(x + (size_t)i * (size_t)v->dim, v->dim);
    free(x);
    return out;
}

// Attention weights of one head at position pos -> w (pos + 1): the softmax of q k over the positions that the row may
// see, which are its own and those before it, at most `window` of them (0: all). The scale is 1. The others get 0.
// k: (pos + 1) keys of this head, `stride` values from one to the next.
static void attention_weights(const float *q, const float *k, int stride, int head_dim, int window, int pos,
                              double *w) {
    const int from = window ? max_int(0, pos - window + 1) : 0;
    double most = -INFINITY, sum = 0;
    for (int j = 0; j < from; j++) w[j] = 0;
    for (int j = from; j <= pos; j++) {
        const float *key = k + (size_t)j * (size_t)stride;
        w[j] = 0;
        for (int i = 0; i < head_dim; i++) w[j] += (double)q[i] * key[i];
        most = fmax(most, w[j]);
    }
    for (int j = from; j <= pos; j++) sum += w[j] = exp(w[j] - most);
    for (int j = from; j <= pos; j++) w[j] /= sum;
}

// The attention of all heads of a layer in the shown rows -> (n_heads, n, n + 1); the caller frees it. Column 0 is the
// sum over the positions that are not shown, column 1 + j the weight of the shown row j.
static double *view_attention(const View *v, int l) {
    const ViewLayer *layer = &v->layer[l];
    const int hd = layer->head_dim, q_dim = v->n_heads * hd, kv_dim = layer->n_kv_heads * hd;
    const int group = v->n_heads / layer->n_kv_heads;          // query heads that share a key head
    float *q = read_values(v, "Qcur_pos", l, v->n_rows, q_dim, v->first, v->n);
    float *k = read_values(v, "Kcur_pos", layer->kv_layer, v->n_rows, kv_dim, 0, v->n_rows);
    double *all = alloc_or_die((size_t)v->n_heads * (size_t)v->n * (size_t)(v->n + 1), sizeof *all);
    double *w = alloc_or_die((size_t)v->n_rows, sizeof *w), *out = all;
    for (int h = 0; h < v->n_heads; h++)
        for (int i = 0; i < v->n; i++, out += v->n + 1) {
            const int pos = v->first + i;
            const float *query = q + ((size_t)i * (size_t)v->n_heads + (size_t)h) * (size_t)hd;
            attention_weights(query, k + (size_t)(h / group) * (size_t)hd, kv_dim, hd, layer->window, pos, w);
            for (int j = 0; j <= pos; j++) out[j < v->first ? 0 : 1 + j - v->first] += w[j];
        }
    free(q);
    free(k);
    free(w);
    return all;
}

// The indices of the n largest of `count` values, largest first; the lower index first if two are equal. n <= count.
static void pick_largest(const double *values, int count, int n, int *index) {
    for (int i = 0; i < n; i++) {
        int best = -1;
        for (int j = 0; j < count; j++) {
            bool taken = false;
            for (int k = 0; k < i; k++) taken |= index[k] == j;
            if (!taken && (best < 0 || values[j] > values[best])) best = j;
        }
        index[i] = best;
    }
}

// The experts that the router chose for a row (n_used), those with the largest logits, and the softmax over these.
static void chosen_experts(const View *v, const float *logits, int *expert, double *weight) {
    double *wide = alloc_or_die((size_t)v->n_experts, sizeof *wide), sum = 0;
    for (int e = 0; e < v->n_experts; e++) wide[e] = logits[e];
    pick_largest(wide, v->n_experts, v->n_used, expert);
    for (int i = 0; i < v->n_used; i++) sum += weight[i] = exp(wide[expert[i]] - wide[expert[0]]);
    for (int i = 0; i < v->n_used; i++) weight[i] /= sum;
    free(wide);
}

// ==== [3] Texts and heat maps =======================================================================================

// Prints at most `most` characters of a text. Nothing in it can be taken for markup: <, >, & and quotes are escaped,
// line breaks and other control characters become \n or \x1b, bytes that are not UTF-8 become U+FFFD.
static void page_text(TokStr t, int most) {
    for (size_t i = 0, n = 0; i < t.n; n++) {
        uint32_t c = 0;
        const unsigned char *s = (const unsigned char *)t.s + i;
        const int len = tok_read_utf8(s, t.n - i, &c);
        if ((int)n == most) {
            printf("\xe2\x80\xa6");                            // an ellipsis
            return;
        }
        i += len > 0 ? (size_t)len : 1;
        if (len <= 0 || c == 0xfffe || c == 0xffff) printf("\xef\xbf\xbd");
        else if (c == '\n') printf("\\n");
        else if (c == '\t') printf("\\t");
        else if (c < ' ' || (c >= 0x7f && c < 0xa0)) printf("\\x%02x", (unsigned)c);
        else if (strchr("<>&\"'", (int)c) && c < 0x80) printf("&#%u;", (unsigned)c);
        else fwrite(s, 1, (size_t)len, stdout);
    }
}

static void page_token(const View *v, int32_t id, int most) {
    if (id >= 0 && id < v->vocab && v->text[id].n) page_text(v->text[id], most);
    else printf("#%d", (int)id);
}

enum { LEVELS = 8,            // shades of a heat map: level k stands for (k / 8)^2, so that small weights show too
       CELL = 12, LEFT = 78, TOP = 60, LABEL = 10 };           // pixels of a cell, of labels; characters of a label

static int level_of(double value) {
    return value > 0 ? (int)(sqrt(fmin(value, 1)) * LEVELS + 0.5) : 0;
}

// Prints the cells of a heat map, values (rows, stride) from 0 to 1: one path for each level. Level 0 is left blank.
static void page_cells(const double *values, int rows, int cols, int stride) {
    for (int level = 1; level <= LEVELS; level++) {
        bool begun = false;
        for (int i = 0; i < rows; i++)
            for (int j = 0, n; j < cols; j += n) {
                const double *row = values + (size_t)i * (size_t)stride;
                n = 1;
                if (level_of(row[j]) != level) continue;
                while (j + n < cols && level_of(row[j + n]) == level) n++;
                printf("%sM%d %dh%d", begun ? "" : "<path class=\"a\" d=\"", j, i, n);
                begun = true;
            }
        if (begun) printf("\" opacity=\"%.3g\"/>", (double)level / LEVELS);
    }
}

// Begins a heat map with a column for each of n tokens; earlier: and one before them for all tokens that are not shown.
// row_labels: the id of its labels, which page_labels() has defined, as those of the columns.
static void begin_map(const char *title, const char *row_labels, int rows, int n, bool earlier) {
    const int width = LEFT + (n + earlier) * CELL + 24, height = TOP + rows * CELL + 4;
    printf("<figure><figcaption>%s</figcaption><svg width=\"%d\" height=\"%d\" role=\"img\" aria-label=\"%s\"><use "
           "href=\"#%s\"/><use href=\"#columns\" x=\"%d\"/>%s<g transform=\"translate(%d %d) scale(%d)\">",
           title, width, height, title, row_labels, earlier * CELL,
           earlier ? "<use href=\"#earlier\"/>" : "", LEFT, TOP + CELL / 2, CELL);
}

static void end_map(void) { printf("</g></svg></figure>\n"); }

static void page_label(const View *v, int i, bool column) {
    const int at = i * CELL + CELL - 3;
    if (column) printf("<text transform=\"translate(%d %d) rotate(-60)\">", LEFT + at, TOP - 4);
    else printf("<text x=\"%d\" y=\"%d\" class=\"end\">", LEFT - 4, TOP + at);
    page_token(v, v->token[v->first + i], LABEL);
    printf("</text>");
}

// Defines the labels of all maps: the shown tokens as rows and as columns; the layers as rows.
static void page_labels(const View *v) {
    printf("<svg width=\"0\" height=\"0\" class=\"defs\"><defs><g id=\"rows\">");
    for (int i = 0; i < v->n; i++) page_label(v, i, false);
    printf("</g>\n<g id=\"columns\">");
    for (int i = 0; i < v->n; i++) page_label(v, i, true);
    printf("</g>\n<text id=\"earlier\" transform=\"translate(%d %d) rotate(-60)\">earlier</text>",
           LEFT + CELL - 3, TOP - 4);
    printf("\n<g id=\"layers\">");
    for (int l = 0; l < v->n_layers; l++)
        printf("<text x=\"%d\" y=\"%d\" class=\"end\">layer %d</text>", LEFT - 4, TOP + l * CELL + CELL - 3, l);
    printf("</g></defs></svg>\n");
}

// ==== [4] The page ==================================================================================================

static const char view_head[] =
    "<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
    "<meta name=\"color-scheme\" content=\"light dark\"/>\n<style>\n"
    ":root { --back: #fff; --side: #f3f4f6; --line: #d5d8de; --text: #1c1f24; --quiet: #5d6470; --accent: #3559d6;\n"
    "        --bar: #dbe3fb; --seen: #edeff2; }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "    :root { --back: #16181c; --side: #1e2126; --line: #3a3f48; --text: #e6e8ec; --quiet: #a0a7b4;\n"
    "            --accent: #93abff; --bar: #2b3a66; --seen: #262a31; }\n}\n"
    "* { box-sizing: border-box; }\n"
    "body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--back); color: var(--text);\n"
    "       font: 1rem/1.5 system-ui, sans-serif; }\n"
    "h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 1.6rem 0 .4rem; }\n"
    "h3 { font-size: 1rem; margin: 1rem 0 .3rem; }\n"
    "p, li { max-width: 46rem; } p { margin: .4rem 0; }\n"
    "ul { padding-left: 1.2rem; }\n"
    ".quiet, figcaption, small { color: var(--quiet); font-size: .875rem; }\n"
    ".run { background: var(--side); border-radius: .5rem; padding: .5rem .8rem; overflow-wrap: anywhere;\n"
    "       max-width: none; }\n"
    ".run span:nth-of-type(even) { background: var(--bar); }\n"
    ".t { font-family: ui-monospace, monospace; unicode-bidi: isolate; white-space: pre; }\n"
    "details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; padding: 0 .8rem; }\n"
    "summary { cursor: pointer; padding: .5rem 0; } details[open] > summary { border-bottom: 1px solid var(--line); }\n"
    ".wide { overflow-x: auto; padding-bottom: .5rem; }\n"
    "table { border-collapse: collapse; font-size: .875rem; }\n"
    "th, td { border-bottom: 1px solid var(--line); padding: .15rem .5rem; text-align: left; white-space: nowrap; }\n"
    "thead th { vertical-align: bottom; white-space: normal; min-width: 4.5rem; font-weight: 600; }\n"
    "tbody th { position: sticky; left: 0; background: var(--back); font-weight: 400; max-width: 11rem;\n"
    "           overflow: hidden; text-overflow: ellipsis; }\n"
    ".n { text-align: right; font-variant-numeric: tabular-nums;\n"
    "     background: linear-gradient(to right, var(--bar) var(--w, 0%), transparent 0); }\n"
    "figure { margin: 0 0 1rem; overflow-x: auto; max-width: 100%; }\n"
    ".maps { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }\n"
    "svg { display: block; } .defs { position: absolute; }\n"
    "text { font: 10px ui-monospace, monospace; fill: var(--text); white-space: pre; } .end { text-anchor: end; }\n"
    ".a, .s { fill: none; stroke: var(--accent); stroke-width: 1; } .s { stroke: var(--seen); }\n"
    "</style>\n";

static void page_head(const View *v) {
    printf("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<title>Inside ");
    page_text(v->name, 80);
    printf("</title>\n%s</head>\n<body>\n<h1>Inside ", view_head);
    page_text(v->name, 80);
    printf("</h1>\n<p>%d token%s ran through %d layers with %d attention heads each",
           v->n_rows, v->n_rows == 1 ? "" : "s", v->n_layers, v->n_heads);
    if (v->n_experts) printf(" and %d experts, of which each token uses %d", v->n_experts, v->n_used);
    printf(". All numbers on this page are computed from the files that <code>--dump</code> wrote.");
    if (v->first)
        printf(" <strong>The page shows the last %d tokens; %d earlier ones are not shown.</strong>", v->n, v->first);
    if (v->sparse)
        printf(" <strong>The run used sparse attention (--pflash): where it left keys out, the attention below is not "
               "what the model computed.</strong>");
    printf("</p>\n<p class=\"run\">");
    for (int i = 0; i < v->n; i++) {
        printf("<span class=\"t\">");
        page_token(v, v->token[v->first + i], 100);
        printf("</span><wbr/>");
    }
    printf("</p>\n<p class=\"quiet\">A token is shown as its text in the vocabulary: <span "
           "class=\"t\">\xe2\x96\x81</span> stands for a space, <span class=\"t\">\\n</span> for a line break.</p>\n");
}

static void page_formulas(const View *v) {
    printf("<details><summary>What the words mean</summary><ul>\n"
           "<li><b>Stream</b> (residual stream): the vector of %d numbers that represents a token while it goes "
           "through the layers. It begins as the token's embedding. Each layer computes stream = (stream + attention + "
           "feed-forward%s) \xc3\x97 scale, where scale is one number of the layer.</li>\n"
           "<li><b>Length</b> (norm) of a vector: the square root of the sum of the squares of its numbers.</li>\n"
           "<li><b>Attention</b>: a head compares the token's query q with the key k of each position that it may see. "
           "Weights = softmax(q \xc2\xb7 k), without a scale; they sum to 1. A token sees itself and earlier tokens, "
           "in a sliding-window layer only the nearest. Keys are those before they go to the KV cache, which may round "
           "them.</li>\n", v->dim, v->ple_dim ? " + per-layer embedding" : "");
    if (v->n_experts)
        printf("<li><b>Experts</b>: the router gives each of %d experts a logit. The %d experts with the largest "
               "logits are used; weight = softmax over their logits. The model then multiplies each weight by a "
               "number of the expert, if the file has one.</li>\n", v->n_experts, v->n_used);
    printf("<li><b>Logit lens</b>: the most likely next tokens if the model ended at this layer: the output norm and "
           "the output matrix applied to the stream after the layer, then softmax over the vocabulary. After the last "
           "layer this is the model's answer.</li></ul></details>\n");
}

static void page_position(const View *v, int r) {                      // a token and its position
    printf("<small>%d</small> <span class=\"t\">", r);
    page_token(v, v->token[r], 24);
    printf("</span>");
}

static void page_candidate(const View *v, const float *c) {             // a cell: token, logit, probability
    printf("<td class=\"n\" style=\"--w:%.0f%%\" title=\"logit %.4g\"><span class=\"t\">",
           fmin(fmax(100 * c[2], 0), 100), (double)c[1]);
    page_token(v, view_id(v, c[0]), 24);
    printf("</span> %.1f %%</td>", 100 * (double)c[2]);
}

// The logit lens: a table for each output row that is shown; the last one is open.
static void page_lens(const View *v) {
    const size_t width = (size_t)v->n_lens * 3;
    float **lens = alloc_or_die((size_t)v->n_layers, sizeof *lens);
    for (int l = 0; l < v->n_layers; l++) lens[l] = read_values(v, "lens", l, v->n_out, v->n_lens * 3, 0, v->n_out);
    printf("<h2>Likeliest next tokens after each layer</h2>\n<p class=\"quiet\">The output norm and the output "
           "matrix, applied to the stream after each layer (logit lens). For tokens whose logits the run computed: "
           "the last one of the prompt and each generated one that ran; in a dump of <code>gemma4 logits</code>, "
           "all.</p>\n");
    int shown = 0;
    for (int r = v->n_rows - 1; r >= v->first; r--) {
        if (v->out[r] < 0) continue;
        if (shown == 1) printf("<details><summary>After earlier tokens</summary>\n");
        printf("<details%s><summary>After ", shown++ ? "" : " open=\"open\"");
        page_position(v, r);
        if (r + 1 < v->n_rows) {
            printf("; the run went on with ");
            page_position(v, r + 1);
        }
        printf("</summary><div class=\"wide\"><table class=\"lens\"><tbody>\n");
        for (int l = 0; l < v->n_layers; l++) {
            printf("<tr><th>layer %d</th>", l);
            for (int i = 0; i < v->n_lens; i++) page_candidate(v, lens[l] + (size_t)v->out[r] * width + 3 * i);
            printf("</tr>\n");
        }
        printf("</tbody></table></div></details>\n");
    }
    if (shown > 1) printf("</details>\n");
    if (!shown) printf("<p>None of the shown tokens is one of these.</p>\n");
    for (int l = 0; l < v->n_layers; l++) free(lens[l]);
    free(lens);
}

typedef struct {              // lengths of a layer's vectors, (n) each
    double *before, *attention, *feed_forward, *ple, *after;   // ple: NULL, or what the per-layer embedding adds
} Lengths;

static Lengths *read_lengths(const View *v) {                          // (n_layers)
    Lengths *all = alloc_or_die((size_t)v->n_layers, sizeof *all);
    for (int l = 0; l < v->n_layers; l++)
        all[l] = (Lengths){ .before = l ? all[l - 1].after : view_lengths(v, "inp_scaled", -1),
                            .attention = view_lengths(v, "attn_post_norm", l),
                            .feed_forward = view_lengths(v, "ffn_post_norm", l),
                            .ple = v->ple_dim ? view_lengths(v, "per_layer_embd_out", l) : NULL,
                            .after = view_lengths(v, "l_out", l) };
    return all;
}

// A map of layers and tokens: the length of what one block adds, divided by that of the stream before the layer.
static void page_overview_map(const View *v, const char *title, const Lengths *all, size_t field) {
    double *ratio = alloc_or_die((size_t)v->n_layers * (size_t)v->n, sizeof *ratio);
    for (int l = 0; l < v->n_layers; l++) {
        double *added;
        memcpy(&added, (const char *)&all[l] + field, sizeof added);
        double *row = ratio + (size_t)l * (size_t)v->n;
        for (int i = 0; i < v->n; i++) row[i] = added[i] / all[l].before[i];
    }
    begin_map(title, "layers", v->n_layers, v->n, false);
    page_cells(ratio, v->n_layers, v->n, v->n);
    end_map();
    free(ratio);
}

static void page_overview(const View *v, const Lengths *all) {
    printf("<h2>How much each layer adds</h2>\n<p class=\"quiet\">The length of what a block adds, divided by the "
           "length of the stream before the layer. Blank: less than 0.4 %%; full color: 88 %% or more.</p>\n<div "
           "class=\"maps\">\n");
    page_overview_map(v, "attention adds", all, offsetof(Lengths, attention));
    page_overview_map(v, "feed-forward adds", all, offsetof(Lengths, feed_forward));
    if (v->ple_dim) page_overview_map(v, "per-layer embedding adds", all, offsetof(Lengths, ple));
    printf("</div>\n");
}

static void page_length(double length, double full) {                   // a cell with a bar, which is full at `full`
    const int digits = length < 10 ? 3 : length < 100 ? 2 : length < 1000 ? 1 : 0;
    printf("<td class=\"n\" style=\"--w:%.0f%%\">%.*f</td>",
           full > 0 ? fmin(100 * length / full, 100) : 0, digits, length);
}

// A cell of the row i: the positions with most attention, in the mean of the heads (attention: as view_attention()).
static void page_most_attended(const View *v, const double *attention, int i) {
    const int width = v->n + 1, count = min_int(3, width);
    double *mean = alloc_or_die((size_t)width, sizeof *mean);
    int index[3];
    for (int h = 0; h < v->n_heads; h++)
        for (int j = 0; j < width; j++)
            mean[j] += attention[((size_t)h * (size_t)v->n + (size_t)i) * (size_t)width + (size_t)j] / v->n_heads;
    pick_largest(mean, width, count, index);
    printf("<td>");
    for (int k = 0; k < count && mean[index[k]] >= 0.005; k++) {
        printf("%s", k ? ", " : "");
        if (index[k]) page_position(v, v->first + index[k] - 1);
        else printf("earlier tokens");
        printf(" %.0f %%", 100 * mean[index[k]]);
    }
    printf("</td>");
    free(mean);
}

// The table of a layer: a row for each shown token.
static void page_layer_table(const View *v, int l, const Lengths *n, const double *attention) {
    float *router = v->n_experts ? read_values(v, "ffn_moe_logits", l, v->n_rows, v->n_experts, v->first, v->n) : NULL;
    int *expert = alloc_or_die((size_t)v->n_used, sizeof *expert);
    double *weight = alloc_or_die((size_t)v->n_used, sizeof *weight), most = 0;
    for (int i = 0; i < v->n; i++) most = fmax(most, fmax(n->before[i], n->after[i]));
    printf("<div class=\"wide\"><table class=\"tokens\"><thead><tr><th>token</th><th>stream before</th><th>attention "
           "adds</th><th>feed-forward adds</th>%s<th>stream after</th><th>looks at most (mean of the "
           "heads)</th>%s</tr></thead><tbody>\n",
           v->ple_dim ? "<th>per-layer embedding adds</th>" : "", v->n_experts ? "<th>experts</th>" : "");
    for (int i = 0; i < v->n; i++) {
        printf("<tr><th>");
        page_position(v, v->first + i);
        printf("</th>");
        page_length(n->before[i], most);
        page_length(n->attention[i], n->before[i]);
        page_length(n->feed_forward[i], n->before[i]);
        if (n->ple) page_length(n->ple[i], n->before[i]);
        page_length(n->after[i], most);
        page_most_attended(v, attention, i);
        if (router) {
            chosen_experts(v, router + (size_t)i * (size_t)v->n_experts, expert, weight);
            printf("<td class=\"experts\">");
            for (int k = 0; k < v->n_used; k++) printf("%s%d: %.0f %%", k ? ", " : "", expert[k], 100 * weight[k]);
            printf("</td>");
        }
        printf("</tr>\n");
    }
    printf("</tbody></table></div>\n");
    free(router);
    free(expert);
    free(weight);
}

// The heat maps of a layer's heads. What a row may see has a grey background, which is defined once for the layer.
static void page_heads(const View *v, int l, const double *attention) {
    const ViewLayer *layer = &v->layer[l];
    const int group = v->n_heads / layer->n_kv_heads, skip = v->first > 0;
    printf("<h3>What each head looks at</h3>\n<p class=\"quiet\">A row is the token that looks, a column the token "
           "that it looks at. Grey: it may look there. Color: attention weight; blank: less than 0.4 %%, full color: "
           "88 %% or more.%s%s</p>\n<div class=\"maps\">\n",
           group > 1 ? " Some heads share their keys and values." : "",
           skip ? " The first column is the sum over the tokens that are not shown." : "");
    printf("<svg width=\"0\" height=\"0\" class=\"defs\"><defs><path class=\"s\" id=\"seen%d\" d=\"", l);
    for (int i = 0; i < v->n; i++) {
        const int pos = v->first + i, from = layer->window ? max_int(0, pos - layer->window + 1) : 0;
        const int begin = from < v->first ? 0 : from - v->first + skip;
        printf("M%d %dh%d", begin, i, i + skip + 1 - begin);
    }
    printf("\"/></defs></svg>\n");
    for (int h = 0; h < v->n_heads; h++) {
        char title[64];
        snprintf(title, sizeof title, group > 1 ? "head %d, key head %d" : "head %d", h, h / group);
        begin_map(title, "rows", v->n, v->n, skip);
        printf("<use href=\"#seen%d\"/>", l);
        page_cells(attention + (size_t)h * (size_t)v->n * (size_t)(v->n + 1) + !skip, v->n, v->n + skip, v->n + 1);
        end_map();
    }
    printf("</div>\n");
}

static void page_layer(const View *v, int l, const Lengths *lengths) {
    const ViewLayer *layer = &v->layer[l];
    double *attention = view_attention(v, l);
    printf("<details class=\"layer\"%s><summary><b>Layer %d</b>: ", l ? "" : " open=\"open\"", l);
    if (layer->window) printf("sliding window of %d tokens", layer->window);
    else printf("global attention");
    if (layer->kv_layer != l) printf(", keys and values of layer %d", layer->kv_layer);
    printf("</summary>\n<p class=\"quiet\">Lengths of vectors. Bars: of the stream, relative to the longest in this "
           "table; of what is added, relative to the stream before. At its end the layer multiplies the stream by "
           "%.4g.</p>\n",
           layer->scale);
    page_layer_table(v, l, lengths, attention);
    page_heads(v, l, attention);
    printf("</details>\n");
    free(attention);
}

static void free_view(View *v, Lengths *all) {
    for (int l = 0; l < v->n_layers; l++) {
        if (!l) free(all[l].before);
        free(all[l].attention);
        free(all[l].feed_forward);
        free(all[l].ple);
        free(all[l].after);
    }
    for (int i = 0; i < v->vocab; i++) free((char *)v->text[i].s);
    free((char *)v->name.s);
    free(all);
    free(v->layer);
    free(v->text);
    free(v->token);
    free(v->out);
}

static View read_view(const char *dir, int last) {
    View v = { .dir = dir };
    read_view_model(&v);
    read_view_rows(&v, last);
    check_dump(&v);
    return v;
}

// gemma4 view: writes a page about the last tokens of a dump to stdout.
static void verb_view(const char *dir, int last) {
    View v = read_view(dir, last);
    Lengths *all = read_lengths(&v);
    page_head(&v);
    page_labels(&v);
    page_formulas(&v);
    page_lens(&v);
    page_overview(&v, all);
    printf("<h2>Layer by layer</h2>\n");
    for (int l = 0; l < v.n_layers; l++) page_layer(&v, l, &all[l]);
    printf("</body>\n</html>\n");
    flush_output();
    free_view(&v, all);
}

#endif
