// What a host computes for a Needle package in Core ML: n-gram rows, slots, masks, and how a prompt is cut.
//
// The same as host.py, which lies beside every package too. Needs Foundation only, so that it runs wherever Swift does;
// NeedleModel.swift is the part that calls Core ML.

import Foundation

/// What goes wrong between an app and a package.
enum NeedleError: Error {
    /// A feature, a file or an entry of the metadata isn't there.
    case missing(String)
    /// The package, the system or the caller asks for what can't be done.
    case unsupported(String)
}

/// Types of the numbers in inputs and outputs.
enum NeedleType: String, Decodable {
    case int32
    case float16
    case float32

    /// Bytes of a number.
    var size: Int { self == .float16 ? 2 : 4 }
}

/// A number in half precision, rounded to the nearest one, ties to even.
func needleHalf(_ value: Float) -> UInt16 {
    let bits = value.bitPattern
    let sign = UInt16(truncatingIfNeeded: bits >> 16) & 0x8000
    let magnitude = bits & 0x7fff_ffff
    if magnitude > 0x7f80_0000 { return sign | 0x7e00 } // not a number
    if magnitude >= 0x477f_f000 { return sign | 0x7c00 } // from 65,520 on: infinity
    if magnitude < 0x3880_0000 { // below 2^-14 a half's last bit weighs 2^-24, as one of a float between 0.5 and 1 does
        let moved = Float(bitPattern: magnitude) + 0.5
        return sign | UInt16(truncatingIfNeeded: moved.bitPattern &- 0x3f00_0000)
    }
    let rounded = magnitude &+ 0xfff &+ ((magnitude >> 13) & 1)
    return sign | UInt16(truncatingIfNeeded: (rounded &- 0x3800_0000) >> 13)
}

/// Numbers of one type, the last axis innermost and without gaps, in memory that stays where it is.
final class NeedleTensor {
    let shape: [Int]
    let type: NeedleType
    let count: Int
    let memory: UnsafeMutableRawPointer

    /// Zeros.
    init(_ shape: [Int], _ type: NeedleType) {
        let numbers = shape.reduce(1, *)
        let bytes = max(numbers * type.size, 1)
        let made = UnsafeMutableRawPointer.allocate(byteCount: bytes, alignment: 64)
        made.initializeMemory(as: UInt8.self, repeating: 0, count: bytes)
        self.shape = shape
        self.type = type
        self.count = numbers
        self.memory = made
    }

    deinit {
        memory.deallocate()
    }

    /// Write one number into an int32 tensor.
    func put(int value: Int32, at index: Int) {
        precondition(type == .int32 && index < count)
        memory.storeBytes(of: value, toByteOffset: 4 * index, as: Int32.self)
    }

    /// Write one number into a tensor of floats, rounded to its type.
    func put(real value: Float, at index: Int) {
        precondition(type != .int32 && index < count)
        if type == .float16 {
            memory.storeBytes(of: needleHalf(value), toByteOffset: 2 * index, as: UInt16.self)
        } else {
            memory.storeBytes(of: value, toByteOffset: 4 * index, as: Float.self)
        }
    }

    /// A number of a float32 tensor.
    func float(at index: Int) -> Float {
        precondition(type == .float32 && index < count)
        return memory.load(fromByteOffset: 4 * index, as: Float.self)
    }

    /// Copy numbers from another tensor of the same type.
    func copy(_ numbers: Int, from other: NeedleTensor, at source: Int, to target: Int) {
        precondition(type == other.type && source + numbers <= other.count && target + numbers <= count)
        let from = other.memory.advanced(by: source * type.size)
        memory.advanced(by: target * type.size).copyMemory(from: from, byteCount: numbers * type.size)
    }
}

/// What a package says of itself: the JSON under `needle.contract` of its metadata.
struct NeedleContract: Decodable {
    /// The n-gram hash; empty if the model has none.
    struct Ngrams: Decodable {
        let seeds: [UInt32]?
        let orders: [Int]?
        let slots: UInt32?
    }

    /// One state of the model, and the port of the package that holds it.
    struct State: Decodable {
        let name: String
        let kind: String
        let port: String
        let shape: [Int]
        let rows: Int
    }

