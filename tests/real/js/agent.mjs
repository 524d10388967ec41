// An agent in another language, on node's standard library. It hosts one model, `echo`,
// whose answer is the last user message, word by word:
//
//   AGENT_TOKEN=... node agent.mjs [--id NAME] [--port N] [--slots N] [--pause MS]
//
// It prints the address that it listens on. It was written from docs/wire.md alone, by
// somebody who had not read our code, and must stay so: it shows that the document is
// enough. Where the two differ, mend the document, or this by the document's words.

import { randomBytes, timingSafeEqual } from "node:crypto";
import { createServer } from "node:net";
import { parseArgs } from "node:util";
import {
  ACCEPTED, BYE, CANCEL, COUNTED, CREDIT, DECLINED, DELTAS, DRAINING, FAILED, FINISHED,
  FROM_ROUTER, HELLO, OBSERVATION, OFFER, PART, PIECE, PROOF, RICH_DELTA, WireFault,
  cost, frame, pack, proof, readBody, unpack,
} from "./wire.mjs";

const FRAME_MAX = 2097152, FRAME_MAX_UNPROVEN = 4096, TEXT_MAX = 262144;
const HEARTBEAT_MS = 1000, EXPIRY_MS = 3000, OPENING_MS = 3000, STUCK_MS = 5000;
const MODEL = "echo", SERVES = 2, JOB_MAX = 33554432, JOBS_MAX = 4 * JOB_MAX;
const GATHERING_MAX = 1024, GATHER_MS = 30000, GATHER_STEP = 1024;
const DONE_MAX = 64, BACKLOG_MAX = 1048576, DRAIN_MS = 30000;
const REQUESTS_KEPT = 100000, WORDS_KEPT = 256;
const EPOCH = Date.now(); // greater at each start, as long as the clock is right
const TOKEN = (process.env.AGENT_TOKEN ?? "").trim();
const links = new Set();
const newest = new Map(); // request: its latest attempt, over all connections
let options, server, engine, sequence = 0, draining = false;

const log = (...things) => console.error(...things);
const total = (numbers) => numbers.reduce((sum, x) => sum + x, 0);
const inState = (state) =>
  [...links].flatMap((link) => [...link.live.values()]).filter((job) => job.state === state);

function textOf(message) {
  const content = typeof message === "string" ? message : message?.content;
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => part?.text ?? "").join("") : "";
}

const wordsOf = (text) => text.match(/\s*\S+|\s+$/g) ?? [];

// What to say for one word: a delta, in pieces where it is longer than a delta may be.
function deltaOf(stream, index, text) {
  if (text.length <= TEXT_MAX) return [{ cost: cost(text), entry: [stream, index, 0, text] }];
  const out = [];
  while (text.length > TEXT_MAX) {
    const pair = text.codePointAt(TEXT_MAX - 1) > 0xffff; // never cut a character in two
    const piece = text.slice(0, TEXT_MAX - pair);
    out.push({ cost: cost(piece), frame: frame(PIECE, stream, index, out.length, piece) });
    text = text.slice(piece.length);
  }
  const rich = frame(RICH_DELTA, stream, index, "text", text, null, null, out.length);
  return [...out, { cost: cost(text), frame: rich }];
}

function remember(map, key, value, room) {
  map.delete(key);
  map.set(key, value);
  if (map.size > room) map.delete(map.keys().next().value);
}

// One router's connection.
class Link {
  state = "greeted";
  live = new Map(); // stream: assignment
  highest = 0; // stream: they ascend, so one that is not live up to here is over
  lastWords = new Map(); // stream: its last word
  input = Buffer.alloc(0);
  part = null; // the slots that the router was told last
  heard = Date.now();
  moved = { bytes: 0, at: Date.now() };

  constructor(socket) {
    this.socket = socket;
    socket.setNoDelay(true);
    socket.on("data", (bytes) => this.read(bytes));
    socket.on("error", () => {}); // "close" follows
    socket.on("close", () => this.forget("the connection ended"));
    this.opening = setTimeout(() => this.close("slow_opening"), OPENING_MS);
    const hello = ["fencepost", 1, 1, "agent", options.id, EPOCH, randomBytes(32), ["count"]];
    this.hello = pack([HELLO, ...hello]);
    this.say(HELLO, ...hello);
    links.add(this);
  }

