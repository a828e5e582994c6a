/* test_flags.c - the command line with random combinations of flags. Flags come from the program's table, so a new flag
 * is tested automatically; values are valid, at a limit, or wrong, by the kind and range in the table.
 *
 *   build/test_flags [SEED [N [FIRST]]]      N random combinations (150; LONG=1: 5000) from number FIRST (1) on. Each
 *                                            depends only on SEED and its number: repeat a failure with
 *                                            build/test_flags SEED 1 NUMBER
 * Each run of the program must end with status 0 and no error, or with status 1 and one error line; never by a signal.
 * A server answers requests and gets SIGTERM. Every run has the same files, and its output is removed.
 *
 * Run from the top of the repository.
 * Environment: GEMMA4 (./gemma4), RUNS (2 at a time), TMPDIR (/tmp), SHOW=1 (print every command and how it ended). A
 * GPU is hidden, except with LONG=1, because initialising it takes longer than a run. */
static int main_of_gemma4(int argc, char **argv);   // never called, so that the code that only it needs is not compiled
#define main main_of_gemma4
#include "../gemma4.c"
#undef main
#include "test.h"
#include "files.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define N_OF(a) ((int)(sizeof(a) / sizeof *(a)))
#ifdef SANITIZED
enum { PATIENCE_SECONDS = 900 };
#else
enum { PATIENCE_SECONDS = 900 };   // a longer run counts as hanging; bench of a tower with the plain loops takes half of it
#endif

// ==== Chance =========================================================================================================

static uint64_t chance;                                // random state of the current combination

