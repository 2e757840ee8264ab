"""The NCCL adapter of the transfer port: NCCL between pairs of workers, sockets without a GPU."""
