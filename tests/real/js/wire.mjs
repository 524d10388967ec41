// The frames of docs/wire.md: msgpack, shapes, the proof, what a delta costs. Written from
// that document alone, on node alone, and to stay so: see agent.mjs.

import { createHmac } from "node:crypto";

export const HELLO = 0, PROOF = 1, BYE = 2;
export const OFFER = 16, PART = 17, CANCEL = 18, CREDIT = 19, SEEN = 20, END_REASONING = 21;
export const ACCEPTED = 32, DECLINED = 33, WAITING = 34, DELTAS = 35, RICH_DELTA = 36;
export const PIECE = 37, FINISHING = 38, FINISHED = 39, FAILED = 40, OBSERVATION = 41;
export const DRAINING = 42, COUNTED = 43;

export class WireFault extends Error {
  constructor(reason, words = "") {
    super(words);
    this.reason = reason;
  }
}

// ---- msgpack ----

function tagged(tag, width, number) {
  const bytes = Buffer.alloc(1 + width);
  bytes[0] = tag;
  bytes.writeUIntBE(number, 1, width);
  return bytes;
}

// The shortest head of an array, a map, a string or bytes, or a small number itself.
function head(number, short, shortRoom, tag8, tag16, tag32) {
  if (number < shortRoom) return Buffer.of(short | number);
  if (tag8 && number < 2 ** 8) return tagged(tag8, 1, number);
  return number < 2 ** 16 ? tagged(tag16, 2, number) : tagged(tag32, 4, number);
}

function packNumber(value) {
  if (Number.isInteger(value) && value >= 0 && value < 2 ** 32)
    return head(value, 0, 128, 0xcc, 0xcd, 0xce);
  const bytes = Buffer.alloc(9);
  if (!Number.isInteger(value)) {
    bytes[0] = 0xcb;
    bytes.writeDoubleBE(value, 1);
  } else if (value < 0) {
    bytes[0] = 0xd3;
    bytes.writeBigInt64BE(BigInt(value), 1);
  } else {
    bytes[0] = 0xcf;
    bytes.writeBigUInt64BE(BigInt(value), 1);
  }
  return bytes;
}

export function pack(value) {
  if (value === null) return Buffer.of(0xc0);
  if (typeof value === "boolean") return Buffer.of(value ? 0xc3 : 0xc2);
  if (typeof value === "number") return packNumber(value);
  if (typeof value === "string") {
    const bytes = Buffer.from(value);
    return Buffer.concat([head(bytes.length, 0xa0, 32, 0xd9, 0xda, 0xdb), bytes]);
  }
  if (Buffer.isBuffer(value))
    return Buffer.concat([head(value.length, 0, 0, 0xc4, 0xc5, 0xc6), value]);
  if (Array.isArray(value))
    return Buffer.concat([head(value.length, 0x90, 16, 0, 0xdc, 0xdd), ...value.map(pack)]);
  const items = Object.entries(value).flat().map(pack);
  return Buffer.concat([head(items.length / 2, 0x80, 16, 0, 0xde, 0xdf), ...items]);
}

// What is no value of a message: a float, even 1.0, since numbers are integers here; and
// what an extension type holds.
export class Odd {
  constructor(value) {
    this.value = value;
  }
}

class Unpacker {
  utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  at = 0;

  constructor(bytes) {
    this.bytes = bytes;
  }

  take(count) {
    if (this.at + count > this.bytes.length) throw new RangeError("it ends too early");
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }

  number(width) {
    return this.take(width).readUIntBE(0, width);
  }

  text(count) {
    return this.utf8.decode(this.take(count));
  }

  array(count) {
    const items = [];
    while (items.length < count) items.push(this.value());
    return items;
  }

  map(count) {
    const items = Object.create(null); // where "__proto__" is a key like others
    for (let i = 0; i < count; i++) items[this.value()] = this.value();
    return items;
  }

  extension(count) {
    return new Odd(this.take(1 + count));
  }

