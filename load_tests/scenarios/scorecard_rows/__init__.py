"""The rows of the scorecard, a module each: a fault, the proof that it happened, and what was measured."""
