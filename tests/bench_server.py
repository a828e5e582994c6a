#!/usr/bin/env python3
"""Times the server: tokens a second of several sessions at once, and the time between the tokens of one while a long prompt of
another is processed. Beside llama.cpp's llama-server with as many slots, when it is named. Prints one table in Markdown.

    tests/bench_server.py MODEL.gguf [--llama PATH/llama-server] [--gemma4 ./gemma4] [--sessions 1,2,4,8,16] [--tokens 256]
                          [--prompt 65536] [--flags "-ctk q8_0"]        flags of gemma4 serve

It needs Python and the servers, and some three minutes on one H100. Prompts are lists of random ids, answers ignore their end."""
import argparse, http.client, json, os, random, shlex, socket, statistics, subprocess, sys, tempfile, threading, time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """One server process that has loaded its model."""

    def __init__(self, command, log):
        self.port = free_port()
        self.log = open(log, "w")
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stdout=self.log, stderr=self.log)
        for _ in range(1200):
            if self.process.poll() is not None:
                sys.exit(f"{command[0]} ended with {self.process.returncode}; see {log}")
            try:
                if self.request("GET", "/health").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"{command[0]} is not ready after 120 s; see {log}")

    def request(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        return c.getresponse()

    def stream(self, ids, n, on_token=None):
        """Generates n tokens -> (tokens, time of the first, time of the last)."""
        r = self.request("POST", "/v1/completions", {"model": "any", "prompt": ids, "max_tokens": n, "temperature": 0, "stream": True,
                         "ignore_eos": True, "cache_prompt": False, "stream_options": {"include_usage": True}})
        if r.status != 200:
            sys.exit(f"status {r.status}: {r.read(300)}")
        made, first, last = 0, None, None
        for line in r:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            made = (event.get("usage") or {}).get("completion_tokens", made)
            if event.get("choices"):
                last = time.monotonic()
                first = first or last
                if on_token and not on_token(last):
                    r.close()
                    break
        return made, first, last

    def stop(self):
        self.process.terminate()
        self.process.wait()


def ids_of(seed, n):
    r = random.Random(seed)
    return [r.randrange(1000, 4000) for _ in range(n)]


def together(server, n, tokens):
    """n sessions at once -> tokens a second of all of them, from the first token of the first on."""
    results = [None] * n
    def one(i):
        results[i] = server.stream(ids_of(i, 64), tokens)
    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads: t.start()
    for t in threads: t.join()
    made = sum(r[0] - 1 for r in results)
    return made / (max(r[2] for r in results) - min(r[1] for r in results))


def beside_prompt(server, n_prompt):
    """Times between tokens of one session before and while a prompt of another runs, in ms, and the seconds that this takes."""
    times, done = [], threading.Event()
    def running():
        server.stream(ids_of(1, 64), 100000, lambda t: times.append(t) or not done.is_set())
    t = threading.Thread(target=running)
    t.start()
    while len(times) < 100: time.sleep(0.01)
    start = time.monotonic()
    _, end, _ = server.stream(ids_of(2, n_prompt), 1)
    done.set()
    t.join()
    before = [1e3 * (b - a) for a, b in zip(times, times[1:]) if b < start]
    during = sorted(1e3 * (b - a) for a, b in zip(times, times[1:]) if b >= start and a <= end)
    return statistics.median(before), statistics.median(during), during[int(0.99 * (len(during) - 1))], during[-1], end - start


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("--gemma4", default="./gemma4")
    p.add_argument("--llama")
    p.add_argument("--sessions", default="1,2,4,8,16")
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--prompt", type=int, default=65536)
    p.add_argument("--flags", default="")
    o = p.parse_args()
    counts = [int(n) for n in o.sessions.split(",")]
    most, room, long_room = max(counts), o.tokens + 256, o.prompt + 4096
    ours = lambda np, c: [o.gemma4, "serve", o.model, "-np", str(np), "-c", str(c)] + shlex.split(o.flags)
    theirs = lambda np, c: [o.llama, "-m", o.model, "-np", str(np), "-c", str(np * c), "-ngl", "99"]
    columns = [("gemma4", ours)] + ([("llama-server", theirs)] if o.llama else [])
    rows = {}
    for name, command in columns:
        server = Server(command(most, room), os.path.join(tempfile.gettempdir(), f"bench_server.{name}.log"))
        together(server, most, 16)                                  # what is done once is done
        for n in counts:
            rows.setdefault(f"{n} sessions, tok/s", []).append(f"{together(server, n, o.tokens):.1f}")
        server.stop()
        if not o.prompt:
            continue
        server = Server(command(2, long_room), os.path.join(tempfile.gettempdir(), f"bench_server.{name}.log"))
        figures = beside_prompt(server, o.prompt)
        server.stop()
        for title, value in zip(("ms between tokens, alone, median", f"beside a prompt of {o.prompt}: median", "  99 %", "  most",
                                 f"seconds to the first token of that prompt"), figures):
            rows.setdefault(title, []).append(f"{value:.2f}")
    print("| " + " | ".join([""] + [name for name, _ in columns]) + " |")
    print("|" + "---|" * (1 + len(columns)))
    for title, values in rows.items():
        print("| " + " | ".join([title] + values) + " |")


main()
