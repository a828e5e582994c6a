"""Writes tests/prompts.jsonl: prompts that the small models can answer, for `gemma4 eval`.

  python3 tools/make_prompts.py > tests/prompts.jsonl

A line of each kind in turn, so that the first lines hold all kinds. Held-out questions, as in make_eval.py.
"""
import json

import stories
import text
from make_eval import bare, generator

stories.LEAN = 2.0


def tool_line(rnd):
    name = text.pick(rnd, sorted(text.TOOLS))
    question, arguments, _, _ = text.tool_use(rnd, name)
    values = json.loads("{\"" + arguments.replace(",", ",\"").replace(":", "\":").replace(text.Q, "\"") + "}")
    description, fields = text.TOOLS[name]
    parameters = {"type": "object", "properties": {f[0]: {"type": f[2].lower(), "description": f[1]} for f in fields},
                  "required": [f[0] for f in fields if f[3]]}
    call = "{\"name\":%s,\"arguments\":%s}" % (json.dumps(name), json.dumps(values, separators=(",", ":")))
    return {"question": question, "answer": call, "check": "exact",
            "tools": [{"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}]}


def arithmetic_line(rnd):
    question, _, answer = text.arithmetic(rnd, "eval")
    return {"question": question, "answer": bare(answer).split("=")[-1].strip(), "check": "number"}


def exact_line(pair):
    return {"question": pair[0], "answer": bare(pair[1]), "check": "exact"}


def follow_up(rnd):
    """A conversation: a fact is asked for after another one."""
    (q1, a1), (q2, a2) = (text.ask_fact(rnd, "eval") for _ in range(2))
    return {"messages": [{"role": "user", "content": q1}, {"role": "assistant", "content": bare(a1)}, {"role": "user", "content": q2}],
            "answer": bare(a2), "check": "exact"}


KINDS = {"facts": lambda rnd: exact_line(text.ask_fact(rnd, "eval")), "arithmetic": arithmetic_line,
         "counting": lambda rnd: exact_line(text.counting(rnd)), "tool": tool_line,
         "edit": lambda rnd: exact_line(text.edit(rnd)), "roll": lambda rnd: exact_line(text.recite_roll(rnd)),
         "story": lambda rnd: {"prompt": text.story_turn(rnd)[0]}, "conversation": follow_up}


def main():
    rnds = {kind: generator("prompts " + kind) for kind in KINDS}
    for i in range(6):
        for kind, line in KINDS.items():
            print(json.dumps({"id": "%s/%d" % (kind, i), "kind": kind, **line(rnds[kind])}))


if __name__ == "__main__":
    main()
