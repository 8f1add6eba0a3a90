// Matrices of integers in floats: WebAssembly has no kernels that multiply by packed levels.
//
// The same as needle_export/targets/onnx/widen.py, which says what a matrix is made of.

/**
 * The file that the graphs call widened.bin.
 *
 * @param {Uint8Array} weights weights.bin
 * @param {object[]} matrices places in bytes, rows, columns, bits and block of each
 */
export function widened(weights, matrices) {
  const last = matrices.at(-1);
  const floats = new Float32Array(last.floats / 4 + last.rows * last.columns);
  for (const { levels, scales, floats: place, rows, columns, bits, block } of matrices) {
    const count = rows * columns, each = 8 / bits, mask = 2 ** bits - 1, half = 2 ** (bits - 1);
    const scale = new Float32Array(weights.slice(scales, scales + (4 * count) / block).buffer);
    let to = place / 4;
    for (let from = levels, run = 0; run < scale.length; run++) {
      const factor = scale[run];
      for (const end = from + block / each; from < end; from++) {
        for (let byte = weights[from], i = 0; i < each; i++, byte >>= bits) floats[to++] = ((byte & mask) - half) * factor;
      }
    }
  }
  return new Uint8Array(floats.buffer);
}
