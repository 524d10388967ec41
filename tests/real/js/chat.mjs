// Scenarios with the official OpenAI SDK, only `baseURL` changed:
//   node chat.mjs BASE_URL PLAYS_JSON
// plays each [scenario, request] in turn and prints what the SDK gave of each, as one line
// of JSON. The tests judge it.

import OpenAI from "openai";

const [baseURL, json] = process.argv.slice(2);

const scenarios = {
  async models(sdk) {
    const listed = [];
    for await (const model of sdk.models.list()) listed.push(model.id);
    return { listed, one: await sdk.models.retrieve(listed[0]) };
  },

  async whole(sdk, asked) {
    return { reply: await sdk.chat.completions.create(asked) };
  },

  // Every chunk as it comes; *got* holds them for whoever fails.
  async stream(sdk, asked, got) {
    for await (const chunk of await sdk.chat.completions.create({ ...asked, stream: true }))
      got.push(chunk);
    return { chunks: got };
  },

  // The SDK's own accumulator, which parses the arguments of strict tools as each call ends.
  async accumulate(sdk, asked) {
    const parsed = [];
    const stream = sdk.chat.completions.stream(asked);
    stream.on("tool_calls.function.arguments.done", (call) => parsed.push(call.parsed_arguments));
    return { parsed, reply: await stream.finalChatCompletion() };
  },

  // Leaves after the first text.
  async close(sdk, asked) {
    const stream = await sdk.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    return { left: true };
  },
};

async function play(scenario, { apiKey = "none", ...asked }) {
  const sdk = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
  const got = [];
  try {
    return await scenarios[scenario](sdk, asked, got);
  } catch (error) {
    return {
      error: error.constructor.name,
      status: error.status ?? null,
      code: error.code ?? null,
      type: error.type ?? null,
      param: error.param ?? null,
      message: error.message,
      requestID: error.requestID ?? null,
      retryAfter: error.headers?.get("retry-after") ?? null,
      chunks: got,
    };
  }
}

const said = [];
for (const [scenario, asked] of JSON.parse(json)) said.push(await play(scenario, asked));
console.log(JSON.stringify(said));
