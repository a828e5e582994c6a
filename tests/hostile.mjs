// hostile.mjs - requests that should do no harm, byte by byte over sockets, each with the status that is right for it; for test_hostile.sh:
// node hostile.mjs URL heads|bodies|memory. LONG=1: also what takes long.
import net from "node:net";
const [url, part] = process.argv.slice(2), { hostname, port } = new URL(url), long = process.env.LONG > 0;
const host = `Host: ${hostname}:${port}\r\n`, chat = "/v1/chat/completions";
let passed = 0, failed = 0;

function ok(name, condition, got) {
  if (condition) { passed++; return; }
  failed++;
  console.log(`FAILED: ${name}: got ${JSON.stringify(got)?.slice(0, 300)}`);
}
// Sends pieces; returns all that comes until the server closes the connection, or until `done` says that it is enough.
function raw(pieces, done) {
  return new Promise((end) => {
    const s = net.connect(port, hostname);
    let all = "";
    s.on("data", (data) => { all += data.toString("latin1"); if (done?.(all)) s.destroy(); });
    s.on("error", () => {}).on("close", () => end(all));
    for (const p of [pieces].flat()) s.write(typeof p === "string" ? Buffer.from(p, "latin1") : p);
  });
}
const status = (answer) => Number(/^HTTP\/1\.1 (\d+)/.exec(answer)?.[1] ?? 0);
const body = (answer) => answer.slice(answer.indexOf("\r\n\r\n") + 4);
const question = JSON.stringify({ messages: [{ role: "user", content: "hi" }], max_tokens: 2, temperature: 0 });
const post = (text, { path = chat, lines = "", length, at = host } = {}) =>
  `POST ${path} HTTP/1.1\r\n${at}${lines}Connection: close\r\n${length ?? `Content-Length: ${text.length}\r\n`}\r\n${text}`;
const get = (path, lines = "", at = host) => `GET ${path} HTTP/1.1\r\n${at}${lines}Connection: close\r\n\r\n`;
const chunked = (text) => `${text.length.toString(16)}\r\n${text}\r\n0\r\n\r\n`;
const coded = "Transfer-Encoding: chunked\r\n", sized = `Content-Length: ${question.length}\r\n`;