static uint64_t draw_bits(void) {                      // splitmix64
    uint64_t z = chance += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int draw(int n) { return (int)(draw_bits() % (uint64_t)n); }    // 0 .. n - 1
static bool coin(int percent) { return draw(100) < percent; }
static double draw_unit(void) { return (double)(draw_bits() >> 11) * 0x1p-53; }
#define ONE_OF(texts) (texts)[draw(N_OF(texts))]

// ==== Values =========================================================================================================
// Values for the table's kinds. For some flags large values are valid but slow; values above the bound are not used.
// Otherwise no flag is treated by name, except for values that only make sense for one flag.

static const struct { const char *name; double most; } bounds[] = {
    { "-n", 32 }, { "-c", 4096 }, { "-t", 4 }, { "-r", 2 }, { "--chunks", 3 }, { "--needles", 3 }, { "-np", 8 },
    { "--top-logits", 50 } };

static const struct { const char *name, *value; } favourites[] = {
    { "--grammar", "root ::= (\"yes\" | \"no\") \", it is\"" }, { "--grammar", "root ::= \"a\" root" },
    { "--grammar-file", "form.gbnf" }, { "-j", "{}" }, { "-j", "{\"enum\":[\"red\",\"green\"]}" },
    { "-jf", "schema.json" }, { "--tools", "tools.json" }, { "--tools", "tools.json" },
    { "--tool-choice", "required" }, { "--tool-choice", "weather" }, { "-md", "mtp.gguf" }, { "-md", "dflash.gguf" },
    { "-ctk", "q8_0,f16" }, { "-ctv", "f16" }, { "-pg", "8,2" }, { "-md", "mtp.gguf,dflash.gguf" },
    { "-md", "mtp.gguf" }, { "-md", "dflash.gguf" }, { "-l", "5-inf,7+2.5" }, { "--scorer", "mini.gguf" },
    { "--ids", "ids.i32" }, { "-o", "new" }, { "--session", "new" }, { "--session", "session" }, { "-f", "text.txt" },
    { "-f", "long.txt" }, { "--kld-base", "new" }, { "--api-key-file", "text.txt" }, { "--dump", "folder" },
    { "--session-dir", "folder" }, { "--spec-force", "0.9,0.5" }, { "--history", "new" }, { "-m", "mini.gguf" },
    { "--mmproj", "tower.gguf" } };

static const struct { const char *name, *words; } companions[] = {     // flags that need another flag
    { "--scorer", "--compress 0.3" }, { "--think-budget", "--think" }, { "--history", "-i" },
    { "--tree", "-md mtp.gguf" }, { "--tool-choice", "--tools tools.json" }, { "-ctv", "--kv-layout untied" },
    { "--spec-force", "-md dflash.gguf" }, { "--kv-swa", "-ctk f32" }, { "--pflash", "--pflash-from 0" },
    { "--compress", "-f long.txt -c 2000" },
    { "--compress-from", "--compress 0.4" }, { "--images", "--mmproj tower.gguf" },
    { "--image-tokens", "--mmproj tower.gguf" } };

static const char *const files[] = {
    "text.txt", "long.txt", "empty", "tools.json", "schema.json", "form.gbnf", "ids.i32", "noise", "session",
    "folder", "new", "folder/new", "missing/new", "", "/dev/null", "/dev/full", "-", "mini.gguf", "mini-e.gguf",
    "mtp.gguf", "dflash.gguf", "tower.gguf", "text.txt/new" };
static const char *const folders[] = { "folder", "folder/new", "text.txt", "", "missing/new", "/dev/null", "." };
static const char *const texts[] = {
    "Hello", "Tell me a story about a fox.", "", " ", "\n", "two\nlines", "\xff\xfe",
    "Gr\xc3\xbc\xc3\x9f Gott \xe4\xbd\xa0", "{}", "[]", "\x1b[31mred", "<|turn>user", "<bos>", "root ::= [a-z]+",
    "{\"type\":\"object\"}", "%s%n", "a \"quoted\" \\ text", "The", "-p",
    "{\"type\":\"string\",\"pattern\":\"^[a-c]{2,3}$\"}", "2 105 2364", "0.5", "x,y", "root ::= (", "none", "auto",
    "/", "--" };
static const char *const addresses[] = { "127.0.0.1", "127.0.0.1", "::1", "localhost", "", "203.0.113.1", "::2:3" };
static const char *const biases[] = {
    "5+1", "5-inf", "1-2,3+4", "+", "5", "99999999+1", "5+nan", "5+inf", "5+1e30", "", "5+1,", "-1+2", "4095-3",
    "4096+1", "5+1e-50", "5+0x10" };
static const char *const ids[] = {
    "2 105 2364", "ids.i32", "", "0", "4095", "4096", "-1", "2,3", "99999999999999999999", "2 x", "text.txt" };
static const char *const lists[] = {
    "0", "1", "2,3", "3,1", "8,0,5", "17", "64", "65", "256", "256,300", "", ",", "1,", ",1", "1,,2", "-1", "abc",
    "1.5", "99999999999", "1;2", " 1", "1e2", "16777217", "0,0",
    "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1" };
static const char *const shares[] = {
    "0.5", "1", "0", "0.7,0.5", "50", "0,100", "101", "2", "-0.5", "nan", "", ",", "0.5,", "x", "1e-9", "25,75",
    ("1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
     "1,1,1,1,1,1,1,1,1,1,1,1,1") };
static const char *const wrong_numbers[] = {
    "", "nan", "inf", "-inf", "1e30", "-1e30", "2147483648", "-2147483649", "4294967296", "1e400", "3abc", "5 ",
    "1.5", "\xc3\xa4", "--", "1,5", "1e-320", "-0", "0x", "x", "9007199254740993", "-", "1\n" };

typedef struct {
    Verb  verb;
    bool  chats;
    int   argc;
    char *argv[80], text[8192];
    size_t n_text;
    char  input[512];         // standard input
} Combination;

__attribute__((format(printf, 2, 3))) static void add_word(Combination *c, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    if (c->argc >= N_OF(c->argv) - 1 || sizeof c->text - c->n_text < 600) die("a combination of too many words");
    c->argv[c->argc++] = c->text + c->n_text;
    c->n_text += (size_t)vsnprintf(c->text + c->n_text, 599, fmt, ap) + 1;
    va_end(ap);
}

static void add_words(Combination *c, const char *words) {             // words separated by spaces
    char copy[200], *rest = copy;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word; (word = strsep(&rest, " ")); ) if (*word) add_word(c, "%s", word);
}

