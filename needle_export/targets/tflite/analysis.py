"""What a .tflite file holds, read from the file alone, and how XNNPACK cuts a signature when it is opened.

Reading maps the file: weights of hundreds of megabytes are never copied. Only :func:`partitions` opens an
interpreter.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needle_export.errors import BadInput
from needle_export.targets.tflite.quantization import scale_buffers

#: What the runtime calls the node that stands for a partition.
DELEGATE = "DELEGATE"

#: What the exporter calls the oldest runtime that a file's ops ask for.
RUNTIME_KEY = "min_runtime_version"

#: Bits an element takes where the type's name doesn't say it.
_BITS = {"bool": 8, "string": 0, "resource": 0, "variant": 0, "float8_e4m3fn": 8, "float8_e5m2": 8}

#: Constants above this many bytes are left out of the copy that is opened to count partitions.
_HOLE = 1 << 16

#: Places of fields in their tables, as schema.fbs numbers them (4 + 2 for each field before).
_SUBGRAPHS, _BUFFER_DATA = 8, 4


@dataclass(frozen=True)
class Op:
    """An operator: its builtin name (``CUSTOM:<name>`` for a custom one) and tensors, -1 for an absent one."""

    name: str
    version: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a graph.

    Attributes:
        name: as the file calls it.
        shape: sizes, -1 where one is known only at run time.
        dtype: "float32", "int8", "int4", ...
        buffer: index of its constant data; tensors of several graphs may share one.
        constant: whether the file holds its data.
        bytes: of the constant's data, or that an activation takes (0 where the shape isn't known).
        quantized: "", "per tensor", "per channel" or "blockwise".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: int
    constant: bool
    bytes: int
    quantized: str


@dataclass(frozen=True)
class Graph:
    """What one signature runs; ``inputs`` and ``outputs`` lead from the signature's names to tensors."""

    name: str
    ops: tuple[Op, ...]
    tensors: tuple[TensorInfo, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]


@dataclass(frozen=True)
class LeftOp:
    """Ops of one kind that no partition took.

    Attributes:
        name: of the kind.
        count: of its ops.
        splits: of them, those that stand between two partitions (see :func:`between`). The others come
            before the first partition or after the last one, or apart from all, and cut nothing.
    """

    name: str
    count: int
    splits: int


@dataclass(frozen=True)
class Partitions:
    """How a delegate cut a graph: partitions, the ops within them, and the kinds of op outside, cutters first."""

    count: int
    delegated_ops: int
    left: tuple[LeftOp, ...]


@contextmanager
def mapped(path: Path) -> Iterator[tuple[mmap.mmap, Any]]:
    """The file's bytes, mapped, and the model in them.

    Raises:
        BadInput: the file isn't there, isn't a TFLite model, or is damaged where the caller reads it.
    """
    from ai_edge_litert import schema_py_generated as schema

    try:
        handle = path.open("rb")
    except OSError as error:
        raise BadInput("can't be read", where=str(path), fix="check the path") from error
    with handle:
        handle.seek(4)
        if handle.read(4) != b"TFL3":
            raise BadInput("isn't a TFLite model", where=str(path), fix="build the artifact anew")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield data, schema.Model.GetRootAsModel(data, 0)
            except (struct.error, IndexError, TypeError, ValueError) as error:
                raise BadInput("the file is cut short or damaged", where=str(path), fix="build it anew") from error


def read_graph(path: Path) -> tuple[Graph, ...]:
    """The graph of every signature, in the file's order.

    Raises:
        BadInput: the file isn't there, isn't a TFLite model, or is damaged.
    """
    with mapped(path) as (data, model):
        names = _Names(model)
        graphs = []
        for at in range(model.SignatureDefsLength()):
            signature = model.SignatureDefs(at)
            subgraph = model.Subgraphs(signature.SubgraphIndex())
            graphs.append(
                Graph(
                    name=signature.SignatureKey().decode(),
                    ops=tuple(names.op(subgraph.Operators(i)) for i in range(subgraph.OperatorsLength())),
                    tensors=tuple(
                        _tensor(data, model, names, subgraph.Tensors(i)) for i in range(subgraph.TensorsLength())
                    ),
                    inputs=_named(signature.Inputs, signature.InputsLength()),
                    outputs=_named(signature.Outputs, signature.OutputsLength()),
                )
            )
        return tuple(graphs)


def count_ops(graph: Graph) -> dict[str, int]:
    """How often each op occurs, most frequent first, then by name."""
    counts = Counter(op.name for op in graph.ops)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def metadata(path: Path, key: str) -> str | None:
    """The text that the file carries under a key, or None."""
    with mapped(path) as (data, model):
        for at in range(model.MetadataLength()):
            entry = model.Metadata(at)
            if entry.Name() == key.encode():
                start, size = span_of(data, model.Buffers(entry.Buffer()))
                return data[start : start + size].decode()
    return None


