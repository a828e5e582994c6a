/* bench_tokenizer.c - speed of encoding text with Gemma 4's vocabulary, on one core.
 *
 *   gzip -dc tests/golden/gemma4-tokens.txt.gz | build/make_vocab /tmp/vocab.gguf
 *   build/bench_tokenizer /tmp/vocab.gguf [FILE ...]
 *
 * Without files it makes its own texts: mixed text of many scripts, code and numbers, whose words are tokens of the
 * vocabulary; one repeated letter; random letters without spaces. Prints for each: bytes, ids, seconds (best of three).
 * */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap; popen
#define GGUF_IMPLEMENTATION
#include "../gguf.h"
#define TOKENIZER_IMPLEMENTATION
#include "../tokenizer.h"
#include "test.h"
#include "vocab.h"
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void bench(Tokenizer *t, const char *what, const char *text, size_t n) {
    double best = 1e9;
    TokIds ids = { 0 };
    for (int i = 0; i < 3; i++) {
        ids.n = 0;
        const double start = seconds();
        if (tok_encode(t, text, n, TOK_SPECIAL, &ids) < 0) {
            printf("%s: %s\n", what, t->err);
            exit(1);
        }
        if (seconds() - start < best) best = seconds() - start;
    }
    printf("%-24s %9zu bytes %9zu ids %7.3f s %6.2f M ids/s\n", what, n, ids.n, best, (double)ids.n / best * 1e-6);
    tok_ids_free(&ids);
}

int main(int argc, char **argv) {
    File f;
    Tokenizer t;
    if (argc < 2) {
        printf("bench_tokenizer: error: expected a GGUF file with a tokenizer\n");
        return 1;
    }
    if (!open_vocab(&f, argv[1])) return 1;
    double start = seconds();
    if (tok_init(&t, &f.v) < 0) {
        printf("%s: %s\n", argv[1], t.err);
        return 1;
    }
    printf("tables: %.3f s\n", seconds() - start);
    for (int i = 2; i < argc; i++) {
        FILE *in = fopen(argv[i], "rb");
        if (!in) {
            printf("%s: cannot read\n", argv[i]);
            return 1;
        }
        size_t n;
        char *text = read_stream(in, &n);
        fclose(in);
        bench(&t, argv[i], text, n);
        free(text);
    }
    if (argc > 2) return 0;

    const size_t n = 7 << 20;
    char *text = alloc(n);
    size_t at = 0;
    while (at + 200 < n) {                             // lines of consecutive tokens, or of numbers
        const uint32_t from = 500 + rnd(200000);
        for (int words = 0; words < 12 && at + 200 < n; words++) {
            const TokStr word = tok_piece(&t, (int32_t)(from + rnd(2000)), false);
            if (from % 16 == 0) at += (size_t)snprintf(text + at, 64, " %u,", rnd(100000));
            else if (word.n < 100) memcpy(text + at, word.s, word.n), at += word.n;
        }
        text[at++] = '\n';
    }
    bench(&t, "mixed text", text, at);
    memset(text, 'a', n);
    bench(&t, "one letter", text, 4000000);
    for (size_t i = 0; i < n; i++) text[i] = (char)('a' + rnd(26));
    bench(&t, "random letters", text, 3000000);
    for (size_t i = 0; i < n; i++) text[i] = (char)rnd(256);
    bench(&t, "random bytes", text, 4000000);
    free(text);
    tok_free(&t);
    close_vocab(&f);
    return 0;
}