static double bound_of(const Flag *f) {
    for (int i = 0; i < N_OF(bounds); i++) if (!strcmp(bounds[i].name, f->name)) return fmin(bounds[i].most, f->max);
    return f->max;
}

// A number that the flag accepts, or a wrong one as above.
static void add_number(Combination *c, const Flag *f) {
    const double most = bound_of(f), span = most - f->min;
    const bool bounded = most < f->max;
    double v;
    if (coin(5)) {
        add_word(c, "%s", ONE_OF(wrong_numbers));
        return;
    }
    switch (draw(20)) {
    case 0: case 1: case 2: v = f->min; break;
    case 3: case 4: case 5: v = most; break;
    case 6: case 7: v = fmax(fmin(0, most), f->min); break;
    case 8: v = coin(50) || bounded ? f->min - 1 : f->max + 1; break;
    default: v = f->min + (span > 100 ? exp(draw_unit() * log(span)) - 1 : draw_unit() * span);
    }
    if (f->kind == FLAG_INT) add_word(c, coin(10) ? "%.0fe0" : "%.0f", round(v));
    else add_word(c, coin(50) ? "%.3g" : "%.10f", v);
}

static void add_choice(Combination *c, const Flag *f) {
    static const char *const wrong[] = { "", " ", "|", "none", "OFF", "f16 ", "\xc3\xa4" };
    int n = 1;
    if (coin(5)) {
        add_word(c, "%s", coin(80) ? ONE_OF(wrong) : f->value);
        return;
    }
    for (const char *at = f->value; *at; at++) n += *at == '|';
    const char *at = f->value;
    for (int k = draw(n); k; k--) at = strchr(at, '|') + 1;
    add_word(c, "%.*s", (int)strcspn(at, "|"), at);
}

static void add_text(Combination *c, const Flag *f) {
    const char *kind = f->value, *favourite = NULL;
    int n = 0;
    for (int i = 0; i < N_OF(favourites); i++)
        if (!strcmp(favourites[i].name, f->name) && !draw(++n)) favourite = favourites[i].value;
    if (favourite && coin(75)) add_word(c, "%s", favourite);
    else if (coin(2)) add_word(c, "%0500d", draw(10));
    else if (!strcmp(kind, "FILE")) add_word(c, "%s", ONE_OF(files));
    else if (!strcmp(kind, "DIR")) add_word(c, "%s", ONE_OF(folders));
    else if (!strcmp(kind, "ADDRESS")) add_word(c, "%s", ONE_OF(addresses));       // other names would need the network
    else if (!strcmp(kind, "ID+B")) add_word(c, "%s", ONE_OF(biases));
    else if (!strcmp(kind, "IDS")) add_word(c, "%s", ONE_OF(ids));
    else if (!strcmp(kind, "N,..")) add_word(c, "%s", ONE_OF(lists));
    else if (!strcmp(kind, "P,..")) add_word(c, "%s", ONE_OF(shares));
    else add_word(c, "%s", ONE_OF(texts));
}

static void add_flag(Combination *c, const Flag *f) {
    int n = 1;
    const char *name = f->name;
    for (const char *at = f->alias; at && *at; at += strcspn(at, " "), at += strspn(at, " ")) if (!draw(++n)) name = at;
    add_word(c, "%.*s", (int)strcspn(name, " "), name);
    if (f->kind == FLAG_INT || f->kind == FLAG_REAL || (f->kind == FLAG_MAYBE && coin(70))) add_number(c, f);
    else if (f->kind == FLAG_CHOICE || (f->kind == FLAG_WORD && coin(70))) add_choice(c, f);
    else if (f->kind == FLAG_TEXT || f->kind == FLAG_LIST) add_text(c, f);
    for (int i = 0; i < N_OF(companions); i++)
        if (!strcmp(companions[i].name, f->name) && coin(80)) add_words(c, companions[i].words);
}

// ==== Combinations ===================================================================================================

