// origins.mjs - a browser uses the server: its page behind the nginx of docs/server.md, and pages of other sites, allowed and not.
// Without nginx a proxy of a few lines does the same. test_origins.sh runs it: CHROMIUM=.. GEMMA4=.. node origins.mjs FOLDER.
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import http from "node:http";
const [folder] = process.argv.slice(2), { CHROMIUM, GEMMA4 } = process.env;
let passed = 0, failed = 0;
const started = [];
process.on("exit", () => started.forEach((p) => p.kill("SIGKILL")));

function ok(name, condition, got) {
  if (condition) { passed++; return; }
  failed++;
  console.log(`FAILED: ${name}: got ${JSON.stringify(got)}`);
}
function start(program, args, stdio) {
  const p = spawn(program, args, { stdio });
  started.push(p);
  return p;
}
const listen = (answer) => new Promise((done) => {
  const server = http.createServer(answer).listen(0, "127.0.0.1", () => done(server));
});

// ---- the browser, by its own protocol: messages that end with a NUL, over two pipes ----
const browser = start(CHROMIUM, ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
  `--user-data-dir=${folder}/chromium`, "about:blank"], ["ignore", "ignore", "ignore", "pipe", "pipe"]);
const waiting = new Map();
let n = 0, rest = "";
browser.stdio[4].setEncoding("utf8").on("data", (data) => {
  const messages = (rest + data).split("\0");
  rest = messages.pop();
  for (const message of messages.map((m) => JSON.parse(m))) waiting.get(message.id)?.(message);
});
function tell(method, params, sessionId) {
  return new Promise((done, fail) => {
    waiting.set(++n, (m) => m.error ? fail(new Error(`${method}: ${m.error.message}`)) : done(m.result));
    browser.stdio[3].write(`${JSON.stringify({ id: n, method, params, sessionId })}\0`);
  });
}
async function open(url) {             // a tab, when it is loaded; returns what runs a function in it
  const { targetId } = await tell("Target.createTarget", { url });
  const { sessionId } = await tell("Target.attachToTarget", { targetId, flatten: true });
  const run = async (f, ...args) => {
    const { result, exceptionDetails } = await tell("Runtime.evaluate", { awaitPromise: true, returnByValue: true,
      expression: `(${f})(...${JSON.stringify(args)})` }, sessionId);
    return exceptionDetails ? `exception: ${exceptionDetails.exception?.description}` : result.value;
  };
  const loaded = (url) => location.href === url && document.readyState === "complete";
  for (let i = 0; i < 1200 && !(await run(loaded, url).catch(() => false)); i++) await new Promise((r) => setTimeout(r, 50));
  return run;
}

// ---- the proxy, a site, the server ----
const blank = await listen((request, response) => response.end("<!doctype html><title>a site</title>"));
const nginx = [...process.env.PATH.split(":"), "/usr/sbin"].map((at) => `${at}/nginx`).find(existsSync);
let server = null;                     // its address, host:port
const proxy = await listen((request, response) => {
  const path = request.url.replace(/^\/gemma\//, "/");
  const headers = { ...request.headers, host: "localhost", connection: "keep-alive" };
  request.pipe(http.request(`http://${server}${path}`, { method: request.method, headers }, (from) => {
    response.writeHead(from.statusCode, from.headers);
    from.pipe(response);
  }));
});
const port = proxy.address().port, site = `localhost:${blank.address().port}`, chat = `http://chat.localhost:${port}`;
const engine = start(GEMMA4, ["serve", "models/gemma4-mini-q8_0.gguf", "--port", "0", "-t", "2", "--temp", "0", "--public-url", chat,
  "--allow-origin", `http://app.${site}`], ["ignore", "ignore", "pipe"]);
await new Promise((done) => {
  let log = "";
  engine.stderr.on("data", (data) => {
    log += data;
    server ??= /^# serving at http:\/\/(.*)$/m.exec(log)?.[1] ?? null;
    if (server) done();
  });
});
if (nginx) {                           // in place of the proxy, at the same port
  await new Promise((done) => proxy.close(done));
  const [, block] = /```nginx\n([^]*?)```/.exec(readFileSync("docs/server.md", "utf8"));
  const location = /\n    location \/ \{[^]*?\n    \}/.exec(block)[0];
  const below = location.replace("location / {", "location /gemma/ {").replace("http://gemma4;", "http://gemma4/;");
  const servers = block.replaceAll(/10\.0\.0\.\d:8080/g, server).replace("listen 80", `listen 127.0.0.1:${port}`).replace(location, location + below);
  const paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map((p) => `${p}_temp_path ${folder}/origins/${p};`).join(" ");
  mkdirSync(`${folder}/origins`);
  writeFileSync(`${folder}/origins.conf`, `daemon off; master_process off; pid ${folder}/origins/pid; error_log stderr; events {}
http { access_log off; ${paths}\n${servers}}\n`);
  start(nginx, ["-p", `${folder}/origins`, "-e", "stderr", "-c", `${folder}/origins.conf`], ["ignore", "ignore", "inherit"]);
  for (let i = 0; i < 600 && !(await fetch(`http://127.0.0.1:${port}/health`).catch(() => null))?.ok; i++) await new Promise((r) => setTimeout(r, 50));
}

// ---- in the browser: sends a message in the page, and waits for an answer with this text ----
async function say(message, answer) {
  const until = async (f) => {
    for (let i = 0; i < 1200; i++, await new Promise((r) => setTimeout(r, 50))) if (f()) return f();
    return null;
  };
  const input = await until(() => document.getElementById("model")?.textContent && document.getElementById("input"));
  if (!input) return document.body.textContent;
  input.value = message;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  document.getElementById("send").click();
  await until(() => document.body.textContent.includes(answer));
  return document.body.textContent;
}
async function call(url, body) {       // in the browser: an answer of the API, as a page sees it
  try {
    const response = await fetch(url, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-Mine": "1" } });
    return { status: response.status, warning: response.headers.get("x-gemma4-warning"), text: await response.text() };
  } catch (e) { return `${e}`; }
}

try {
  const question = "Tell me a story about a fox.", text = "Once upon a time, there was a little fox named";
  const by = nginx ? "nginx" : "a proxy";
  for (const path of ["/", "/gemma/"]) {
    const page = await open(chat + path), shown = await page(say, question, text);
    ok(`the page behind ${by} at ${path} is answered`, shown?.includes?.(text), shown?.slice?.(0, 300));
    const asked = await page(() => performance.getEntriesByType("resource").map((r) => r.name));
    ok(`it stays below ${path}`, asked.length && asked.every((name) => name.startsWith(chat + path)), asked);
  }
  const body = { messages: [{ role: "user", content: question }], options: { num_predict: 3, num_gpu: 1 } };
  const app = await open(`http://app.${site}/`), other = await open(`http://other.${site}/`);
  const streamed = await app(call, `http://${server}/api/chat`, body);
  ok("an allowed site reads a stream", streamed.status === 200 && streamed.text?.includes('"done":true'), streamed);
  ok("and its headers", streamed.warning === "options.num_gpu: left out", streamed.warning);
  const wrong = await app(call, `http://${server}/v1/chat/completions`, {});
  ok("and errors", wrong.status === 400 && JSON.parse(wrong.text).error.message.includes("messages"), wrong);
  ok("an allowed site behind the proxy too", (await app(call, `${chat}/api/chat`, body)).status === 200);
  const blocked = await other(call, `http://${server}/api/chat`, body);
  ok("another site is blocked", /^TypeError/.test(blocked), blocked);
} catch (e) { ok("no exception", false, e.stack); }
console.log(`# origins: ${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
