"""The sampler that belongs to a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.sampler import Sampler
from pdserve.model.decoder import Decoder

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler


def open_sampler(decoder: Decoder) -> Sampler | CpuSampler | DeviceSampler:
    """A sampler that runs where the decoder's logits are, on the decoder's threads if it has any."""
    if decoder.device.type == "cpu":
        return Sampler() if decoder.row_sampler is None else CpuSampler(decoder.row_sampler)
    # Imported on use: Triton takes a second.
    from pdserve.engine.device_sampler import DeviceSampler

    return DeviceSampler(decoder.device)
