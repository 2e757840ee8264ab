"""Cost of a day with autoscaling; see run.py."""
