"""ONNX for ONNX Runtime: lowering, the artifact's contract, and the session that runs it."""
