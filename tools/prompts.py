"""Prompts on which the draft models are trained and measured: documents, cut where the target continues.

  python3 tools/prompts.py > tests/drafted.txt      the first 24 of each kind that models/acceptance.md was measured on
"""
import random

import stories
import text
from tokenizer import BOS, Tokenizer

T = 384                                        # ids of a row: a prompt and the target's continuation
DECAY_LEAN = 2.0                               # stories.LEAN of the end of training (train.py) and of prompts
# Shares of prompts to train on, and the kinds to measure.
SHARES = {"chat_story": 8, "story": 4, "small_talk": 1, "facts": 2, "needle": 2, "arithmetic": 2, "think": 2, "task": 2,
          "tool": 3, "code": 1, "edit": 3, "roll": 2, "almanac": 2, "dice": 1}
MEASURED = [k for k in SHARES if k != "small_talk"]


def prompt(tokenizer, rnd, split, kind):
    """A document cut where the target continues -> ids, or None when it is too long or belongs to the other split."""
    d = text.document(rnd, split, kind, max_words=120).replace("\x01", "")
    if text.MODEL in d:
        parts = d.split(text.MODEL)
        j = 1 if rnd() < 0.6 else len(parts) - 1
        before, after = text.MODEL.join(parts[:j]) + text.MODEL, parts[j]
        if "<tool_response|>" in after and rnd() < 0.5:
            at = after.rindex("<tool_response|>") + len("<tool_response|>")
            before, after = before + after[:at], after[at:]
        if after.startswith(text.EMPTY_THOUGHT):
            before, after = before + text.EMPTY_THOUGHT, after[len(text.EMPTY_THOUGHT):]
        ids, rest = tokenizer.encode(before), tokenizer.encode(after)
        if split == "draft" and rnd() < 0.35 and len(rest) > 20:
            ids += rest[:int(rnd() * min(len(rest) - 3, 120))]
    else:
        ids = tokenizer.encode(d)
        ids = before = ids[:4 + int(rnd() * min(50, len(ids) - 5))]
    by_subject = kind in ("facts", "roll", "almanac")
    if len(ids) > T - 101 or not by_subject and text.held(str(before), 8) != (split == "draft-eval"):
        return None
    return [BOS] + ids


def prompts(seed, n, split, kinds):
    """-> ids of n prompts, each of one of the kinds"""
    stories.LEAN = DECAY_LEAN
    tokenizer, rnd, out = Tokenizer(), random.Random("prompts " + seed).random, []
    while len(out) < n:
        ids = prompt(tokenizer, rnd, split, kinds[int(rnd() * len(kinds))])
        if ids:
            out.append(ids)
    return out


def main():
    print("# Made by tools/prompts.py. [KIND], then a prompt a line, as ids.")
    for kind in MEASURED:
        print("[%s]" % kind.replace("_", " "))
        for ids in prompts(kind, 96, "draft-eval", [kind])[:24]:
            print(*ids)


if __name__ == "__main__":
    main()
