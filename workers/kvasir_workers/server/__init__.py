"""The worker's side of sessions: the gRPC server and the sessions that outlive its connections."""
