"""LoRA adapters that are loaded at run time: on which workers they are, and should be."""
