"""CUDA's virtual memory: memory of a GPU that other processes map by a descriptor. Through the driver's own library.

Unlike handles of CUDA IPC, a descriptor needs no process namespace in common, and keeps the memory alive until the last
process has unmapped it, whatever became of the one that allocated it.

Source: NVIDIA, CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Values of CUDA's enumerations.
_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE, _RECOMMENDED = 1, 1, 1, 1
_EXPORTS_DESCRIPTORS, _DEVICE_ORDINAL = 103, 9
_READ, _READ_AND_WRITE = 1, 3
_MAPS_TO_DEVICE, _HOST_READS_ONLY = 2, 8


class CudaError(Exception):
    """A call of the driver failed; the text has its name and CUDA's reason."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """Implements `pdserve.base.gpu_memory.GpuDriver`. Devices are numbered as torch numbers them. On any thread."""

    def __init__(self) -> None:
        """Raises: CudaError where there is no driver."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver cannot be loaded: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        #: Contexts that this process shares with torch, by device.
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def allocate(self, device: int, num_bytes: int) -> tuple[int, int, int]:
        with self._on(device):
            self._require_descriptors(device)
            properties = _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, device))
            granularity = ctypes.c_size_t()
            by_reference = ctypes.byref(properties)
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), by_reference, _RECOMMENDED)
            size = -(-num_bytes // granularity.value) * granularity.value
            handle = ctypes.c_ulonglong()
            self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), by_reference, ctypes.c_ulonglong(0))
            with self._released(handle):
                file = ctypes.c_int(-1)
                self._call(
                    "cuMemExportToShareableHandle",
                    ctypes.byref(file),
                    handle,
                    ctypes.c_int(_POSIX_DESCRIPTOR),
                    ctypes.c_ulonglong(0),
                )
                os.set_inheritable(file.value, False)
                try:
                    return self._mapped(device, handle, size, [_READ_AND_WRITE]), size, file.value
                except BaseException:
                    os.close(file.value)
                    raise

    def map(self, device: int, file: int, num_bytes: int) -> int:
        with self._on(device):
            handle = ctypes.c_ulonglong()
            self._call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(file),
                ctypes.c_int(_POSIX_DESCRIPTOR),
            )
            with self._released(handle):
                # Not every driver maps memory to be read only.
                return self._mapped(device, handle, num_bytes, [_READ, _READ_AND_WRITE])

    def device_of(self, address: int) -> int:
        device = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(device), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_ulonglong(address)
        )
        return device.value

    def unmap(self, device: int, address: int, num_bytes: int) -> None:
        with self._on(device):
            self._call("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))
            self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def pin(self, device: int, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        here, there = ctypes.c_void_p(address), ctypes.c_ulonglong()
        flags = [_MAPS_TO_DEVICE | _HOST_READS_ONLY, _MAPS_TO_DEVICE] if is_read_only else [_MAPS_TO_DEVICE]
        with self._on(device):
            self._register(here, num_bytes, flags)
            try:
                self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), here, ctypes.c_uint(0))
            except BaseException:
                self._call("cuMemHostUnregister", here)
                raise
        return there.value

    def _register(self, here: ctypes.c_void_p, num_bytes: int, flags: list[int]) -> None:
        """With the first flags that the device knows. Raises the error of the first ones."""
        first, *others = flags
        try:
            self._call("cuMemHostRegister_v2", here, ctypes.c_size_t(num_bytes), ctypes.c_uint(first))
        except CudaError:
            for each in others:
                with suppress(CudaError):
                    self._call("cuMemHostRegister_v2", here, ctypes.c_size_t(num_bytes), ctypes.c_uint(each))
                    return
            raise

    def unpin(self, device: int, address: int) -> None:
        with self._on(device):
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _mapped(self, device: int, handle: ctypes.c_ulonglong, size: int, accesses: list[int]) -> int:
        """The address of memory, with the first kind of access that the driver grants."""
        address, num_bytes, zero = ctypes.c_ulonglong(), ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, ctypes.c_size_t(0), zero, zero)
        try:
            self._call("cuMemMap", address, num_bytes, ctypes.c_size_t(0), handle, zero)
            try:
                self._grant(device, address, num_bytes, accesses)
            except BaseException:
                self._call("cuMemUnmap", address, num_bytes)
                raise
        except BaseException:
            self._call("cuMemAddressFree", address, num_bytes)
            raise
        return address.value

    def _grant(self, device: int, address: ctypes.c_ulonglong, num_bytes: ctypes.c_size_t, accesses: list[int]) -> None:
        *others, last = accesses
        for access in others:
            with suppress(CudaError):
                self._set_access(device, address, num_bytes, access)
                return
        self._set_access(device, address, num_bytes, last)

    def _set_access(self, device: int, address: ctypes.c_ulonglong, num_bytes: ctypes.c_size_t, access: int) -> None:
        wanted = _Access(_Location(_ON_DEVICE, device), access)
        self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(wanted), ctypes.c_size_t(1))

    @contextmanager
    def _released(self, handle: ctypes.c_ulonglong) -> Iterator[None]:
        """The memory stays while it is mapped, or a descriptor of it is open."""
        try:
            yield
        finally:
            self._call("cuMemRelease", handle)

    def _require_descriptors(self, device: int) -> None:
        number, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_EXPORTS_DESCRIPTORS), number)
        if not value.value:
            raise CudaError("this GPU, or its driver, does not share memory by descriptors")

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Within the block, the calling thread has the device's context."""
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            result = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise CudaError(f"CUDA's driver is too old: it lacks {name}") from None
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'an unknown error').decode()} ({result})")