  say(...message) {
    this.write(frame(...message));
  }

  write(bytes) {
    this.socket.cork(); // what is said in one go is written in one go
    process.nextTick(() => this.socket.uncork());
    this.socket.write(bytes);
  }

  close(reason, why = "") {
    if (this.state === "closed") return;
    this.forget(`we say ${reason} ${why}`);
    // Reading goes on, and what comes is left aside: a reset would take the bye with it.
    this.socket.end(frame(BYE, reason, why));
    setTimeout(() => this.socket.destroy(), 500);
  }

  // The end of a connection is the end of all that is on it.
  forget(why) {
    if (this.state === "closed") return;
    log("router", this.peer ?? "?", "gone:", why);
    this.state = "closed";
    clearTimeout(this.opening);
    clearInterval(this.pulse);
    this.live.clear();
    links.delete(this);
    partsChanged();
  }

  read(bytes) {
    this.heard = Date.now();
    this.input = this.input.length ? Buffer.concat([this.input, bytes]) : bytes;
    try {
      while (this.state !== "closed" && this.input.length >= 4) {
        const size = this.input.readUInt32BE();
        const limit = this.state === "open" ? FRAME_MAX : FRAME_MAX_UNPROVEN;
        if (size === 0 || size > limit) throw new WireFault("oversize", `${size} bytes`);
        if (this.input.length < 4 + size) break;
        const body = this.input.subarray(4, 4 + size);
        this.input = this.input.subarray(4 + size);
        const isOurs = (kind) => kind >= ACCEPTED && kind <= COUNTED;
        this.take(body, readBody(body, FROM_ROUTER, isOurs));
      }
    } catch (error) {
      if (!(error instanceof WireFault)) log(error);
      this.close(error.reason ?? "internal", error.message.slice(0, 4096));
    }
  }

  take(body, [kind, ...fields]) {
    if (kind === BYE) {
      this.forget(`it says ${fields.join(" ")}`);
      this.socket.end();
      return;
    }
    const fits = { greeted: kind === HELLO, met: kind === PROOF, open: kind >= OFFER };
    if (!fits[this.state]) throw new WireFault("out_of_order", `message ${kind}`);
    const job = this.live.get(fields[0]);
    if (kind === HELLO) this.meet(body, ...fields);
    else if (kind === PROOF) this.open(fields[0]);
    else if (kind === OFFER) this.offered(fields);
    else if (kind === PART && job) this.gather(job, fields[1], fields[2]);
    else if (kind === CREDIT && job) this.grant(job, fields[1]);
    else if (kind === CANCEL && job) {
      log("cancel", job.stream);
      this.end(job, null);
    }
  }

  // ---- opening ----

  meet(body, magic, low, high, role, id, epoch) {
    if (magic !== "fencepost") throw new WireFault("not_fencepost");
    if (low > 1 || high < 1) throw new WireFault("version", "version 1 is spoken here");
    if (role !== "router") throw new WireFault("role", "this is an agent");
    this.peer = id;
    this.peerEpoch = epoch;
    this.expected = proof(TOKEN, "router", body, this.hello);
    this.say(PROOF, proof(TOKEN, "agent", this.hello, body));
    this.state = "met";
  }

  open(mac) {
    if (mac.length !== this.expected.length || !timingSafeEqual(mac, this.expected))
      throw new WireFault("unauthorized", "the proof is not right");
    for (const other of links)
      if (other.state === "open" && other.peer === this.peer && other.peerEpoch === this.peerEpoch)
        other.close("superseded");
    clearTimeout(this.opening);
    this.state = "open";
    log("router", this.peer, "is here");
    this.observe();
    if (draining) this.say(DRAINING);
    this.pulse = setInterval(() => this.beat(), HEARTBEAT_MS);
  }

  // ---- observations ----

