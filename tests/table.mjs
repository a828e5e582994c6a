// table.mjs - the table of clients in docs/server.md: rows from rows.mjs, a column for each feature. clients.mjs --table writes the
// rows that it ran; node table.mjs checks that the table has the rows and columns of rows.mjs, and that its cells are those of rows.mjs.
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { rows } from "./rows.mjs";

export const features = ["plain", "stream", "tools", "second turn", "structured", "thoughts", "abort", "errors"];
export const rowName = (row) => row.packages.map((name) => `\`${name}\``).join(", ") + (row.name ? `: ${row.name}` : "");
const file = new URL("../docs/server.md", import.meta.url), begin = "<!-- tests/clients.mjs --table -->\n", end = "<!-- end -->\n";
const cell = (row, feature) => row.faults?.[feature] ? `no: ${row.faults[feature]}` : "yes";
const head = (cells) => `| ${cells.join(" | ")} |`;

function read() {                                       // the text before, the lines, the text after
  const text = readFileSync(file, "utf8"), from = text.indexOf(begin) + begin.length, to = text.indexOf(end);
  if (to < from) throw new Error("docs/server.md: no table of clients");
  return [text.slice(0, from), text.slice(from, to).split("\n").slice(0, -1), text.slice(to)];
}
const nameOf = (line) => line.slice(2).split(" | ")[0];  // with versions: `openai` 6.49.0: chat
const plainName = (line) => nameOf(line).replace(/` [\d.]+/g, "`");

// Rows that did not run keep the line that they have.
export function write(made, version) {
  const [before, lines, after] = read();
  const line = (row) => {
    if (!made.includes(row)) return lines.find((l) => plainName(l) === rowName(row));
    const versions = row.packages.map((name) => `\`${name}\` ${version(name).replace(/-.*/, "")}`).join(", ");
    return head([versions + (row.name ? `: ${row.name}` : ""), ...features.map((f) => cell(row, f))]);
  };
  const table = [head(["client", ...features]), `|${"---|".repeat(features.length + 1)}`, ...rows.map(line).filter(Boolean)];
  writeFileSync(file, before + table.join("\n") + "\n" + after);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [, lines] = read(), wanted = rows.map((row) => head([rowName(row), ...features.map((f) => cell(row, f))]));
  const found = lines.slice(2).map((l) => head([plainName(l), ...l.slice(2, -2).split(" | ").slice(1)]));
  const wrong = [[head(["client", ...features]), ...wanted], [lines[0], ...found]];
  for (let i = 0; i < Math.max(wrong[0].length, wrong[1].length); i++)
    if (wrong[0][i] !== wrong[1][i]) {
      console.log(`docs/server.md: expected ${wrong[0][i]}, got ${wrong[1][i]}; try LONG=1 and --table (tests/test_clients.sh)`);
      process.exitCode = 1;
    }
}
