"""Tiny models of many architectures, with random weights and the tokenizer of the embedded model."""
