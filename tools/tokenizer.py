"""The tokenizer of the small models: ranked merges as in Gemma 4, 4096 ids.

  python3 tools/tokenizer.py --learn FILE       learn merges from the training text and write them
  python3 tools/tokenizer.py --check            compare the fast encoder with plain ranked merging

Ids 0..493 are Gemma 4's own: special tokens, runs of newlines from 107, runs of spaces from 138, HTML tags, bytes from
238. ASCII characters follow at 494, then one id per learned merge. The learned merges are kept in tokenizer.txt, one
"left right" per line, best first: they were learned from an earlier version of the text and are fixed, so that ids do not change.
Words never merge with their neighbours, so encoding word by word gives what ranked merging of the whole line gives.
"""
import argparse
import collections
import heapq
import os
import random
import re

N_VOCAB = 4096
MERGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.txt")
SPACE = "\u2581"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6             # token types of GGUF
SPECIAL = {0: ("<pad>", 3), 1: ("<eos>", 3), 2: ("<bos>", 3), 3: ("<unk>", 3), 4: ("<mask>", 3), 46: ("<|tool>", 3),
           47: ("<tool|>", 3), 48: ("<|tool_call>", 4), 49: ("<tool_call|>", 4), 50: ("<|tool_response>", 4),
           51: ("<tool_response|>", 4), 52: ('<|"|>', 4), 98: ("<|think|>", 3), 100: ("<|channel>", 4),
           101: ("<channel|>", 4), 105: ("<|turn>", 3), 106: ("<turn|>", 3)}
PAD, EOS, BOS, MASK, STOP = 0, 1, 2, 4, (1, 50, 106)         # STOP: what ends a turn
FIRST_NEWLINES, FIRST_SPACES, FIRST_TAG, FIRST_BYTE, FIRST_CHARACTER = 107, 138, 168, 238, 494
TAGS = ("table caption thead tbody tfoot tr th td", "h1 h2 h3 h4 h5 h6 blockquote", "strong em b i u s sub sup code",
        "a html body img span bbox ul li div iframe footer")
_special = "|".join(re.escape(text) for text, _ in SPECIAL.values())
_words = re.compile("(" + _special + r")|\n+| {2,}| ?[A-Za-z]+|[0-9]| ?(?:(?!" + _special +
                    r")[!-/:-@\[-`{-~])+| |\t+|.", re.S)


def fixed_part():
    """-> tokens (None where free), types, merges of newline and space runs"""
    tokens, types = [None] * N_VOCAB, [NORMAL] * N_VOCAB
    for i, (text, kind) in SPECIAL.items():
        tokens[i], types[i] = text, kind
    tokens[5] = "[multimodal]"
    for n in range(1, 32):
        tokens[FIRST_NEWLINES + n - 1] = "\n" * n
    for n in range(2, 32):
        tokens[FIRST_SPACES + n - 2] = SPACE * n
    tags = [form % tag for row in TAGS for form in ("<%s>", "</%s>") for tag in row.split()]
    tokens[FIRST_TAG:FIRST_BYTE] = tags
    for b in range(256):
        tokens[FIRST_BYTE + b], types[FIRST_BYTE + b] = "<0x%02X>" % b, BYTE
    for i, c in enumerate([SPACE] + [chr(c) for c in range(33, 127)] + ["\t"]):
        tokens[FIRST_CHARACTER + i] = c
    merges = [(c * left, c * (total - left)) for total in range(31, 1, -1) for left in range(total - 1, 0, -1)
              for c in ("\n", SPACE)]
    return tokens, types, merges


