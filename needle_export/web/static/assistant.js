// Requests to calls: prompt, prefill, and greedy decoding, within the grammar or free.
//
// The same loop as needle_export/generate/assistant.py.

import { Automaton, Constraint, Masks } from "./grammar.js";

export class Assistant {
  /**
   * @param {Model} model
   * @param {Tokenizer} tokenizer
   * @param {object} prompt texts before and after a request, limit of tokens, and the tokens around calls
   * @param {object} grammar of the calls
   */
  constructor(model, tokenizer, prompt, grammar) {
    this.model = model;
    this.tokenizer = tokenizer;
    this.prompt = prompt;
    // Markers are no text, though their pieces have letters: they end or begin parts of an answer.
    const apart = new Set(prompt.frame.apart);
    const pieces = tokenizer.bytes.map((bytes, token) => (apart.has(token) ? new Uint8Array(0) : bytes));
    const thinkable = pieces.flatMap((bytes, token) => (bytes.length || token === prompt.frame.thought ? [token] : []));
    this.frame = { ...prompt.frame, thinkable };
    this.masks = new Masks(new Automaton(grammar), pieces);
    this.common = null;
  }

  /** Tokens of the prompt with a request. */
  render(request) {
    const text = this.prompt.before + request + this.prompt.after;
    return [this.tokenizer.table.bos_id, ...this.tokenizer.encode(text)];
  }

  /** Read what every prompt begins with, so that a request needn't wait for it; how many tokens that are. */
  async warm() {
    // Two requests that have nothing in common share what all do, but for a token that may merge with a request's first.
    const one = this.render("a"), other = this.render("\n");
    let count = 0;
    while (one[count] === other[count]) count++;
    this.model.reset();
    await this.model.feed(one.slice(0, count));
    this.common = { tokens: one.slice(0, count), mark: this.model.mark() };
    return count;
  }

  /**
   * Answer one request.
   *
   * @param {boolean} constrained whether only valid calls may be answered
   * @param {number} limit at most so many tokens are generated
   * @param {(token: number) => void} heard called with each token
   */
  async ask(request, { constrained = true, limit = this.prompt.max_new_tokens, heard = () => {} } = {}) {
    const { model } = this;
    const started = performance.now();
    const tokens = this.render(request);
    const context = model.about.context;
    if (tokens.length >= context) throw new Error(`The prompt has ${tokens.length} tokens, and the context holds ${context}.`);
    const known = this.#resume(tokens);
    let logits = await model.feed(tokens.slice(known));
    const constraint = constrained ? new Constraint(this.masks, this.frame) : null;
    const ends = [this.frame.message_end, this.tokenizer.table.eos_id];
    // The last token is known without a place of its own in the context.
    const most = Math.min(limit, context - tokens.length + 1);
    const answer = [];
    let first = 0, finished = false;
    while (true) {
      const token = constraint ? best(logits, constraint.admitted()) : argmax(logits);
      first ||= performance.now();
      if (!constraint && ends.includes(token)) {
        finished = true;
        break;
      }
      answer.push(token);
      heard(token);
      constraint?.push(token);
      finished = constraint?.done ?? false;
      if (finished || answer.length === most) break;
      logits = await model.feed([token]);
    }
    const text = this.tokenizer.decode(answer.filter((token) => token < this.tokenizer.bytes.length));
    const calls = finished ? parsed(text) : null;
    return {
      tokens: answer,
      text,
      calls,
      problem: !finished ? "It didn't end within the limit of tokens." : calls ? "" : "It isn't calls.",
      finished,
      promptTokens: tokens.length,
      readAhead: known,
      firstTokenMs: first - started,
      decodeMs: performance.now() - first,
      steps: answer.length - 1 + (finished && !constraint ? 1 : 0),
    };
  }

  /** Go back to where the common beginning was read, if a prompt has it; how many tokens needn't be read again. */
  #resume(tokens) {
    const { common } = this;
    if (common && common.tokens.every((token, i) => token === tokens[i])) {
      this.model.at(common.mark);
      return common.tokens.length;
    }
    this.model.reset();
    return 0;
  }
}

/** The index of the greatest number, the first of equals. */
export function argmax(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

/** The token with the greatest logit of those that are admitted, the first of equals. */
function best(logits, admitted) {
  let found = admitted[0];
  for (const token of admitted) if (logits[token] > logits[found]) found = token;
  return found;
}

/** The calls in an answer's text, or null where it isn't calls; as parse_calls in needle_export/generate/calls.py. */
export function parsed(text) {
  const found = /^\s*(?:<think>.*?<\/think>\s*)?<tool_call>(.*)<\/tool_call>\s*(?:<\|im_end\|>)?\s*$/s.exec(text);
  if (!found) return null;
  let calls;
  try {
    calls = JSON.parse(found[1]);
  } catch {
    return null;
  }
  const isCall = (call) =>
    call !== null && typeof call === "object" && Object.keys(call).sort().join() === "arguments,name" &&
    typeof call.name === "string" && call.arguments !== null && typeof call.arguments === "object" &&
    !Array.isArray(call.arguments);
  return Array.isArray(calls) && calls.every(isCall) ? calls : null;
}