def buffer_bytes(path: Path) -> tuple[int, int]:
    """Bytes of all constant data, each counted once however many tensors share it, and bytes of the file.

    Metadata lies in buffers too and isn't counted.
    """
    with mapped(path) as (data, model):
        used = {
            subgraph.Tensors(i).Buffer()
            for subgraph in (model.Subgraphs(at) for at in range(model.SubgraphsLength()))
            for i in range(subgraph.TensorsLength())
        }
        # By place: two buffers may point at the same bytes.
        spans = {span_of(data, model.Buffers(index)) for index in used}
        return sum(size for _, size in spans), len(data)


def oldest_runtime(path: Path) -> str | None:
    """The oldest runtime that knows every op version of the file, as its exporter noted it, or None.

    It says nothing of a runtime's faults: one that knows an op's version may still abort on how the op's
    weights are packed.
    """
    text = metadata(path, RUNTIME_KEY)
    return text.rstrip("\0") or None if text is not None else None


def partitions(path: Path, name: str, *, threads: int = 1) -> Partitions:
    """How XNNPACK cuts a signature.

    The interpreter lists the nodes of a file's first subgraph alone. For another signature a copy is opened
    in which that subgraph comes first.

    Raises:
        BadInput: the file can't be read, or has no such signature.
    """
    with tempfile.TemporaryDirectory(prefix="needle-export-") as folder:
        opened = path
        with mapped(path) as (data, model):
            index = _subgraph_of(model, name, path)
            if index:
                opened = Path(folder) / "first.tflite"
                _put_first(data, model, index, opened)
        return cut(_nodes(opened, threads))


def cut(nodes: Sequence[Op]) -> Partitions:
    """Partitions by a runtime's node list: every op in an order of execution, then a node for each partition.

    An op belongs to a partition if it is reached backwards from the partition's outputs without crossing the
    partition's inputs.
    """
    ops = [node for node in nodes if node.name != DELEGATE]
    delegates = [node for node in nodes if node.name == DELEGATE]
    producer = {tensor: at for at, op in enumerate(ops) for tensor in op.outputs}
    taken: set[int] = set()
    for node in delegates:
        border, open_tensors = set(node.inputs), list(node.outputs)
        while open_tensors:
            tensor = open_tensors.pop()
            at = producer.get(tensor)
            if tensor not in border and at is not None and at not in taken:
                taken.add(at)
                open_tensors += ops[at].inputs
    cutters = between(ops, taken)
    counts = Counter(op.name for at, op in enumerate(ops) if at not in taken)
    splits = Counter(ops[at].name for at in cutters)
    left = [LeftOp(name, count, splits[name]) for name, count in counts.items()]
    left.sort(key=lambda item: (-item.splits, -item.count, item.name))
    return Partitions(len(delegates), len(taken), tuple(left))


def between(ops: Sequence[Op], inside: Collection[int]) -> frozenset[int]:
    """Ops outside that need an op inside and that an op inside needs, by index; ``ops`` in an order of execution.

    A partition runs as a whole, so what such an op needs and what needs it can't be in one partition: it
    really cuts. Without any, one partition could hold everything inside; a runtime whose order of execution
    keeps parts aside may still make more.
    """
    inside = frozenset(inside)
    follows: set[int] = set()  # tensors that need an op inside
    after = set()
    for at, op in enumerate(ops):
        touched = not follows.isdisjoint(op.inputs)
        if touched and at not in inside:
            after.add(at)
        if touched or at in inside:
            follows.update(op.outputs)
    needed: set[int] = set()  # tensors that an op inside needs
    cutters = set()
    for at in range(len(ops) - 1, -1, -1):
        wanted = not needed.isdisjoint(ops[at].outputs)
        if wanted and at in after:
            cutters.add(at)
        if wanted or at in inside:
            needed.update(ops[at].inputs)
    return frozenset(cutters)


