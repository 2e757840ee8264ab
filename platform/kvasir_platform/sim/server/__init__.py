"""The whole server in virtual time: engines by the performance model, behind the production router, admission
and planner."""
