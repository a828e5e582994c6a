// rows.mjs - the rows of the table of clients in docs/server.md, as data: a row has a name, the npm packages that it needs and
// open({ need, url, key }), where need(NAME) imports a package. open returns the client's side of each feature:
//   plain(ask)                  the text of an answer; ask: prompt, max (tokens), temperature
//   stream(ask, piece)          calls piece(text) for each piece; ends early after ask.signal, or when piece returns true
//   turns(questions, weather)   asks the first question with the tool get_weather, which weather(arguments) answers; then the
//                               second one in the same conversation; returns the texts of both answers
//   structured(ask, schema)     an answer by a JSON schema, parsed
//   thoughts(ask)               the thoughts of an answer
// faults says what the client itself cannot do: a feature and why; such a feature must fail, or be missing. clients.mjs runs the rows
// and knows what is right. An agent's row has what agents.mjs needs instead of open.
const description = "Weather of a city";
const user = (content) => ({ role: "user", content });
const messages = (ask) => [user(ask.prompt)];

// ---- openai ----
export const cityArguments = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const chatTool = { type: "function", function: { name: "get_weather", description, parameters: cityArguments } };
const responseTool = { type: "function", name: "get_weather", description, parameters: cityArguments, strict: false };

async function openaiClient({ need, url, key }) {
  const { OpenAI } = await need("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
}

async function openaiChat(server) {
  const chat = (await openaiClient(server)).chat.completions;
  const body = (ask) => ({ model: "any", messages: messages(ask), max_tokens: ask.max, temperature: ask.temperature });
  const text = (answer) => answer.choices[0].message.content;
  return {
    plain: async (ask) => text(await chat.create(body(ask))),
    async stream(ask, piece) {
      for await (const c of await chat.create({ ...body(ask), stream: true }, { signal: ask.signal }))
        if (c.choices[0]?.delta.content) piece(c.choices[0].delta.content);
    },
    async turns([first, second], weather) {
      const tool = { ...chatTool.function, parse: JSON.parse, function: weather };
      const runner = chat.runTools({ ...body(first), tools: [{ type: "function", function: tool }] });
      const answer = await runner.finalContent();
      return [answer, text(await chat.create({ ...body(second), tools: [chatTool], messages: [...runner.messages, user(second.prompt)] }))];
    },
    async structured(ask, schema) {
      const response_format = { type: "json_schema", json_schema: { name: "a", strict: true, schema } };
      return JSON.parse(text(await chat.create({ ...body(ask), response_format })));
    },
    thoughts: async (ask) => (await chat.create({ ...body(ask), reasoning_effort: "high" })).choices[0].message.reasoning_content,
  };
}

async function openaiResponses(server) {
  const { responses } = await openaiClient(server);
  const body = (ask) => ({ model: "any", input: messages(ask), max_output_tokens: ask.max, temperature: ask.temperature });
  return {
    plain: async (ask) => (await responses.create(body(ask))).output_text,
    async stream(ask, piece) {
      for await (const event of await responses.create({ ...body(ask), stream: true }, { signal: ask.signal }))
        if (event.type === "response.output_text.delta") piece(event.delta);
    },
    async turns([first, second], weather) {
      const asked = await responses.create({ ...body(first), tools: [responseTool] });
      const call = asked.output.find((item) => item.type === "function_call");
      const output = { type: "function_call_output", call_id: call?.call_id, output: weather(JSON.parse(call.arguments)) };
      const told = await responses.create({ ...body(first), tools: [responseTool], input: [output], previous_response_id: asked.id });
      const last = await responses.create({ ...body(second), tools: [responseTool], previous_response_id: told.id });
      return [told.output_text, last.output_text];
    },
    async structured(ask, schema) {
      const format = { type: "json_schema", name: "a", strict: true, schema };
      return (await responses.parse({ ...body(ask), text: { format } })).output_parsed;
    },
    async thoughts(ask) {
      const answer = await responses.create({ ...body(ask), reasoning: { effort: "high", summary: "auto" } });
      return answer.output.find((item) => item.type === "reasoning").summary[0].text;
    },
  };
}

// ---- @anthropic-ai/sdk ----
async function anthropic({ need, url, key }) {
  const Anthropic = (await need("@anthropic-ai/sdk")).default;
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const body = (ask) => ({ model: "any", messages: messages(ask), max_tokens: ask.max, temperature: ask.temperature });
  const text = (answer) => answer.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  return {
    plain: async (ask) => text(await client.messages.create(body(ask))),
    async stream(ask, piece) {
      await client.messages.stream(body(ask), { signal: ask.signal }).on("text", piece).finalMessage();
    },
    async turns([first, second], weather) {
      const tool = { type: "custom", name: "get_weather", description, input_schema: cityArguments, run: weather, parse: (x) => x };
      const runner = client.beta.messages.toolRunner({ ...body(first), tools: [tool] });
      const answer = await runner;
      const more = [...runner.params.messages, { role: "assistant", content: answer.content }, user(second.prompt)];
      const { run, parse, ...declared } = tool;
      return [text(answer), text(await client.messages.create({ ...body(second), messages: more, tools: [declared] }))];
    },
    async structured(ask, schema) {
      return (await client.messages.parse({ ...body(ask), output_config: { format: { type: "json_schema", schema,
        parse: JSON.parse } } })).parsed_output;
    },
    async thoughts(ask) {
      const answer = await client.messages.create({ ...body(ask), max_tokens: 1024 + ask.max, thinking: { type: "enabled", budget_tokens: 1024 } });
      return answer.content[0].thinking;
    },
  };
}

// ---- ollama ----
async function ollama({ need, url, key }) {
  const { Ollama } = await need("ollama");
  const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
  const body = (ask) => ({ model: "any", messages: messages(ask), options: { temperature: ask.temperature, num_predict: ask.max } });
  return {
    plain: async (ask) => (await client.chat(body(ask))).message.content,
    async stream(ask, piece) {
      const parts = await client.chat({ ...body(ask), stream: true });
      ask.signal?.addEventListener("abort", () => parts.abort());
      for await (const part of parts) piece(part.message.content);
    },
    async turns([first, second], weather) {
      const tools = [chatTool], history = messages(first);
      const { message } = await client.chat({ ...body(first), tools });
      const call = message.tool_calls[0].function;
      history.push(message, { role: "tool", tool_name: call.name, content: weather(call.arguments) });
      const told = (await client.chat({ ...body(first), tools, messages: history })).message;
      const last = await client.chat({ ...body(second), tools, messages: [...history, told, user(second.prompt)] });
      return [told.content, last.message.content];
    },
    structured: async (ask, format) => JSON.parse((await client.chat({ ...body(ask), format })).message.content),
    thoughts: async (ask) => (await client.chat({ ...body(ask), think: true })).message.thinking,
  };
}

// ---- ai, with a provider: model(server, ask), and the provider's options that ask for thoughts ----
function ai(model, thinking) {
  return async (server) => {
    const { generateText, generateObject, streamText, tool, jsonSchema, stepCountIs } = await server.need("ai");
    const body = async (ask) => ({ model: await model(server, ask), messages: messages(ask), maxOutputTokens: ask.max,
      temperature: ask.temperature, maxRetries: 0, abortSignal: ask.signal });
    return {
      plain: async (ask) => (await generateText(await body(ask))).text,
      async stream(ask, piece) {
        for await (const part of streamText({ ...await body(ask), onError() {} }).textStream) piece(part);
      },
      async turns([first, second], weather) {
        const tools = { get_weather: tool({ description, inputSchema: jsonSchema(cityArguments), execute: weather }) };
        const { text, response } = await generateText({ ...await body(first), tools, stopWhen: stepCountIs(2) });
        const history = [...messages(first), ...response.messages, user(second.prompt)];
        return [text, (await generateText({ ...await body(second), tools, messages: history })).text];
      },
      structured: async (ask, schema) => (await generateObject({ ...await body(ask), schema: jsonSchema(schema) })).object,
      thoughts: async (ask) => (await generateText({ ...await body(ask), providerOptions: thinking })).reasoningText,
    };
  };
}
const aiOpenai = (kind) => async ({ need, url, key }) =>
  (await need("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: key })[kind]("any");
const aiCompatible = async ({ need, url, key }) => (await need("@ai-sdk/openai-compatible")).createOpenAICompatible(
  { name: "gemma4", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true })("any");
const aiAnthropic = async ({ need, url, key }) => (await need("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: key })("any");
const aiOllama = async ({ need, url, key }, ask) => {  // it sends temperature and length where Ollama does not read them
  const options = { temperature: ask.temperature, num_predict: ask.max };
  const sent = (at, init) => fetch(at, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), options }) });
  return (await need("ollama-ai-provider-v2")).createOllama({ baseURL: `${url}/api`, headers: { Authorization: `Bearer ${key}` }, fetch: sent })("any");
};

// ---- @langchain: model(server, ask, thinking) ----
function langchain(model, thoughts) {
  return async (server) => {
    const { HumanMessage, ToolMessage } = await server.need("@langchain/core/messages");
    const text = (answer) => answer.text;
    return {
      plain: async (ask) => text(await (await model(server, ask)).invoke(ask.prompt)),
      async stream(ask, piece) {
        for await (const part of await (await model(server, ask)).stream(ask.prompt, { signal: ask.signal })) piece(text(part));
      },
      async turns([first, second], weather) {
        const bound = (await model(server, first)).bindTools([chatTool]);
        const history = [new HumanMessage(first.prompt)];
        const called = await bound.invoke(history), call = called.tool_calls[0];
        history.push(called, new ToolMessage({ content: weather(call.args), tool_call_id: call.id, name: call.name }));
        const told = await bound.invoke(history);
        return [text(told), text(await bound.invoke([...history, told, new HumanMessage(second.prompt)]))];
      },
      structured: async (ask, schema) =>
        (await model(server, ask)).withStructuredOutput(schema, { method: "jsonSchema" }).invoke(ask.prompt),
      thoughts: async (ask) => thoughts(await (await model(server, ask, true)).invoke(ask.prompt)),
    };
  };
}
const langchainOpenai = (useResponsesApi) => async ({ need, url, key }, ask, thinking) => {
  const { ChatOpenAI } = await need("@langchain/openai");
  const modelKwargs = !thinking ? {} : useResponsesApi ? { reasoning: { effort: "high", summary: "auto" } } : { reasoning_effort: "high" };
  return new ChatOpenAI({ model: "any", apiKey: key, configuration: { baseURL: `${url}/v1` }, useResponsesApi, modelKwargs,
    temperature: ask.temperature, maxTokens: ask.max, maxRetries: 0 });
};
const langchainAnthropic = async ({ need, url, key }, ask, thinking) => {
  const { ChatAnthropic } = await need("@langchain/anthropic");
  const more = thinking ? { thinking: { type: "enabled", budget_tokens: 1024 }, maxTokens: 1024 + ask.max } :
    { temperature: ask.temperature, maxTokens: ask.max };
  return new ChatAnthropic({ model: "any", apiKey: key, anthropicApiUrl: url, maxRetries: 0, ...more });
};
const langchainOllama = async ({ need, url, key }, ask, think) => {
  const { ChatOllama } = await need("@langchain/ollama");
  return new ChatOllama({ baseUrl: url, model: "any", headers: { Authorization: `Bearer ${key}` }, think,
    temperature: ask.temperature, numPredict: ask.max });
};

// ---- @openai/agents ----
const agents = (useResponses) => async ({ need, url, key }) => {
  const { Agent, Runner, OpenAIProvider, tool } = await need("@openai/agents");
  const runner = new Runner({ modelProvider: new OpenAIProvider({ apiKey: key, baseURL: `${url}/v1`, useResponses }), tracingDisabled: true });
  const agent = (ask, more) => new Agent({ name: "a", model: "any", ...more,
    modelSettings: { temperature: ask.temperature, maxTokens: ask.max, ...more?.modelSettings } });
  return {
    plain: async (ask) => (await runner.run(agent(ask), ask.prompt)).finalOutput,
    async stream(ask, piece) {
      const run = await runner.run(agent(ask), ask.prompt, { stream: true, signal: ask.signal });
      for await (const part of run.toTextStream()) piece(part);
      await run.completed;
    },
    async turns([first, second], weather) {
      const parameters = { ...cityArguments, additionalProperties: true };
      const tools = [tool({ name: "get_weather", description, parameters, strict: false, execute: weather })];
      const run = await runner.run(agent(first, { tools }), first.prompt);
      const next = await runner.run(agent(second, { tools }), [...run.history, user(second.prompt)]);
      return [run.finalOutput, next.finalOutput];
    },
    structured: async (ask, schema) =>
      (await runner.run(agent(ask, { outputType: { type: "json_schema", name: "a", strict: true, schema } }), ask.prompt)).finalOutput,
    async thoughts(ask) {
      const run = await runner.run(agent(ask, { modelSettings: { reasoning: { effort: "high", summary: "auto" } } }), ask.prompt);
      return run.newItems.find((item) => item.type === "reasoning_item").rawItem.content[0].text;
    },
  };
};

// ---- llamaindex ----
async function llamaindex({ need, url, key }) {
  const { OpenAI } = await need("@llamaindex/openai"), { FunctionTool } = await need("llamaindex");
  const model = (ask, additionalChatOptions) => new OpenAI({ model: "any", apiKey: key, baseURL: `${url}/v1`, maxRetries: 0,
    temperature: ask.temperature, maxTokens: ask.max, additionalChatOptions });
  return {
    plain: async (ask) => (await model(ask).chat({ messages: messages(ask) })).message.content,
    async stream(ask, piece) {
      for await (const part of await model(ask).chat({ messages: messages(ask), stream: true })) if (piece(part.delta)) break;
    },
    async turns([first, second], weather) {
      const tools = [FunctionTool.from(weather, { name: "get_weather", description, parameters: cityArguments })];
      const run = await model(first).exec({ messages: messages(first), tools });
      const told = await model(first).exec({ messages: [...messages(first), ...run.newMessages], tools });
      const history = [...messages(first), ...run.newMessages, ...told.newMessages, user(second.prompt)];
      return [told.newMessages.at(-1).content, (await model(second).chat({ messages: history, tools })).message.content];
    },
    async structured(ask, schema) {
      const response_format = { type: "json_schema", json_schema: { name: "a", strict: true, schema } };
      return JSON.parse((await model(ask, { response_format }).chat({ messages: messages(ask) })).message.content);
    },
  };
}

// ---- headless agents: what agents.mjs needs ----
const codex = ({ url, key, home }) => ({
  env: { CODEX_HOME: `${home}/.codex`, GEMMA4_KEY: key },
  files: { ".codex/config.toml": `model = "any"\nmodel_provider = "gemma4"\n[model_providers.gemma4]\nname = "gemma4"\n` +
    `base_url = "${url}/v1"\nenv_key = "GEMMA4_KEY"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n` },
  args: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
});
const opencode = ({ url, key }) => ({
  files: { ".config/opencode/opencode.json": JSON.stringify({ model: "gemma4/any", small_model: "gemma4/any", autoupdate: false,
    provider: { gemma4: { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${url}/v1`, apiKey: key }, models: { any: {} } } } }) },
  args: ["run"],
});
const qwen = ({ url, key }) => ({
  env: { OPENAI_API_KEY: key, OPENAI_BASE_URL: `${url}/v1`, OPENAI_MODEL: "any" },
  args: ["--auth-type", "openai", "--approval-mode", "yolo", "--bare"],
});
const continueCli = ({ url, key, home }) => ({
  files: { "config.yaml": `name: gemma4\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: any\n    provider: openai\n    model: any\n` +
    `    apiBase: ${url}/v1\n    apiKey: ${key}\n` },
  args: ["--config", `${home}/config.yaml`, "--auto", "-p"],
});

export const rows = [
  { name: "chat", packages: ["openai"], open: openaiChat },
  { name: "responses", packages: ["openai"], open: openaiResponses },
  { name: "toolRunner", packages: ["@anthropic-ai/sdk"], open: anthropic },
  { packages: ["ollama"], open: ollama },
  { name: "responses", packages: ["@ai-sdk/openai", "ai"],
    open: ai(aiOpenai("responses"), { openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true } }) },
  { name: "chat", packages: ["@ai-sdk/openai", "ai"], open: ai(aiOpenai("chat")),
    faults: { thoughts: "`reasoning_content` is not read" } },
  { packages: ["@ai-sdk/openai-compatible", "ai"], open: ai(aiCompatible, { gemma4: { reasoningEffort: "high" } }) },
  { packages: ["@ai-sdk/anthropic", "ai"], open: ai(aiAnthropic, { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } }) },
  { packages: ["ollama-ai-provider-v2", "ai"], open: ai(aiOllama, { ollama: { think: true } }),
    faults: { errors: "the message is the status" } },
  { name: "chat", packages: ["@langchain/openai", "@langchain/core"],
    open: langchain(langchainOpenai(false), (answer) => answer.additional_kwargs.reasoning_content) },
  { name: "responses", packages: ["@langchain/openai", "@langchain/core"],
    open: langchain(langchainOpenai(true), (answer) => answer.additional_kwargs.reasoning.summary[0].text) },
  { packages: ["@langchain/anthropic", "@langchain/core"], open: langchain(langchainAnthropic, (answer) => answer.content[0].thinking) },
  { packages: ["@langchain/ollama", "@langchain/core"],
    open: langchain(langchainOllama, (answer) => answer.additional_kwargs.reasoning_content),
    faults: { abort: "the connection stays open" } },
  { name: "responses", packages: ["@openai/agents"], open: agents(true) },
  { name: "chat", packages: ["@openai/agents"], open: agents(false),
    faults: { thoughts: "`reasoning_content` is not read" } },
  { packages: ["@llamaindex/openai", "llamaindex"], open: llamaindex,
    faults: { thoughts: "`reasoning_content` is not read", abort: "the connection stays open" } },
  { packages: ["@openai/codex"], bin: "codex", agent: codex, tool: { name: "exec_command", call: (cmd) => ({ cmd }) },
    structured: (file) => ["--output-schema", file], faults: { thoughts: "not shown by default" } },
  { packages: ["opencode-ai"], bin: "opencode", agent: opencode,
    tool: { name: "bash", call: (command) => ({ command, description: "prints" }) },
    faults: { structured: "not offered", thoughts: "not shown by default" } },
  { packages: ["@qwen-code/qwen-code"], bin: "qwen", agent: qwen,
    tool: { name: "run_shell_command", call: (command) => ({ command, is_background: false }) },
    faults: { structured: "not tried (`--json-schema`)", thoughts: "not shown by default" } },
  { packages: ["@continuedev/cli"], bin: "cn", agent: continueCli, tool: { name: "Bash", call: (command) => ({ command }) },
    faults: { structured: "not offered", thoughts: "not shown by default" } },
];