  beat() {
    this.observe();
    for (const job of [...this.live.values()]) {
      if (job.out.length && job.spent === job.spentBefore) log("waits for credit", job.stream);
      job.spentBefore = job.spent;
      if (job.state === "gathering") this.hurry(job);
    }
    const { bytesWritten, writableLength } = this.socket;
    const bytes = bytesWritten - writableLength, now = Date.now();
    if (!writableLength || bytes !== this.moved.bytes) this.moved = { bytes, at: now };
    else if (now - this.moved.at > STUCK_MS) this.close("overflow");
    // After a stop of this process its timers run first: only what reading leaves is silence.
    const isSilent = () => Date.now() - this.heard > EXPIRY_MS;
    if (isSilent()) setImmediate(() => isSilent() && this.close("expired"));
  }

  hurry(job) {
    const now = Date.now();
    if (job.got - job.gotBefore >= GATHER_STEP) [job.gotBefore, job.gotAt] = [job.got, now];
    else if (now - job.gotAt > GATHER_MS) this.decline(job, "too_large");
  }

  // The slots that this router may have, its own included.
  share() {
    const own = [...this.live.values()].filter((job) => job.state === "running").length;
    return options.slots - inState("running").length + own;
  }

  observe() {
    this.part = this.share();
    const models = { [MODEL]: [this.part, SERVES] };
    const load = inState("running").length;
    this.say(OBSERVATION, EPOCH, ++sequence, options.slots, load, models, null, []);
  }

  // ---- assignments ----

  offered(offer) {
    const [stream, request, attempt, epoch, target, size, credit, , purpose] = offer;
    const known = this.live.get(stream);
    if (known && known.offer.some((field, i) => field !== offer[i]))
      throw new WireFault("out_of_order", `stream ${stream} is another offer's`);
    if (known) {
      if (known.state !== "gathering") this.say(ACCEPTED, stream);
      return;
    }
    if (stream <= this.highest) {
      if (this.lastWords.has(stream)) this.write(this.lastWords.get(stream));
      return;
    }
    this.highest = stream;
    const job = {
      offer, stream, target, size, credit, purpose,
      state: "gathering", parts: [], got: 0, // then "running", then "done"
      gotBefore: 0, gotAt: Date.now(),
      index: 0, spent: 0, out: [], // out: what waits for credit
    };
    const latest = purpose ? 0 : newest.get(request) ?? 0;
    if (!purpose) remember(newest, request, Math.max(latest, attempt), REQUESTS_KEPT);
    const hasRoom = this.hasRoom(size);
    this.live.set(stream, job);
    if (attempt <= latest) this.decline(job, "stale");
    else if (epoch !== EPOCH) this.decline(job, "wrong_epoch");
    else if (!hasRoom) this.decline(job, "too_large");
    else this.refuse(job);
  }

  hasRoom(size) {
    const own = [...this.live.values()].filter((job) => job.state === "gathering");
    const sizeOf = (jobs) => total(jobs.map((job) => job.size));
    const free = JOBS_MAX - sizeOf(inState("gathering")) - size;
    if (!size || size > JOB_MAX || free < 0 || inState("done").length > DONE_MAX) return false;
    // No connection shuts others out: it has no more on its way than it leaves, or one job.
    return own.length === 0 || (own.length < GATHERING_MAX && sizeOf(own) + size <= free);
  }

  // What is asked at the offer, and again when the job is whole; true: it was declined.
  refuse(job) {
    const isFull = !job.purpose && inState("running").length >= options.slots;
    let reason = null;
    if (draining) reason = "draining";
    else if (job.target !== MODEL) reason = "unknown_model";
    else if (isFull) reason = "no_slot";
    if (reason === "no_slot") this.observe();
    if (reason) this.decline(job, reason);
    return reason !== null;
  }

  decline(job, reason, why = "") {
    this.end(job, frame(DECLINED, job.stream, reason, why));
  }

  gather(job, offset, octets) {
    if (job.state !== "gathering" || offset !== job.got) return;
    job.parts.push(octets);
    job.got += octets.length;
    if (job.got > job.size) throw new WireFault("out_of_order", "longer than it was offered");
    if (job.got === job.size && !this.refuse(job)) this.begin(job);
  }

