// What may come next in an answer: its markers in order, and between them what the grammar of calls admits.
//
// The same as needle_export/generate/constraint.py: an automaton over bytes, and the vocabulary's bytes as a trie.

/** A deterministic automaton over bytes, as generate/automaton.py writes it. */
export class Automaton {
  /** @param {{start: number, accept: number[], edges: number[][][]}} described an edge is [lowest byte, highest, target] */
  constructor(described) {
    this.start = described.start;
    this.accept = new Set(described.accept);
    this.edges = described.edges;
  }

  /** The state after one byte, or -1 where none is admitted. */
  after(state, byte) {
    for (const [lowest, highest, target] of this.edges[state]) {
      if (byte <= highest) return byte >= lowest ? target : -1;
    }
    return -1;
  }

  /** The state after some bytes, or -1. */
  step(state, bytes) {
    for (const byte of bytes) {
      state = this.after(state, byte);
      if (state < 0) break;
    }
    return state;
  }
}

/** Tokens that each state admits as a whole; each state is looked at once. */
export class Masks {
  #byState = new Map();
  #root = node();

  /**
   * @param {Automaton} automaton
   * @param {Uint8Array[]} pieces the bytes of each token; one without bytes is never admitted
   */
  constructor(automaton, pieces) {
    this.automaton = automaton;
    this.pieces = pieces;
    pieces.forEach((bytes, token) => {
      if (!bytes.length) return;
      let place = this.#root;
      for (const byte of bytes) {
        if (!place.children.has(byte)) place.children.set(byte, node());
        place = place.children.get(byte);
      }
      place.tokens.push(token);
    });
  }

  /** Tokens in ascending order. */
  admitted(state) {
    let found = this.#byState.get(state);
    if (!found) {
      found = [];
      this.#walk(this.#root, state, found);
      found = Int32Array.from(found).sort();
      this.#byState.set(state, found);
    }
    return found;
  }

  #walk(place, state, found) {
    for (const [byte, child] of place.children) {
      const next = this.automaton.after(state, byte);
      if (next < 0) continue;
      found.push(...child.tokens);
      this.#walk(child, next, found);
    }
  }
}

/** Follows one answer: which tokens may come next, and whether it is whole. */
export class Constraint {
  /**
   * @param {Masks} masks
   * @param {object} frame tokens around the calls: front, start, end, think, thought, between, and those that thoughts may have
   */
  constructor(masks, frame) {
    this.masks = masks;
    this.frame = frame;
    this.forced = [...frame.front];
    this.part = "front";
    this.state = masks.automaton.start;
    this.done = false;
  }

  /** Tokens that may come next, in ascending order. */
  admitted() {
    const { frame } = this;
    if (this.forced.length) return [this.forced[0]];
    if (this.part === "front" && frame.think !== null && frame.thought !== null) {
      return [frame.start, frame.think].sort((a, b) => a - b);
    }
    if (this.part === "front" || this.part === "behind") return [frame.start];
    if (this.part === "thoughts") return frame.thinkable;
    const found = this.masks.admitted(this.state);
    if (this.masks.automaton.accept.has(this.state)) return [...found, frame.end].sort((a, b) => a - b);
    if (!found.length) throw new Error("The tokenizer has no piece for what must come next in a call.");
    return found;
  }

  /** Go on with an admitted token. */
  push(token) {
    const { frame } = this;
    if (this.forced.length) this.forced.shift();
    else if (token === frame.start) this.part = "calls";
    else if (this.part === "front") this.part = "thoughts";
    else if (this.part === "thoughts") {
      if (token === frame.thought) {
        this.part = "behind";
        this.forced = [...frame.between];
      }
    } else if (token === frame.end) this.done = true;
    else this.state = this.masks.automaton.step(this.state, this.masks.pieces[token]);
  }
}

function node() {
  return { tokens: [], children: new Map() };
}
