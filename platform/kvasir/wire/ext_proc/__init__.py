"""Generated messages of Envoy's external processing service; see third_party."""
