"""Start of an engine: arguments, environment, hardware, quantized weights, identity."""
