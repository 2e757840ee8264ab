"""A fleet whose size changes, in virtual time: a day of traffic in seconds, for whoever decides on sizes."""
