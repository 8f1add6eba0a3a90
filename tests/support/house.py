"""The house's rules as data: which rooms there are, and which import which for what reason.

tests/test_house.py enforces them. A new exception belongs here, with its reason.
"""

from __future__ import annotations

STAGES = frozenset({"checkpoint", "model", "graph", "weights", "targets", "measure", "report", "bundle", "generate",
                    "web"})

#: What runs the stages and hands values from one to the next.
_NAMES = """answering appfiles assemble calibration companions demo estimates evaluation importing inspection loading
            plan provenance reuse runtimes timing website"""
_BESIDE = frozenset(_NAMES.split())
_BELOW = _BESIDE | {"compile", "codebooks", "improvement"}
PIPELINE = _BELOW | {"pipeline", "batch", "demonstration"}

#: Which of these stand above others: one build over what it is made of, several over one.
ABOVE = {
    "appfiles": frozenset({"assemble"}),
    "companions": frozenset({"demo"}),
    "answering": frozenset({"assemble", "companions"}),
    "evaluation": frozenset({"assemble", "companions", "loading"}),
    "website": frozenset({"companions", "reuse"}),
    "pipeline": _BELOW,
    "batch": _BELOW | {"pipeline"},
    "demonstration": _BELOW | {"pipeline", "batch"},
}

#: What everybody may import.
GROUND = frozenset({"errors", "config", "__version__"})

#: Vocabulary that stages share: (importing module, imported module) by prefix, and why.
SHARED = {
    ("checkpoint", "weights.cq"): "what the levels and norms of a container's matrices stand for; numpy alone",
    ("generate.examples", "checkpoint.jsonl"): "files of one object a line",
    ("model", "checkpoint.geometry"): "data types: what a model is, in numbers, names and shapes",
    ("model", "weights"): "how a matrix is rounded and what a runtime computes with it, which the reference follows",
    ("targets.onnx", "weights"): "how a matrix is rounded, and the inputs of its products, the same for every target",
    ("targets.coreml.store", "weights.forms"): "how a matrix is rounded, the same for every target",
    ("model", "graph.reference"): "the model is written with the functions that the patterns are traced from",
    ("graph.promises", "checkpoint.geometry"): "data types: how many layers and sites a model has",
    ("targets", "graph.program"): "data types: what a target is handed to lower",
    ("targets", "graph.ops"): "the ops that a target lowers",
    ("targets.tflite", "graph.reference"): "constants that a lowering writes down: the hash's, the score of padding",
    ("targets.tflite.store", "weights"): "how a matrix is rounded, the same for every target",
    ("targets.constants", "weights.codes"): "rows of several matrices in codebook form below each other",
    ("targets.coreml.codebook", "graph.reference"): "the rotation's matrix, which a lowering writes down",
    ("targets.onnx.codebook", "graph.reference"): "the same",
    ("measure.ledger", "checkpoint.dimensions"): "data types, from the module itself: no numpy for a ledger",
    ("measure.ledger", "checkpoint.layout"): "roles and shapes that the ledger sums",
    ("measure.ledger", "checkpoint.ladder"): "the geometry of a rung, whose bytes are counted",
    ("measure.inventory", "checkpoint.dimensions"): "data types: the shapes that a geometry has",
    ("measure.inventory", "checkpoint.layout"): "names, roles and shapes of tensors, whose bytes are counted",
    ("measure.predict", "checkpoint.dimensions"): "data types: what grows with which number of a geometry",
    ("measure.predict", "checkpoint.layout"): "roles in their order",
    ("measure.predict_work", "checkpoint.dimensions"): "data types: how much there is to multiply",
    ("measure.weights", "targets.matrices"): "data types: a matrix as a target has read it back from its files",
    ("targets", "measure.work"): "data types: what an artifact's ops move and compute, as its files tell",
    ("measure.worker", "targets"): "the main of a process of its own: opens an artifact by its target's name",
    ("measure.answers", "generate"): "what an answer is, and when two call the same",
    ("bundle.publish", "report.manifest"): "the files that it lists are the build's",
    ("bundle", "report.schema"): "a published folder is recognised, and its ids are checked, by its report",
    ("bundle.arrays", "checkpoint.files"): "writing a file whole or not at all",
    ("bundle.rewrite", "checkpoint.files"): "the same",
    ("bundle.cache", "checkpoint.files"): "the hash of a file",
    ("web.runtime", "checkpoint.files"): "writing a file whole or not at all",
}

#: Stages that commands call without the pipeline, because one function of one stage is all they do.
DIRECT = {
    ("cli", "report"): "showing a report",
    ("cli.eval", "bundle.arrays"): "reading ids and writing logits",
    ("cli.shared", "bundle.publish"): "finishing an interrupted exchange before a folder is read",
    ("cli.import_latency", "measure.readings"): "the names of the formats that it takes",
    ("cli.bench", "measure.adb"): "where benchmark_model lies unless somebody says so",
    ("cli.run", "generate.prompt"): "writing arguments as answers write them",
    ("cli.sample", "checkpoint"): "the two geometries by name, and writing a random checkpoint",
    ("cli.output", "checkpoint.files"): "writing a file whole or not at all",
}

#: Imports for type checking alone that point upwards; nothing is loaded.
TYPES_ONLY = {
    ("report.plan_text", "plan"): "it words a plan, and never makes one",
    ("report.evaluated_view", "evaluation"): "it words what a run has found, and never runs one",
    ("report.site_text", "website"): "it words what was written, and never writes it",
    ("report.demonstration_text", "demonstration"): "it words what was asked, and never asks",
    ("report.inspection_text", "inspection"): "it words what inspection found, and never calls it",
    ("compile", "codebooks"): "it is handed one",
}

#: What lies beside builds and runs without this package, and what it needs beside the standard library.
ALONE = {
    "generate.loop": ("numpy", "sentencepiece"),
    "targets.onnx.decoder": ("numpy", "onnxruntime"),
    "targets.tflite.session": ("numpy", "ai_edge_litert"),
    "targets.coreml.decoder": ("numpy", "coremltools", "host"),
    "targets.coreml.host": ("numpy",),
}

#: A runtime and the tools around it, and the one package that may import them.
RUNTIMES = {
    "onnx": "targets.onnx",
    "onnx_ir": "targets.onnx",
    "onnxruntime": "targets.onnx",
    "onnxscript": "targets.onnx",
    "coremltools": "targets.coreml",
    "ai_edge_litert": "targets.tflite",
    "litert_converter": "targets.tflite",
    "litert_torch": "targets.tflite",
    "tflite_runtime": "targets.tflite",
}

#: Modules that import their runtime at the top; everything that leads to them is imported when it is used.
_LOWERING = ("attention", "builder", "elementwise", "fused", "lower")
_OWN = {
    "onnx": "caches codebook integers kernels load_time shapes work",
    "tflite": "probes store",
    "coreml": "codebook store",
}
LOADED_LATE = frozenset(f"targets.{t}.{name}" for t, own in _OWN.items() for name in (*_LOWERING, *own.split()))

#: Modules for all targets.
COMMON = ("base", "claims", "constants", "kernels", "matrices", "ports", "quiet", "views")

#: Third parties by the packages that may import them at all.
TORCH = frozenset({"model", "graph", "targets", "compile", "demo", "improvement", "weights"})

MAX_LINES = 400
