"""Code shared by the NIXL and NCCL transfers: tickets, leases, pulls, checksums and access to KV memory."""
