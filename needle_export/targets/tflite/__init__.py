"""TFLite target: LiteRT flatbuffers and the interpreter that runs them."""