// Flags that make runs short; they come first, so random flags may override them.
static const struct { Verb verb; const char *words; } frames[] = {
    { GENERATE, "-n 12 -c 300 -t 1" }, { LOGITS, "--ids ids.i32 -o new -t 1" }, { TOKENIZE, "-p Hello" },
    { DETOKENIZE, "--ids 2" }, { BENCH, "-p 8 -n 3 -r 1 -t 1" }, { SWEEP, "-d 8 -n 3 -t 1" }, { CHECK, "--against reference -t 2" },
    { SERVE, "--port 0 -n 8 -c 300 -t 1 --cache-ram 16" }, { PPL, "-f text.txt -c 32 --chunks 2 -t 1" },
    { NIAH, "-p 256 -d 50 -r 1 -t 1" }, { EVAL, "--prompts prompts.jsonl -n 6 -c 300 -t 1" } };

static const struct { Verb verb; int share; } shares_of_verbs[] = {    // relative frequency; others 1
    { GENERATE, 40 }, { SERVE, 8 }, { PLAN, 4 }, { PPL, 5 }, { LOGITS, 4 }, { BENCH, 2 }, { TOKENIZE, 2 },
    { QUANTIZE, 2 } };

static const char *const chats[] = {
    "Hello\n/set temp 0.5\n/think\n/regen\n/show\n/bye\n", "\"\"\"a\nb\"\"\"\n/verbose\n/set x y\n/?\n",
    "Hello\n/stats\n/exit\n", "Hello\nMore\n", "", "\n\n", "/help\n/nothing\n",
    "/system Be brief.\nHello\n/retry\n/clear\n", "Hello\n/save new.json\n/load new.json\n/load text.txt\n",
    "one \\\ntwo\n/stats\n", "Hello\n/tool {}\n", "\xff\xfe\n/exit now\n", "//x\n/retry\n/system\n/load\n/save\n" };

static int share_of_verb(Verb verb) {
    for (int i = 0; i < N_OF(shares_of_verbs); i++)
        if (shares_of_verbs[i].verb == verb) return shares_of_verbs[i].share;
    return 1;
}

static Verb draw_verb(const char **name) {             // NULL: no command
    int n = share_of_verb(GENERATE);
    for (int i = 0; i < N_OF(verbs); i++) n += share_of_verb(verbs[i].verb);
    int at = draw(n) - share_of_verb(GENERATE);
    *name = NULL;
    for (int i = 0; i < N_OF(verbs) && at >= 0; at -= share_of_verb(verbs[i].verb), i++) *name = verbs[i].name;
    return *name ? verb_named(*name) : GENERATE;
}

// Words that are neither flags nor values.
static void add_stray(Combination *c) {
    static const char *const stray[] = {
        "--nothing", "-", "--", "", "serve", "bench", "mini-e.gguf", "text.txt", "-ngl", "--jinja", "--temp=1",
        "-x\n", "--lora", "--fa", "-fa", "--temp=", "--raw=off", "--color", "--color=off", "--keep=4", "run", "help" };
    add_word(c, "%s", ONE_OF(stray));
}

static bool has_word(const Combination *c, const char *word) {
    for (int i = 1; i < c->argc; i++) if (!strcmp(c->argv[i], word)) return true;
    return false;
}

