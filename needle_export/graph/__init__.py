"""From a traced model to a program of fused ops: trace, patterns, proofs, passes and the legal ops between."""
