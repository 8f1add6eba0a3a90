// The model: two ONNX graphs in onnxruntime-web, and the state that goes from call to call.
//
// docs/onnx.md has the contract. Here every call copies its inputs into WebAssembly's memory and its outputs out of it, so
// nothing is written in place: what a call gave is what the next one takes, and earlier state stays as it was.

import { widened } from "./widen.js";

/** Cache rows are bound in multiples of this many, so that a step costs what the sequence so far costs. */
const ROW_STEP = 64;

const ARRAYS = { float32: Float32Array, int8: Int8Array, int64: BigInt64Array, float16: globalThis.Float16Array ?? Uint16Array };

export class Model {
  /**
   * @param {object} ort the module of onnxruntime-web
   * @param {object} about context, max_chunk, vocab, state, files and matrices: targets/onnx/widen.py's Contract
   * @param {{decode: object, prefill: object}} sessions
   */
  constructor(ort, about, sessions) {
    this.ort = ort;
    this.about = about;
    this.sessions = sessions;
    this.reset();
  }

  /**
   * Open both graphs.
   *
   * @param {(name: string) => Promise<Uint8Array>} read a file of the model
   */
  static async open(ort, about, read) {
    const weights = await read(about.files.weights);
    const files = [{ path: about.files.weights, data: weights }];
    if (about.matrices.length) files.push({ path: about.files.widened, data: widened(weights, about.matrices) });
    const sessions = {};
    for (const phase of ["decode", "prefill"]) {
      sessions[phase] = await ort.InferenceSession.create(await read(about.files[phase]), {
        executionProviders: ["wasm"],
        externalData: files,
        // Bound rows change as the sequence grows; a memory plan per shape would be kept for each.
        enableMemPattern: false,
        logSeverityLevel: 3,
      });
    }
    return new Model(ort, about, sessions);
  }

  /** Forget the sequence. */
  reset() {
    const state = new Map();
    for (const spec of this.about.state) {
      state.set(spec.name, spec.cache ? new ARRAYS[spec.dtype](0) : new ARRAYS[spec.dtype](product(spec.shape)));
    }
    this.at({ position: 0, state });
  }

  /** Where the sequence is now; `at` goes back there. */
  mark() {
    return { position: this.position, state: this.state };
  }

  at({ position, state }) {
    this.position = position;
    this.state = state;
  }

  /** Append tokens, in chunks that the graphs take; the logits of the last, [V]. */
  async feed(tokens) {
    if (this.position + tokens.length > this.about.context) {
      throw new Error(`${this.position + tokens.length} tokens don't fit in a context of ${this.about.context}.`);
    }
    let logits = null;
    for (let start = 0; start < tokens.length; start += this.about.max_chunk) {
      logits = await this.#call(tokens.slice(start, start + this.about.max_chunk));
    }
    return logits;
  }

  async #call(tokens) {
    const { ort, about } = this;
    const end = this.position + tokens.length;
    const feeds = {
      tokens: new ort.Tensor("int64", BigInt64Array.from(tokens, BigInt), [tokens.length]),
      position: new ort.Tensor("int64", BigInt64Array.of(BigInt(this.position)), [1]),
    };
    for (const spec of about.state) {
      let data = this.state.get(spec.name), shape = spec.shape;
      if (spec.cache) {
        const rows = Math.min(Math.ceil(end / ROW_STEP) * ROW_STEP, spec.rows);
        shape = [rows, ...spec.shape.slice(1)];
        data = grown(data, product(shape));
      }
      feeds[spec.name] = new ort.Tensor(spec.dtype, data, shape);
    }
    const results = await this.sessions[tokens.length === 1 ? "decode" : "prefill"].run(feeds);
    const state = new Map(about.state.map(({ name }) => [name, results[`${name}_next`].data]));
    this.at({ position: end, state });
    return results.logits.data.subarray((tokens.length - 1) * about.vocab);
  }
}

/** An array with zeros behind what was in it. */
function grown(data, size) {
  if (data.length === size) return data;
  const larger = new data.constructor(size);
  larger.set(data);
  return larger;
}

function product(shape) {
  return shape.reduce((a, b) => a * b, 1);
}
