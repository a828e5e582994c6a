#!/usr/bin/env python3
"""A random walk over `gemma4 serve`: each answer must equal that of the same request alone on a server with one slot, without
drafter and without anything held. Also the command line with --compress.

    tests/walk.py [--gemma4 ./gemma4] [--seed 1] [--count N | --seconds 30 | --seeds 3,7] [--gpu] [--log FILE] [--keep-going]

Each seed is one walk: server flags, clients and requests follow from it, so `--seeds N` replays one, as far as the order in
which clients are served allows. --gpu: the build's CUDA backend, with --chunk 64 at most. --log: every request, one line of
JSON each. --keep-going: more seeds after one that found something. Needs Python and the models in models/ only.

Not equal by documentation (docs/server.md, docs/usage.md), counted in the last line:
  held    the prompt has an earlier answer, which a session holds in the tokens that the model wrote; with cache_prompt false
          the same request must be equal, which is asked then
  chunks  --pflash with chunks over 64 tokens: what is held was run in other chunks; equal with cache_prompt false
  ties    a tree on a GPU, where two tokens are within 1e-3, or the token is drawn"""
import argparse, http.client, json, os, random, re, shutil, signal, subprocess, sys, tempfile, threading, time

WAIT = 300                                             # seconds, for whatever answers at all: sanitizers are slow
MINI, SMALL = "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-e-q8_0.gguf"
DRAFTERS = {"mtp": "models/gemma4-mini-mtp-q8_0.gguf", "dflash": "models/gemma4-mini-dflash-q8_0.gguf"}
GROUPED = ["q8_0", "q4_0", "tq4", "tq3"]               # cache types that --kv-tail has an effect on
REPORT = re.compile(r"Sanitizer|runtime error:|Assertion|DEADLYSIGNAL", re.I)
CHAT, PLAIN, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"

WORDS = "fox cow duck bear otter goat mouse lion cat dog river tree house quiet shy old runs sees likes and the a near".split()
QUESTIONS = ["Tell me a story about a {w}.", "Count from {a} to {b}.", "Wake me in {a} minutes.",
             "What is {a} plus {b}?",
             "Recite the roll of Besu.", "What is the weather in Paris?", "Sort these letters: {w} {w}", "Hello!",
                     "Was it a {w}? Ünïcode 🦊"]
OPENINGS = ["There was once a shy fox who lived near a quiet river. Everyone called him Tom.", "Once upon a time",
            "def add(a, b):\n    return a + b\n",
                    "One day the old bear was hungry. He went to the river, and saw a duck."]


def tool(name, what, **properties):
    return {"name": name, "description": what, "parameters": {"type": "object", "properties": properties,
            "required": list(properties)}}


TOOLS = [tool("set_timer", "Set a timer.", minutes={"type": "integer"}), tool("get_weather", "Weather of a city",
        city={"type": "string"}),
         tool("add", "Adds two numbers.", a={"type": "number"}, b={"type": "number"})]
SCHEMAS = [{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"], "additionalProperties": False},
           {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1, "maxItems": 4}, {"type": "boolean"}]
GRAMMARS = ['root ::= ("yes" | "no") "."', "root ::= [a-z]+ (\" \" [a-z]+)*", 'root ::= "{" [0-9]{1,4} "}"']


class Failure(Exception):
    pass


class Gone(Exception):
    """The connection broke, or the server refuses since it ends."""


class Server:
    """One server process; it may be ended and started again with the same flags."""

    def __init__(self, gemma4, flags, log, env):
        self.command, self.log, self.env = [gemma4, "serve"] + flags + ["--port", "0"], log, env
        self.ending = None                             # the signal that it got
        self.start()

    def start(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                            stderr=log, env=self.env)
        until = time.monotonic() + WAIT
        while True:
            at = re.search(r"# serving at http://127\.0\.0\.1:(\d+)", self.text())
            if at:
                break
            if self.process.poll() is not None or time.monotonic() > until:
                raise Failure(f"the server did not start, status {self.process.poll()}:\n{self.text()[-1500:]}")
            time.sleep(0.01)
        self.port, self.ending = int(at[1]), None

    def text(self):
        with open(self.log, errors="replace") as log:
            return log.read()

    def begin_end(self, number):
        self.ending = number
        self.process.send_signal(number)

    def end(self, number=signal.SIGTERM):
        """Ends the server unless that has begun, and looks at how it ended."""
        if not self.ending and self.process.poll() is None:
            self.begin_end(number)
        number = self.ending or number
        try:
            status = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Failure(f"the server did not end within {WAIT} s after signal {number}")
        log = self.text()
        if REPORT.search(log) or status != (-9 if number == signal.SIGKILL else 0):
            at = REPORT.search(log)
            own = "".join(line for line in log[max(0, at.start() - 200) if at else 0:].splitlines(True)
                          if line[0] != "{")
            raise Failure(f"the server ended with status {status} after signal {number}:\n{own[:4000] if at else own[-1500:]}")


class Line:
    """A client's connection to a server, kept open between requests."""

    def __init__(self, server):
        self.server, self.http, self.process, self.used = server, None, None, 0

    def send(self, method, path, body=None):
        idle = time.monotonic() - self.used > 20       # the server ends connections that are idle for 30 seconds
        self.used = time.monotonic()
        if not self.http or self.process is not self.server.process or idle:
            self.close()
            self.http = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT)
            self.process = self.server.process
        self.http.request(method, path, json.dumps(body) if body is not None else None)

    def close(self):
        if self.http:
            self.http.close()
        self.http = None

    def events(self, r):
        """What a stream says, as objects; None at its end if it has one of its own."""
        for line in r:
            if line.startswith(b"data: "):
                if line[-1:] != b"\n":
                    raise Gone("in the middle of an event")
                yield None if line[6:].strip() == b"[DONE]" else json.loads(line[6:])

    def ask(self, path, body, on_event=None):
        """Asks and puts a stream together -> what the answer says, in one form for all dialects."""
        try:
            self.send("POST", path, body)
            r = self.http.getresponse()
            if "event-stream" in r.getheader("Content-Type", ""):
                events = []
                for e in self.events(r):
                    events.append(e)
                    if on_event:
                        on_event(len(events))
                return STREAMS[path](events)
            text = r.read()
            if r.status == 503:
                raise Gone("503")
        except (OSError, http.client.HTTPException) as e:
            self.close()
            raise Gone(repr(e))
        try:
            answer = json.loads(text)
        except ValueError:
            raise Failure(f"{path}: the answer is not JSON: {text[:2000]!r}")
        return error_of(answer) or WHOLES[path](answer)


