"""The whole server in virtual time: simulated engines behind the production router, admission and planner."""