class Tokenizer:
    def __init__(self, path=MERGES):
        self.tokens, self.types, self.merges = fixed_part()
        learned = [tuple(line.split(" ")) for line in open(path, encoding="utf8").read().split("\n") if line]
        known, free = set(self.tokens), FIRST_CHARACTER + 96
        for left, right in learned:
            self.merges.append((left, right))
            if left + right not in known:
                known.add(left + right)
                self.tokens[free] = left + right
                free += 1
        unused = [i for i, t in enumerate(self.tokens) if t is None]
        for n, i in enumerate(unused):
            self.tokens[i] = "<unused%d>" % n
        assert len(set(self.tokens)) == N_VOCAB
        self.rank = {m: i for i, m in enumerate(self.merges)}
        self.id = {t: i for i, t in enumerate(self.tokens)}
        self.special = {text: i for i, (text, _) in SPECIAL.items()}
        self.cache = {}

    def merge(self, text):
        """Ranked merging of the whole text, whose spaces are SPACE already -> ids"""
        s = list(text)
        while len(s) > 1:
            best = min(range(len(s) - 1), key=lambda i: self.rank.get((s[i], s[i + 1]), 1 << 30))
            if (s[best], s[best + 1]) not in self.rank:
                break
            s[best:best + 2] = [s[best] + s[best + 1]]
        out = []
        for t in s:
            if t in self.id and self.types[self.id[t]] != BYTE:
                out.append(self.id[t])
            else:
                out += [FIRST_BYTE + b for b in t.encode()]
        return out

    @staticmethod
    def words(text):
        """-> the parts of a text that are encoded each by itself"""
        return [m.group(0) for m in _words.finditer(text)]

    def encode(self, text):
        out, cache = [], self.cache
        for m in _words.finditer(text):
            w = m.group(0)
            ids = cache.get(w)
            if ids is None:
                ids = [self.special[w]] if m.group(1) else self.merge(w.replace(" ", SPACE))
                cache[w] = ids
            out += ids
        return out

    def encode_marked(self, text):
        """Marks \\x01 stand in pairs around the text that counts more -> ids, 0 or 1 for each"""
        ids, marked = [], []
        for i, part in enumerate(text.split("\x01")):
            e = self.encode(part) if part else []
            ids += e
            marked += [i & 1] * len(e)
        return ids, marked

    def decode(self, ids):
        out = b""
        for i in ids:
            t = self.tokens[i]
            out += bytes([int(t[3:5], 16)]) if self.types[i] == BYTE else t.replace(SPACE, " ").encode()
        return out.decode("utf8", "replace")


def learn(path, n_docs=6000):
    """Joins the most frequent pair of neighbours inside words, until all ids are used."""
    import text
    count = collections.Counter()
    rnd = random.Random(77).random
    for _ in range(n_docs):
        for m in _words.finditer(text.document(rnd).replace("\x01", "")):
            if m.group(1) is None:
                count[m.group(0)] += 1
    for w in text.COMMON_WORDS:                    # so that other English text is not split into letters
        for v in (" " + w, w, " " + w.capitalize(), w.capitalize()):
            count[v] += 3
    tokens, _, _ = fixed_part()
    known, free, merges = set(tokens), FIRST_CHARACTER + 96, []
    words, freq = [], []
    for w, c in count.items():
        w = w.replace(" ", SPACE)
        if len(w) > 1 and set(w) not in ({"\n"}, {SPACE}) and all(ch in known for ch in w):
            words.append(list(w))
            freq.append(c)
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, w in enumerate(words):
        for p in zip(w, w[1:]):
            pairs[p] += freq[i]
            where[p].add(i)
    heap = [(-c, p) for p, c in pairs.items()]
    heapq.heapify(heap)
    while free < N_VOCAB and heap:
        c, p = heapq.heappop(heap)
        if pairs[p] != -c:                         # the count has changed since
            if pairs[p] > 0:
                heapq.heappush(heap, (-pairs[p], p))
            continue
        if -c < 2:
            break
        new = p[0] + p[1]
        merges.append(p)
        if new not in known:
            known.add(new)
            free += 1
        touched = set()
        for i in list(where[p]):
            w, out, j = words[i], [], 0
            for q in zip(w, w[1:]):
                pairs[q] -= freq[i]
                touched.add(q)
            while j < len(w):
                two = j + 1 < len(w) and (w[j], w[j + 1]) == p
                out.append(new if two else w[j])
                j += 2 if two else 1
            words[i] = out
            for q in zip(out, out[1:]):
                pairs[q] += freq[i]
                where[q].add(i)
                touched.add(q)
        for q in touched - {p}:
            if pairs[q] > 0:
                heapq.heappush(heap, (-pairs[q], q))
        pairs[p] = 0
    open(path, "w", encoding="utf8").write("".join("%s %s\n" % m for m in merges))
    print("%d merges, %d ids" % (len(merges), free))


def check():
    import text
    tk, rnd = Tokenizer(), random.Random(5).random
    n_ids = n_chars = 0
    for i in range(300):
        t = text.document(rnd, max_words=60)
        ids, _ = tk.encode_marked(t)
        t = t.replace("\x01", "")
        plain = []
        for part in re.split("(" + _special + ")", t):
            for line in [part] if part in tk.special else re.split("(\n+)", part):
                if line:
                    plain += [tk.special[line]] if line in tk.special else tk.merge(line.replace(" ", SPACE))
        assert ids == plain and tk.decode(ids) == t, t
        n_ids += len(ids)
        n_chars += len(t)
    print("300 documents agree; %.2f characters per id" % (n_chars / n_ids))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--learn")
    ap.add_argument("--check", action="store_true")
    a = ap.parse_args()
    if a.learn:
        learn(a.learn)
    if a.check:
        check()
