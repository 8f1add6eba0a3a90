// Runs a Needle package with Core ML: loads its functions, holds the state that they share, hands logits back.
//
// What the inputs hold is computed in NeedleHost.swift. Nothing in this file has run on an Apple device yet.

#if canImport(CoreML)
import CoreML
import Foundation

@available(iOS 17.0, macOS 14.0, tvOS 17.0, watchOS 10.0, *)
extension NeedleTensor {
    /// The same memory as Core ML's type; nothing is copied, and the tensor lives as long as the array does.
    func array() throws -> MLMultiArray {
        var steps = [Int](repeating: 1, count: shape.count)
        var axis = shape.count - 1
        while axis > 0 {
            steps[axis - 1] = steps[axis] * shape[axis]
            axis -= 1
        }
        let dataType: MLMultiArrayDataType
        switch type {
        case .int32: dataType = .int32
        case .float16: dataType = .float16
        case .float32: dataType = .float32
        }
        return try MLMultiArray(
            dataPointer: memory,
            shape: shape.map { NSNumber(value: $0) },
            dataType: dataType,
            strides: steps.map { NSNumber(value: $0) },
            deallocator: { _ in withExtendedLifetime(self) {} }
        )
    }

    /// A copy of an output without gaps: Core ML may pad its rows, and says so in the strides.
    convenience init(copying array: MLMultiArray) throws {
        let type: NeedleType
        switch array.dataType {
        case .int32: type = .int32
        case .float16: type = .float16
        case .float32: type = .float32
        default: throw NeedleError.unsupported("an output of type \(array.dataType.rawValue)")
        }
        self.init(array.shape.map { $0.intValue }, type)
        let width = shape.last ?? 1
        array.withUnsafeMutableBytes { (bytes: UnsafeMutableRawBufferPointer, strides: [Int]) -> Void in
            guard let base = bytes.baseAddress, width > 0 else { return }
            let step = strides.last ?? 1
            for row in 0..<(count / width) {
                var offset = 0
                var rest = row
                var axis = shape.count - 2
                while axis >= 0 {
                    offset += rest % shape[axis] * strides[axis]
                    rest /= shape[axis]
                    axis -= 1
                }
                let target = memory.advanced(by: row * width * type.size)
                if step == 1 {
                    target.copyMemory(from: base.advanced(by: offset * type.size), byteCount: width * type.size)
                } else {
                    for index in 0..<width {
                        target.advanced(by: index * type.size).copyMemory(
                            from: base.advanced(by: (offset + index * step) * type.size), byteCount: type.size)
                    }
                }
            }
        }
    }
}

/// One sequence of a model. Not for use by two threads at once, nor on the main thread.
@available(iOS 17.0, macOS 14.0, tvOS 17.0, watchOS 10.0, *)
final class NeedleModel {
    let host: NeedleHost
    private let folder: URL
    private let computeUnits: MLComputeUnits
    private var functions: [Int: MLModel] = [:] // by bucket; 1 is `decode`
    private var state: AnyObject? // an MLState, where the package has states

    /// Open `model.mlmodelc` in a folder, which is an app's bundle if Xcode compiled the package.
    init(folder: URL = Bundle.main.bundleURL, computeUnits: MLComputeUnits = .cpuOnly) throws {
        self.folder = folder
        self.computeUnits = computeUnits
        let first = try NeedleModel.load(folder, "model", function: nil, computeUnits)
        let entries = first.modelDescription.metadata[.creatorDefinedKey] as? [String: String]
        guard let json = entries?["needle.contract"] else { throw NeedleError.missing("needle.contract") }
        host = NeedleHost(try NeedleContract.decode(json))
        let tokens = first.modelDescription.inputDescriptionsByName["tokens"]?.multiArrayConstraint?.shape
        if tokens?.map({ $0.intValue }) == [1] { // the package's default function is `decode`
            functions[1] = first
        }
        try reset()
    }

    /// Positions that are behind us.
    var position: Int { host.position }

