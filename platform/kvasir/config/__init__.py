"""The frozen, validated deployment spec: parsed once and passed as an argument."""