  value() {
    const tag = this.number(1);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return this.map(tag & 15);
    if (tag < 0xa0) return this.array(tag & 15);
    if (tag < 0xc0) return this.text(tag & 31);
    if (tag >= 0xe0) return tag - 256;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.number(1 << (tag - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return this.extension(this.number(1 << (tag - 0xc7)));
      case 0xca: return new Odd(this.take(4).readFloatBE());
      case 0xcb: return new Odd(this.take(8).readDoubleBE());
      case 0xcc: case 0xcd: case 0xce: return this.number(1 << (tag - 0xcc));
      case 0xcf: return safe(this.take(8).readBigUInt64BE());
      case 0xd0: return this.take(1).readInt8();
      case 0xd1: return this.take(2).readInt16BE();
      case 0xd2: return this.take(4).readInt32BE();
      case 0xd3: return safe(this.take(8).readBigInt64BE());
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return this.extension(1 << (tag - 0xd4));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.number(1 << (tag - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.number(2 << (tag - 0xdc)));
      case 0xde: case 0xdf: return this.map(this.number(2 << (tag - 0xde)));
    }
    throw new RangeError(`the tag ${tag} has no meaning`);
  }
}

// A number where it is one exactly; else a BigInt, which no check of a field takes.
const safe = (big) => (big >= -(2n ** 53n) && big <= 2n ** 53n ? Number(big) : big);

export function unpack(bytes) {
  const unpacker = new Unpacker(bytes);
  try {
    const whole = unpacker.value();
    if (unpacker.at < bytes.length) throw new RangeError("bytes are left");
    return whole;
  } catch (error) {
    // A RangeError, from a nesting too deep as well, or a TypeError of UTF-8.
    throw new WireFault("garbage", error.message);
  }
}

// ---- frames ----

// Characters are code points; no string has more of them than its length.
const characters = (x) => (x.length > 256 ? [...x].length : x.length);
export const number = (low = 0, high = 2 ** 53) => (x) =>
  Number.isInteger(x) && x >= low && x <= high;
export const string = (low = 0, high = Infinity) => (x) =>
  typeof x === "string" && characters(x) >= low && characters(x) <= high;
export const octets = (low, high) => (x) =>
  Buffer.isBuffer(x) && x.length >= low && x.length <= high;
export const list = (item, high = Infinity) => (x) =>
  Array.isArray(x) && x.length <= high && x.every(item);
export const name = string(1, 256), words = string(0, 4096), stream = number(1);

// Of each message the checks of its fields, and the defaults of those at the end.
export const BOTH = {
  [HELLO]: [
    [string(), number(), number(), name, name, number(), octets(16, 64), list(name, 32)],
  ],
  [PROOF]: [[octets(0, 64)]],
  [BYE]: [[name, words], [""]],
};
export const FROM_ROUTER = {
  [OFFER]: [
    [stream, name, number(1, 2 ** 31), number(), name, number(), number(), number(), number(0, 1)],
    [0, 0],
  ],
  [PART]: [[stream, number(), octets(1, 65536)]],
  [CANCEL]: [[stream]],
  [CREDIT]: [[stream, number()]],
  [SEEN]: [[number()]],
  [END_REASONING]: [[stream]],
};

export function frame(...message) {
  const body = pack(message);
  return Buffer.concat([tagged(0, 4, body.length).subarray(1), body]);
}

// The message of a body, from a peer that says *theirs*; *isOurs* knows our own numbers.
export function readBody(body, theirs, isOurs) {
  const message = unpack(body);
  const kind = Array.isArray(message) ? message.shift() : null;
  if (!number()(kind)) throw new WireFault("bad_shape", "a body is an array with a number");
  const shape = BOTH[kind] ?? theirs[kind];
  if (!shape)
    throw new WireFault(isOurs(kind) ? "wrong_direction" : "unknown_message", `message ${kind}`);
  const [checks, defaults = []] = shape;
  const missing = checks.length - message.length;
  if (missing > 0 && missing <= defaults.length) message.push(...defaults.slice(-missing));
  if (message.length !== checks.length || !checks.every((check, i) => check(message[i])))
    throw new WireFault("bad_shape", `fields of message ${kind}`);
  return [kind, ...message];
}

export function proof(token, role, own, peers) {
  if (!token) return Buffer.alloc(0);
  const mac = createHmac("sha256", token);
  for (const part of [Buffer.from(`fencepost wire 1 ${role}`), own, peers])
    mac.update(tagged(0, 4, part.length).subarray(1)).update(part);
  return mac.digest();
}

export const cost = (...strings) =>
  strings.reduce((sum, x) => sum + (x === null ? 0 : Buffer.byteLength(x)), 64);
