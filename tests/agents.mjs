// agents.mjs - drives headless coding agents in a home folder of their own, through a proxy that forces their first tool call, since
// the small model would not make one. clients.mjs uses it. A row has agent({ home, url, key }): the program's files (by path in
// home), environment and the arguments before a prompt; bin, the program; tool, the shell tool's name and how it takes a command; and
// if it can answer by a schema, structured(file), the arguments for that.
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";

const command = "printf %s-%s seven eleven", printed = "seven-eleven";   // the result is no part of the call

// The text of a stream so far, of chat completions or responses, and of how many pieces.
function textOf(body) {
  let text = "", pieces = 0;
  for (const line of body.split("\n").slice(0, -1)) {
    if (!line.startsWith("data: {")) continue;
    const event = JSON.parse(line.slice(6));
    const more = event.type === "response.output_text.delta" ? event.delta : event.choices?.[0]?.delta.content;
    if (more) { text += more; pieces++; }
  }
  return { text, pieces };
}

// A proxy to the server: seen gets { body, status, text, pieces } for each request that declares tools; change(body) edits these.
export async function proxy(url, seen, change = () => {}, onRequest = () => {}) {
  const at = new URL(url);
  const server = http.createServer(async (request, response) => {
    let sent = "";
    for await (const piece of request) sent += piece;
    const body = sent.startsWith("{") ? JSON.parse(sent) : null, record = body?.tools?.length ? { body } : null;
    if (record) { change(body, seen.length); seen.push(record); }
    const bytes = Buffer.from(body ? JSON.stringify(body) : sent);
    const headers = { ...request.headers, host: at.host, "content-length": bytes.length };
    delete headers["transfer-encoding"];
    const onward = http.request({ host: at.hostname, port: at.port, path: request.url, method: request.method, headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      let got = "";
      answer.on("data", (d) => {
        got += d;
        if (record) Object.assign(record, textOf(got), { status: answer.statusCode });
        response.write(d);
      });
      answer.on("end", () => response.end());
      answer.on("error", () => response.destroy());
    });
    onward.on("error", () => response.destroy());      // or the agent has closed it, having read what it needs
    response.on("close", () => onward.destroy());
    onward.end(bytes);
    if (record) onRequest();
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => { server.closeAllConnections(); server.close(); } };
}
// Changes the first request so that the model must call the shell, the others so that it must not: else it would call without end.
function force({ name, call }) {
  return (body, n) => {
    const tool = body.tools.map((t) => t.function ?? t).find((t) => t.name === name);
    if (n) body.tool_choice = "none";
    if (n || !tool) return;
    const properties = Object.fromEntries(Object.entries(call(command)).map(([key, value]) => [key, { enum: [value] }]));
    tool.parameters = { type: "object", properties, required: Object.keys(properties), additionalProperties: false };
    tool.strict = false;
    body.tool_choice = body.messages ? { type: "function", function: { name } } : { type: "function", name };
    body.parallel_tool_calls = false;
  };
}

export function agentTries(row, { folder, url, apiKey, counted, untilIdle, schema }) {
  const bin = path.join(folder, "node_modules/.bin", row.bin);
  // Runs the agent once: what it prints, its exit status and the requests.
  async function run(prompt, { key = apiKey, change, more = () => [], stop = false } = {}) {
    const home = mkdtempSync(path.join(os.tmpdir(), "gemma4-agent-")), work = path.join(home, "work"), seen = [];
    let child;
    const through = await proxy(url, seen, change, () => stop && setTimeout(() => process.kill(-child.pid, "SIGTERM"), 300));
    try {
      const { files, env, args } = row.agent({ home, url: through.url, key });
      mkdirSync(work);
      for (const [name, text] of Object.entries({ "schema.json": JSON.stringify(schema), ...files })) {
        mkdirSync(path.dirname(path.join(home, name)), { recursive: true });
        writeFileSync(path.join(home, name), text);
      }
      child = spawn(bin, [...args, ...more(home), prompt], { cwd: work, stdio: ["ignore", "pipe", "pipe"],
        env: { PATH: process.env.PATH, HOME: home, NO_COLOR: "1", TERM: "dumb", ...env }, detached: true });
      let out = "", err = "";
      child.stdout.on("data", (d) => { out += d; });
      child.stderr.on("data", (d) => { err += d; });
      const timer = setTimeout(() => process.kill(-child.pid, "SIGKILL"), 240e3);
      const status = await new Promise((resolve) => child.on("close", (code, signal) => resolve(code ?? signal)));
      clearTimeout(timer);
      return { out, err, status, seen };
    } finally {
      through.close();
      rmSync(home, { recursive: true, force: true });
    }
  }
  const brief = ({ out, err, status, seen }) => [status, out.slice(-300), err.slice(-300), seen.map((r) => [r.status, r.text, r.pieces])];
  const prompt = "Who are you?", flat = (text) => text.replace(/\s+/g, " ");
  let plain, called;
  const first = () => plain ??= run(prompt);
  const calls = () => called ??= run(prompt, { change: force(row.tool) });
  const shows = (r, n) => r.status === 0 && r.seen[n]?.text && flat(r.out).includes(flat(r.seen[n].text));
  return {
    plain: async () => { const r = await first(); return [shows(r, 0), brief(r)]; },
    stream: async () => { const r = await first(); return [r.seen[0]?.body.stream === true && r.seen[0].pieces > 5, brief(r)]; },
    tools: async () => { const r = await calls(); return [r.seen[1] && JSON.stringify(r.seen[1].body).includes(printed), brief(r)]; },
    "second turn": async () => { const r = await calls(); return [r.seen[1]?.status === 200 && shows(r, r.seen.length - 1), brief(r)]; },
    async structured() {
      const change = (body) => { body.tool_choice = "none"; };
      const r = await run(prompt, { change, more: (home) => row.structured(path.join(home, "schema.json")) });
      return [typeof JSON.parse(r.out).sunny === "boolean", brief(r)];
    },
    async abort() {
      const change = (body) => Object.assign(body, { tool_choice: "none", ignore_eos: true });   // an answer without end
      const before = await counted("gemma4_requests_cancelled_total"), r = await run(prompt, { change, stop: true });
      await untilIdle();
      return [r.seen.length && await counted("gemma4_requests_cancelled_total") > before, brief(r)];
    },
    async errors() {
      const r = await run(prompt, { key: "wrong" });
      return [/401|key/i.test(r.out + r.err), brief(r)];
    },
  };
}
