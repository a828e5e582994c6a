// clients.mjs - the official clients of OpenAI, Anthropic and Ollama drive the server: node clients.mjs URL KEY FOLDER, with the
// packages in node_modules of that folder. test_clients.sh runs it. Prints a line for each case that fails and a summary at the end.
import { createRequire } from "node:module";
import net from "node:net";
import path from "node:path";
import { readFileSync, writeFileSync } from "node:fs";
import { agentTries } from "./agents.mjs";
import { cityArguments, rows } from "./rows.mjs";
import { features, rowName, write } from "./table.mjs";
const folder = path.resolve(process.argv[4]);
writeFileSync(path.join(folder, "need.mjs"), "export default (name) => import(name);   // from here, since it finds what is here\n");
const need = (await import(path.join(folder, "need.mjs"))).default;
const require = createRequire(path.join(folder, "x"));
const { OpenAI } = require("openai");
const Anthropic = require("@anthropic-ai/sdk").default ?? require("@anthropic-ai/sdk");
const { Ollama } = require("ollama");
const [url, apiKey] = process.argv.slice(2, 4);
const context = (await (await fetch(`${url}/props`, { headers: { "x-api-key": apiKey } })).json()).default_generation_settings.n_ctx;
let passed = 0, failed = 0;

function ok(name, condition, got) {
  if (condition) { passed++; return; }
  failed++;
  console.log(`FAILED: ${name}: got ${JSON.stringify(got)}`);
}
async function throws(name, kind, status, promise) {
  try { ok(name, false, await promise); }
  catch (e) { ok(name, e instanceof kind && e.status === status && e.message.length > 10, `${e.constructor.name} ${e.message}`); return e; }
}
async function counted(name) {                          // a counter of the server
  const text = await (await fetch(`${url}/metrics`, { headers: { "x-api-key": apiKey } })).text();
  return Number(new RegExp(`^${name} (\\d+)$`, "m").exec(text)[1]);
}
async function untilIdle() {                            // waits until what was cancelled is gone, a minute at most
  for (let i = 0; i < 1200; i++) {
    if (await counted("gemma4_requests_running") === 0) return true;
    await new Promise((r) => setTimeout(r, 50));
  }
  return false;
}
const endsSoon = async (name) => ok(name, await untilIdle(), "a request that runs");

