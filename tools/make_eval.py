"""Writes tests/eval_mini.txt: held-out questions and texts for tests/eval_mini.c.

  python3 tools/make_eval.py > tests/eval_mini.txt

Lines of a section: [haystack] one sentence; [loss KIND] one document; [exact KIND] alternating prompts and expected texts, separated
by tabs. \\n, \\t and \\\\ stand for newline, tab and backslash. A prompt without chat markup is a user's question.
"""
import random

import stories
import text
from text import END, MODEL, USER

stories.LEAN = 2.0


def escape(t):
    return t.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def section(name, lines):
    print("[%s]" % name)
    for line in lines:
        print(line if isinstance(line, str) else "\t".join(map(escape, line)))


def generator(name):
    return random.Random("held out: " + name).random


def bare(t):
    return t.replace("\x01", "")


def asked(name, n, ask):
    """n different questions with their answers"""
    rnd, seen = generator(name), {}
    while len(seen) < n:
        question, answer = ask(rnd)
        seen.setdefault(question, bare(answer) + "<turn|>")
    return list(seen.items())


def thoughtful(rnd):
    question, thought, answer = text.thoughtful(rnd, "eval")
    return (text.SYSTEM + "<|think|>\n" + END + USER + question + END + MODEL,
            "<|channel>thought\n" + thought + "\n<channel|>" + answer)


def tool_item(rnd, n_calls):
    while True:
        d = bare(text.tool_chat(rnd, "eval", n_calls))
        if "<|tool_call>" in d:
            break
    d = d.replace(text.EMPTY_THOUGHT, "")
    opened, closed, cue = "<|tool_response>", "<tool_response|>", "<|channel>thought\n"
    start, results, answer = d.index(MODEL) + len(MODEL), d.index(opened) + len(opened), d.rindex(closed) + len(closed)
    if d.startswith(cue, answer):
        answer += len(cue)
    return d[:start], d[start:results], d[results:answer], d[answer:d.index(END, answer)] + "<turn|>"


def story_item(rnd):
    question, story, slots, plot = text.story_turn(rnd)
    asked_, answer = text.story_question(rnd, slots, plot)
    return USER + question + END + MODEL + story + END + USER + asked_ + END + MODEL, bare(answer) + "<turn|>"


def documents(kind, size):
    """Held-out documents of one kind, of about this many bytes."""
    rnd, out = generator("loss " + kind), []
    while sum(map(len, out)) < size:
        out.append(bare(text.document(rnd, "eval", kind, max_words=60)))
    return out


def main():
    print("# Made by tools/make_eval.py, which describes it.")
    section("exact facts", asked("facts", 48, lambda rnd: text.ask_fact(rnd, "eval")))
    section("exact arithmetic", asked("arithmetic", 60, lambda rnd: text.arithmetic(rnd, "eval")[::2]))
    section("exact think", asked("think", 32, thoughtful))
    section("exact task", asked("task", 60, text.small_task))
    rnd = generator("tools")
    section("exact tool", [tool_item(rnd, 1) for _ in range(16)])
    section("exact parallel_tool", [tool_item(rnd, 2 + i % 2) for i in range(40)])
    section("exact edit", asked("edit", 18, text.edit))
    section("exact roll", asked("roll", 16, text.recite_roll))
    section("exact almanac", asked("almanac", 4, text.read_page))
    rnd = generator("story questions")
    section("exact story_question", [story_item(rnd) for _ in range(10)])
    for kind in text.SHARES:
        section("loss " + kind, map(escape, documents(kind, 1000)))
    rnd = generator("haystack")
    section("haystack", map(escape, text.sentences(rnd, 11800)))


if __name__ == "__main__":
    main()