# ---- answers of every dialect in one form: text, thought, calls, why it ended, tokens, probabilities ----

def error_of(answer):
    return {"error": answer["error"]["message"]} if answer and answer.get("error") else None


def form(text="", thought="", calls=(), finish=None, prompt=0, made=0, likely=None, **more):
    return dict(text=text or "", thought=thought or "", calls=[list(c) for c in calls], finish=finish, prompt=prompt,
                made=made, likely=likely or None, **more)


def usage(u):
    return dict(prompt=u["prompt_tokens"], made=u["completion_tokens"],
                thoughts=u["completion_tokens_details"]["reasoning_tokens"])


def tokens_of(likely):
    return likely and [[t["id"], t["token"], t["logprob"], [[o["id"], o["logprob"]] for o in t["top_logprobs"]]]
                       for t in likely["content"]]


def calls_of(calls):
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls or []]


def whole_chat(a):
    c = a["choices"][0]
    m = c["message"]
    return form(m["content"], m.get("reasoning_content"), calls_of(m.get("tool_calls")), c["finish_reason"],
                likely=tokens_of(c["logprobs"]),
                **usage(a["usage"]))


def ended(events, last, answer=None):
    """The answer of a stream that ends as its dialect says: with an event of a type in `last`; None: with [DONE]."""
    at = events[-1] if events else {}
    if error_of(at):
        return error_of(at)
    if not (at is None if last is None else at.get("type") in last):
        raise Gone(f"a stream ended after {len(events)} events: {str(at)[:200]}")
    return answer or {}


def plain_tokens(l):
    if not l:
        return None
    tops = l["top_logprobs"] or [None] * len(l["tokens"])
    return [list(t) for t in zip(l["text_offset"], l["tokens"], l["token_logprobs"], tops)]


def whole_plain(a):
    c = a["choices"][0]
    return form(c["text"], finish=c["finish_reason"], likely=plain_tokens(c["logprobs"]), **usage(a["usage"]))


def stream_completion(events, tokens):
    """A stream of either kind of completion; tokens: reads its probabilities."""
    text = thought = ""
    calls, likely, finish, used = [], None, None, {}
    for e in events[:-1]:
        if error_of(e):
            return error_of(e)
        if e.get("usage"):
            used = usage(e["usage"])
        for c in e["choices"]:
            new = c.get("delta", c)                    # a chat's is inside
            text += new.get("content") or new.get("text") or ""
            thought += new.get("reasoning_content") or ""
            calls += calls_of(new.get("tool_calls"))
            finish = c["finish_reason"] or finish
            likely = (likely or []) + tokens(c["logprobs"]) if c.get("logprobs") else likely
    return ended(events, None, form(text, thought, calls, finish, likely=likely, **used))


def stream_chat(events):
    return stream_completion(events, tokens_of)


def stream_plain(events):
    return stream_completion(events, plain_tokens)


def whole_anthropic(a):
    text = [b["text"] for b in a["content"] if b["type"] == "text"]
    thought = [b["thinking"] for b in a["content"] if b["type"] == "thinking"]
    calls = [(b["id"], b["name"], json.dumps(b["input"])) for b in a["content"] if b["type"] == "tool_use"]
    u = a["usage"]
    return form("".join(text), "".join(thought), calls, a["stop_reason"],
                u["input_tokens"] + u["cache_read_input_tokens"], u["output_tokens"], stop=a["stop_sequence"])


def stream_anthropic(events):
    blocks, a = [], {}
    for e in events:
        if e["type"] == "content_block_start":
            blocks.append(dict(e["content_block"], json=""))
        elif e["type"] == "content_block_delta":
            d, b = e["delta"], blocks[e["index"]]
            for key, to in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                b[to] = b.get(to, "") + d.get(key, "")
        elif e["type"] == "message_delta":
            a = dict(e["delta"], usage=e["usage"])
    for b in blocks if a else ():
        if b["type"] == "tool_use":
            b["input"] = json.loads(b["json"])
    return ended(events, ["message_stop"], whole_anthropic(dict(a, content=blocks)) if a else None)


