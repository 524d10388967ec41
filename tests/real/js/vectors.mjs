// The codec of wire.mjs against every entry of a wire-vectors.json, as docs/wire.md means it:
//
//   node vectors.mjs FILE
//
// prints how many checks it made; what differs is told, and makes the exit code 1.

import { readFileSync } from "node:fs";
import * as wire from "./wire.mjs";

const { list, name, number, octets, stream, string, words } = wire;
const or = (check) => (x) => x === null || check(x);
const array = (...checks) => (x) =>
  Array.isArray(x) && x.length === checks.length && checks.every((check, i) => check(x[i]));
const oneOf = (...words) => (x) => words.includes(x);
const map = (check) => (x) =>
  x !== null && typeof x === "object" && Object.entries(x).every(([k, v]) => name(k) && check(v));
const text = string(0, 262144);
const reason = oneOf("stop", "length", "tool_calls", "content_filter");
const kind = oneOf("text", "reasoning", "refusal", "tool_call", "document");
const tool = or(array(number(), or(string()), or(string())));
const usage = or(array(number(), number(), or(number()), or(number())));
const models = map(array(number(), number(0, 2)));

// An agent reads nothing of this; a router would.
const FROM_AGENT = {
  [wire.ACCEPTED]: [[stream]],
  [wire.DECLINED]: [[stream, name, words, or(number())], ["", null]],
  [wire.WAITING]: [[stream, name]],
  [wire.DELTAS]: [[list(array(stream, number(), number(0, 2), text))]],
  [wire.RICH_DELTA]: [
    [stream, number(), kind, text, tool, or(octets(0, Infinity)), number()],
    [null, null, 0],
  ],
  [wire.PIECE]: [[stream, number(), number(), text]],
  [wire.FINISHING]: [[stream, number(), reason]],
  [wire.FINISHED]: [[stream, number(), reason, usage, or(string())], [null, null]],
  [wire.FAILED]: [
    [
      stream, name, words, or(number()), octets(0, 65536),
      or(string()), or(number()), or(string()), or(string()),
    ],
    [null, Buffer.alloc(0), null, null, null, null],
  ],
  [wire.OBSERVATION]: [
    [
      number(), number(), number(), number(), models,
      or(number()), list(name), or(list(Array.isArray)),
    ],
    [null],
  ],
  [wire.DRAINING]: [[]],
  [wire.COUNTED]: [[stream, or(number())]],
};

const isBytes = (x) => "bytes" in x && Object.keys(x).length === 1;

function through(x, change) {
  const changed = change(x);
  if (changed !== undefined) return changed;
  if (Array.isArray(x)) return x.map((inner) => through(inner, change));
  if (x === null || typeof x !== "object") return x;
  return Object.fromEntries(Object.entries(x).map(([k, v]) => [k, through(v, change)]));
}

// From what the file shows to values, and back.
const real = (shown) =>
  through(shown, (x) =>
    x !== null && typeof x === "object" && isBytes(x) ? Buffer.from(x.bytes, "hex") : undefined);
const shown = (value) =>
  through(value, (x) => {
    if (Buffer.isBuffer(x)) return { bytes: x.toString("hex") };
    return x instanceof wire.Odd ? x.value : undefined;
  });

const hex = (bytes) => bytes.toString("hex");
let checks = 0;

function check(what, found, expected) {
  checks += 1;
  const [is, should] = [JSON.stringify(found), JSON.stringify(expected)];
  if (is === should) return;
  process.exitCode = 1;
  console.log(`${what}: ${is} in place of ${should}`);
}

function read(from, digits) {
  const bytes = Buffer.from(digits, "hex");
  check("length", bytes.readUInt32BE(), bytes.length - 4);
  const both = { router: wire.FROM_ROUTER, agent: FROM_AGENT };
  const other = from === "agent" ? both.router : both.agent;
  return wire.readBody(bytes.subarray(4), both[from], (number) => number in other);
}

function refusal(from, digits) {
  try {
    read(from, digits);
  } catch (error) {
    return error.reason;
  }
  return null;
}

function costOf([number, ...fields]) {
  if (number === wire.PIECE) return wire.cost(fields[3]);
  const [, , , text, tool, logprobs] = fields;
  return wire.cost(text, tool?.[1] ?? null, tool?.[2] ?? null, logprobs);
}

const vectors = JSON.parse(readFileSync(process.argv[2]));

for (const vector of vectors.frames) {
  check(`write ${vector.name}`, hex(wire.frame(...real(vector.fields))), vector.hex);
  for (const from of vector.from === "both" ? ["router", "agent"] : [vector.from])
    check(`read ${vector.name}`, shown(read(from, vector.hex)), vector.fields);
}

const opening = vectors.opening;
const bodyOf = (who) => Buffer.from(opening[`${who} hello`], "hex").subarray(4);
for (const [who, other] of [["router", "agent"], ["agent", "router"]]) {
  const said = opening[`${who} hello`];
  check(`hello of the ${who}`, hex(wire.frame(...read(who, said))), said);
  const mac = wire.proof(opening.token, who, bodyOf(who), bodyOf(other));
  check(`proof of the ${who}`, hex(wire.frame(wire.PROOF, mac)), opening[`${who} proof`]);
}

for (const { text, frame, cost } of vectors.costs) {
  const vector = vectors.frames.find((one) => one.name === frame);
  check("cost", text === undefined ? costOf(real(vector.fields)) : wire.cost(text), cost);
}

const job = Buffer.from(vectors.job.hex, "hex");
check("read the job", shown(wire.unpack(job)), vectors.job.fields);
check("write the job", hex(wire.pack(vectors.job.fields)), vectors.job.hex);

for (const vector of vectors.refused)
  check(`refuse ${vector.hex}`, refusal(vector.from, vector.hex), vector.reason);

console.log(`${checks} checks`);
