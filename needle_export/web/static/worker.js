// The page's other thread: it loads the model and answers requests, so that the page never stands still.
//
// Messages to it: {ask, constrained}. Messages from it: {loaded, total}, {stage}, {ready}, {token}, {answer}, {error}.

const base = new URL("./", import.meta.url);

/** Memories of WebAssembly, to tell how large they are; the runtime doesn't hand its own out. */
const memories = [];
WebAssembly.Memory = class extends WebAssembly.Memory {
  constructor(descriptor) {
    super(descriptor);
    memories.push(this);
  }
};

let assistant = null;
let busy = Promise.resolve();

self.onmessage = ({ data }) => {
  // One request after the other: they share the model's state.
  busy = busy.then(() => answer(data)).catch(fail);
};

busy = start().catch(fail);

async function start() {
  const [{ Assistant }, { Model }, { Tokenizer }] = await Promise.all(
    ["assistant.js", "model.js", "tokenizer.js"].map((name) => import(new URL(name, base))),
  );
  const site = await json("site.json");
  const read = reader(site);
  const ort = await import(new URL(site.runtime.module, base));
  ort.env.wasm.wasmPaths = new URL("runtime/", base).href;
  // More than one thread needs memory that is shared, which browsers give to isolated pages alone.
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, Math.max(1, navigator.hardwareConcurrency >> 1)) : 1;
  const [table, grammar] = await Promise.all([read.json("data/tokenizer.json"), read.json("data/grammar.json")]);
  const model = await Model.open(ort, site.model, (name) => read.bytes(`model/${name}`));
  read.forget();
  assistant = new Assistant(model, new Tokenizer(table), site.prompt, grammar);
  post({ stage: "reading the tools" });
  const began = performance.now();
  const ahead = await assistant.warm();
  post({ ready: { ahead, aheadMs: performance.now() - began, threads: ort.env.wasm.numThreads, ...memory() } });
}

async function answer({ ask, constrained, limit }) {
  if (!assistant) return;
  const { tokenizer } = assistant;
  const heard = [];
  const result = await assistant.ask(ask, {
    constrained,
    limit,
    heard: (token) => {
      heard.push(token);
      post({ text: tokenizer.decode(heard) });
    },
  });
  post({ answer: { ...result, ...memory() } });
}

/** Files of the site, counted as they come. */
function reader(site) {
  const wanted = site.files.filter(({ path }) => path.startsWith("model/") || path.startsWith("data/"));
  const total = wanted.reduce((sum, { bytes }) => sum + bytes, 0);
  const kept = new Map();
  let loaded = 0;
  const bytes = async (path) => {
    if (kept.has(path)) return kept.get(path);
    const response = await get(path);
    const size = wanted.find((file) => file.path === path).bytes;
    const whole = new Uint8Array(size);
    let end = 0;
    const parts = response.body.getReader();
    for (let part = await parts.read(); !part.done; part = await parts.read()) {
      if (end + part.value.length > size) throw new Error(`${path} is larger than site.json says: publish the site again.`);
      whole.set(part.value, end);
      end += part.value.length;
      loaded += part.value.length;
      post({ loaded, total });
    }
    if (end !== size) throw new Error(`${path} was cut off after ${end} of ${size} bytes: load the page again.`);
    kept.set(path, whole);
    return whole;
  };
  return {
    bytes,
    json: async (path) => JSON.parse(new TextDecoder().decode(await bytes(path))),
    forget: () => kept.clear(),
  };
}

async function get(path) {
  let response;
  try {
    response = await fetch(new URL(path, base));
  } catch {
    throw new Error(`${path} couldn't be loaded: is the server still there?`);
  }
  if (!response.ok) throw new Error(`${path} couldn't be loaded (HTTP ${response.status}).`);
  return response;
}

async function json(path) {
  return (await get(path)).json();
}

function memory() {
  return {
    wasmBytes: memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0),
    heapBytes: performance.memory?.usedJSHeapSize ?? null,
  };
}

function post(message) {
  self.postMessage(message);
}

function fail(error) {
  post({ error: String(error?.message ?? error).split("\n")[0] });
}
