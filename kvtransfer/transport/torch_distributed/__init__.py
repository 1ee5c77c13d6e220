"""The `nccl` transport: torch.distributed point-to-point, over NCCL between GPUs and over gloo in host memory."""
