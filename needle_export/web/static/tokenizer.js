// Text to tokens and back: byte-pair merges by score, as SentencePiece makes them.
//
// The same as needle_export/checkpoint/text.py and encode.py, on the same table: spaces become U+2581, one of which is
// put in front where the table says so; user-defined pieces are cut out first, the longest that fits; what lies between
// is merged, always the pair of neighbours whose piece has the greatest score, the leftmost of equals. What is no piece
// in the end becomes the pieces of its UTF-8 bytes, or the unknown one.

/** Kinds of pieces. */
const NORMAL = 0, UNKNOWN = 1, CONTROL = 2, USER_DEFINED = 3, BYTE = 4;

const SPACE = "\u2581";

export class Tokenizer {
  /**
   * @param {object} table pieces, scores and types by token; bos_id, eos_id, unk_id, add_dummy_prefix, byte_fallback
   */
  constructor(table) {
    this.table = table;
    // Of pieces that occur twice the last counts.
    this.ids = new Map(table.pieces.map((piece, id) => [piece, id]));
    this.mergeable = new Map();
    this.byteIds = new Map();
    const markers = [];
    table.pieces.forEach((piece, id) => {
      const type = table.types[id];
      if (type === NORMAL || type === USER_DEFINED) this.mergeable.set(piece, id);
      if (type === BYTE) this.byteIds.set(byteOf(piece), id);
      if (type === USER_DEFINED && piece) markers.push(piece);
    });
    markers.sort((a, b) => [...b].length - [...a].length);
    const escaped = markers.map((marker) => marker.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    this.markers = markers.length ? new RegExp(`(${escaped.join("|")})`, "u") : null;
    /** What each token adds to a text, in UTF-8; nothing for control pieces. */
    this.bytes = table.pieces.map((piece, id) => {
      const type = table.types[id];
      if (type === BYTE) return Uint8Array.of(byteOf(piece));
      if (type === CONTROL) return new Uint8Array(0);
      return new TextEncoder().encode(type === UNKNOWN ? table.unknown_text : piece.replaceAll(SPACE, " "));
    });
  }

  /** The token of a piece by its name, such as "<tool_call>"; undefined where there is none. */
  id(piece) {
    return this.ids.get(piece);
  }

  /** Tokens of a text; those of its beginning and end aren't added. */
  encode(text) {
    if (!text.isWellFormed()) throw new Error("A lone surrogate is no text: write the character itself.");
    const { unk_id: unk, byte_fallback: fallback } = this.table;
    const escaped = this.#escaped(text);
    // Every other part is a marker.
    const parts = this.markers ? escaped.split(this.markers) : [escaped];
    const ids = [];
    let unknown = false;
    parts.forEach((part, i) => {
      for (const symbol of i % 2 ? [part] : this.#merged(part)) {
        const id = this.ids.get(symbol) ?? unk;
        if (id !== unk) ids.push(id);
        else if (fallback) ids.push(...this.#fallback(symbol));
        // One for neighbours that are no pieces.
        else if (!unknown) ids.push(id);
        unknown = id === unk && !fallback;
      }
    });
    return ids;
  }

  /** The text of tokens. Those of beginning, end and padding have none. */
  decode(ids) {
    const { types, add_dummy_prefix: added, remove_extra_whitespaces: removed } = this.table;
    const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
    let text = "", run = [];
    // Whether a space in front of the next piece is the one that encoding put there.
    let first = added || removed, dropped = false;
    for (const id of ids) {
      if (types[id] === BYTE) {
        run.push(this.bytes[id][0]);
        continue;
      }
      text += characters(run);
      run = [];
      first &&= !dropped && !text;
      let piece = utf8.decode(this.bytes[id]);
      dropped = false;
      if (first && types[id] !== CONTROL && types[id] !== UNKNOWN && piece.startsWith(" ")) {
        piece = piece.slice(1);
        dropped = !removed;
      }
      text += piece;
    }
    return text + characters(run);
  }

  /** The text with U+2581 for spaces: the one in front added, extra ones removed, as the table says. */
  #escaped(text) {
    const { add_dummy_prefix: added, remove_extra_whitespaces: removed } = this.table;
    const kept = removed ? text.replace(/^ +/, "").replace(/ +/g, " ") : text;
    const escaped = kept && (added ? SPACE : "") + kept.replaceAll(" ", SPACE);
    return removed ? escaped.replace(/\u2581+$/, "") : escaped;
  }

  /** Symbols of a text once no two neighbours make a piece. */
  #merged(text) {
    const symbols = [...text];
    const count = symbols.length;
    const after = symbols.map((_, i) => i + 1), before = symbols.map((_, i) => i - 1);
    const waiting = new Heap();
    const consider = (left) => {
      const right = left >= 0 ? after[left] : count;
      if (right >= count) return;
      const pair = symbols[left] + symbols[right];
      const id = this.mergeable.get(pair);
      if (id !== undefined) waiting.push({ score: this.table.scores[id], left, pair });
    };
    for (let left = 0; left < count; left++) consider(left);
    for (let best = waiting.pop(); best; best = waiting.pop()) {
      const { left, pair } = best;
      const right = after[left];
      // One of the two may have been merged with another since.
      if (symbols[left] === null || right >= count || symbols[left] + symbols[right] !== pair) continue;
      symbols[left] = pair;
      symbols[right] = null;
      after[left] = after[right];
      if (after[left] < count) before[after[left]] = left;
      consider(before[left]);
      consider(left);
    }
    return symbols.filter((symbol) => symbol !== null);
  }

  #fallback(symbol) {
    return [...new TextEncoder().encode(symbol)].map((byte) => {
      const id = this.byteIds.get(byte);
      if (id === undefined) throw new Error(`The tokenizer has no piece for the byte 0x${byte.toString(16)}.`);
      return id;
    });
  }
}

/** The byte of a piece such as <0x0A>. */
function byteOf(piece) {
  return parseInt(piece.slice(3, 5), 16);
}

/** Bytes of neighbouring byte pieces as text: each byte that begins no whole character is U+FFFD by itself. */
function characters(run) {
  const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let text = "";
  for (let at = 0; at < run.length; ) {
    const size = run[at] < 0xc0 ? 1 : run[at] < 0xe0 ? 2 : run[at] < 0xf0 ? 3 : 4;
    try {
      text += utf8.decode(Uint8Array.from(run.slice(at, at + size)));
      at += size;
    } catch {
      text += "\ufffd";
      at += 1;
    }
  }
  return text;
}

/** Pairs to merge: the greatest score first, of equals the leftmost. */
class Heap {
  #items = [];

  push(item) {
    const items = this.#items;
    let at = items.push(item) - 1;
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (!precedes(item, items[parent])) break;
      items[at] = items[parent];
      at = parent;
    }
    items[at] = item;
  }

  pop() {
    const items = this.#items;
    const top = items[0], last = items.pop();
    if (items.length === 0) return top;
    let at = 0;
    for (let child = 1; child < items.length; child = 2 * at + 1) {
      if (child + 1 < items.length && precedes(items[child + 1], items[child])) child++;
      if (!precedes(items[child], last)) break;
      items[at] = items[child];
      at = child;
    }
    items[at] = last;
    return top;
  }
}

function precedes(a, b) {
  return a.score > b.score || (a.score === b.score && a.left < b.left);
}
