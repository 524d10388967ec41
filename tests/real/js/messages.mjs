// One scenario with the official Anthropic SDK, only `baseURL` changed:
//   node messages.mjs BASE_URL SCENARIO REQUEST_JSON
// prints what the SDK gave, as one line of JSON. The tests judge it.

import Anthropic from "@anthropic-ai/sdk";

const [baseURL, scenario, json] = process.argv.slice(2);
const asked = JSON.parse(json);
const sdk = new Anthropic({
  baseURL,
  apiKey: asked.apiKey ?? "none",
  maxRetries: 0,
  timeout: 20_000,
});
delete asked.apiKey;

const scenarios = {
  async whole() {
    return { message: await sdk.messages.create(asked) };
  },

  async stream() {
    const events = [];
    const stream = sdk.messages.stream(asked);
    stream.on("streamEvent", (event) => events.push(event.type));
    const message = await stream.finalMessage();
    return { events, message };
  },

  async count() {
    return await sdk.messages.countTokens(asked);
  },

  // An agent's loop: each tool gives back the city that it is asked about.
  async runner() {
    const run = async (input) => String(input.city);
    const tools = asked.tools.map((tool) => ({ ...tool, run, parse: (input) => input }));
    const reasons = [];
    for await (const message of sdk.beta.messages.toolRunner({ ...asked, tools })) {
      reasons.push(message.stop_reason);
    }
    return { reasons };
  },

  // Leaves after the first text.
  async close() {
    const stream = await sdk.messages.create({ ...asked, stream: true });
    for await (const event of stream) {
      if (event.type === "content_block_delta") break;
    }
    return { left: true };
  },
};

let said;
try {
  said = await scenarios[scenario]();
} catch (error) {
  said = {
    error: error.constructor.name,
    status: error.status ?? null,
    type: error.error?.error?.type ?? error.type ?? null,
    message: error.message,
    requestID: error.requestID ?? null,
  };
}
console.log(JSON.stringify(said));
