/* test_judge.c - which answers are right (parts/judge.h), and how the lines of public data sets are read (parts/eval.h).
 * Programs run in a confined child: what it may not do is tried. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include <arpa/inet.h>
#include <sys/socket.h>

static TokStr str(const char *s) { return (TokStr){ s, strlen(s) }; }

static void test_texts(void) {
    static const struct { JudgeKind kind; const char *want, *got; Verdict verdict; } cases[] = {
        { JUDGE_EXACT, "The flag is blue.", " The flag is blue.\n", RIGHT },
        { JUDGE_EXACT, "The flag is blue.", "The flag is blue", WRONG },
        { JUDGE_EXACT, "yes", "", WRONG },
        { JUDGE_NUMBER, "42", "The sum is 42.", RIGHT },
        { JUDGE_NUMBER, "42", "42 is more than 41", WRONG },            // the last number counts
        { JUDGE_NUMBER, "42", "#### 42\nas 40 + 2 = 42 and 1 < 2", RIGHT },
        { JUDGE_NUMBER, "42", "It is \\boxed{42}, not 43", RIGHT },
        { JUDGE_NUMBER, "She has 5 + 3 = 8.\n#### 8", "#### 8", RIGHT },
        { JUDGE_NUMBER, "#### 1,250", "$1250", RIGHT },
        { JUDGE_NUMBER, "1250000", "1,250,000.00 dollars", RIGHT },
        { JUDGE_NUMBER, "3", "1, 2, 3", RIGHT },
        { JUDGE_NUMBER, "123", "1,23", WRONG },
        { JUDGE_NUMBER, "-7", "x = -7", RIGHT },
        { JUDGE_NUMBER, "7", "x = -7", WRONG },
        { JUDGE_NUMBER, "5", "10-5", RIGHT },                           // a minus, not a sign
        { JUDGE_NUMBER, "0.5", "about .5", RIGHT },
        { JUDGE_NUMBER, "0.5", "0.50001", WRONG },
        { JUDGE_NUMBER, "4", "four", WRONG },
        { JUDGE_CHOICE, "B", "B", RIGHT },
        { JUDGE_CHOICE, "B", "(B) because A is false", RIGHT },
        { JUDGE_CHOICE, "(B)", "**B.** Paris", RIGHT },
        { JUDGE_CHOICE, "B", "A cat is no dog, so the answer is B", RIGHT },
        { JUDGE_CHOICE, "A", "The answer: A", RIGHT },
        { JUDGE_CHOICE, "C", "First A, then B. Answer: \\boxed{C}", RIGHT },
        { JUDGE_CHOICE, "B", "I Believe", WRONG },
        { JUDGE_CHOICE, "B", "", WRONG },
        { JUDGE_MATH, "\\frac{1}{2}", "so \\boxed{\\dfrac{1}{2}}.", RIGHT },
        { JUDGE_MATH, "\\frac{1}{2}", "so \\frac{1}{2}", WRONG },        // not in a box
        { JUDGE_MATH, "the sum is $\\boxed{17}$", "\\boxed{ 17.0 }", RIGHT },
        { JUDGE_MATH, "\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3,\\frac{\\pi}{2})}", RIGHT },
        { JUDGE_MATH, "10,\\!000", "\\boxed{10000}", RIGHT },
        { JUDGE_MATH, "x^{2}", "\\boxed{x^{3}}", WRONG },
        { JUDGE_MATH, "2", "\\boxed{2", WRONG },
        { JUDGE_MATH, "3", "\\boxed{2} and then \\boxed{3}", RIGHT },
        { JUDGE_NONE, "", "anything", NOT_JUDGED } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Verdict v = judge_text(cases[i].kind, str(cases[i].want), str(cases[i].got));
        CHECK(v == cases[i].verdict, "%s: want '%s', answer '%s': '%s'", judge_names[cases[i].kind], cases[i].want,
              cases[i].got, verdict_names[v]);
    }
}

static void test_code(void) {
    static const struct { const char *answer, *with, *code; } cases[] = {
        { "Here:\n```python\ndef f():\n    pass\n```\nIt passes.", "def f", "def f():\n    pass\n" },
        { "```\nx\n```\n```py\ndef f(): 1\n```", "def f", "def f(): 1\n" },
        { "```\nx\n```\n```py\ny\n```", "def f", "x\n" },
        { "    return 1\n", "def f", "    return 1\n" },
        { "```python\ndef f(): 2", "def f", "def f(): 2" },             // cut off
        { "```", "def f", "" },
        { "", "def f", "" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const TokStr code = code_block(str(cases[i].answer), cases[i].with);
        CHECK(code.n == strlen(cases[i].code) && !memcmp(code.s, cases[i].code, code.n), "code %zu: '%.*s'", i, (int)code.n,
              code.s);
    }
}

static const volatile sig_atomic_t never;

static Verdict judge(const char *given, const char *answer, const char *tests, const char *entry) {
    return judge_program(str(given), str(answer), str(tests), entry, &never);
}

static void test_programs(void) {
    static const char given[] = "from typing import List\n\n\ndef total(x: List[int]) -> int:\n    \"\"\" Adds. \"\"\"\n";
    static const char tests[] = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n";
    CHECK(judge(given, "    return sum(x)\n", tests, "total") == RIGHT, "the rest of a function");
    CHECK(judge(given, "```python\ndef total(x: List[int]) -> int:\n    return sum(x)\n```", tests, "total") == RIGHT,
          "a whole function in a block");
    CHECK(judge(given, "```python\ndef total(x):\n    return 3\n```", tests, "total") == WRONG, "a wrong function");
    CHECK(judge(given, "I do not know.", tests, "total") == WRONG, "no program");
    CHECK(judge(given, "    import os\n    os._exit(0)\n", tests, "total") == WRONG, "an early exit is no success");
    CHECK(judge(given, "    raise SystemExit(127)\n", tests, "total") == WRONG, "nor the status of a missing python3");
    CHECK(judge("", "def f(): return 2", "assert f() == 2", "") == RIGHT, "tests without a function to check");
    CHECK(judge("", "x = 1", "import resource\nassert resource.getrlimit(resource.RLIMIT_CPU)[0] == 10", "") == RIGHT,
          "its time is limited");
    CHECK(judge("", "x = bytearray(2 << 30)", "", "") == WRONG, "2 GiB of memory");
    CHECK(judge("", "f = open('big', 'wb')\nfor i in range(20): f.write(bytes(1 << 20)); f.flush()", "", "") == WRONG,
          "a file of 20 MiB");
    CHECK(judge("", "open('own', 'w').write('x')", "assert open('own').read() == 'x'", "") == RIGHT, "a file of its own");
    setenv("OURS", "secret", 1);
    CHECK(judge("", "import os", "assert 'OURS' not in os.environ", "") == RIGHT, "nothing of our environment");
    const sig_atomic_t now = 1;                        // without it the program would end well
    CHECK(judge_program(str(""), str("import time\ntime.sleep(10)"), str(""), "", &now) == WRONG, "Ctrl-C ends it");
}

static void test_confinement(void) {
    const int taken = try_confinement();
    char code[300], path[] = "/tmp/gemma4-judge-XXXXXX";
    const int fd = mkstemp(path), s = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof at;
    CHECK(fd >= 0 && s >= 0 && !bind(s, (struct sockaddr *)&at, n) && !listen(s, 1) && !getsockname(s, (struct sockaddr *)&at, &n),
          "a file, and a port of ours");
    snprintf(code, sizeof code, "import socket\nsocket.create_connection(('127.0.0.1', %d), 5)\n", ntohs(at.sin_port));
    if (taken & NO_NETWORK) CHECK(judge("", code, "", "") == WRONG, "it reaches no port");
    else SKIP("this system does not take the network from a child");
    snprintf(code, sizeof code, "open('%s', 'a').write('x')\n", path);
    if (taken & NO_WRITES) CHECK(judge("", code, "", "") == WRONG, "it writes no file of ours");
    else SKIP("this system does not take files from a child");
    snprintf(code, sizeof code, "import os\nos.remove('%s')\n", path);
    if (taken & NO_WRITES) CHECK(judge("", code, "", "") == WRONG && !access(path, F_OK), "it removes no file of ours");
    close(fd);
    close(s);
    unlink(path);
}

// The fields of data sets, with the model's tokenizer: how they are judged, and that the prompt says what is asked for.
static void test_lines(void) {
    static const struct { const char *line; JudgeKind judge; const char *id, *kind, *prompt, *want; } cases[] = {
        { "{\"task_id\":\"HumanEval/0\",\"prompt\":\"def f(x):\\n\",\"entry_point\":\"f\",\"canonical_solution\":\"    return x\\n\","
          "\"test\":\"def check(c):\\n    assert c(1) == 1\\n\"}", JUDGE_CODE, "HumanEval/0", "", "```python\ndef f(x):\n```",
          "def check(c):\n    assert c(1) == 1\n" },
        { "{\"question\":\"How many?\",\"answer\":\"2 + 2 = <<2+2=4>>4\\n#### 4\"}", JUDGE_NUMBER, "", "", "How many?\n\nEnd with a line",
          "2 + 2 = <<2+2=4>>4\n#### 4" },
        { "{\"problem\":\"Find x.\",\"level\":\"Level 5\",\"type\":\"Algebra\",\"solution\":\"So $x = \\\\boxed{5}$.\"}", JUDGE_MATH, "",
          "Algebra", "Find x.\n\nPut the result in \\boxed{}.", "So $x = \\boxed{5}$." },
        { "{\"problem\":\"Find x.\",\"solution\":\"So $x = \\\\boxed{5}$.\",\"answer\":\"5\",\"subject\":\"Algebra\",\"level\":5,"
          "\"unique_id\":\"test/algebra/1.json\"}", JUDGE_MATH, "test/algebra/1.json", "Algebra", "Find x.", "5" },
        { "{\"prompt\":\"Hello\"}", JUDGE_NONE, "", "", "Hello", "" },
        { "{\"prompt\":\"2 + 2\",\"answer\":4}", JUDGE_NUMBER, "", "", "2 + 2", "4" },
        { "{\"prompt\":\"2 + 2\",\"answer\":\"4\",\"check\":\"exact\",\"kind\":\"sums\"}", JUDGE_EXACT, "", "sums", "2 + 2", "4" },
        { "{\"question\":\"A or B?\",\"answer\":\"B\"}", JUDGE_CHOICE, "", "", "A or B?", "B" },
        { "{\"question\":\"Who?\",\"answer\":\"The king.\"}", JUDGE_EXACT, "", "", "Who?", "The king." },
        { "{\"prompt\":\"Write f.\",\"tests\":[\"assert f(1) == 2\",\"assert f(2) == 3\"]}", JUDGE_CODE, "", "", "Write f.",
          "assert f(1) == 2\nassert f(2) == 3\n" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}", JUDGE_NONE, "", "", "Hi", "" } };
    Gguf g;
    Tokenizer t;
    open_tokenizer(&t, &g, "models/gemma4-mini-q8_0.gguf");
    const EvalOptions o = { .prompts = "lines" };
    Eval e = { .o = &o, .t = &t };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        EvalTask task = { 0 };
        GgufJson line;
        size_t at;
        const char *err;
        TokText prompt = { 0 };
        CHECK(!gguf_json_parse(cases[i].line, strlen(cases[i].line), &line, &at, &err), "line %zu", i);
        const char *wrong = read_task(&e, &line, &task);
        CHECK(!wrong && task.judge == cases[i].judge, "line %zu: judged as %s, %s", i, judge_names[task.judge], wrong ? wrong : "");
        eval_word(&task.id, ""), eval_word(&task.kind, "");
        CHECK(task.id.n == strlen(cases[i].id) && !memcmp(cases[i].id, str_of(&task.id).s, task.id.n), "line %zu: its id", i);
        CHECK(task.kind.n == strlen(cases[i].kind) && !memcmp(cases[i].kind, str_of(&task.kind).s, task.kind.n), "line %zu: its kind", i);
        CHECK(task.want.n == strlen(cases[i].want) && !memcmp(cases[i].want, str_of(&task.want).s, task.want.n), "line %zu: wants '%.*s'",
              i, (int)task.want.n, str_of(&task.want).s);
        for (size_t k = 0; k < task.ids.n; k++) {
            const TokStr piece = tok_piece(&t, task.ids.ids[k], false);
            eval_text(&prompt, piece.s, piece.n);
        }
        CHECK(after_last(str_of(&prompt), cases[i].prompt).s, "line %zu: the prompt is '%.*s'", i, (int)prompt.n, prompt.s);
        tok_text_free(&prompt);
        free_task(&task);
    }
    static const char *const bad[] = { "{\"text\":\"Hello\"}", "{\"prompt\":\"x\",\"check\":\"maybe\"}", "{\"prompt\":\"x\",\"check\":\"number\"}",
                                       "{\"messages\":\"Hello\"}", "{\"messages\":[{\"content\":1}]}" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        EvalTask task = { 0 };
        GgufJson line;
        size_t at;
        const char *err;
        CHECK(!gguf_json_parse(bad[i], strlen(bad[i]), &line, &at, &err) && read_task(&e, &line, &task), "bad line %zu is refused", i);
        free_task(&task);
    }
    tok_free(&t);
    gguf_close(&g);
}

static void test_csv(void) {
    char line[] = "1,\"a \"\"b\"\", c\",,x,\"\"", *f[8];
    const int n = split_csv(line, f, 8);
    CHECK(n == 5 && !strcmp(f[0], "1") && !strcmp(f[1], "a \"b\", c") && !*f[2] && !strcmp(f[3], "x") && !*f[4], "fields of a line: %d", n);
    char many[] = "1,2,3";
    CHECK(split_csv(many, f, 2) == 3 && !strcmp(f[1], "2"), "more fields than there is room for");
}

int main(void) {
    test_texts();
    test_code();
    test_lines();
    test_csv();
    if (system("python3 -c '' 2>/dev/null")) {
        SKIP("no python3 to run programs with");
    } else {
        test_programs();
        test_confinement();
    }
    return test_done("judge");
}
