// zod.mjs - zod's types drive the server: node zod.mjs URL KEY FOLDER, with zod in node_modules of that folder. Each type, alone and
// in an object, as it is written by zod 4 and by zod-to-json-schema for zod 3, is a response_format and a tool's parameters. All
// answers are 200; those that are not cut are what zod itself accepts. Under strict a schema may be refused, with the keyword's name.
import { writeFileSync } from "node:fs";
import path from "node:path";
const [url, key, folder] = process.argv.slice(2, 5), file = path.resolve(folder, "need.mjs");
writeFileSync(file, "export default (name) => import(name);   // from here, since it finds what is here\n");
const need = (await import(file)).default;
let passed = 0, failed = 0;
function ok(name, condition, got) {
  if (condition) { passed++; return; }
  failed++;
  console.log(`FAILED: ${name}: got ${JSON.stringify(got)}`.slice(0, 600));
}

// Both versions know these; a type that one of them lacks throws and is left out.
const types = (z) => ({
  string: () => z.string(), minimum: () => z.string().min(3), maximum: () => z.string().max(5), length: () => z.string().length(4),
  regex: () => z.string().regex(/^[A-Z]{2}-\d{3}$/), startsWith: () => z.string().startsWith("a"), endsWith: () => z.string().endsWith("z"),
  includes: () => z.string().includes("mid"), regexAndLength: () => z.string().regex(/^[a-z]+$/).min(2).max(6),
  nonempty: () => z.string().nonempty(), email: () => z.string().email(), url: () => z.string().url(), uuid: () => z.string().uuid(),
  cuid: () => z.string().cuid(), cuid2: () => z.string().cuid2(), ulid: () => z.string().ulid(), nanoid: () => z.string().nanoid(),
  base64: () => z.string().base64(), base64url: () => z.string().base64url(), datetime: () => z.string().datetime(),
  date: () => z.string().date(), time: () => z.string().time(), duration: () => z.string().duration(), emoji: () => z.string().emoji(),
  ipv4: () => z.ipv4(), ipv6: () => z.ipv6(), cidrv4: () => z.cidrv4(), cidrv6: () => z.cidrv6(), e164: () => z.e164(),
  guid: () => z.guid(), uuidv4: () => z.uuidv4(), uuidv7: () => z.uuidv7(), hex: () => z.hex(), hostname: () => z.hostname(),
  jwt: () => z.jwt(), isoDate: () => z.iso.date(), isoDatetime: () => z.iso.datetime({ offset: true }), isoTime: () => z.iso.time(),
  lowercase: () => z.string().lowercase(), uppercase: () => z.string().uppercase(), trim: () => z.string().trim(),
  number: () => z.number(), int: () => z.number().int(), zInt: () => z.int(), int32: () => z.int32(), uint32: () => z.uint32(),
  float32: () => z.float32(), positive: () => z.number().positive(), negative: () => z.number().negative(),
  nonnegative: () => z.number().nonnegative(), gt: () => z.number().gt(0.5).lt(2.5), range: () => z.number().int().min(1).max(10),
  multipleOf: () => z.number().int().multipleOf(5), safe: () => z.number().safe(), finite: () => z.number().finite(),
  boolean: () => z.boolean(), null: () => z.null(), any: () => z.any(), unknown: () => z.unknown(), never: () => z.never().optional(),
  literal: () => z.literal("a"), literalNumber: () => z.literal(7), literals: () => z.literal(["a", 2, true]),
  enum: () => z.enum(["red", "green"]), nativeEnum: () => z.nativeEnum({ A: 0, B: "b" }), nullable: () => z.string().nullable(),
  optional: () => z.string().optional(), nullish: () => z.number().nullish(), default: () => z.string().default("x"),
  catch: () => z.number().catch(1), describe: () => z.string().describe("a word"), readonly: () => z.array(z.number()).readonly(),
  brand: () => z.string().brand("B"), array: () => z.array(z.boolean()), arrayBounds: () => z.array(z.enum(["a", "b"])).min(1).max(3),
  arrayLength: () => z.array(z.boolean()).length(2), tuple: () => z.tuple([z.boolean(), z.literal("a")]),
  tupleRest: () => z.tuple([z.boolean()]).rest(z.boolean()), set: () => z.set(z.boolean()), map: () => z.map(z.string(), z.boolean()),
  object: () => z.object({ a: z.boolean(), b: z.enum(["x"]) }), partial: () => z.object({ a: z.boolean() }).partial(),
  strict: () => z.object({ a: z.boolean() }).strict(), passthrough: () => z.object({ a: z.boolean() }).passthrough(),
  catchall: () => z.object({ a: z.boolean() }).catchall(z.boolean()), extend: () => z.object({ a: z.boolean() }).extend({ b: z.null() }),
  pick: () => z.object({ a: z.boolean(), b: z.string() }).pick({ a: true }), nested: () => z.object({ a: z.object({ b: z.boolean() }) }),
  record: () => z.record(z.string(), z.boolean()), recordEnum: () => z.record(z.enum(["a", "b"]), z.boolean()),
  partialRecord: () => z.partialRecord(z.enum(["a", "b"]), z.boolean()), union: () => z.union([z.boolean(), z.literal("a")]),
  discriminated: () => z.discriminatedUnion("k", [z.object({ k: z.literal("a"), n: z.boolean() }), z.object({ k: z.literal("b") })]),
  intersection: () => z.intersection(z.object({ a: z.boolean() }), z.object({ b: z.boolean() })), lazy: () => z.lazy(() => z.boolean()),
  recursive: () => { const node = z.object({ v: z.boolean(), next: z.lazy(() => node).nullable() }); return node; },
  template: () => z.templateLiteral(["v", z.number().int(), z.enum(["a", "b"])]), json: () => z.json(), stringbool: () => z.stringbool(),
  file: () => z.file(), refine: () => z.string().refine((x) => x.length >= 0), pipe: () => z.string().pipe(z.string()),
  effects: () => z.string().transform((x) => x.length),
});

