"""vLLM behind the engine port: the only package that imports vllm.

`engine` is the adapter; it imports vLLM only in `start`, after the environment that vLLM reads at
import has been set.
"""
