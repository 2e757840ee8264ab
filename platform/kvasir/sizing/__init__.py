"""What a model needs of a GPU's memory, computed from its files before an engine starts.

The formulas are those of vLLM 0.32: its KV cache specifications, its division of layers among ranks, and its
profile of a first step. Nothing here imports an engine.
"""
