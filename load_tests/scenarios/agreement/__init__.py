"""`kvasir bench` compared with aiperf on the same endpoint, in turn."""