const story = [{ role: "user", content: "Tell me a story about a fox." }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const name = [{ role: "user", content: "Who are you?" }];
const sum = [{ role: "user", content: "What is 2 + 2?" }];
const endless = "Write the word fox 1000 times:" + " fox".repeat(40);   // the answer to which has no end
const sunny = { type: "object", properties: { sunny: { type: "boolean" } }, required: ["sunny"], additionalProperties: false };
const long = [{ role: "user", content: "The fox ran over the hill and saw a bird. ".repeat(60) }];
const tooLong = [{ role: "user", content: "The fox ran over the hill. ".repeat(context / 3) }];
const oneCity = { type: "object", properties: { city: { type: "string", enum: ["Paris"] } }, required: ["city"], additionalProperties: false };
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const greedy = { model: "any", temperature: 0 };

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  const chat = client.chat.completions;
  const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters: schema } }];
  const model = (await client.models.list()).data[0];
  ok("openai: models", model.object === "model");
  ok("openai: a model", (await client.models.retrieve(model.id)).id === model.id);
  const none = await throws("openai: no such model", OpenAI.NotFoundError, 404, client.models.retrieve("none"));
  ok("openai: the code of that", none?.code === "model_not_found", none?.code);
  const plain = await chat.create({ ...greedy, messages: story, max_tokens: 30 });
  const text = plain.choices[0].message.content;
  ok("openai: plain", text.length > 20 && plain.choices[0].finish_reason === "length" && plain.usage.completion_tokens === 30, plain);

  let streamed = "", usage = null, finish = null;
  for await (const c of await chat.create({ ...greedy, messages: story, max_tokens: 30, stream: true, stream_options: { include_usage: true } })) {
    streamed += c.choices[0]?.delta.content ?? "";
    finish = c.choices[0]?.finish_reason ?? finish;
    usage = c.usage ?? usage;
  }
  ok("openai: a stream holds the same text", streamed === text, streamed);
  ok("openai: it ends with a reason and the usage", finish === "length" && usage?.completion_tokens === 30, [finish, usage]);
  const runner = chat.stream({ ...greedy, messages: story, max_tokens: 30 });
  ok("openai: its own reader of streams", (await runner.finalContent()) === text);
  const likely = await chat.create({ ...greedy, messages: story, max_tokens: 3, logprobs: true, top_logprobs: 2 });
  ok("openai: logprobs", likely.choices[0].logprobs.content.length === 3, likely.choices[0].logprobs);

  const called = await chat.create({ ...greedy, messages: weather, tools, max_tokens: 60 });
  const call = called.choices[0].message.tool_calls?.[0];
  ok("openai: a tool call", called.choices[0].finish_reason === "tool_calls" && call?.function.name === "get_weather" &&
     JSON.parse(call.function.arguments).city === "Paris", called.choices[0]);
  const calls = await chat.stream({ ...greedy, messages: weather, tools, max_tokens: 60 }).finalChatCompletion();
  ok("openai: a tool call, streamed", calls.choices[0].message.tool_calls?.[0].function.arguments === call?.function.arguments, calls);
  const after = [...weather, called.choices[0].message, { role: "tool", tool_call_id: call?.id, content: "sunny" }];
  const answer = await chat.create({ ...greedy, messages: after, tools, max_tokens: 20 });
  ok("openai: the answer to its result", answer.choices[0].message.content?.length > 0, answer.choices[0]);

  const formed = { ...greedy, messages: story, max_tokens: 60,
    response_format: { type: "json_schema", json_schema: { name: "a", strict: true, schema: oneCity } } };
  const made = (await chat.create(formed)).choices[0];
  ok("openai: response_format", made.finish_reason === "stop" && JSON.parse(made.message.content).city === "Paris", made);
  const parsed = await chat.stream(formed).finalChatCompletion();
  ok("openai: response_format, streamed", parsed.choices[0].message.content === made.message.content, parsed.choices[0]);
  const city = [{ type: "function", function: { name: "get_weather", parameters: oneCity } }];
  for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
    const forced = await chat.create({ ...greedy, messages: story, tools: city, tool_choice, parallel_tool_calls: false, max_tokens: 60 });
    ok("openai: tool_choice", forced.choices[0].finish_reason === "tool_calls" && forced.choices[0].message.tool_calls.length === 1 &&
       JSON.parse(forced.choices[0].message.tool_calls[0].function.arguments).city === "Paris", forced.choices[0]);
  }
  const refused = await throws("openai: a schema that is not understood", OpenAI.BadRequestError, 400, chat.create({ ...greedy, messages: story,
    response_format: { type: "json_schema", json_schema: { name: "a", schema: { not: {} } } } }));
  ok("openai: the parameter of that", refused?.param === "response_format", refused?.param);
  const begun = [...story, { role: "assistant", content: "Once upon a time, there was" }];
  const more = (await chat.create({ ...greedy, messages: begun, max_tokens: 8, continue_final_message: true,
    add_generation_prompt: false })).choices[0].message.content;
  ok("openai: an answer that was begun", more.length > 0 && !more.startsWith("Once"), more);
  ok("openai: a long prompt", (await chat.create({ ...greedy, messages: long, max_tokens: 4 })).usage.prompt_tokens > 500);
  const e = await throws("openai: a prompt that is too long", OpenAI.BadRequestError, 400, chat.create({ ...greedy, messages: tooLong }));
  ok("openai: the code of that", e?.code === "context_length_exceeded", e?.code);
  const two = await chat.create({ ...greedy, messages: story, n: 2, max_tokens: 8 });
  ok("openai: n 2", two.choices.length === 2 && two.choices[1].index === 1 && two.choices[0].message.content === two.choices[1].message.content &&
     two.usage.completion_tokens === 16 && two._request_id?.startsWith("req_"), two);
  const both = await chat.stream({ ...greedy, messages: story, n: 2, max_tokens: 8 }).finalChatCompletion();
  ok("openai: n 2, streamed", both.choices[1].message.content === two.choices[1].message.content, both);
  await throws("openai: an image", OpenAI.BadRequestError, 400, chat.create({ ...greedy, messages: [{ role: "user",
    content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AA==" } }] }] }));
  ok("openai: the text of that", /maximum context length is (\d+) tokens.* (\d+) tokens/.test(e?.message) && e?.requestID?.startsWith("req_"), e?.message);
  await throws("openai: no such endpoint", OpenAI.NotFoundError, 404, client.embeddings.create({ model: "any", input: "a" }));
  await throws("openai: a wrong key", OpenAI.AuthenticationError, 401,
    new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).chat.completions.create({ ...greedy, messages: story }));
  let n = 0;
  const endless = await chat.create({ model: "any", messages: story, stream: true, ignore_eos: true });
  for await (const c of endless) if (c && ++n === 5) break;           // leaving the loop closes the connection
  await endsSoon("openai: a stream that is left ends");
  const gone = new AbortController();
  setTimeout(() => gone.abort(), 300);
  await chat.create({ model: "any", messages: story, ignore_eos: true }, { signal: gone.signal })
    .then((r) => ok("openai: cancelled", false, r), (x) => ok("openai: cancelled", x instanceof OpenAI.APIUserAbortError, x));
  await endsSoon("openai: an answer that is cancelled ends");

  const once = await client.completions.create({ ...greedy, prompt: "Once upon a time", max_tokens: 10 });
  ok("openai: completions", once.choices[0].text.length > 5, once);
  const chances = { ...greedy, prompt: "Once upon a time", max_tokens: 6, logprobs: 2 };
  const whole = (await client.completions.create(chances)).choices[0].logprobs;
  ok("openai: logprobs of completions", whole.tokens.length === 6 && whole.token_logprobs.every((x) => x <= 0) && whole.text_offset[0] === 0 &&
     whole.top_logprobs.every((top, i) => Object.keys(top).length === 2 && top[whole.tokens[i]] === whole.token_logprobs[i]), whole);
  const pieces = [];
  for await (const c of await client.completions.create({ ...chances, stream: true })) pieces.push(...(c.choices[0]?.logprobs?.tokens ?? []));
  ok("openai: logprobs of completions, streamed", pieces.join("|") === whole.tokens.join("|"), pieces);
  await throws("openai: too many logprobs of completions", OpenAI.BadRequestError, 400, client.completions.create({ ...chances, logprobs: 6 }));
  const response = await client.responses.create({ ...greedy, input: story[0].content, max_output_tokens: 30 });
  ok("openai: responses", response.output_text === text && response.status === "incomplete", response);
  let delta = "", last = null;
  for await (const event of await client.responses.create({ ...greedy, input: story, max_output_tokens: 30, stream: true })) {
    if (event.type === "response.output_text.delta") delta += event.delta;
    last = event;
  }
  ok("openai: responses, streamed", delta === text && last.type === "response.incomplete" && last.response.output_text !== "", delta);
  for (const summary of [null, "auto"]) {                              // the client checks the order of events and their places
    const thinking = client.responses.stream({ ...greedy, input: weather, max_output_tokens: 40, reasoning: { effort: "high", summary } });
    const types = new Set();
    for await (const event of thinking) types.add(event.type);
    const thought = (await thinking.finalResponse()).output[0];
    ok(`openai: responses, thoughts, summary ${summary}`, thought?.type === "reasoning" && thought.content[0].text.length > 5 &&
       thought.summary.length === (summary ? 1 : 0) && types.has("response.reasoning_text.delta") === !summary, [...types]);
  }
  const tool = { type: "function", name: "get_weather", description: "Weather of a city", parameters: schema, strict: false };
  const asked = await client.responses.create({ ...greedy, input: weather, tools: [tool], max_output_tokens: 60 });
  const f = asked.output.find((x) => x.type === "function_call");
  ok("openai: responses with tools", f?.name === "get_weather", asked.output);
  const formedResponse = await client.responses.create({ ...greedy, input: story, max_output_tokens: 60,
    text: { format: { type: "json_schema", name: "a", schema: oneCity, strict: true } } });
  ok("openai: responses, text.format", JSON.parse(formedResponse.output_text).city === "Paris", formedResponse.output_text);
  const forcedResponse = await client.responses.create({ ...greedy, input: story, max_output_tokens: 60, parallel_tool_calls: false,
    tools: [{ ...tool, parameters: oneCity }], tool_choice: "required" });
  ok("openai: responses, tool_choice", forcedResponse.output.length === 1 && forcedResponse.output[0].type === "function_call" &&
     JSON.parse(forcedResponse.output[0].arguments).city === "Paris", forcedResponse.output);
  const told = await client.responses.create({ ...greedy, tools: [tool], max_output_tokens: 20,
    input: [...weather, f, { type: "function_call_output", call_id: f?.call_id, output: "sunny" }] });
  ok("openai: responses, the answer to its result", told.output_text.length > 0, told.output);
  return text;
}

async function anthropic(text) {
  const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const tools = [{ name: "get_weather", description: "Weather of a city", input_schema: schema }];
  const model = (await client.models.list()).data[0];
  ok("anthropic: models", model.type === "model" && !Number.isNaN(Date.parse(model.created_at)), model);
  ok("anthropic: a model", (await client.models.retrieve(model.id)).display_name === model.id);
  await throws("anthropic: no such model", Anthropic.NotFoundError, 404, client.models.retrieve("none"));
  const plain = await client.messages.create({ ...greedy, messages: story, max_tokens: 30 });
  ok("anthropic: plain", plain.content[0].text === text && plain.stop_reason === "max_tokens", plain);
  const stream = client.messages.stream({ ...greedy, messages: story, max_tokens: 30 });
  let streamed = "";
  stream.on("text", (t) => { streamed += t; });
  const final = await stream.finalMessage();
  ok("anthropic: a stream holds the same text", streamed === text && final.content[0].text === text, streamed);
  ok("anthropic: it ends with a reason and the usage", final.stop_reason === "max_tokens" && final.usage.output_tokens === 30, final);
  const called = await client.messages.create({ ...greedy, messages: weather, tools, max_tokens: 60 });
  const use = called.content.find((b) => b.type === "tool_use");
  ok("anthropic: a tool call", called.stop_reason === "tool_use" && use?.input.city === "Paris", called);
  const calls = await client.messages.stream({ ...greedy, messages: weather, tools, max_tokens: 60 }).finalMessage();
  ok("anthropic: a tool call, streamed", calls.content.find((b) => b.type === "tool_use")?.input.city === "Paris", calls);
  const answer = await client.messages.create({ ...greedy, tools, max_tokens: 20, messages: [...weather,
    { role: "assistant", content: called.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: use?.id, content: "sunny" }] }] });
  ok("anthropic: the answer to its result", answer.content.length > 0, answer);
  const city = [{ name: "get_weather", input_schema: oneCity }];
  for (const tool_choice of [{ type: "any", disable_parallel_tool_use: true }, { type: "tool", name: "get_weather", disable_parallel_tool_use: true }]) {
    const forced = await client.messages.create({ ...greedy, messages: story, tools: city, tool_choice, max_tokens: 60 });
    ok(`anthropic: tool_choice ${tool_choice.type}`, forced.stop_reason === "tool_use" && forced.content.length === 1 &&
       forced.content[0].input.city === "Paris", forced);
    const pieces = await client.messages.stream({ ...greedy, messages: story, tools: city, tool_choice, max_tokens: 60 }).finalMessage();
    ok(`anthropic: tool_choice ${tool_choice.type}, streamed`, pieces.content.find((b) => b.type === "tool_use")?.input.city === "Paris", pieces);
  }
  const formed = await client.messages.create({ ...greedy, messages: story, max_tokens: 60,
    output_config: { format: { type: "json_schema", schema: oneCity } } });
  ok("anthropic: output_config", JSON.parse(formed.content[0].text).city === "Paris", formed);
  const begun = [...story, { role: "assistant", content: "Once upon a time, there was" }];
  const more = (await client.messages.create({ ...greedy, messages: begun, max_tokens: 8 })).content[0].text;
  ok("anthropic: an answer that was begun", more.length > 0 && !more.startsWith("Once"), more);
  ok("anthropic: tokens counted", (await client.messages.countTokens({ model: "any", messages: long })).input_tokens > 500);
  ok("anthropic: a long prompt", (await client.messages.create({ ...greedy, messages: long, max_tokens: 4 })).usage.output_tokens === 4);
  const e = await throws("anthropic: a prompt that is too long", Anthropic.BadRequestError, 400,
    client.messages.create({ ...greedy, messages: tooLong, max_tokens: 4 }));
  ok("anthropic: the text of that", /prompt is too long: \d+ tokens > \d+ maximum/.test(e?.message) && e?.requestID?.startsWith("req_"), e?.message);
  const thinking = await client.messages.stream({ ...greedy, messages: weather, max_tokens: 1040, thinking: { type: "enabled", budget_tokens: 1024 } }).finalMessage();
  ok("anthropic: a thought, streamed, is signed", thinking.content[0]?.type === "thinking" && thinking.content[0].signature.length > 5, thinking);
  const thought = await client.messages.create({ ...greedy, max_tokens: 4, messages: [...weather, { role: "assistant", content: thinking.content }, ...story] });
  ok("anthropic: and is taken back", thought.content.length > 0, thought);
  await throws("anthropic: a wrong type", Anthropic.BadRequestError, 400,
    client.messages.create({ ...greedy, messages: story, max_tokens: "many" }));
  await throws("anthropic: a wrong key", Anthropic.AuthenticationError, 401,
    new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).messages.create({ ...greedy, messages: story, max_tokens: 4 }));
  let n = 0;
  for await (const event of await client.messages.create({ model: "any", messages: long, max_tokens: 2000, stream: true }))
    if (event && ++n === 5) break;
  await endsSoon("anthropic: a stream that is left ends");
}