async function heads() {
  const cases = [
    ["a plain one", 200, post(question)], ["chunked", 200, post(chunked(question), { length: coded })],
    ["empty lines before it", 200, `\r\n\r\n${get("/health")}`],
    ["a complete URL", 200, get(`http://${hostname}:${port}/health`)],
    ["a complete URL without a path", 200, get(`http://localhost`)],
    ["a complete URL of another host", 403, get("http://evil.example/health")],
    ["a complete URL, whatever Host says", 200, get("http://localhost/health", "", "Host: evil.example\r\n")],
    ["two equal Content-Length", 400, post(question, { length: sized + sized })],
    ["two Content-Length", 400, post(question, { length: "Content-Length: 5\r\n" + sized })],
    ["Content-Length and Transfer-Encoding", 400, post(chunked(question), { length: coded + sized })],
    ["Transfer-Encoding twice", 400, post(chunked(question), { length: coded + coded })],
    ["an unknown Transfer-Encoding", 400, post(question, { length: "Transfer-Encoding: gzip\r\n" })],
    ["chunked after another coding", 400, post(chunked(question), { length: "Transfer-Encoding: gzip, chunked\r\n" })],
    ["chunked in HTTP/1.0", 400, post(chunked(question), { length: coded }).replace("HTTP/1.1", "HTTP/1.0")],
    ["a negative Content-Length", 400, post(question, { length: "Content-Length: -5\r\n" })],
    ["a Content-Length that is no number", 400, post(question, { length: "Content-Length: 5x\r\n" })],
    ["a Content-Length above all numbers", 413, post(question, { length: `Content-Length: ${"9".repeat(30)}\r\n` })],
    ["a Content-Length of 100 MB", 413, post(question, { length: "Content-Length: 100000000\r\n" })],
    ["a chunk without size", 400, post("zz\r\nab\r\n0\r\n\r\n", { length: coded })],
    ["a chunk of size -1", 400, post("-1\r\nab\r\n0\r\n\r\n", { length: coded })],
    ["bare LF everywhere", 400, post(question).replaceAll("\r\n", "\n")],
    ["bare LF after the first line", 400, get("/health").replace("\r\n", "\n")],
    ["bare LF after a header", 400, get("/health", "X-A: b\n")], ["bare LF at the end", 400, get("/health").replace(/\r\n$/, "\n")],
    ["bare LF after the last header", 400, get("/health").replace(/\r\n\r\n$/, "\n\r\n")],
    ["bare CR in a header", 400, get("/health", "X-A: b\rX-B: c\r\n")], ["NUL in a header", 400, get("/health", "X-A: b\0c\r\n")],
    ["NUL in the last header", 400, get("/health").replace(/close\r\n/, "close\0x\r\n")],
    ["NUL in the name of a header", 400, get("/health", "X-\0A: b\r\n")],
    ["a control character in a header", 400, get("/health", "X-A: b\x01c\r\n")],
    ["a folded header", 400, get("/health", "X-A: b\r\n c\r\n")], ["a folded last header", 400, get("/health").replace(/\r\n$/, "\tx\r\n\r\n")],
    ["a blank before the colon", 400, get("/health", "X-A : b\r\n")], ["a header without name", 400, get("/health", ": b\r\n")],
    ["a header without colon", 400, get("/health", "nothing\r\n")], ["a header without value", 200, get("/health", "X-A:\r\n")],
    ["blanks around a value, and a tab", 200, get("/health", "X-A:  \tb c \r\n")],
    ["no Host", 400, get("/health", "", "")], ["two Hosts", 400, get("/health", "", host + host)],
    ["two different Hosts", 400, get("/health", "", "Host: localhost\r\nHost: evil.example\r\n")],
    ["Host with a user", 400, get("/health", "", "Host: 127.0.0.1:80@evil.example\r\n")],
    ["Host with a path", 400, get("/health", "", "Host: localhost/x\r\n")], ["Host with a blank", 400, get("/health", "", "Host: localhost x\r\n")],
    ["Host with a port of letters", 400, get("/health", "", "Host: localhost:http\r\n")],
    ["an empty Host", 400, get("/health", "", "Host:\r\n")], ["Host of others", 403, get("/health", "", "Host: localhost.evil.example\r\n")],
    ["Host in capitals", 200, get("/health", "", "Host: LOCALHOST\r\n")], ["Host in IPv6", 200, get("/health", "", `Host: [::1]:${port}\r\n`)],
    ["Origin of another scheme", 403, get("/health", `Origin: x-evil://${hostname}:${port}\r\n`)],
    ["two Origins", 400, get("/health", `Origin: ${url}\r\nOrigin: http://evil.example\r\n`)],
    ["Origin null", 403, get("/health", "Origin: null\r\n")], ["our own Origin", 200, get("/health", `Origin: ${url}\r\n`)],
    ["a method that is no word", 400, get("/health").replace("GET", "F\x01O")], ["a method of others", 405, get("/health").replace("GET", "BREW")],
    ["PUT", 405, post(question).replace("POST", "PUT")], ["a lower-case method", 405, post(question).replace("POST", "post")],
    ["another expectation", 417, post(question, { lines: "Expect: 200-maybe\r\n" })],
    ["an expectation of a body that is too large", 413, post("", { lines: "Expect: 100-continue\r\n", length: "Content-Length: 20000000\r\n" })],
    ["a head of 40 kB", 431, get("/health", `X-A: ${"a".repeat(40000)}\r\n`)], ["5,000 headers", 431, get("/health", "X-A: b\r\n".repeat(5000))],
    ["HTTP/2", 505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    ["a path with NUL", 404, get("/health%00")], ["a path upwards", 404, get("/../../etc/passwd")],
    ["a path upwards, encoded", 404, get("/v1/models/..%2f..%2fetc%2fpasswd")], ["a name with line breaks", 404, get("/v1/models/a%0d%0aX-A:%20b")],
    ["two slashes", 404, get("//health")], ["a path of 20 kB", 404, get(`/${"a".repeat(20000)}`)], ["GET with a body", 200, get("/health", "Content-Length: 2\r\n") + "ab"],
  ];
  const answers = await Promise.all(cases.map(([, , text]) => raw(text)));
  cases.forEach(([name, want], i) => ok(name, status(answers[i]) === want, answers[i]));
  const three = await raw(post(question).replace("Connection: close\r\n", "").repeat(2) + post(question));
  ok("three in one packet: three answers", three.split("HTTP/1.1 200 OK").length === 4, three);
  const hidden = await raw(post(question + get("/health"), { length: sized + "Content-Length: 0\r\n" }));
  ok("a request hidden in a body: one answer, then the end", hidden.split("HTTP/1.1 ").length === 2 && /^connection: close/im.test(hidden), hidden);
  const waits = await raw([post("", { lines: "Expect: 100-continue\r\n", length: sized }), question]);
  ok("100-continue", waits.startsWith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"), waits);
  const large = await raw(post("x".repeat(17 << 20)));
  ok("a body that is too large: 413 also to who sends all of it first", status(large) === 413, large);
}

const S = { type: "string" };
const schema = (s, more) => JSON.stringify({ messages: [{ role: "user", content: "hi" }], max_tokens: 3,
  response_format: { type: "json_schema", json_schema: { schema: s } }, ...more });
const ask = (fields) => JSON.stringify({ messages: [{ role: "user", content: "hi" }], max_tokens: 2, ...fields });
const field = (text) => `{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,${text}}`;

async function bodies() {
  const text = (n) => "a".repeat(n);
  const cases = [
    ["stop: 16 of 1 KiB", 200, ask({ stop: Array(16).fill(text(1024)) })], ["stop: 17", 400, ask({ stop: Array(17).fill("a") }), "at most 16 strings"],
    ["stop: 1025 bytes", 400, ask({ stop: ["b", text(1025)] }), "stop[1]: expected at most 1024 bytes, got 1025"],
    ["stop: 900 kB", 400, ask({ stop: text(900000) }), "stop[0]: expected at most 1024 bytes, got 900000"],
    ["stop: 1 KiB of escapes", 200, field(`"stop":"${"\\u0061".repeat(1024)}"`)],
    ["stop: NUL", 400, ask({ stop: ["a\0b"] }), "stop[0]: expected no NUL"], ["stop: empty", 400, ask({ stop: "" }), "stop[0]: expected a text"],
    ["stop: a number", 400, ask({ stop: [1] }), "a string or a list"], ["stop: an empty list", 200, ask({ stop: [] })],
    ["a prompt that cannot fit", 400, ask({ messages: [{ role: "user", content: "word ".repeat(200000) }] }), "resulted in at least"],
    ["a plain prompt that cannot fit", 400, JSON.stringify({ prompt: text(1000000) }), "resulted in at least", "/v1/completions"],
    ["a raw prompt that cannot fit", 400, JSON.stringify({ prompt: text(1000000), raw: true }), "resulted in at least", "/api/generate"],
    ["10,000 messages", 400, ask({ messages: Array(10000).fill({ role: "user", content: "a" }) }), "resulted in at least"],
    ["5,000 tools", 400, ask({ tools: [...Array(5000).keys()].map((i) => ({ type: "function", function: { name: `f${i}`, parameters: { type: "object" } } })) }), "resulted in at least"],
    ["128 messages, which fit", 200, ask({ messages: Array(128).fill({ role: "user", content: "a" }) })],
    ["/tokenize: 5 MB", 413, JSON.stringify({ content: text(5 << 20), with_pieces: true }), "at most 4194304 bytes", "/tokenize"],
    ["/detokenize: 9 MB of text", 413, `{"tokens":[${"9,".repeat(1 << 20)}9]}`, "at most 4194304 bytes", "/detokenize"],
    ["/detokenize: an id out of range", 400, '{"tokens":[4096]}', "tokens[0]", "/detokenize"], ["/detokenize: an id of 1e99", 400, '{"tokens":[1e99]}', "tokens[0]", "/detokenize"],
    ["[ a million times", 400, "[".repeat(1000000), "at most 256 levels"], ['{"a": many times', 400, '{"a":'.repeat(200000), "at most 256 levels"],
    ["200 levels in a message", 200, ask({ messages: [{ role: "user", content: "hi", z: JSON.parse("[".repeat(200) + "]".repeat(200)) }] })],
    ["the same member 100,000 times: the last one counts", 400, field(`"temperature":1,`.repeat(100000) + '"temperature":-1'), '"param":"temperature"'],
    ["100,000 unknown members", 200, field([...Array(100000).keys()].map((i) => `"u${i}":1`).join())],
    ["temperature 1e999", 400, field('"temperature":1e999'), "temperature: expected a number"], ["temperature NaN", 400, field('"temperature":NaN'), "not JSON"],
    ["temperature -1", 400, field('"temperature":-1'), "temperature: expected 0 to 100"], ["seed 1e300", 400, field('"seed":1e300'), "seed"],
    ["max_tokens 1e99", 400, field('"max_tokens":1e99'), "max_tokens"], ["n 1e9", 400, field('"n":1e9'), "at most 128 answers"],
    ["n is a list", 400, field('"n":[1]'), "n: expected an integer"], ["a lone surrogate", 200, field('"user":"\\ud83d"')],
    ["lone surrogates in a message", 200, ask({}).replace('"hi"', '"\\ud83d\\udc00 \\udc00"')], ["messages is an object", 400, ask({ messages: {} }), "messages: expected a list"],
    ["messages of numbers", 400, ask({ messages: [1] }), "messages[0]: expected an object"], ["tools is a text", 400, ask({ tools: "a" }), "tools: expected a list"],
    ["a bias of a token out of range", 400, ask({ logit_bias: { 4096: 1 } }), "from 0 to 4095"], ["bytes that are no UTF-8", 200, field('"user":"\xff"')],
    ["previous_response_id upwards", 400, '{"input":"a","previous_response_id":"../../x"}', "not kept here", "/v1/responses"],
    ["an item with NUL in its id", 400, '{"input":[{"type":"item_reference","id":"\\u0000"}]}', "not kept here", "/v1/responses"],
    ["a grammar that no text matches", 400, ask({ grammar: 'root ::= "a" root' }), "no text matches"],
    ["a grammar of an empty set", 400, ask({ grammar: "root ::= []" }), "grammar"], ["a grammar of blanks", 400, ask({ grammar: "  \n" }), "grammar"],
    ["a grammar of the empty text", 200, ask({ grammar: 'root ::= ""' }), '"content":""'],
    ["schema false", 400, schema(false), "no text matches"], ["an empty enum", 400, schema({ enum: [] }), ""], ["not {}", 400, schema({ not: {} }), ""],
    ["minLength over maxLength", 400, schema({ type: "string", minLength: 3, maxLength: 2 }), "no text matches"],
    ["minimum over maximum", 400, schema({ type: "integer", minimum: 3, maximum: 2 }), "no text matches"],
    ["minItems over maxItems", 400, schema({ type: "array", minItems: 3, maxItems: 2 }), "no text matches"],
    ["required and forbidden", 400, schema({ type: "object", properties: { a: false }, required: ["a"] }), "no text matches"],
    ["allOf of two types", 400, schema({ allOf: [{ type: "string" }, { type: "integer" }] }), "no text matches"],
    ["a pattern that no text matches", 400, schema({ type: "string", pattern: "^a$b" }), "no text matches"],
    ["a list of what cannot be", 400, schema({ type: "array", items: false, minItems: 1 }), "no text matches"],
    ["$ref to itself", 400, schema({ $ref: "#" }), "refers only to itself"],
    ["20,000 properties", 400, schema({ type: "object", properties: Object.fromEntries([...Array(20000).keys()].map((i) => [`p${i}`, S])) }), "at most 262144 bytes"],
    ["2^25 alternatives", 200, schema({ $defs: { ...Object.fromEntries([...Array(25).keys()].map((i) => [`d${i}`, { anyOf: Array(2).fill({ $ref: `#/$defs/d${i + 1}` }) }])), d25: S }, $ref: "#/$defs/d0" })],
    ["a left-recursive grammar", 400, ask({ grammar: 'root ::= root "a" | "b"' }), "left recurs"],
    ["10,000 brackets", 400, ask({ grammar: `root ::= ${"(".repeat(10000)}"a"${")".repeat(10000)}` }), "at most 64 nested groups"],
  ];
  for (let i = 0; i < cases.length; i += 8)
    await Promise.all(cases.slice(i, i + 8).map(async ([name, want, data, words = "", path]) => {
      const answer = await raw(post(data, { path }));
      ok(name, status(answer) === want && body(answer).includes(words), answer);
    }));
}

// The server has little memory: a body gets an answer, or is refused, and one after it is answered as always.
async function memory() {
  const most = Number(process.argv[4]), fill = (text, more = 0) => text.repeat(Math.floor((most - 100 - more) / text.length));
  const messages = (list, end) => `{"messages":[${list.slice(0, -1)}${end}]}`;
  const cases = [
    ["/tokenize", JSON.stringify({ content: "a".repeat(15 << 20) }), [413], "/tokenize"], ["detokenize", `{"tokens":[${fill("9,")}9]}`, [200, 413], "/detokenize"],
    ["/tokenize with pieces", `{"with_pieces":true,"content":"${fill("q")}"}`, [200], "/tokenize"],
    ["/tokenize, escapes", `{"with_pieces":true,"content":"${fill("\\u0001")}"}`, [200], "/tokenize"],
    ["/apply-template", messages(`{"role":"user","content":"${fill("a b ")}"},`, ""), [200], "/apply-template"],
    ["small messages", messages(fill('{"role":"user"},'), ""), [400]], ["small parts", messages(`{"role":"user","content":[${fill("1,", 50)}1]},`, ',{"role":"user","content":"b"}'), [400]],
    ["small results", messages(fill('{"role":"tool"},', 50), ',{"role":"user","content":"b"}'), [400]],
    ["small messages of Ollama", messages(fill('{"role":"user"},'), ""), [400], "/api/chat"],
    ["items of responses", `{"input":[${fill('{"role":"user","content":""},').slice(0, -1)}]}`, [400], "/v1/responses"],
    ["small tools", `{"messages":[{"role":"user","content":"a"}],"tools":[${fill('{"name":""},', 50).slice(0, -1)}]}`, [400]],
    ["brackets", fill("["), [400]], ["n and a long prompt", JSON.stringify({ prompt: Array(500).fill(9), n: 128, max_tokens: 1, logprobs: 5, logit_bias: { 5: 1 }, cache_prompt: false }), [429, 503, 200], "/v1/completions"],
  ].slice(0, long ? 99 : 12);
  for (const [name, data, want, path] of cases) {
    const answer = await raw(post(data, { path }));
    ok(`${name}: one of ${want}`, want.includes(status(answer)), answer);
    const next = await raw(post(question));
    ok(`after ${name}: as always`, status(next) === 200, next);
  }
  const many = await Promise.all([...Array(12).keys()].map((i) => raw(post(cases[2 + i % 9][1], { path: cases[2 + i % 9][3] }))));
  ok("12 at once: each is answered, refused or told to come back", many.every((a) => [200, 400, 503].includes(status(a))), many.map(status));
  ok("503 says when to come back", many.every((a) => status(a) !== 503 || /^retry-after: \d/im.test(a)), many);
  const deaf = net.connect(port, hostname);                          // asks, and never reads
  deaf.on("error", () => {}).pause();
  deaf.write(post(ask({ stream: true, max_tokens: 500, ignore_eos: true, logprobs: true, top_logprobs: 20 })));
  ok("next to one that never reads: as always", status(await raw(post(question))) === 200);
  deaf.destroy();
}

// How long another stream waits for its next token while large requests are prepared; clients that are slow, or never read.
async function slow() {
  const reader = net.connect(port, hostname), big = "a".repeat(15 << 20);
  let last = 0, gap = 0;
  reader.write(post(ask({ stream: true, max_tokens: 8000, ignore_eos: true })).replace("Connection: close\r\n", ""));
  reader.on("error", () => {}).on("data", () => { const now = Date.now(); if (last) gap = Math.max(gap, now - last); last = now; });
  for (const [name, data, path] of [["a long word", ask({ messages: [{ role: "user", content: big }] })],
    ["many parts", ask({ messages: [{ role: "user", content: Array(400000).fill({ type: "text", text: "a" }) }] })],
    ["many messages", ask({ messages: Array(300000).fill({ role: "user", content: "a" }) })], ["tokens", JSON.stringify({ content: "ab ".repeat(1 << 20), with_pieces: true }), "/tokenize"],
    ["many members", field(`"temperature":1,`.repeat(900000) + '"seed":1')], ["many alternatives", ask({ grammar: `root ::= ${[...Array(20000).keys()].map((i) => `"w${i}"`).join(" | ")}` })]]) {
    gap = 0;
    const answer = await raw(post(data, { path }));
    ok(`${name}: another stream waits less than 0.5 s (status ${status(answer)})`, gap < 500, gap);
  }
  reader.destroy();
  const deaf = net.connect(port, hostname);
  const closed = new Promise((done) => deaf.on("error", () => {}).on("close", done));
  deaf.pause().write(post(ask({ stream: true, max_tokens: 8000, ignore_eos: true, logprobs: true, top_logprobs: 20 })));
  const head = raw("GET /health HTTP/1.1\r\n"), part = raw(post("x", { length: "Content-Length: 100\r\n" }));
  await Promise.race([head, new Promise((late) => setTimeout(late, 90000))]).then((answer) => ok("half a head: the connection is closed", answer !== undefined, answer));
  await Promise.race([part, new Promise((late) => setTimeout(late, 90000))]).then((answer) => ok("half a body: the connection is closed", answer !== undefined, answer));
  for (let i = 0; i < 90; i++) {
    if (/"is_processing":true/.test(await raw(get("/slots")))) await new Promise((next) => setTimeout(next, 1000));
  }
  ok("who never reads: the answer ends", !/"is_processing":true/.test(await raw(get("/slots"))));
  deaf.resume();
  await closed;
}

await { heads, bodies, memory, slow }[part]();
console.log(`# hostile: ${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