  begin(job) {
    let asked;
    try {
      asked = unpack(Buffer.concat(job.parts));
      if (!Array.isArray(asked.messages)) throw new Error("no messages");
    } catch (error) {
      this.decline(job, "bad_job", error.message);
      return;
    }
    const { messages, params = {}, endpoint = "chat" } = asked;
    const isChat = endpoint === "chat";
    const last = isChat ? messages.findLast((m) => m?.role === "user") : messages[0];
    job.parts = [];
    job.prompt = total(messages.map((m) => wordsOf(textOf(m)).length));
    if (job.purpose) {
      this.end(job, frame(COUNTED, job.stream, job.prompt));
      return;
    }
    job.words = wordsOf(textOf(last));
    job.count = Math.min(job.words.length, params.max_tokens ?? Infinity);
    job.state = "running";
    this.say(ACCEPTED, job.stream);
    partsChanged();
    if (endpoint === "embeddings")
      this.end(job, frame(FAILED, job.stream, "rejected", "Echo makes no embeddings.", 400));
  }

  grant(job, credit) {
    job.credit = Math.max(job.credit, credit);
    this.send(job, null);
  }

  // One step of the engine for this job. Its next word is made when the last one is out.
  step(job, entries) {
    if (job.state !== "running" || job.out.length) return;
    if (this.socket.writableLength > BACKLOG_MAX) return;
    if (job.index < job.count) {
      job.out = deltaOf(job.stream, job.index, job.words[job.index]);
      job.index += 1;
    }
    if (job.index === job.count) {
      const reason = job.count < job.words.length ? "length" : "stop";
      const usage = [job.prompt, job.count, null, null];
      job.out.push({ cost: 0, last: frame(FINISHED, job.stream, job.count, reason, usage) });
      job.state = "done"; // its slot is free, whatever waits for credit
      partsChanged();
    }
    this.send(job, entries);
  }

  // *entries*: of this step, which go in one frame; null: out of step.
  send(job, entries) {
    while (job.out.length && (job.out[0].last || job.spent < job.credit)) {
      const next = job.out.shift();
      job.spent += next.cost;
      if (next.last) {
        if (entries?.length) this.say(DELTAS, entries.splice(0)); // they come before the end
        this.end(job, next.last);
      } else if (next.frame) this.write(next.frame);
      else if (entries) entries.push(next.entry);
      else this.say(DELTAS, [next.entry]);
    }
  }

  end(job, word) {
    this.live.delete(job.stream);
    if (word) {
      this.write(word);
      remember(this.lastWords, job.stream, word, WORDS_KEPT);
    }
    partsChanged();
  }
}

// A slot taken or freed by one router is news for the others.
function partsChanged() {
  for (const link of links)
    if (link.state === "open" && link.part !== link.share()) link.observe();
}

function step() {
  for (const link of links) {
    const entries = [];
    for (const job of [...link.live.values()]) link.step(job, entries);
    if (entries.length) link.say(DELTAS, entries);
    if (draining && !link.live.size) link.close("stopping", "the agent stops");
  }
  if (draining && !links.size) clearInterval(engine);
}

function drain() {
  if (draining) return;
  draining = true;
  log("draining");
  server.close();
  for (const link of links) if (link.state === "open") link.say(DRAINING);
  setTimeout(() => {
    for (const link of links)
      for (const job of [...link.live.values()])
        link.end(job, frame(FAILED, job.stream, "drained", "The agent stops."));
  }, DRAIN_MS).unref();
}

const { values } = parseArgs({
  options: {
    id: { type: "string", default: "js" },
    port: { type: "string", default: "0" },
    slots: { type: "string", default: "2" },
    pause: { type: "string", default: "5" },
  },
});
options = { id: values.id, slots: Number(values.slots) };
server = createServer((socket) => new Link(socket));
server.listen(Number(values.port), "127.0.0.1", () => {
  console.log(`listening on 127.0.0.1:${server.address().port}`);
});
engine = setInterval(step, Number(values.pause));
process.on("SIGTERM", drain);