async function ollama(text) {
  const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${apiKey}` } });
  const options = { temperature: 0, num_predict: 30 };
  const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters: schema } }];
  const fails = (name, status, word, promise) => promise.then((r) => ok(name, false, r), (e) => ok(name, e.status_code === status &&
    e.name === "ResponseError" && e.message.includes(word), `${e.status_code} ${e.message}`));
  const model = (await client.list()).models[0].name;
  const shown = await client.show({ model });
  ok("ollama: show", ["completion", "tools", "thinking"].every((x) => shown.capabilities.includes(x)) &&
     shown.model_info[`${shown.model_info["general.architecture"]}.context_length`] === context, shown);
  ok("ollama: ps", (await client.ps()).models[0].context_length === context);
  ok("ollama: version", /^\d+\.\d+\.\d+$/.test((await client.version()).version));
  const plain = await client.chat({ model, messages: story, options });
  ok("ollama: plain", plain.message.content === text && plain.done_reason === "length" && plain.eval_count === 30, plain);
  let streamed = "", last = null;
  for await (const part of await client.chat({ model, messages: story, options, stream: true })) {
    streamed += part.message.content;
    last = part;
  }
  ok("ollama: a stream holds the same text", streamed === text && last.done && last.eval_count === 30, last);
  const made = await client.generate({ model, prompt: story[0].content, options });
  ok("ollama: generate", made.response === text && made.context.length > 40, made);
  let pieces = "";
  for await (const part of await client.generate({ model, prompt: story[0].content, options, stream: true })) pieces += part.response;
  ok("ollama: generate, streamed", pieces === text, pieces);
  const called = await client.chat({ model, messages: weather, tools, options });
  ok("ollama: a tool call", called.message.tool_calls?.[0].function.arguments.city === "Paris", called);
  const answer = await client.chat({ model, tools, options,
    messages: [...weather, called.message, { role: "tool", tool_name: "get_weather", content: "sunny" }] });
  ok("ollama: the answer to its result", answer.message.content.includes("Paris"), answer);
  // as zod 4 writes it
  const format = { $schema: "https://json-schema.org/draft/2020-12/schema", ...oneCity };
  const formed = await client.chat({ model, messages: story, format, options: { temperature: 0 } });
  ok("ollama: format", JSON.parse(formed.message.content).city === "Paris", formed);
  const thought = await client.chat({ model, messages: story, think: true, options });
  ok("ollama: think", thought.message.thinking.length > 10 && thought.message.content.length > 0, thought);
  let n = 0;
  const endless = await client.chat({ model, messages: long, options: { num_predict: -1, temperature: 2 }, stream: true });
  const left = await (async () => { for await (const part of endless) if (part && ++n === 3) client.abort(); })().catch((e) => e);
  ok("ollama: abort", n >= 3 && (!left || left.name === "AbortError"), left);
  await endsSoon("ollama: a stream that is aborted ends");
  await fails("ollama: an unknown model", 404, "not found", client.show({ model: "none" }));
  await fails("ollama: embed", 400, "embeddings", client.embed({ model, input: "a" }));
  await fails("ollama: pull", 400, "not supported", client.pull({ model, stream: true }));
  await fails("ollama: delete", 400, "not supported", client.delete({ model }));
  await fails("ollama: an image", 400, "images", client.chat({ model, messages: [{ role: "user", content: "a", images: ["aGk="] }] }));
  await fails("ollama: a prompt that is too long", 400, `${context}`, client.chat({ model, messages: tooLong, stream: true }));
  await fails("ollama: a wrong key", 401, "key", new Ollama({ host: url }).chat({ model, messages: story }));
}

// ---- the table ----
const version = (name) => {                             // null: not installed
  try { return JSON.parse(readFileSync(path.join(folder, "node_modules", name, "package.json"))).version; } catch { return null; }
};
async function ended(tried) {                           // no client may hang
  let timer;
  const late = new Promise((_, no) => { timer = setTimeout(() => no(new Error("no end in 5 minutes")), 300e3); });
  return Promise.race([tried(), late]).finally(() => clearTimeout(timer));
}
async function reference(body) {                        // the message that the server answers with, without any client
  const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers: { "x-api-key": apiKey },
    body: JSON.stringify({ temperature: 0, max_tokens: 60, ...body }) });
  return (await answer.json()).choices[0].message;
}
// What every client must get: a text, both answers of a conversation with a tool, thoughts.
async function references() {
  const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters: cityArguments } }];
  const call = await reference({ messages: weather, tools });
  const history = [...weather, call, { role: "tool", tool_call_id: call.tool_calls[0].id, content: "sunny" }];
  const told = await reference({ messages: history, tools });
  const last = await reference({ messages: [...history, told, ...name], tools });
  return { text: (await reference({ messages: name })).content, turns: [told.content, last.content],
    thoughts: (await reference({ messages: sum, reasoning_effort: "high" })).reasoning_content };
}

// A library's function for each feature: throws, or returns whether it is right and what came.
function libraryTries(row, right) {
  const server = { need, url, key: apiKey }, ask = { prompt: name[0].content, max: 60, temperature: 0 };
  const open = row.open(server), cities = [];
  const turns = open.then((client) => client.turns([{ ...ask, prompt: weather[0].content }, ask], ({ city }) => { cities.push(city); return "sunny"; }));
  turns.catch(() => {});
  return {
    plain: async () => { const got = await (await open).plain(ask); return [got === right.text, got]; },
    async stream() {
      const pieces = [];
      await (await open).stream(ask, (text) => { if (text) pieces.push(text); });
      return [pieces.join("") === right.text, pieces];
    },
    tools: async () => { await turns.catch((e) => { if (!cities.length) throw e; }); return [cities.join() === "Paris", cities]; },
    "second turn": async () => { const got = await turns; return [JSON.stringify(got) === JSON.stringify(right.turns), got]; },
    structured: async () => { const got = await (await open).structured(ask, sunny); return [typeof got.sunny === "boolean", got]; },
    async thoughts() { const got = await (await open).thoughts({ ...ask, prompt: sum[0].content }); return [got === right.thoughts, got]; },
    async abort() {
      const gone = new AbortController(), before = await counted("gemma4_requests_cancelled_total");
      let n = 0;
      const end = await (await open).stream({ ...ask, prompt: endless, max: 8000, signal: gone.signal },
        (text) => text && ++n && (gone.abort(), true)).catch((e) => e);
      await untilIdle();
      return [n && await counted("gemma4_requests_cancelled_total") === before + 1, [n, String(end)]];
    },
    async errors() {
      const refused = await row.open({ ...server, key: "wrong" }).then((client) => client.plain(ask)).catch((e) => e);
      const long = await (await open).plain({ ...ask, prompt: tooLong[0].content }).catch((e) => e);
      const status = refused.status ?? refused.statusCode ?? refused.status_code;
      return [status === 401 && long.message.includes(context), [status, String(refused), String(long)]];
    },
  };
}
async function table() {
  const right = await references(), missing = new Set(), made = [];
  for (const row of rows.filter((r) => !r.agent || process.env.LONG)) {
    const absent = row.packages.filter((name) => !version(name));
    if (absent.length) { absent.forEach((name) => missing.add(name)); continue; }
    const tries = row.agent ? agentTries(row, { folder, url, apiKey, counted, untilIdle, schema: sunny }) : libraryTries(row, right);
    for (const feature of features) {
      const name = `${rowName(row)}: ${feature}`, fault = row.faults?.[feature];
      const [works, got] = await ended(tries[feature]).catch((e) => [false, e.stack]);
      if (fault) ok(`${name}: is said not to work: ${fault}`, !works, got);
      else ok(name, works, got);
    }
    made.push(row);
  }
  if (missing.size) console.log(`# not installed: ${[...missing].join(", ")}`);
  if (process.argv[5] === "--table") write(made, version);
}

