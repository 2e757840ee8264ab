"""An endpoint picker for gateways with the Gateway API Inference Extension: Kvasir's index and decision in
front of model servers that speak HTTP."""
