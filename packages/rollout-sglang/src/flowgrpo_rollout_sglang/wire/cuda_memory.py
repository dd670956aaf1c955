"""Device memory that two processes share: plain cudaMalloc, so its handle is valid whatever torch's allocator does.

Calls the CUDA runtime that torch has loaded.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""

    def __init__(self, call: str, code: int, what: str):
        super().__init__(call, code, what)
        self.call, self.code, self.what = call, code, what

    def __str__(self) -> str:
        return f"{self.call}: {self.what} (CUDA error {self.code})"


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime of torch's own major version."""
    version = torch.version.cuda
    if version is None:
        raise CudaError("load", 0, "this torch was built without CUDA")
    runtime = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    pointer = ctypes.POINTER(ctypes.c_void_p)
    runtime.cudaMalloc.argtypes = [pointer, ctypes.c_size_t]
    runtime.cudaFree.argtypes = [ctypes.c_void_p]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), ctypes.c_void_p]
    runtime.cudaIpcOpenMemHandle.argtypes = [pointer, _IpcHandle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    return runtime


def _call(name: str, device: torch.device, *arguments: object) -> None:
    with torch.cuda.device(device):
        code = getattr(_runtime(), name)(*arguments)
        if code:
            what = _runtime().cudaGetErrorString(code).decode()
            _runtime().cudaGetLastError()  # or the next launch of torch would report it
            raise CudaError(name, code, what)


def allocate(nbytes: int, device: torch.device) -> int:
    """Address of `nbytes` of new device memory. Raises CudaError."""
    pointer = ctypes.c_void_p()
    _call("cudaMalloc", device, ctypes.byref(pointer), nbytes)
    assert pointer.value is not None
    return pointer.value


def free(pointer: int, device: torch.device) -> None:
    _call("cudaFree", device, pointer)


def export(pointer: int, device: torch.device) -> bytes:
    """The handle under which another process opens this allocation."""
    handle = _IpcHandle()
    _call("cudaIpcGetMemHandle", device, ctypes.byref(handle), pointer)
    return bytes(handle)


def open_exported(handle: bytes, device: torch.device) -> int:
    """Address of another process's allocation in this one. Raises CudaError, ValueError."""
    if len(handle) != _HANDLE_BYTES:
        raise ValueError(f"a CUDA memory handle has {_HANDLE_BYTES} bytes, got {len(handle)}")
    pointer = ctypes.c_void_p()
    opened = _IpcHandle.from_buffer_copy(handle)
    _call("cudaIpcOpenMemHandle", device, ctypes.byref(pointer), opened, _PEER_ACCESS)
    assert pointer.value is not None
    return pointer.value


def close_exported(pointer: int, device: torch.device) -> None:
    _call("cudaIpcCloseMemHandle", device, pointer)


class _Memory:
    """What torch reads an address through."""

    def __init__(self, pointer: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def as_tensor(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    """[nbytes] uint8 over device memory that somebody else frees."""
    return torch.as_tensor(_Memory(pointer, nbytes), device=device)


def device_uuid(device: torch.device) -> str:
    """The GPU's own identity: indices differ between processes with different CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_uuids() -> list[str]:
    """The identities of this process's GPUs, by index."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [device_uuid(torch.device("cuda", index)) for index in range(count)]


def device_with(uuid: str) -> torch.device | None:
    """The visible GPU of that identity."""
    return next((torch.device("cuda", i) for i, found in enumerate(visible_uuids()) if found == uuid), None)