// What is sent over a connection, and everything that comes back until it closes; leave: how it is left.
function raw(bytes, leave) {
  return new Promise((resolve) => {
    const at = new URL(url);
    const socket = net.connect({ port: at.port, host: at.hostname, allowHalfOpen: true });
    let got = "";
    socket.on("data", (d) => { got += d; });
    socket.on("error", () => resolve(got));
    socket.on("close", () => resolve(got));
    socket.on("end", () => socket.end());
    socket.write(bytes, () => leave === "half" ? socket.end() : leave === "reset" && socket.resetAndDestroy());
  });
}

async function http() {
  const body = JSON.stringify({ messages: story, max_tokens: 2, temperature: 0 });
  const head = (more, verb = "POST /v1/chat/completions") => `${verb} HTTP/1.1\r\nHost: localhost\r\nx-api-key: ${apiKey}\r\n${more}`;
  const whole = (more) => head(`${more}Content-Length: ${body.length}\r\n\r\n${body}`);
  const close = "Connection: close\r\n";
  const count = (text, word) => text.split(word).length - 1;
  ok("http: one request", /^HTTP\/1.1 200 .*finish_reason/s.test(await raw(whole(close))));
  ok("http: three in a row", count(await raw(whole("") + whole("") + whole(close)), "HTTP/1.1 200 ") === 3);
  const pieces = [...body].map((c) => `1\r\n${c}\r\n`).join("");
  ok("http: in chunks", /^HTTP\/1.1 200 /.test(await raw(head(`${close}Transfer-Encoding: chunked\r\n\r\n${pieces}0\r\n\r\n`))));
  ok("http: 100-continue", /^HTTP\/1.1 100 .*HTTP\/1.1 200 /s.test(await raw(whole(`${close}Expect: 100-continue\r\n`))));
  ok("http: one that is too large is not waited for",
     /^HTTP\/1.1 413 .*expected at most/s.test(await raw(head("Expect: 100-continue\r\nContent-Length: 99000000\r\n\r\n"))));
  ok("http: OPTIONS", /^HTTP\/1.1 204 .*Allow: POST, OPTIONS/s.test(await raw(head(`${close}\r\n`, "OPTIONS /v1/chat/completions"))));
  ok("http: another page's", /^HTTP\/1.1 403 /.test(await raw(head(`${close}Origin: http://example.com\r\n\r\n`, "OPTIONS /v1/chat/completions"))));
  ok("http: HTTP/2", /^HTTP\/1.1 505 /.test(await raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")));
  const endless = JSON.stringify({ messages: story, ignore_eos: true });
  const left = await raw(head(`Content-Length: ${endless.length}\r\n\r\n${endless}`), "half");
  ok("http: who closes its sending side has left", /^(HTTP\/1.1 499 .*closed|$)/s.test(left), left);
  for (let n = 0; n < body.length; n += 7) await raw(whole("").slice(0, -n), "reset");
  await endsSoon("http: who hangs up anywhere is gone");
  ok("http: and answers go on", /^HTTP\/1.1 200 /.test(await raw(whole(close))));
}

try {
  const text = await openai();
  await anthropic(text);
  await ollama(text);
  await table();
  await http();
}
catch (e) { ok("no exception", false, e.stack); }
console.log(`# clients: ${passed} passed, ${failed} failed`);
