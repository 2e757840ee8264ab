"""What an engine is started with: arguments, environment, hardware, quantized weights, identity."""