    /// Forget the sequence.
    func reset() throws {
        host.reset()
        if host.contract.stateful {
            guard #available(iOS 18.0, macOS 15.0, tvOS 18.0, watchOS 11.0, visionOS 2.0, *) else {
                throw NeedleError.unsupported("a package with states needs iOS 18")
            }
            state = try function(1).makeState() // zeros
        }
    }

    /// Append tokens; the logits that answer the last of them.
    func feed(_ tokens: [Int32]) throws -> [Float] {
        guard !tokens.isEmpty else { throw NeedleError.unsupported("nothing to feed") }
        guard position + tokens.count <= host.contract.context else {
            throw NeedleError.unsupported("the context is full")
        }
        var logits: [Float] = []
        var start = 0
        for step in host.plan(tokens.count) {
            let chunk = Array(tokens[start..<(start + step.count)])
            logits = try autoreleasepool { try call(chunk, step.bucket) }
            start += step.count
        }
        return logits
    }

    /// The most likely token each time, so many of them, or up to one of `stop`, which isn't returned.
    func greedy(_ prompt: [Int32], count: Int, stop: Set<Int32> = []) throws -> [Int32] {
        var answer: [Int32] = []
        var logits = try feed(prompt)
        while answer.count < count {
            var best = 0
            for index in logits.indices where logits[index] > logits[best] {
                best = index
            }
            let token = Int32(best)
            if stop.contains(token) { break }
            answer.append(token)
            if answer.count < count {
                logits = try feed([token])
            }
        }
        return answer
    }

    private func call(_ tokens: [Int32], _ bucket: Int) throws -> [Float] {
        let model = try function(bucket)
        var features: [String: MLFeatureValue] = [:]
        for (name, tensor) in host.inputs(tokens, bucket: bucket) {
            features[name] = MLFeatureValue(multiArray: try tensor.array())
        }
        let given = try MLDictionaryFeatureProvider(dictionary: features)
        let results: MLFeatureProvider
        if host.contract.stateful {
            guard #available(iOS 18.0, macOS 15.0, tvOS 18.0, watchOS 11.0, visionOS 2.0, *),
                let shared = state as? MLState
            else { throw NeedleError.unsupported("a package with states needs iOS 18") }
            results = try model.prediction(from: given, using: shared)
        } else {
            results = try model.prediction(from: given)
            var outputs: [String: NeedleTensor] = [:]
            for name in results.featureNames where name != "logits" {
                outputs[name] = try output(name, of: results)
            }
            try host.keep(outputs, count: tokens.count)
        }
        let logits = try output("logits", of: results)
        host.advance(tokens)
        let first = (tokens.count - 1) * host.contract.vocab // rows behind are padding
        return (0..<host.contract.vocab).map { logits.float(at: first + $0) }
    }

    private func output(_ name: String, of results: MLFeatureProvider) throws -> NeedleTensor {
        guard let array = results.featureValue(for: name)?.multiArrayValue else { throw NeedleError.missing(name) }
        return try NeedleTensor(copying: array)
    }

    /// A function, loaded when it is first used and kept.
    private func function(_ bucket: Int) throws -> MLModel {
        if let loaded = functions[bucket] { return loaded }
        let name = host.contract.stateful ? NeedleHost.function(bucket) : nil
        let loaded = try NeedleModel.load(folder, host.package(bucket), function: name, computeUnits)
        functions[bucket] = loaded
        return loaded
    }

    private static func load(
        _ folder: URL, _ package: String, function: String?, _ computeUnits: MLComputeUnits
    ) throws -> MLModel {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = computeUnits
        if let function = function {
            guard #available(iOS 18.0, macOS 15.0, tvOS 18.0, watchOS 11.0, visionOS 2.0, *) else {
                throw NeedleError.unsupported("a package of several functions needs iOS 18")
            }
            configuration.functionName = function
        }
        let place = folder.appendingPathComponent(package + ".mlmodelc")
        return try MLModel(contentsOf: place, configuration: configuration)
    }
}
#endif
