"""The device a worker computes on: finding it, and checking that it supports the requested settings."""

from __future__ import annotations

import torch

from pdserve.base.config import variable
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.timing import timed
from pdserve.worker.config import WorkerConfig

log = get_logger(__name__)


def require_handover_memory(config: WorkerConfig) -> None:
    """Raises `SetupError` if blocks are to stay in GPU memory on their way and cannot."""
    if config.handover_memory == "host":
        return
    needed = {
        "--device cuda": config.device.startswith("cuda"),
        "--tensor-parallel-size 1": config.tensor_parallel_size == 1,
    }
    missing = [name for name, is_met in needed.items() if not is_met]
    if missing:
        raise SetupError(f"--handover-memory device needs {', '.join(missing)}. Leave it out to use host memory.")
    if config.transport != "ucx":
        return  # NCCL lets other processes map only memory of its own.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in (variable(name) or "").lower():
            raise SetupError(
                f"--handover-memory device cannot be combined with expandable_segments in {name}: other processes "
                "cannot map such memory. Remove one of them, or use --transport nccl between GPUs."
            )


def bind_thread(config: WorkerConfig) -> None:
    """Gives the calling thread the GPU's context, which UCX looks up in the thread that starts and drives it.

    Without it, CUDA would make one on the first GPU when the thread asks for an event.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.synchronize(device)


def open_device(name: str, num_ranks: int = 1) -> torch.device:
    """The device of that name, the first of `num_ranks`. Raises `SetupError` when this machine does not have them."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SetupError(f"--device {name} is not a device. Use cpu, cuda or, for example, cuda:1.") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise SetupError(f"--device {name} is not supported. Use cpu or cuda.")
    with timed(log, "device_opened"):
        return _open_gpu(name, device.index or 0, num_ranks)


def _open_gpu(name: str, index: int, num_ranks: int) -> torch.device:
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise SetupError(f"--device {name} needs a GPU, but {why}. Use --device cpu, or fix the installation.")
    count = torch.cuda.device_count()
    last = index + num_ranks - 1
    if last >= count:
        ranks = "" if num_ranks == 1 else f" with --tensor-parallel-size {num_ranks}"
        raise SetupError(
            f"--device {name}{ranks} needs cuda:{last}, but this machine has {count} GPUs, cuda:0 to cuda:{count - 1}."
        )
    # This makes the context, which takes some tenths of a second.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def local_gpu(config: WorkerConfig) -> int | None:
    """The number of the GPU that has a worker's blocks, as torch counts; None: they are in host memory."""
    device = torch.device(config.device)
    return (device.index or 0) if device.type == "cuda" else None
