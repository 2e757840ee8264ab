"""Scorecard rows about lost, stopped and partitioned workers and routers."""
