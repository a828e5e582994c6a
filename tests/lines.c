/* lines.c - parts/lines.h alone: a small program that reads messages as the chat does and builds in a second.
 * test_terminal types to it.
 *
 *   build/lines [HISTORY]      prints each message in brackets, and a number in the locale */
#define _GNU_SOURCE
#define BASE_IMPLEMENTATION
#include "../parts/base.h"

typedef struct { char *s; size_t n, cap; } TokText;    // as in tokenizer.h
static volatile sig_atomic_t interrupted;

static bool tok_text_append(TokText *v, const char *s, size_t n) {
    if (v->n + n > v->cap) {
        char *more = realloc(v->s, v->cap = 2 * (v->n + n));
        if (!more) return false;
        v->s = more;
    }
    if (n) memcpy(v->s + v->n, s, n);
    v->n += n;
    return true;
}

static void tok_text_free(TokText *v) {
    free(v->s);
    *v = (TokText){ 0 };
}

#include "../parts/lines.h"

static void on_interrupt(int signal_number) { interrupted = signal_number; }

static const char *word_of(size_t i) {
    static const char *const words[] = { "/help", "/save", "/set", "/show" };
    return i < 4 ? words[i] : NULL;
}

int main(int argc, char **argv) {
    TokText text = { 0 };
    const struct sigaction act = { .sa_handler = on_interrupt };
    sigaction(SIGINT, &act, NULL);
    setvbuf(stdout, NULL, _IONBF, 0);
    open_lines(argc > 1 ? argv[1] : NULL, word_of);
    for (LineKind kind; (kind = read_message("> ", &text)) != LINE_END; ) {
        if (kind == LINE_INTERRUPTED) {
            printf("interrupted\n");
            continue;
        }
        printf("got [%.*s] numbers: %s\n", (int)text.n, text.s, setlocale(LC_NUMERIC, NULL));
        if (!text.n || !tok_text_append(&text, "", 1)) continue;         // appends a NUL
        remember_line(text.s);
    }
    tok_text_free(&text);
    return 0;
}
