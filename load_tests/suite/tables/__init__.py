"""What each scenario measures, as tables that need no engine to be imported."""
