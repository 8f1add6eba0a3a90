"""Everything that turns a file into a checked, named set of Needle 3 weights.

Import from the modules: ``checkpoint`` (read any file), ``geometry`` (what the model is),
``adapter`` (LoRA), ``ladder`` (rungs), ``tokenizer``, ``resolve`` (``hf:`` names), ``sample``
(random but lively checkpoints), ``safetensors_file`` and ``container`` (the two formats).
"""
