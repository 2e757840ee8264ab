"""What Kvasir tells its operators: metrics, spans, logs, and the closed vocabulary of outcomes."""