    let context: Int
    let vocab: Int
    let buckets: [Int]
    let stateful: Bool
    let rows: Int
    let ring: Int
    let align: Int
    let masked: Float
    let real: NeedleType
    let ngrams: Ngrams
    let state: [State]

    static func decode(_ json: String) throws -> NeedleContract {
        return try JSONDecoder().decode(NeedleContract.self, from: Data(json.utf8))
    }
}

/// One sequence. Not for use by two threads at once.
///
/// A step: `inputs` for one of the chunks of `plan`, the call, `keep` if the package has no states, `advance`.
final class NeedleHost {
    /// Multiplier of the n-gram hash, which is 32-bit FNV-1a.
    static let prime: UInt32 = 0x0100_0193

    /// A tail of a prompt that fills at most one of so many parts of the smallest fitting bucket is decoded.
    static let tailShare = 8

    let contract: NeedleContract

    /// Positions that are behind us.
    private(set) var position = 0

    /// The last tokens, oldest first, 0 before the start.
    private(set) var history: [Int32] = []

    /// The caches of a package without states, by port; empty if it has states.
    private(set) var caches: [String: NeedleTensor] = [:]

    private let buckets: [Int]

    init(_ contract: NeedleContract) {
        self.contract = contract
        self.buckets = contract.buckets.sorted()
        reset()
    }

    /// The function that reads so many tokens.
    static func function(_ bucket: Int) -> String {
        return bucket == 1 ? "decode" : "prefill_\(bucket)"
    }

    /// The package with that function, without its extension: one for all, or one each where there are no states.
    func package(_ bucket: Int) -> String {
        return contract.stateful || bucket == 1 ? "model" : "model_" + NeedleHost.function(bucket)
    }

    /// Forget the sequence.
    func reset() {
        position = 0
        let longest = (contract.ngrams.orders ?? []).max() ?? 1
        history = [Int32](repeating: 0, count: longest - 1)
        caches = [:]
        if !contract.stateful {
            for s in contract.state where !s.port.isEmpty && caches[s.port] == nil {
                caches[s.port] = NeedleTensor(s.shape, contract.real)
            }
        }
    }

    /// How so many tokens are read from here: how many, and by which bucket, in order. Bucket 1 is `decode`.
    ///
    /// A chunk is one write into a cache: it starts where a whole row of keys starts, ends within a full cache, and
    /// doesn't run over a ring's end. Where no bucket fits, a token is decoded.
    func plan(_ count: Int) -> [(count: Int, bucket: Int)] {
        var steps: [(count: Int, bucket: Int)] = []
        var at = position
        var left = count
        while left > 0 {
            let wanted = left
            let start = at
            let fitting = buckets.filter({ fits(start, $0) })
            let whole = fitting.first(where: { $0 >= wanted })
            var step = (count: 1, bucket: 1)
            if let smallest = whole {
                if wanted > 1 && wanted * NeedleHost.tailShare > smallest {
                    step = (count: wanted, bucket: smallest)
                }
            } else if let largest = fitting.last {
                step = (count: largest, bucket: largest)
            }
            steps.append(step)
            at += step.count
            left -= step.count
        }
        return steps
    }

    private func fits(_ at: Int, _ bucket: Int) -> Bool {
        if !contract.stateful { return true }
        return at % contract.align == 0
            && (contract.rows == 0 || at + bucket <= contract.rows)
            && (contract.ring == 0 || at % contract.ring + bucket <= contract.ring)
    }

    /// Inputs of one call with up to `bucket` tokens; those behind are padding.
    func inputs(_ tokens: [Int32], bucket: Int) -> [String: NeedleTensor] {
        precondition(!tokens.isEmpty && tokens.count <= bucket)
        let padded = tokens + [Int32](repeating: 0, count: bucket - tokens.count)
        var given = caches
        given["tokens"] = integers(padded)
        given["position"] = integers([Int32(position)])
        if bucket > 1 {
            given["count"] = integers([Int32(tokens.count)])
        }
        if contract.stateful {
            let slot = contract.ring > 0 ? position % contract.ring : 0
            given["slots"] = integers([Int32(position), Int32(slot)])
        }
        if contract.rows > 0 {
            given["mask"] = fullMask(bucket)
        }
        if contract.ring > 0 {
            given["ring_mask"] = ringMask(bucket)
        }
        if let found = ngrams(padded) {
            given["ngram_rows"] = found.rows
            given["ngram_valid"] = found.valid
        }
        return given
    }