def whole_responses(a):
    items = {kind: [i for i in a["output"] if i["type"] == kind] for kind in ("message", "reasoning", "function_call")}
    parts = lambda kind: "".join(p["text"] for i in items[kind] for p in i["content"])
    u = a["usage"]
    return form(parts("message"), parts("reasoning"), [(c["call_id"], c["name"], c["arguments"])
            for c in items["function_call"]],
                [a["status"], a["incomplete_details"]], u["input_tokens"], u["output_tokens"],
                thoughts=u["output_tokens_details"]["reasoning_tokens"])


def stream_responses(events):
    last = ("response.completed", "response.incomplete")
    said = {kind: "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
            for kind in ("output_text", "reasoning_text", "function_call_arguments")}
    if "error" in ended(events, last):
        return ended(events, last)
    a = whole_responses(events[-1]["response"])
    if said != dict(output_text=a["text"], reasoning_text=a["thought"], function_call_arguments="".join(c[2]
            for c in a["calls"])):
        return {"error": f"the pieces of a stream are not its response: {said}, {a}"}
    return a


WHOLES = {CHAT: whole_chat, PLAIN: whole_plain, ANTHROPIC: whole_anthropic, RESPONSES: whole_responses}
STREAMS = {CHAT: stream_chat, PLAIN: stream_plain, ANTHROPIC: stream_anthropic, RESPONSES: stream_responses}


# ---- a conversation in every dialect. A turn is (role, text, calls): user, model, or tool, whose calls are [id]. ----

def to_chat(system, turns):
    out = [{"role": "system", "content": system}] if system else []
    for role, text, calls in turns:
        if role == "tool":
            out.append({"role": "tool", "tool_call_id": calls[0], "content": text})
        elif role == "user":
            out.append({"role": "user", "content": text})
        else:
            out.append({"role": "assistant", "content": text})
            if calls:
                out[-1]["tool_calls"] = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                                         for i, n, a in calls]
    return {"messages": out}


def to_anthropic(system, turns):
    out = []
    for role, text, calls in turns:
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": calls[0], "content": text}
            if out[-1]["role"] == "user":
                out[-1]["content"].append(block)
            else:
                out.append({"role": "user", "content": [block]})
        else:
            blocks = [{"type": "text", "text": text}] if text else []
            blocks += [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in (calls
                    if role == "model" else [])]
            out.append({"role": "user" if role == "user" else "assistant", "content": blocks})
    return dict({"messages": out}, **({"system": system} if system else {}))


def to_responses(system, turns):
    out = []
    for role, text, calls in turns:
        if role == "tool":
            out.append({"type": "function_call_output", "call_id": calls[0], "output": text})
        elif role == "user":
            out.append({"role": "user", "content": text})
        else:
            out += [{"role": "assistant", "content": text}] if text else []
            out += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls]
    return dict({"input": out}, **({"instructions": system} if system else {}))


BODIES = {CHAT: to_chat, ANTHROPIC: to_anthropic, RESPONSES: to_responses}


# ---- what is drawn ----

def maybe(r, p, **fields):
    return fields if r.random() < p else {}


def words(r, n):
    return " ".join(r.choice(WORDS) for _ in range(n))


