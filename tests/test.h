/* test.h - macros for all test programs.
 *
 * CHECK(cond, fmt, ...) counts one case; a failure prints file, line and the message (op, case, index, got, want,
 * tolerance). SKIP(why) counts one skipped case; STRICT=1 in the environment turns skips into failures.
 * A test program ends with `return test_done("name");`, which prints "# name: N passed, N failed, N skipped";
 * tests/run.sh adds these lines up. */
#ifndef TEST_H
#define TEST_H
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1           // under AddressSanitizer, which is much slower
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#endif

static int test_passed, test_failed, test_skipped;

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline int test_check(int ok, const char *file, int line, const char *fmt, ...) {
    if (ok) {
        test_passed++;
        return 1;
    }
    if (++test_failed <= 50) {               // further failures are only counted
        va_list ap;
        va_start(ap, fmt);
        printf("%s:%d: ", file, line);
        vprintf(fmt, ap);
        printf("\n");
        va_end(ap);
    }
    return 0;
}
#define CHECK(cond, ...) test_check(!!(cond), __FILE__, __LINE__, __VA_ARGS__)

static inline void test_skip(const char *why) {
    if (getenv("STRICT") && strcmp(getenv("STRICT"), "0") != 0) {
        test_failed++;
        printf("skipped, which STRICT=1 forbids: %s\n", why);
    } else {
        test_skipped++;
        printf("skipped: %s\n", why);
    }
}
#define SKIP(why) test_skip(why)

static inline int test_done(const char *name) {
    printf("# %s: %d passed, %d failed, %d skipped\n", name, test_passed, test_failed, test_skipped);
    return test_failed != 0;
}
#endif
