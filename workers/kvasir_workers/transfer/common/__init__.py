"""What the NIXL and the NCCL transfer share: tickets, leases, pulls, checksums and access to KV memory."""