class _Names:
    """Names of the schema's numbers, for one model."""

    def __init__(self, model: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        def inverse(table: Any) -> dict[int, str]:
            return {value: key for key, value in vars(table).items() if isinstance(value, int)}

        builtin = inverse(schema.BuiltinOperator)
        self._types = {value: key.lower() for value, key in inverse(schema.TensorType).items()}
        self._quantization = inverse(schema.QuantizationDetails)
        self._codes = []
        for at in range(model.OperatorCodesLength()):
            code = model.OperatorCodes(at)
            # Files before schema 3a keep the op in the narrow field alone.
            number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
            name = builtin.get(number, f"BUILTIN:{number}")
            if name == "CUSTOM":
                name = f"CUSTOM:{(code.CustomCode() or b'').decode()}"
            self._codes.append((name, code.Version()))

    def op(self, operator: Any) -> Op:
        name, version = self._codes[operator.OpcodeIndex()]
        return Op(name, version, _numbers(operator.InputsAsNumpy()), _numbers(operator.OutputsAsNumpy()))

    def dtype(self, tensor: Any) -> str:
        return self._types.get(tensor.Type(), f"type {tensor.Type()}")

    def quantized(self, tensor: Any) -> str:
        parameters = tensor.Quantization()
        if parameters is None:
            return ""
        if self._quantization.get(parameters.DetailsType()) == "BlockwiseQuantization":
            return "blockwise"
        scales = parameters.ScaleLength()
        return "" if scales == 0 else "per tensor" if scales == 1 else "per channel"


def _tensor(data: mmap.mmap, model: Any, names: _Names, tensor: Any) -> TensorInfo:
    # The plain shape has 1 where a size is unknown; the signature, where there is one, has -1.
    shape = _numbers(tensor.ShapeSignatureAsNumpy()) or _numbers(tensor.ShapeAsNumpy())
    dtype = names.dtype(tensor)
    _, size = span_of(data, model.Buffers(tensor.Buffer()))
    constant = size > 0 and not tensor.IsVariable()
    return TensorInfo(
        name=(tensor.Name() or b"").decode(),
        shape=shape,
        dtype=dtype,
        buffer=tensor.Buffer(),
        constant=constant,
        bytes=size if constant else _size(shape, dtype),
        quantized=names.quantized(tensor),
    )


def _size(shape: tuple[int, ...], dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    bits = _BITS[dtype] if dtype in _BITS else int(digits or 0)
    for size in shape:
        bits *= max(size, 0)
    return (bits + 7) // 8


def _numbers(array: Any) -> tuple[int, ...]:
    """A vector of the file as a tuple; an absent one reads as the number 0."""
    return () if isinstance(array, int) else tuple(array.tolist())


def _named(entry: Any, count: int) -> dict[str, int]:
    return {entry(i).Name().decode(): entry(i).TensorIndex() for i in range(count)}


def span_of(data: mmap.mmap, buffer: Any) -> tuple[int, int]:
    """Where a buffer's bytes start in the file, and how many there are."""
    # Beyond 2 GB a file keeps them behind the flatbuffer; offsets 0 and 1 stand for "not so".
    if buffer.Offset() > 1:
        return buffer.Offset(), buffer.Size()
    table = buffer._tab
    field = table.Offset(_BUFFER_DATA)
    return (table.Vector(field), table.VectorLen(field)) if field else (0, 0)


def _subgraph_of(model: Any, name: str, path: Path) -> int:
    keys = {}
    for at in range(model.SignatureDefsLength()):
        signature = model.SignatureDefs(at)
        keys[signature.SignatureKey().decode()] = int(signature.SubgraphIndex())
    if name not in keys:
        raise BadInput(f"has no signature {name!r}", where=str(path), fix=f"it has: {', '.join(keys) or 'none'}")
    return keys[name]


def _put_first(data: mmap.mmap, model: Any, index: int, copy: Path) -> None:
    """Write the model with a subgraph exchanged with the first one, and without large constants.

    Cuts depend on a weight's type and shape, so holes stand for numbers, but for small constants, which are axes and
    shapes, and scales of blocks, which must not be 0. Signatures of the copy lead to wrong subgraphs; none is run.
    """
    kept = scale_buffers(model)
    holes = sorted(span_of(data, model.Buffers(i)) for i in range(model.BuffersLength()) if i not in kept)
    with copy.open("wb") as out:
        start = 0
        for hole, size in holes:
            if size > _HOLE and hole >= start:
                out.write(memoryview(data)[start:hole])
                out.seek(hole + size)
                start = hole + size
        out.write(memoryview(data)[start:])
        out.truncate(len(data))
        table = model._tab
        # A vector of tables is a list of distances, each from its own place.
        first = table.Vector(table.Offset(_SUBGRAPHS))
        other = first + 4 * index
        at_first, at_other = (place + struct.unpack_from("<I", data, place)[0] for place in (first, other))
        for place, target in ((first, at_other), (other, at_first)):
            out.seek(place)
            out.write(struct.pack("<I", target - place))


def _nodes(path: Path, threads: int) -> list[Op]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=threads)
    interpreter.allocate_tensors()
    return [
        Op(node["op_name"], 0, _numbers(node["inputs"]), _numbers(node["outputs"]))
        for node in interpreter._get_ops_details()
    ]