    private func integers(_ values: [Int32]) -> NeedleTensor {
        let made = NeedleTensor([values.count], .int32)
        for (index, value) in values.enumerated() {
            made.put(int: value, at: index)
        }
        return made
    }

    /// 0 where a query sees a key, the contract's `masked` elsewhere.
    private func mask(_ queries: Int, _ keys: Int, sees: (Int, Int) -> Bool) -> NeedleTensor {
        let made = NeedleTensor([queries, keys], contract.real)
        for query in 0..<queries {
            for key in 0..<keys {
                if !sees(query, key) {
                    made.put(real: contract.masked, at: query * keys + key)
                }
            }
        }
        return made
    }

    /// Rows of a full cache, [T, S], or [T, S + T] where new rows lie behind it.
    private func fullMask(_ bucket: Int) -> NeedleTensor {
        let size = contract.rows
        let first = position
        if contract.stateful {
            return mask(bucket, size, sees: { query, key in key <= first + query })
        }
        return mask(bucket, size + bucket, sees: { query, key in key < size ? key < first : key - size <= query })
    }

    /// Rows of a ring, [T, W], or [T, W + T] where new rows lie behind it.
    private func ringMask(_ bucket: Int) -> NeedleTensor {
        let size = contract.ring
        let first = position
        if contract.stateful && bucket == 1 {
            return mask(1, size, sees: { _, key in key <= first || first >= size })
        }
        return mask(bucket, size + bucket, sees: { query, key in
            if key >= size {
                let new = key - size
                return new <= query && query - new < size
            }
            let last = first - 1
            let held = last - ((last - key) % size + size) % size // the position that this row holds
            return held >= 0 && first + query - held < size
        })
    }

    /// Rows of the n-gram tables, [T, N], and 0 where an n-gram would begin before the start, [T, N].
    func ngrams(_ tokens: [Int32]) -> (rows: NeedleTensor, valid: NeedleTensor)? {
        guard let seeds = contract.ngrams.seeds, let orders = contract.ngrams.orders, let slots = contract.ngrams.slots
        else { return nil }
        let heads = seeds.count / orders.count
        let known = (history + tokens).map({ UInt32(bitPattern: $0) })
        let rows = NeedleTensor([tokens.count, seeds.count], .int32)
        let valid = NeedleTensor([tokens.count, seeds.count], contract.real)
        for index in 0..<tokens.count {
            for (table, seed) in seeds.enumerated() {
                let order = orders[table / heads]
                var acc = seed
                for back in 0..<order {
                    acc = (acc ^ known[history.count + index - back]) &* NeedleHost.prime
                }
                acc ^= acc >> 15
                let place = index * seeds.count + table
                rows.put(int: Int32(acc % slots), at: place)
                valid.put(real: position + index >= order - 1 ? 1 : 0, at: place)
            }
        }
        return (rows: rows, valid: valid)
    }

    /// Write what a call of a package without states gave into the caches.
    func keep(_ outputs: [String: NeedleTensor], count: Int) throws {
        var replaced: Set<String> = []
        for s in contract.state where !s.port.isEmpty {
            guard let held = caches[s.port] else { throw NeedleError.missing(s.port) }
            if s.kind == "keys" || s.kind == "values" {
                let name = s.name + "_rows"
                guard let new = outputs[name] else { throw NeedleError.missing(name) }
                let rows = new.shape[1]
                let width = new.shape[2]
                for group in 0..<new.shape[0] {
                    for index in 0..<count {
                        let row = group * held.shape[1] + (position + index) % s.rows
                        held.copy(width, from: new, at: (group * rows + index) * width, to: row * width)
                    }
                }
            } else if replaced.insert(s.port).inserted {
                let name = s.port + "_next"
                guard let new = outputs[name] else { throw NeedleError.missing(name) }
                held.copy(held.count, from: new, at: 0, to: 0)
            }
        }
    }

    /// The tokens of a call are behind us.
    func advance(_ tokens: [Int32]) {
        let known = history + tokens
        history = Array(known.suffix(history.count))
        position += tokens.count
    }
}