async function post(body) {
  const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers: { "x-api-key": key },
    body: JSON.stringify({ messages: [{ role: "user", content: "Tell me a story." }], max_tokens: 40, temperature: 0, ...body }) });
  return { status: answer.status, body: await answer.json() };
}
function accepted(type, text) {
  try { return type.safeParse(JSON.parse(text)).success; } catch { return false; }
}
// What the JSON Schema does not say, or in a pattern that the server does not enforce (emoji): zod may refuse an answer.
const unsaid = { "zod 4": ["emoji", "jwt", "stringbool", "file"],
  "zod 3": ["base64", "datetime", "time", "emoji", "multipleOf", "map"] };   // multipleOf: beyond 2^53, which zod 4 excludes
async function one(name, type, schema, checked) {
  const format = (strict) => ({ response_format: { type: "json_schema", json_schema: { name: "a", strict, schema } } });
  if (name.endsWith(" never")) return ok(`${name}: nothing fits`, (await post(format(false))).status === 400);
  const { status, body } = await post(format(false)), choice = body.choices?.[0];
  ok(`${name}: response_format`, status === 200, body);
  if (checked && choice?.finish_reason === "stop") ok(`${name}: zod accepts it`, accepted(type, choice.message.content), choice.message.content);
  const tools = [{ type: "function", function: { name: "f", parameters: schema } }];
  const must = schema.type === "object";               // arguments are an object: no other type can be forced
  const called = await post({ tools, tool_choice: must ? "required" : "auto", parallel_tool_calls: false });
  ok(`${name}: a tool`, called.status === 200, called.body);
  const text = called.body.choices?.[0].finish_reason === "tool_calls" && called.body.choices[0].message.tool_calls[0].function.arguments;
  if (checked && must && text) ok(`${name}: zod accepts its arguments`, accepted(type, text), text);
  const strict = await post(format(true)), message = strict.body.error?.message ?? "";
  const keywords = JSON.stringify(schema).match(/"\$?\w+"(?=:)/g) ?? [];
  ok(`${name}: strict`, strict.status === 200 || strict.status === 400 && keywords.some((k) => message.includes(k.replaceAll('"', ""))), strict);
}
async function grid(version, z, write) {
  let n = 0;
  for (const [name, make] of Object.entries(types(z))) {
    let whole, member;
    try { whole = write(make()); member = write(z.object({ v: make() })); } catch { continue; }   // not in this version, or not in JSON
    n++;
    const checked = !unsaid[version].includes(name);
    await one(`${version} ${name}`, make(), whole, checked);
    await one(`${version} {${name}}`, z.object({ v: make() }), member, checked);
  }
  ok(`${version}: 60 types at least`, n >= 60, n);
  console.log(`# ${version}: ${n} types`);
}
const { z, toJSONSchema = z.toJSONSchema } = await need("zod");
await grid("zod 4", z, toJSONSchema);
const [three, convert] = await Promise.all([need("zod/v3"), need("zod-to-json-schema")]).catch(() => []);
if (convert) await grid("zod 3", three.z, (type) => convert.zodToJsonSchema(type));
else console.log("# not installed: zod 3, or zod-to-json-schema");
console.log(`# zod: ${passed} passed, ${failed} failed`);
