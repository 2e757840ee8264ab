"""Pages for operators: health, status, metrics, routing decisions and drains."""
