/* fuzz.h - used by all fuzz targets: a small vocabulary, and a main() that runs single files.
 *
 * clang -fsanitize=fuzzer links a target with -DFUZZER; otherwise main() runs it once for each file argument. */
#ifndef FUZZ_H
#define FUZZ_H
#ifndef GEMMA4_H              // else gemma4.c was included before
#ifndef ENGINE_LINKED         // else engine.a has these bodies
#define GGUF_IMPLEMENTATION
#define TOKENIZER_IMPLEMENTATION
#endif
#include "../gguf.h"
#include "../tokenizer.h"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); abort(); } } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

// 256 byte tokens, the special strings, a few letters and words, and merges that apply to long and short pieces.
static void make_built_in(Tokenizer *t) {
    static const char *texts[] = {
        "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>", "<|\"|>",
        "<tool_response|>",
        "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|think|>", "<|image|>", "<|audio|>", "<|video|>", "a",
        "b",
        "c", "<", "|", ">", "\n", "\342\226\201", "\303\251", "\357\277\275", "ab", "bc", "abc", "aa", "aaa", "aaaa",
        "\n\n",
        "\342\226\201\342\226\201", "\342\226\201a", "<|", "|>", "\357\277\275\357\277\275", "\303\251a", "call:f{",
        "thought\n",
    };
    static const char *lines[] = {
        "\n \n", "\342\226\201 \342\226\201", "b c", "aa aa", "a b", "a a", "a bc", "aa a", "\342\226\201 a", "< |",
        "| >", "\357\277\275 \357\277\275", "\303\251 a", "ab c",
    };
    char bytes[256][8];
    TokStr tokens[320], merges[24];
    int n_tokens = 0, n_merges = 0;
    for (; n_tokens < 256; n_tokens++) {
        snprintf(bytes[n_tokens], sizeof bytes[n_tokens], "<0x%02X>", (unsigned)n_tokens);
        tokens[n_tokens] = (TokStr){ bytes[n_tokens], 6 };
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        tokens[n_tokens++] = (TokStr){ texts[i], strlen(texts[i]) };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        merges[n_merges++] = (TokStr){ lines[i], strlen(lines[i]) };
    TokVocab v = { tokens, n_tokens, NULL, merges, n_merges, 256, 257, -1, { NULL, 0 }, false, NULL, 0 };
    NEED(tok_init(t, &v) == 0 && t->n_skipped == 0);
}

#ifndef FUZZER
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        static uint8_t bytes[1 << 20];
        FILE *f = fopen(argv[i], "rb");
        if (!f) {
            fprintf(stderr, "%s: cannot read\n", argv[i]);
            return 1;
        }
        LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, sizeof bytes, f));
        fclose(f);
    }
    return 0;
}
#endif
#endif
