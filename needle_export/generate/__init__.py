"""From a request to calls: tools, prompt, a grammar of what may be answered, and the loop over an artifact's logits."""
