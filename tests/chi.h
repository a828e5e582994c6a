/* chi.h - chi-square test: do samples have the expected probabilities? Include after gemma4.c or math.h. */
#ifndef CHI_H
#define CHI_H

#define CHI_Z 4.75                      // standard deviations: a correct sampler fails in one of a million cases

// Wilson and Hilferty: the cube root of chi-square / df is nearly normal.
static double chi_limit(int df) {
    const double a = 2.0 / (9 * df), root = 1 - a + CHI_Z * sqrt(a);
    return df * root * root * root;
}

// Chi-square of n_draws samples, drawn[i] of them i, where i < n has probability p[i]. Values with an expected count
// below 8 are merged into one bin. *bins: the number of bins.
static double chi_square(const int *drawn, const double *p, int n, int n_draws, int *bins) {
    double chi = 0, rest_want = 0, rest = 0;
    *bins = 0;
    for (int i = 0; i < n; i++) {
        const double want = p[i] * n_draws;
        if (want >= 8) chi += (drawn[i] - want) * (drawn[i] - want) / want, ++*bins;
        else rest_want += want, rest += drawn[i];
    }
    if (rest_want >= 8) {
        chi += (rest - rest_want) * (rest - rest_want) / rest_want;
        ++*bins;
    }
    return chi;
}

#endif