class Setting:
    """Flags of a walk's server and of the one that it is compared with."""

    def __init__(self, r, gpu):
        self.model = r.choice([MINI, MINI, SMALL])
        self.n_ctx = r.choice([256, 512, 1024, 2048, 2048])
        self.slots = r.choice([1, 1, 1, 1, 2, 3, 4, 6])
        self.chunk = r.choice([1, 3, 8, 17, 32, 64, 64] + ([] if gpu else [65, 100, 128, 200, 256, 300, 512, 512]))
        k = r.choice(["f16", "f16", "f16", "bf16", "f32"] + GROUPED)
        v, tail, sparse = k, 0, None
        cache = ["-ctk", k]
        if r.random() < 0.3:
            v = r.choice(["f16", "bf16"] + GROUPED)
            cache += ["-ctv", v, "--kv-layout", "untied"]
        elif r.random() < 0.2:
            cache += ["--kv-layout", r.choice(["tied", "untied"])]
        cache += r.choice([[], [], ["--kv-swa", r.choice(["f16", "bf16"] + GROUPED)]])
        if r.random() < (0.5 if {k, v} & set(GROUPED) else 0.1):
            tail = r.choice([1, 16, 64, 100, 300])
            cache += ["--kv-tail", str(tail)]
        alone = list(cache)
        if r.random() < 0.25:
            sparse = r.choice([1, 0.02, 0.1, 0.5, 0.9])
            cache += ["--pflash", str(sparse), "--pflash-from", str(r.choice([0, 128, 600]))]
            if tail and {k, v} & set(GROUPED):
                sparse = min(sparse, 0.9)              # prompts do not read the tail, so 1 is not dense
            alone = alone if sparse == 1 else list(cache)            # 1 is dense, bit for bit
        self.free = self.chunk <= 64 or not (sparse and sparse < 1)
        if not self.free:
            self.n_ctx = min(self.n_ctx, 1024)         # beyond, chunks end where --cache-ram lets a prompt leave copies
        self.spec, self.tree = [], False
        if r.random() < 0.55:
            kind = r.choice(["mtp", "mtp", "dflash", "dflash", "ngram", "ngram-mod", "grammar", "auto"]
                            if self.model == MINI
                            else ["ngram", "ngram-mod", "grammar", "auto"])
            md = kind if kind in DRAFTERS else r.choice(["mtp",
                    "dflash"]) if self.model == MINI and (kind == "auto" or r.random() < 0.3) else None
            self.spec = (["-md", DRAFTERS[md]] if md else []) + ["--spec", kind]
            if (md or kind != "auto") and r.random() < 0.5:
                self.spec += ["--draft-max", str(r.randint(1, 15))]
            self.tree = md is not None and kind in ("mtp", "dflash", "auto") and r.random() < 0.4
            self.spec += ["--tree", str(r.randint(2, 30))] if self.tree else []
            self.spec += ["--lazy-draft"] if md and r.random() < 0.2 else []
            self.spec += ["--draft-min-p", "0.5"] if md and r.random() < 0.2 else []
        self.store = r.choice([[], ["--cache-ram", str(r.choice([0, 1, 2, 2, 3, 6, 40, 400]))]])
        self.files = r.random() < 0.4
        same = ["-t", "1", "-c", str(self.n_ctx), "--chunk", str(self.chunk), "-s", "7"]
        self.flags = [self.model, "-np", str(self.slots)] + same + cache + self.spec + self.store
        self.alone = [self.model, "-np", "1", "--cache-ram", "0"] + same + alone
        self.systems = [None, "You answer what you are asked.",
                        "You answer. " + words(r, r.randint(30, min(90, self.n_ctx // 6)))]
        self.text_words = min(r.choice([60, 110, 110, 110, 250]), self.n_ctx // 6)
        self.roots = [words(r, r.randint(50, 65)) for _ in range(2)]
        self.tail_words = 40 if self.n_ctx < 512 else r.randint(90, 120)


class Request:
    """path, body; own: it has earlier answers, of whose tokens `pieces` tells what is known; exact: the same prompt whatever is
    held."""

    def __init__(self, path, body, own=(), exact=False, n_ids=None):
        self.path, self.body, self.own, self.exact, self.n_ids = path, body, own, exact, n_ids
        self.fresh = body.get("cache_prompt") is False

    def alone(self):
        body = {k: v for k, v in self.body.items() if k not in ("stream", "stream_options", "return_progress")}
        return dict(body, cache_prompt=False) if self.path in (CHAT, PLAIN) else body


def draw_sampling(r, path, bare):
    """Fields of a request that say how tokens are chosen and when it ends."""
    most = {RESPONSES: "max_output_tokens", CHAT: r.choice(["max_tokens", "max_completion_tokens"])}.get(path,
            "max_tokens")
    body = {most: r.choice([1, 4, 8, 8, 16, 24, 40]), "temperature": 0 if bare else r.choice([0, 0, 0.7, 1.5])}
    if bare:
        return dict(body, top_logprobs=3, logprobs=True) if path == CHAT else dict(body, logprobs=3)
    body.update(maybe(r, 0.2, top_p=r.choice([0.3, 0.9])))
    if path == RESPONSES:
        return body
    body.update(maybe(r, 0.2, top_k=r.choice([1, 5, 40])))
    stops = r.sample([", ", "the", " a", ".", "1", "once upon", "\n"], r.randint(1, 3))
    body.update(maybe(r, 0.3, **{"stop_sequences" if path == ANTHROPIC else "stop": stops}))
    if path == ANTHROPIC:
        return body
    body.update(maybe(r, 0.6, seed=r.randrange(1000)), **maybe(r, 0.15, min_p=0.1), **maybe(r, 0.15,
            repeat_penalty=r.choice([0.9, 1.3])))
    body.update(maybe(r, 0.15, presence_penalty=0.8), **maybe(r, 0.15, frequency_penalty=0.4))
    body.update(maybe(r, 0.15, logit_bias={str(r.randrange(4000)): r.choice([-100, -3, 6]) for _ in range(4)}))
    if r.random() < 0.5:
        body.update({"logprobs": r.randint(0, 5)} if path == PLAIN else
                    {"logprobs": True, "top_logprobs": r.choice([0, 1, 5])})
    return body


def draw_form(r, path, tools):
    """Fields that say what form an answer has, and which tools there are."""
    if path == PLAIN:
        return r.choice([{}, {}, {}, {"json_schema": r.choice(SCHEMAS)}, {"grammar": r.choice(GRAMMARS)}])
    some = r.sample(TOOLS, r.randint(1, 3)) if not tools else TOOLS
    kind = r.choice(["call", "call", "tools", "tools"] if tools else ["", "", "", "schema", "grammar", "tools", "call"])
    schema = r.choice(SCHEMAS)
    if kind == "schema":
        return {CHAT: r.choice([{"json_schema": schema},
                                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}]),
                ANTHROPIC: {"output_format": {"type": "json_schema", "schema": schema}},
                RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}}[path]
    if kind == "grammar" and path == CHAT:
        return {"grammar": r.choice(GRAMMARS)}
    if kind not in ("tools", "call"):
        return {}
    one = r.random() < 0.2
    if path == ANTHROPIC:
        choice = dict({"type": "any" if kind == "call" else "auto"}, **({"disable_parallel_tool_use": True} if one else {}))
        return {"tools": [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
                          for t in some], "tool_choice": choice}
    tools = [dict({"type": "function"}, **(t if path == RESPONSES else {"function": t})) for t in some]
    body = dict({"tools": tools, "tool_choice": "required" if kind == "call" else "auto"},
                **({"parallel_tool_calls": False} if one else {}))
    if kind == "call" and path == CHAT and r.random() < 0.5:         # a call that is not written as the template writes it
        blanks = lambda: '"' + " " * r.randint(0, 9) + '" '
        body.update(tools=[{"type": "function", "function": t} for t in TOOLS], tool_choice="auto", max_tokens=40,
                    grammar='root ::= <|tool_call> "call:set_timer{minutes:" ' + blanks() + "[1-9] [0-9] " + blanks() + '"}" <tool_call|>')
    return body


class Client:
    """Asks one request after another, each on a connection to the server and on one to the server it is compared with."""

    def __init__(self, walk, number):
        self.walk, self.set, self.r = walk, walk.set, random.Random(f"{walk.seed} {number}")
        self.server, self.alone = Line(walk.server), Line(walk.alone)
        self.bare = walk.gpu and walk.set.tree         # there only what shows how near two tokens are
        self.is_first = number == 0
        self.talks, self.texts, self.last = [], [], None             # talks: [system, turns, what is known of own answers]

    def answer_alone(self, q):
        with self.walk.one:
            if q.path in (ANTHROPIC, RESPONSES):       # these have no cache_prompt: something else is held before
                self.alone.ask(PLAIN, {"prompt": [5], "max_tokens": 1, "cache_prompt": False})
            return self.alone.ask(q.path, q.alone())

    def tokenize(self, text):
        self.alone.send("POST", "/tokenize", {"content": text, "with_pieces": True})
        return json.loads(self.alone.http.getresponse().read())["tokens"]

    def equal(self, got, want):
        strip = lambda a: dict(a, calls=[c[1:] for c in a["calls"]]) if "calls" in a else a      # ids are each server's own
        return strip(got) == strip(want)

    def near(self, got, want):
        """On a GPU, after a tree: equal up to a token that was nearly as likely, with probabilities of as many bits as that allows."""
        if "error" in got or "error" in want or not want["likely"]:
            return False
        for a, b in zip(got["likely"], want["likely"]):
            top = sorted(b[3].values() if isinstance(b[3], dict) else [t[1] for t in b[3]])
            if a[1] != b[1]:
                return top[-1] - top[-2] < 1e-3
            if abs(a[2] - b[2]) > 1e-2:
                return False
        return (got["text"], got["finish"], got["prompt"]) == (want["text"], want["finish"], want["prompt"])

    def is_odd(self, own):
        """Whether an earlier answer is, or may be, in other tokens than those of its text."""
        text, before, pieces = own
        key = "id" if pieces and isinstance(pieces[0], int) else "piece"         # a chat tells ids
        tokens = lambda text: [t[key] for t in self.tokenize(text)]
        return pieces is None or tokens(before + text) != tokens(before) + pieces

    def judge(self, q, got, want):
        if self.equal(got, want):
            return self.walk.count("compared")
        if self.bare and self.near(got, want):
            return self.walk.count("ties")
        if not q.fresh and q.path in (CHAT, PLAIN) and (q.own or not self.set.free):
            self.judge(Request(q.path, dict(q.body, cache_prompt=False), exact=True, n_ids=q.n_ids),
                       self.server.ask(q.path, dict(q.body, cache_prompt=False)), want)
        if not q.fresh and not self.set.free:
            return self.walk.count("chunks")
        if not q.exact and q.own and (got.get("prompt") != want.get("prompt") or any(self.is_odd(o) for o in q.own)):
            return self.walk.count("held")
        keys = [k for k in {**got, **want} if got.get(k) != want.get(k)]
        raise Failure("\n".join([f"not the answer of the same request alone: {', '.join(keys)}", f"POST {q.path}",
                                 json.dumps(q.body)] +
                                [f"  {name:5} {k}: {json.dumps(a.get(k))[:1500]}" for k in keys for name,
                                 a in (("got", got), ("alone", want))]))

    def ask(self, q, on_event=None):
        self.walk.trace(q)
        got = self.server.ask(q.path, q.body, on_event)
        want = self.answer_alone(q)
        if q.n_ids is not None and got.get("prompt", q.n_ids) != q.n_ids:
            raise Failure(f"{q.n_ids} ids given, {got['prompt']} in the prompt\nPOST {q.path}\n{json.dumps(q.body)}")
        self.judge(q, got, want)
        self.last = q
        return got

    def draw_stream(self, path):
        r = self.r
        if r.random() < 0.5:
            return maybe(r, 0.1, stream=False)
        more = {"stream_options": {"include_usage": True}} if path in (CHAT, PLAIN) else {}
        return dict({"stream": True}, **more, **(maybe(r, 0.2, return_progress=True) if path in (CHAT, PLAIN) else {}))

    def draw_cache(self, path):
        return maybe(self.r, 0.3 if self.set.free else 0.7, cache_prompt=False) if path in (CHAT, PLAIN) else {}

    def draw_talk(self, talk):
        """The next answer in a conversation."""
        r, (system, turns, own) = self.r, talk
        path = CHAT if self.bare else r.choice([CHAT, CHAT, ANTHROPIC, RESPONSES])
        body = BODIES[path](system, turns)
        uses_tools = any(t[2] for t in turns)
        body.update({} if self.bare else draw_form(r, path, uses_tools))
        body = dict(draw_sampling(r, path, self.bare), **body)
        if turns[-1][0] == "model" and path == CHAT:
            body.update(continue_final_message=True, add_generation_prompt=False)
        elif turns[-1][0] == "model" and path == RESPONSES:
            body["input"].append({"role": "user", "content": "Go on."})
        elif not self.bare and r.random() < 0.25:
            budget = r.choice([0, 1, 5, 12])
            body.update({CHAT: {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_budget": budget},
                         ANTHROPIC: {"thinking": {"type": "enabled", "budget_tokens": budget}},
                                 RESPONSES: {"reasoning": {"effort": "low"}}}[path])
        body.update(self.draw_stream(path), **self.draw_cache(path), **maybe(r, 0.2, user=f"u{r.randint(0, 2)}"))
        return Request(path, body, own, "cache_prompt" in body)

    def question(self):
        r = self.r
        text = r.choice(QUESTIONS).format(w=r.choice(WORDS), a=r.randint(2, 60), b=r.randint(61, 90))
        return text + " " + words(r, r.randint(40, self.set.text_words)) if r.random() < 0.3 else text

    def go_on(self, talk, on_event=None):
        q = self.draw_talk(talk)
        got = self.ask(q, on_event)
        if "error" in got:
            talk[1] = [("user", self.question(), [])]  # too long, most likely
            talk[2] = []
            return
        calls = got["calls"] if got["calls"] and "tool" in str(got["finish"]) else []
        text = got["text"] if got["text"] or calls else "Yes."
        pieces = [t[0] for t in got["likely"]] if got["likely"] is not None and not calls and not got["thought"] else None
        begun = talk[1].pop()[1] if talk[1][-1][0] == "model" else ""
        turns = talk[1] + [("model", begun + text, calls)]
        turns += [("tool", self.r.choice(["ok", "sunny, 21", "42"]), [c[0]]) for c in calls]
        if not calls and self.r.random() < 0.9:
            turns.append(("user", self.question(), []))
        talk[1], talk[2] = turns, talk[2] + [(text, begun, pieces)]

    def talk(self, on_event=None):
        r = self.r
        how = r.random()
        if not self.talks or how < 0.2:
            system = r.choice(self.talks)[0] if self.talks and r.random() < 0.6 else r.choice(self.set.systems)
            self.talks.append([system, [("user", self.question(), [])], []])
            talk = self.talks[-1]
        elif how < 0.4:                                # an early turn is written anew; the old conversation stays as well
            system, turns, own = r.choice(self.talks)
            users = [i for i, t in enumerate(turns) if t[0] == "user"]
            at = r.choice(users)
            talk = [system, turns[:at] + [("user", self.question(), [])], list(own)]
            self.talks.append(talk)
        else:
            talk = self.talks[0] if how < 0.6 else r.choice(self.talks)
        self.go_on(talk, on_event)

    def text(self, on_event=None):
        """A prompt as it is: a text, one that goes on, or ids of one in other pieces."""
        r = self.r
        text, own = r.choice(self.texts) if self.texts and r.random() < 0.5 else (r.choice(OPENINGS), [])
        if r.random() < 0.6:                           # of a few long texts each is gone on with in several ways
            text, own = r.choice(self.set.roots) + r.choice(["", "", " " + words(r, self.set.tail_words)]), []
        prompt, n_ids = text, None
        if r.random() < 0.25:
            text = text[:200]
            prompt = self.letters(text, r.choice([1, 1, 3, len(text)]))
            n_ids = len(prompt)
        body = dict(draw_sampling(r, PLAIN, self.bare), prompt=prompt, **({} if self.bare else draw_form(r, PLAIN,
                False)))
        body.update(self.draw_stream(PLAIN), **self.draw_cache(PLAIN))
        if not set(body) & {"grammar", "json_schema"} and r.random() < 0.1:
            body["ignore_eos"] = True
        got = self.ask(Request(PLAIN, body, own, "cache_prompt" in body or n_ids is not None, n_ids), on_event)
        if got.get("text") and n_ids is None:
            likeliest = not set(body) & {"grammar", "json_schema", "logit_bias"} and body["temperature"] == 0
            known = [t[1] for t in got["likely"]] if got["likely"] and likeliest else None     # else bytes, maybe: two ids for a text
            more = r.choice(["", " ", " and ", " " + words(r, r.randint(1, self.set.text_words))])
            self.texts.append((text + got["text"] + more, own + [(got["text"], text, known)]))
            if len(self.texts[-1][0]) > 6 * self.set.n_ctx:
                self.texts.pop()

    def branch(self):
        """One slot: a text is kept, gone on with, and gone on with otherwise, which is long enough to leave what came first."""
        r = random.Random(f"{self.walk.seed} branch")
        first, other = self.set.roots
        for text in (first, other, first, first + " " + words(r, 120), first + " " + words(r, 120), other):
            self.ask(Request(PLAIN, dict(self.short(r), prompt=text)))
        ids = self.letters(other[:200], 1)             # what is held, in other ids
        self.ask(Request(PLAIN, dict(self.short(r), prompt=ids), exact=True, n_ids=len(ids)))
        self.ask(Request(PLAIN, dict(self.short(r), prompt=other[:200] + " and")))       # what a client gave shows in no text

    def short(self, r):
        stream = {"stream": True, "stream_options": {"include_usage": True}} if r.random() < 0.5 else {}
        return dict(stream, temperature=0, max_tokens=r.randint(1, 4), logprobs=3)

    def letters(self, text, n):
        """The ids of a text's pieces of n characters."""
        return [2] + [t["id"] for i in range(0, len(text), n) for t in self.tokenize(text[i:i + n])]

    def cancel(self):
        """Leaves while its prompt runs, or its answer."""
        r = self.r
        talk = r.choice(self.talks) if self.talks else [None, [("user", self.question(), [])], []]
        q = self.draw_talk(talk) if r.random() < 0.5 else \
            Request(PLAIN, {"prompt": words(r, self.set.text_words), "max_tokens": 200})
        q.body["stream"] = r.random() < 0.6
        self.walk.trace(q, "cancel")
        try:
            self.server.send("POST", q.path, q.body)
            if q.body["stream"]:
                left = r.randint(0, 6)
                for e in self.server.events(self.server.http.getresponse()) if left else ():
                    left -= 1
                    if left <= 0:
                        break
            else:
                time.sleep(r.choice([0, 0.002, 0.01, 0.03]))
        except (OSError, http.client.HTTPException) as e:
            raise Gone(repr(e))
        finally:
            self.server.close()
        self.walk.count("cancels")

    def look(self):
        path = self.r.choice(["/metrics", "/slots", "/health", "/props", "/v1/models"])
        try:
            self.server.send("GET", path)
            r = self.server.http.getresponse()
            r.read()
        except (OSError, http.client.HTTPException) as e:
            raise Gone(repr(e))
        if r.status != 200 and not self.walk.server.ending:
            raise Failure(f"GET {path}: status {r.status}")

    def step(self, on_event=None):
        how = self.r.random()
        if on_event:
            return self.talk(on_event)
        if how < 0.1 and self.last:
            return self.ask(self.last)                 # again
        if how < 0.2:
            return self.cancel()
        if how < 0.25:
            return self.look()
        return self.text() if how < 0.65 else self.talk()

    def close(self):
        self.server.close()
        self.alone.close()


class Walk:
    """One seed: a server that is ended and started again, clients, and what they have found."""

    def __init__(self, o, seed, folder, counts, log):
        self.seed, self.gpu, self.counts, self.log = seed, o.gpu, counts, log
        self.o, self.folder, self.lock, self.one, self.failures = o, folder, threading.Lock(), threading.Lock(), []
        self.r = random.Random(seed)
        self.set = Setting(self.r, o.gpu)
        self.env = dict(os.environ) if o.gpu else dict(os.environ, CUDA_VISIBLE_DEVICES="")
        self.flags = self.set.flags + (["--session-dir", os.path.join(folder, f"sessions{seed}")] if self.set.files
                                       else [])

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def trace(self, q, what="ask"):
        if self.log:
            with self.lock:
                self.log.write(json.dumps([self.seed, what, q.path, q.body]) + "\n")
                self.log.flush()

    def failed(self, why):
        with self.lock:
            self.failures.append(str(why))

    def run_client(self, client, n, at, number):
        """n steps; before the step `at` ends a signal is sent."""
        sent = []
        def send(_=0):
            if not sent:
                sent.append(self.server.begin_end(number))
        try:
            if client.is_first and self.set.slots == 1 and self.set.n_ctx >= 512:
                client.is_first = False
                client.branch()
            for i in range(n):
                if self.failures or (self.server.ending and not sent):
                    return
                client.step(send if i == at else None)
                if i == at:
                    send()
                    return
        except Gone as e:
            if not self.server.ending:
                self.failed(f"the server broke a connection or refused: {e}, status {self.server.process.poll()}")
            elif sent and number == signal.SIGTERM and "503" not in str(e):
                self.failed(f"an answer under way at SIGTERM was not given: {e}")
        except Failure as e:
            self.failed(e)
        except Exception as e:                         # a shape of answer that is none of its dialect's
            self.failed(f"{type(e).__name__}: {e}, after {json.dumps(client.last and client.last.body)}"[:3000])

    def round(self, clients):
        r = self.r
        ending = r.choice([None, None, signal.SIGTERM, signal.SIGKILL]) if r.random() < 0.8 else None
        at, who = (r.randint(0, 3), r.randrange(len(clients))) if ending and r.random() < 0.25 else (-1, -1)
        threads = [threading.Thread(target=self.run_client, args=(c, r.randint(4, 10), at if i == who else -1, ending))
                   for i, c in enumerate(clients)]
        for t in threads: t.start()
        for t in threads: t.join()
        if self.failures or not ending:
            return
        self.server.end(ending)
        self.count("kills" if ending == signal.SIGKILL else "restarts")
        self.server.start()

    def count_reuse(self):
        """A server that never goes on from what is held would answer right, too."""
        line = Line(self.server)
        try:
            line.send("GET", "/metrics")
            text = line.http.getresponse().read().decode()
        except (OSError, http.client.HTTPException, AttributeError):
            return                                     # it has ended, which was found before
        finally:
            line.close()
        for name, what in (("prompt_tokens_cached_total", "reused"), ("sessions_resumed_total", "resumed")):
            self.counts[what] += int(float(re.search(rf"^gemma4_{name} (\S+)", text, re.M)[1]))

    def run(self):
        """-> what was found, none: []"""
        self.server = self.alone = None
        clients = []
        try:
            self.server = Server(self.o.gemma4, self.flags, os.path.join(self.folder, "server.log"), self.env)
            self.alone = Server(self.o.gemma4, self.set.alone, os.path.join(self.folder, "alone.log"), self.env)
            clients = [Client(self, i) for i in range(self.r.choice([1, 1, 2, 3, 4]))]
            for _ in range(self.r.randint(2, 3)):
                if not self.failures:
                    self.round(clients)
        except Failure as e:
            self.failed(e)
        for c in clients:
            c.close()
        self.count_reuse()
        for server in (self.server, self.alone):
            try:
                if server:
                    server.end()
            except Failure as e:
                self.failed(e)
        shutil.rmtree(os.path.join(self.folder, f"sessions{self.seed}"), ignore_errors=True)
        return self.failures


def compress(o, seed, counts):
    """The command line shows a model a part of a prompt: the same answer twice, and with a drafter. -> failures"""
    r = random.Random(f"compress {seed}")
    env = dict(os.environ) if o.gpu else dict(os.environ, CUDA_VISIBLE_DEVICES="")
    run = lambda *flags: subprocess.run([o.gemma4, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                        env=env, timeout=WAIT)
    flags = [MINI, "-t", "1", "-n", "24", "-s", "5", "--temp", r.choice(["0", "0.8"]), "-c", "2048", "-ctk",
             r.choice(["f16"] + GROUPED),
             "--compress", r.choice(["0.2", "0.5", "0.8"])] + r.choice([[], ["--scorer", SMALL]])
    flags += ["-p", words(r, r.randint(600, 700)) + " Tell me a story about a fox."]
    kind = r.choice(["mtp", "dflash", "ngram"])
    plain, again = run(*flags), run(*flags)
    drafted = run(*flags, "--spec", kind, *(["-md", DRAFTERS[kind]] if kind in DRAFTERS else []))
    found = []
    for what, a in (("the answer", plain), ("again", again), ("with " + kind, drafted)):
        if a.returncode or REPORT.search(a.stderr) or "prompt compressed" not in a.stderr:
            found.append(f"--compress, {what}: status {a.returncode}: {a.stderr[-1500:]}")
        elif a.stdout != plain.stdout:
            found.append(f"--compress, {what}: another text: {a.stdout!r}, {plain.stdout!r}; {' '.join(flags)[:300]}")
    counts["compressed"] += 3
    return found


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gemma4", default="./gemma4")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--seconds", type=float, default=30)
    p.add_argument("--count", type=int)
    p.add_argument("--seeds")
    p.add_argument("--gpu", action="store_true")
    p.add_argument("--log")
    p.add_argument("--keep-going", action="store_true")
    o = p.parse_args()
    counts = dict.fromkeys(["compared", "cancels", "restarts", "kills", "held", "chunks", "ties", "compressed", "reused",
                            "resumed"], 0)
    start, n, bad = time.monotonic(), 0, []
    seeds = [int(seed) for seed in o.seeds.split(",")] if o.seeds else None
    log = open(o.log, "w") if o.log else None
    with tempfile.TemporaryDirectory(prefix="gemma4-walk") as folder:
        while n < (len(seeds) if seeds else o.count) if seeds or o.count else not n or time.monotonic() - start < o.seconds:
            seed, n = seeds[n] if seeds else o.seed + n, n + 1
            walk = Walk(o, seed, folder, counts, log)
            found = walk.run() or (compress(o, seed, counts) if seed % 8 == 1 else [])
            if not found:
                continue
            bad.append(seed)
            print(f"FAILED: seed {seed} after {time.monotonic() - start:.1f} s; again: tests/walk.py --seeds {seed} --gemma4 {o.gemma4}" +
                  (" --gpu" if o.gpu else "") + f"\n  server: {' '.join(walk.flags)}\n  alone:  {' '.join(walk.set.alone)}")
            for why in found:
                print("  " + why.replace("\n", "\n  "), flush=True)
            if not o.keep_going:
                break
    if counts["held"] > 10 + counts["compared"] / 20:  # some 1.4 in 100 are; more would hide a fault of what is held
        bad.append(0)
        print(f"FAILED: {counts['held']} answers differ by what is held, of {counts['compared']} that are equal")
    print(f"# walk: {n} seeds, {len(bad)} failed: {counts['compared']} answers compared, {counts['cancels']} cancels, "
          f"{counts['restarts']} restarts, {counts['kills']} kills, {counts['compressed']} compressed; {counts['reused']} tokens reused, "
          f"{counts['resumed']} sessions resumed; not equal by documentation: {counts['held']} held, "
          f"{counts['chunks']} chunks, {counts['ties']} ties")
    return len(bad) > 0


if __name__ == "__main__":
    sys.exit(main())
