/* recent.h - texts by their ids, in memory: the newest ones, bounded in number and in bytes.
 *
 * Uses base.h, tokenizer.h, and answer.h (hashes). Begin with recent_add(). */
#ifndef RECENT_H
#define RECENT_H

#if defined USE_MICROHTTPD || defined TESTING
enum { RECENT = 4096, RECENT_BYTES = 32 << 20 };       // most texts, and most bytes of all of them

typedef struct { char id[64], previous[64]; TokText text; } Kept;

// Texts first .. end - 1 are kept; text i is in ring[i % RECENT], the hash of its id in hashes[i % RECENT]. Start with
// {0}. The caller holds a lock.
typedef struct { Kept *ring; uint64_t *hashes; size_t first, end, bytes; } Recent;      // both: (RECENT), or NULL

static inline void recent_drop(Recent *r) {                   // the oldest text
    Kept *k = &r->ring[r->first++ % RECENT];
    r->bytes -= k->text.n;
    tok_text_free(&k->text);
}

// Adds a copy of a text; the oldest ones give way. A text or an id that is too long is not kept, nor a text for which
// there is no memory. previous: an id that belongs to the text, or "".
static inline void recent_add(Recent *r, const char *id, const char *previous, TokStr text) {
    if (text.n > RECENT_BYTES || strlen(id) >= sizeof r->ring->id || strlen(previous) >= sizeof r->ring->id) return;
    if (!r->ring) r->ring = calloc(RECENT, sizeof *r->ring);
    if (!r->hashes) r->hashes = calloc(RECENT, sizeof *r->hashes);
    if (!r->ring || !r->hashes) return;
    while (r->end - r->first == RECENT || r->bytes + text.n > RECENT_BYTES) recent_drop(r);
    r->hashes[r->end % RECENT] = hash_bytes(id, strlen(id));
    Kept *k = &r->ring[r->end++ % RECENT];
    *k = (Kept){ 0 };
    snprintf(k->id, sizeof k->id, "%s", id);
    snprintf(k->previous, sizeof k->previous, "%s", previous);
    if (!tok_text_append(&k->text, text.s, text.n)) {
        r->end--;
        return;
    }
    r->bytes += text.n;
}

// The text with this id, until the next recent_add(). NULL: it is not kept.
static inline const Kept *recent_find(const Recent *r, const char *id) {
    const uint64_t hash = hash_bytes(id, strlen(id));
    for (size_t i = r->end; i-- > r->first; ) {
        if (r->hashes[i % RECENT] != hash) continue;
        const Kept *k = &r->ring[i % RECENT];
        if (!strcmp(k->id, id)) return k;
    }
    return NULL;
}

static inline void recent_free(Recent *r) {
    while (r->first < r->end) recent_drop(r);
    free(r->ring);
    free(r->hashes);
}

#endif
#endif
