"""The NIXL adapter of the transfer port: RDMA, TCP or shared memory through UCX."""
