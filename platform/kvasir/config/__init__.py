"""One frozen, validated deployment spec: parsed once, passed in, never looked up."""