static void draw_combination(Combination *c) {
    const char *name;
    *c = (Combination){ .verb = draw_verb(&name) };
    add_word(c, "gemma4");
    if (name) add_word(c, "%s", name);
    const bool as_flag = coin(5);
    if (as_flag) add_word(c, "-m");
    add_word(c, "%s", coin(3) ? ONE_OF(files) : coin(85) ? "mini.gguf" : "mini-e.gguf");
    if (c->verb == QUANTIZE) {
        static const char *const types[] = {
            "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "bf16", "f16", "f32", "", "q9", "Q4_0" };
        if (!coin(5)) add_word(c, "%s", coin(80) ? "new.gguf" : ONE_OF(files));
        if (!coin(5)) add_word(c, "%s", ONE_OF(types));
    }
    for (int i = 0; i < N_OF(frames); i++) if (frames[i].verb == c->verb) add_words(c, frames[i].words);
    if (c->verb & ANSWERS && coin(15)) add_words(c, "-c 2000");
    if (c->verb == GENERATE) {
        c->chats = coin(25);
        if (c->chats) add_word(c, "-i");
        else if (coin(10)) add_words(c, "-f text.txt");
        else if (coin(90)) add_word(c, "-p"), add_word(c, coin(80) ? "Tell me a story about a fox." : "fox");
        if (coin(30)) add_words(c, "-n 32");
        if (coin(50)) add_words(c, "--temp 0");
    }
    if (find_flag("-md", c->verb)->verbs & (int)c->verb && coin(20))
        add_words(c, coin(50) ? "-md mtp.gguf" : "-md dflash.gguf");
    snprintf(c->input, sizeof c->input, "%s", c->chats ? ONE_OF(chats) : coin(20) ? "Hello" : "");
    for (int n = 1 + draw(coin(20) ? 12 : 5); n; n--) {
        const bool stranger = coin(1);                 // a flag of other commands
        const Flag *f;
        do f = &flags[draw(N_OF(flags))];
        while (!(f->verbs & (int)c->verb) != stranger || (f->verbs == ANY && !coin(10)));
        if (stranger && find_flag(f->name, c->verb)->verbs & (int)c->verb) continue;     // another flag of that name
        add_flag(c, f);
    }
    if (coin(2)) add_stray(c);
    if (coin(2)) c->argc--;
    if (has_word(c, "--context-shift")) add_words(c, "-n 16");         // else it may never end
    c->argv[c->argc] = NULL;
}

// ==== Folders ========================================================================================================

static struct { const char *name, *from; char *data; size_t n; struct stat st; } own[] = {   // the files of every run
    { .name = "mini.gguf", .from = "models/gemma4-mini-q8_0.gguf" },
    { .name = "mini-e.gguf", .from = "models/gemma4-mini-e-q8_0.gguf" },
    { .name = "mtp.gguf", .from = "models/gemma4-mini-mtp-q8_0.gguf" },
    { .name = "dflash.gguf", .from = "models/gemma4-mini-dflash-q8_0.gguf" },
    { .name = "tower.gguf" },
    { .name = "text.txt", .from = "tests/drafted.txt", .n = 200 },
    { .name = "long.txt", .from = "tests/drafted.txt", .n = 1200 },
    { .name = "prompts.jsonl",
      .data = "{\"prompt\":\"Count from 2 to 5.\",\"answer\":5}\n{\"question\":\"Hi\",\"kind\":\"talk\"}\n" },
    { .name = "session" }, { .name = "noise" }, { .name = "ids.i32" }, { .name = "empty", .data = "" },
    { .name = "form.gbnf", .data = "root ::= (\"yes\" | \"no\") \", it is\"\n" },
    { .name = "schema.json",
      .data = "{\"type\":\"object\",\"properties\":{\"n\":{\"type\":\"integer\"}},\"required\":[\"n\"]}" },
    { .name = "tools.json",
      .data = "[{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{\"type\":\"object\","
              "\"properties\":{\"city\":{\"type\":\"string\"}}}}}]" } };

static char folder[600];                               // the working directory of this process's runs

static void write_file(const char *path, const void *data, size_t n) {
    FILE *f = must(fopen(path, "wb"));
    if (fwrite(data, 1, n, f) != n || fclose(f)) must(NULL);
}

// Restores the folder after a run: removes new files, restores missing or changed ones.
static void clean_folder(void) {
    DIR *d = must(opendir("."));
    for (struct dirent *e; (e = readdir(d)); ) {
        struct stat st;
        bool keep = !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..");
        for (int i = 0; i < N_OF(own); i++)
            keep |= !strcmp(e->d_name, own[i].name) && !lstat(e->d_name, &st) && st.st_ino == own[i].st.st_ino &&
                    st.st_size == own[i].st.st_size && st.st_mtim.tv_sec == own[i].st.st_mtim.tv_sec &&
                    st.st_mtim.tv_nsec == own[i].st.st_mtim.tv_nsec;
        if (!keep) remove_tree(e->d_name);
    }
    closedir(d);
    for (int i = 0; i < N_OF(own); i++) {
        if (!access(own[i].name, F_OK)) continue;
        write_file(own[i].name, own[i].data, own[i].n);
        if (stat(own[i].name, &own[i].st)) must(NULL);
    }
    if (mkdir("folder", 0700)) must(NULL);
}

static void read_own_files(const char *gemma4) {
    static char noise[3000], numbers[20 * 4];
    for (int i = 0; i < (int)sizeof noise; i++) noise[i] = (char)draw_bits();
    for (int i = 0; i < 20; i++) memcpy(numbers + i * 4, &(int32_t){ i ? 100 * i + i : 2 }, 4);
    const char *path = kept(in_tmp("session"));
    const char *argv[] = { gemma4, own[0].from, "--session", path, "-n", "5", "-c", "300", "--temp", "0", "-p", "Hello",
                           NULL };
    CHECK(run_program(argv, "/dev/null", "/dev/null") == 0, "no session file");
    for (int i = 0; i < N_OF(own); i++) {
        const bool is_session = !strcmp(own[i].name, "session");
        if (is_session) own[i].from = path;
        if (!strcmp(own[i].name, "tower.gguf"))
            own[i].from = kept(make_model("tower", "tiny-moe", "q8_0", "--kind", "mmproj", "--layers", "2", NULL));
        if (own[i].from) {
            struct stat st;
            own[i].data = text_of(own[i].from);
            if (stat(own[i].from, &st)) must(NULL);
            if (!own[i].n) own[i].n = (size_t)st.st_size;
        } else if (own[i].data) own[i].n = strlen(own[i].data);
        else if (!strcmp(own[i].name, "noise")) own[i].data = noise, own[i].n = sizeof noise;
        else own[i].data = numbers, own[i].n = sizeof numbers;
    }
}

// ==== Runs ===========================================================================================================

static pid_t start_program(const char *gemma4, const Combination *c) {
    const pid_t child = fork();
    if (child) return child;
    const int runs = (int)getppid();
    const char *const paths[] = { in_tmp("%d.in", runs), in_tmp("%d.out", runs), in_tmp("%d.err", runs) };
    for (int i = 0; i < 3; i++)
        if (dup2(open(paths[i], i ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0600), i) < 0) _exit(126);
    for (int fd = 3; fd < 64; fd++) close(fd);
    setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
#ifndef SANITIZED
    setrlimit(RLIMIT_AS, &(struct rlimit){ (rlim_t)6 << 30, (rlim_t)6 << 30 });
#endif
    signal(SIGPIPE, SIG_DFL);
    execv(gemma4, (char *const *)(uintptr_t)c->argv);
    _exit(127);
}

// Sends a few requests to a server at "http://HOST:PORT". Returns the first line of its reply to the first request that
// it refuses, else to the last one; "": no reply.
static const char *ask(const char *url, double until) {
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Tell me a story.\"}],\"max_tokens\":20,\"temperature\":0}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"max_tokens\":9,\"stream\":true}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"1 2 3 4 1 2 3 4 1 2\"}]}" };
    static char reply[1 << 18];
    char host[64] = "", port[8] = "", request[500];
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV }, *a;
    int fds[N_OF(bodies)];
    reply[0] = 0;
    if (sscanf(url, "http://[%63[^]]]:%7[0-9]", host, port) != 2 &&
        sscanf(url, "http://%63[^:]:%7[0-9]", host, port) != 2) return reply;
    if (getaddrinfo(host, port, &hints, &a)) return reply;
    for (int i = 0; i < N_OF(bodies); i++) {
        const int n = snprintf(request, sizeof request, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\n"
                               "Connection: close\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                               url + 7, strlen(bodies[i]), bodies[i]);
        fds[i] = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(fds[i], SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ 1, 0 }, sizeof(struct timeval));
        if (connect(fds[i], a->ai_addr, a->ai_addrlen) || send(fds[i], request, (size_t)n, MSG_NOSIGNAL) != n)
            close(fds[i]), fds[i] = -1;
    }
    for (int i = 0; i < N_OF(bodies); i++) {
        size_t n = 0;
        for (ssize_t got = 1; got && fds[i] >= 0 && n < sizeof reply - 1 && seconds() < until; ) {
            got = recv(fds[i], reply + n, sizeof reply - 1 - n, 0);
            if (got < 0 && errno != EAGAIN && errno != EINTR) break;
            n += got > 0 ? (size_t)got : 0;
        }
        reply[n] = 0;
        reply[strcspn(reply, "\r\n")] = 0;
        if (strncmp(reply, "HTTP/1.1 200", 12)) break;                 // does not wait for the others
    }
    for (int i = 0; i < N_OF(bodies); i++) if (fds[i] >= 0) close(fds[i]);
    freeaddrinfo(a);
    return reply;
}

