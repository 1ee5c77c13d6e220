"""What is called in CUDA's driver, in which order, with which arguments, and what is given back."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base import cuda_driver, gpu_memory
from pdserve.base.cuda_driver import CudaDriver, CudaError
from pdserve.base.gpu_memory import GpuMemory, map_to_read
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.shared_memory import map_to_read as map_host_memory

COMPILER = shutil.which("cc")
DEVICE, GRANULARITY = 1, 1 << 16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


class FakeCuda:
    """`fake_cuda.c`, and the driver that uses it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.driver = CudaDriver()

    def number(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    @property
    def live(self) -> tuple[int, int, int]:
        """Handles, ranges of addresses, and mappings."""
        assert self.number("contexts") == 0
        return self.number("live_handles"), self.number("live_ranges"), self.number("live_mappings")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    assert COMPILER is not None
    command = [COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    return library


@pytest.fixture
def cuda(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    library = ctypes.CDLL(str(shutil.copy(built, tmp_path)))  # A copy has variables of its own.
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: library)
    fake = FakeCuda(library)
    monkeypatch.setattr(gpu_memory, "open_driver", lambda: fake.driver)
    yield fake
    gc.collect()
    assert fake.live == (0, 0, 0)


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def address_of(buffer: object) -> int:
    address: int = buffer.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    return address


def test_memory_is_read_by_others_until_each_has_unmapped_it(cuda: FakeCuda) -> None:
    memory = GpuMemory(DEVICE, 100)
    assert memory.num_bytes == len(memory.bytes) == GRANULARITY
    assert not os.get_inheritable(memory.file)
    ctypes.memset(address_of(memory.bytes), 7, 100)
    peer = map_to_read(DEVICE, memory.file, memory.num_bytes)
    assert peer.device == DEVICE + 1  # type: ignore[comparison-overlap]
    assert cuda.live == (0, 2, 2)
    assert address_of(peer) != address_of(memory.bytes)
    del memory  # As if its process were killed.
    gc.collect()
    assert cuda.live == (0, 1, 1)
    inner = peer[10:20]
    assert (len(inner), address_of(inner)) == (10, address_of(peer) + 10)
    del peer
    gc.collect()
    assert read(address_of(inner), 10) == bytes([7] * 10)  # A slice keeps the memory.


def test_memory_is_mapped_to_be_written_where_it_cannot_be_read_only(cuda: FakeCuda) -> None:
    memory = GpuMemory(DEVICE, 100)
    cuda.set("refuses_reading_only", 1)
    assert len(map_to_read(DEVICE, memory.file, memory.num_bytes)) == GRANULARITY


def test_what_is_no_such_memory_is_refused_and_nothing_stays(cuda: FakeCuda) -> None:
    memory = GpuMemory(DEVICE, 100)
    with pytest.raises(OSError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        map_to_read(DEVICE, memory.file, 2 * GRANULARITY)
    with pytest.raises(OSError, match="cuMemImportFromShareableHandle"):
        map_to_read(DEVICE, 999, GRANULARITY)
    assert cuda.live == (0, 1, 1)


@pytest.mark.parametrize("is_read_only", [True, False])
def test_host_memory_is_pinned_until_its_last_use_and_is_still_mapped_then(cuda: FakeCuda, is_read_only: bool) -> None:
    shared = SharedMemory(GRANULARITY, is_pinned=True)
    shared.bytes[:] = 7
    memory = map_host_memory(shared.file, GRANULARITY) if is_read_only else shared.bytes
    pinned = gpu_memory.pinned(DEVICE, memory, is_read_only=is_read_only)
    assert cuda.live == (0, 0, 1)
    assert cuda.number("pin_flags") == (2 | 8 if is_read_only else 2)
    assert address_of(pinned) == memory.ctypes.data
    inner = pinned[10:20]
    del memory, pinned, shared
    gc.collect()
    assert cuda.live == (0, 0, 1)
    assert read(address_of(inner), 10) == bytes([7] * 10)


def test_host_memory_is_pinned_by_a_device_that_does_not_know_memory_to_be_read_only(cuda: FakeCuda) -> None:
    shared = SharedMemory(GRANULARITY, is_pinned=True)
    cuda.set("refuses_reading_only", 1)
    pinned = gpu_memory.pinned(DEVICE, map_host_memory(shared.file, GRANULARITY), is_read_only=True)
    assert len(pinned) == GRANULARITY
    assert cuda.number("pin_flags") == 2


def test_host_memory_that_cannot_be_pinned_is_refused(cuda: FakeCuda) -> None:
    cuda.set("refuses_pins", 1)
    with pytest.raises(OSError, match="cuMemHostRegister_v2"):
        gpu_memory.pinned(DEVICE, SharedMemory(GRANULARITY).bytes, is_read_only=False)
    assert cuda.live == (0, 0, 0)


def test_more_than_the_gpu_has_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(CudaError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        GpuMemory(DEVICE, 1 << 30)


def test_a_gpu_that_exports_no_descriptors_is_named(cuda: FakeCuda) -> None:
    cuda.set("exports_descriptors", 0)
    with pytest.raises(CudaError, match="does not share memory by descriptors"):
        GpuMemory(DEVICE, 100)


def test_a_device_that_does_not_exist_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(CudaError, match="cuDeviceGet"):
        GpuMemory(0, 100)


def test_an_old_driver_is_named(cuda: FakeCuda) -> None:
    with pytest.raises(CudaError, match="too old: it lacks cuMemNew"):
        cuda.driver._call("cuMemNew")


def test_a_host_without_a_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    with pytest.raises(CudaError, match=r"cannot be loaded: libcuda\.so\.1"):
        CudaDriver()
