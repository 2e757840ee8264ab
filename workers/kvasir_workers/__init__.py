"""Workers: engines, KV transfer and the session server, run as Ray Serve pools."""