// Waits until the program ends. Returns its exit status, or 1000 + the signal that killed it; -1: it hangs. A server
// gets requests once and then SIGTERM; its reply is in `reply`.
static int wait_for_end(pid_t child, bool serves, const char *err_path, const char **reply) {
    const double until = seconds() + PATIENCE_SECONDS;
    int status;
    *reply = NULL;
    for (int wait = 200; waitpid(child, &status, WNOHANG) == 0; usleep((useconds_t)(wait = min_int(wait * 2, 4000)))) {
        if (seconds() > until) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            return -1;
        }
        if (!serves || *reply || access(err_path, R_OK)) continue;
        char *err = text_of(err_path), *at = strstr(err, "# serving at "), *end = at ? strchr(at, '\n') : NULL;
        if (end) {
            *end = 0;
            *reply = ask(at + 13, until);
            kill(child, SIGTERM);
        }
        free(err);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void print_word(const char *s) {                // quoted for bash
    const bool plain = *s && !s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,+=:")];
    printf(plain ? "" : "$'");
    for (; *s; s++)
        if (*s == '\'' || *s == '\\') printf("\\%c", *s);
        else if ((unsigned char)*s < ' ' || (unsigned char)*s > '~') printf("\\x%02x", (unsigned char)*s);
        else putchar(*s);
    printf(plain ? " " : "' ");
}

static void print_command(const Combination *c) {
    for (int i = 0; i < c->argc; i++) print_word(c->argv[i]);
    printf("<<< ");
    print_word(c->input);
    printf("\n");
}

// What is wrong with the end of a run; NULL: nothing.
static const char *fault_of(const Combination *c, int status, const char *out, const char *err, const char *reply) {
    static char what[100];
    const bool measures = c->verb & (BENCH | PPL | NIAH | PLAN);
    int errors = 0, others = 0;
    for (const char *line = err; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        const bool is_error = !strncmp(line, "gemma4: error: ", 15);
        errors += is_error;
        others += !is_error && strncmp(line, "# ", 2) && strncmp(line, "{\"time\":", 8);
    }
    what[0] = 0;
    if (status > 1000) snprintf(what, sizeof what, "ended by signal %d", status - 1000);
    else if (status > 1) snprintf(what, sizeof what, "exit status %d", status);
    else if (status == 1 && errors != 1) snprintf(what, sizeof what, "exit status 1 and %d lines of error", errors);
    if (*what) return what;
    if (status == -1) return "hangs";
    if (status == 0 && errors) return "exit status 0 and an error";
    if (status == 0 && measures && (strstr(out, "nan") || strstr(err, "nan"))) return "a result that is no number";
    if (strstr(out, "gemma4: error")) return "an error on standard output";
    if (others && !has_word(c, "--show-thoughts")) return "a line on stderr that is neither '# ..' nor an error";
    if (reply && strncmp(reply, "HTTP/1.1 ", 9)) return "the server did not answer";
    if (reply && !strncmp(reply, "HTTP/1.1 500", 12)) return "the server answered with 500";
    return NULL;
}

static void run_combination(const char *gemma4, const Combination *c, uint64_t seed, int number) {
    const int runs = (int)getpid();
    const char *const in = kept(in_tmp("%d.in", runs)), *const out_path = kept(in_tmp("%d.out", runs));
    const char *const err_path = kept(in_tmp("%d.err", runs)), *reply;
    clean_folder();
    write_file(in, c->input, strlen(c->input));
    remove(err_path);
    const double start = seconds();
    const pid_t child = start_program(gemma4, c);
    const int status = wait_for_end(child, c->verb == SERVE, err_path, &reply);
    char *out = text_of(out_path), *err = text_of(err_path);
    const char *fault = fault_of(c, status, out, err, reply);
    if (getenv("SHOW")) {
        const char *at = strstr(err, "gemma4: error: ");
        print_command(c);
        printf("    %d in %.3f s: %.*s%s\n", status, seconds() - start, at ? (int)strcspn(at, "\n") : 0, at ? at : "",
               reply ? reply : "");
    }
    if (!CHECK(!fault, "build/test_flags %" PRIu64 " 1 %d: %s", seed, number, fault)) {
        const size_t n = strlen(err);
        printf("    ");
        print_command(c);
        printf("    ..%s\n", err + (n > 1500 ? n - 1500 : 0));
    }
    fflush(stdout);
    free(out);
    free(err);
}

// Lines that failed once; they run before the random ones. Words are separated by one space.
static const struct { Verb verb; const char *words, *input; } failed[] = {
    { GENERATE, "mini.gguf -t 1 --spec auto --draft-max 5 --temp 0 -n 40 -p story", "" },
    { BENCH, "bench mini.gguf -t 1 -p 0 -n 1 -r 1 -md mtp.gguf --spec-force 1 -o json", "" },
    { PPL, "ppl mini.gguf -f text.txt -c 32 --chunks 1 -t 1 --kv-tail 16777216 -ctk q8_0", "" } };

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const bool is_long = getenv("LONG") && strcmp(getenv("LONG"), "0");
    const int n = argc > 2 ? atoi(argv[2]) : is_long ? 5000 : 150, first = argc > 3 ? atoi(argv[3]) : 1;
    const int jobs = getenv("RUNS") && atoi(getenv("RUNS")) > 0 ? min_int(atoi(getenv("RUNS")), 16) : 2;
    static Combination c;
    char *gemma4 = realpath(getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4", NULL);
    pid_t pids[16];
    int pipes[16][2];
    if (!gemma4) {
        CHECK(false, "%s: %s", getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4", strerror(errno));
        return test_done("test_flags");
    }
    setenv("ASAN_OPTIONS", "exitcode=99:allocator_may_return_null=1", 0);
    setenv("UBSAN_OPTIONS", "exitcode=99:print_stacktrace=1", 0);
    if (!is_long) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    setvbuf(stdout, NULL, _IOLBF, 1 << 16);
    make_tmp();
    chance = 1;
    read_own_files(gemma4);
    for (int j = 0; j < jobs; j++) {
        if (pipe(pipes[j])) must(NULL);
        pids[j] = fork();
        if (pids[j]) continue;
        snprintf(folder, sizeof folder, "%s", in_tmp("runs%d", j));
        if (mkdir(folder, 0700) || chdir(folder)) must(NULL);
        test_passed = test_failed = 0;
        for (int i = j; i < N_OF(failed) && argc <= 2; i += jobs) {
            c = (Combination){ .verb = failed[i].verb };
            add_word(&c, "gemma4");
            add_words(&c, failed[i].words);
            snprintf(c.input, sizeof c.input, "%s", failed[i].input);
            run_combination(gemma4, &c, 0, i);
        }
        for (int i = j; i < n; i += jobs) {
            chance = seed * 0x2545f4914f6cdd1du + (uint64_t)(first + i) * 0x9e6c63d0876a9a47u;
            draw_combination(&c);
            run_combination(gemma4, &c, seed, first + i);
        }
        if (write(pipes[j][1], (int[]){ test_passed, test_failed }, 2 * sizeof(int)) < 0) {}
        _exit(0);
    }
    for (int j = 0; j < jobs; j++) {
        int counts[2] = { 0, 1 };
        close(pipes[j][1]);
        const bool told = read(pipes[j][0], counts, sizeof counts) == sizeof counts;
        CHECK(told, "a process that runs combinations has ended early");
        waitpid(pids[j], NULL, 0);
        test_passed += counts[0];
        test_failed += counts[1];
    }
    free(gemma4);
    return test_done("test_flags");
}
