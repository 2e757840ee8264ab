"""A fleet of changing size in virtual time: a day of traffic within seconds, to evaluate scaling rules."""
