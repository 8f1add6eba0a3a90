// The page: what is asked goes to the worker, what it says is shown.

const $ = (id) => document.getElementById(id);
const form = $("form"), request = $("request"), constrained = $("constrained"), ask = $("ask");

$("unserved").hidden = true;
$("app").hidden = false;

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
worker.onmessage = ({ data }) => Object.entries(data).forEach(([kind, value]) => shown[kind]?.(value, data));
worker.onerror = (event) => shown.error(`The page's worker couldn't be started${event.message ? `: ${event.message}` : "."}`);

const shown = {
  loaded(loaded, { total }) {
    $("progress").max = total;
    $("progress").value = loaded;
    $("state").textContent = `Loading the model: ${size(loaded)} of ${size(total)}`;
  },
  stage(stage) {
    $("progress").removeAttribute("value");
    $("state").textContent = `Loaded; ${stage} …`;
  },
  ready(ready) {
    $("progress").hidden = true;
    const threads = ready.threads === 1 ? "one thread" : `${ready.threads} threads`;
    const why = self.crossOriginIsolated ? "" : " (the page isn't cross-origin isolated)";
    $("state").textContent = `Ready, on ${threads}${why}. The tools were read ahead: ${ready.ahead} tokens.`;
    ask.disabled = false;
    memory(ready);
    document.body.dataset.state = "ready";
  },
  text(text) {
    $("raw").textContent = text;
  },
  answer(answer) {
    ask.disabled = false;
    document.body.dataset.state = "answered";
    document.body.dataset.tokens = JSON.stringify(answer.tokens);
    $("raw").textContent = answer.text;
    calls(answer);
    const { steps } = answer;
    number("first", answer.firstTokenMs, `${answer.firstTokenMs.toFixed(0)} ms`);
    if (steps > 0) number("speed", (1000 * steps) / answer.decodeMs, `${((1000 * steps) / answer.decodeMs).toFixed(1)} tokens/s`);
    else number("speed", "", "one token has no speed");
    number("tokens", answer.tokens.length, `${answer.tokens.length}, to ${answer.promptTokens} of prompt`);
    memory(answer);
  },
  error(error) {
    $("progress").hidden = true;
    ask.disabled = false;
    $("error").textContent = error;
    $("error").hidden = false;
    document.body.dataset.state = "failed";
  },
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = request.value.trim();
  if (!text || ask.disabled) return;
  ask.disabled = true;
  $("error").hidden = true;
  $("calls").replaceChildren();
  $("raw").textContent = "";
  document.body.dataset.state = "asked";
  worker.postMessage({ ask: text, constrained: constrained.checked });
});

request.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});

/** The calls in an answer, one item each. */
function calls({ calls: found, problem }) {
  const list = $("calls");
  if (!found) return list.append(item(problem));
  if (!found.length) return list.append(item("Nothing is called."));
  for (const { name, arguments: values } of found) {
    const entry = item("");
    const title = document.createElement("strong");
    title.textContent = name;
    entry.append(title);
    const table = document.createElement("dl");
    for (const [key, value] of Object.entries(values ?? {})) {
      const term = document.createElement("dt"), detail = document.createElement("dd");
      term.textContent = key;
      detail.textContent = typeof value === "string" ? value : JSON.stringify(value);
      table.append(term, detail);
    }
    if (table.children.length) entry.append(table);
    list.append(entry);
  }
}

function item(text) {
  const entry = document.createElement("li");
  entry.textContent = text;
  return entry;
}

function memory({ wasmBytes, heapBytes }) {
  number("wasm", wasmBytes, size(wasmBytes));
  const page = performance.memory?.usedJSHeapSize ?? null;
  if (heapBytes === null && page === null) number("heap", "", "this browser doesn't tell");
  else number("heap", (heapBytes ?? 0) + (page ?? 0), size((heapBytes ?? 0) + (page ?? 0)));
}

function number(id, value, text) {
  $(id).textContent = text;
  $(id).dataset.value = value;
}

function size(bytes) {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
