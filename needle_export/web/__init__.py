"""A static site that runs an ONNX artifact in a browser: its page, its JavaScript, and the runtime's files."""
