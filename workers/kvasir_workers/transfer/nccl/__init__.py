"""The NCCL adapter of the transfer port: torch.distributed between pairs of workers, gloo without a GPU."""
