"""Launching compiled kernels through the CUDA driver (ctypes), with all look-ups done once.

A launch fills a few prebuilt fields and makes one foreign call: 2 to 3 us on the host. It is safe under CUDA graphs and on any
stream: no allocation, no synchronisation, torch's current stream.
"""

import ctypes
import struct
import threading
from functools import cache, lru_cache, partial
from typing import Any

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda import nvrtc
from lowq_packers.errors import UnsupportedError, device_lost

_CLUSTER, _SERIALIZE = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SMEM, _CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, ..._PREFERRED_SHARED_MEMORY_CARVEOUT
_NO_CONTEXT = 201
SYSTEM, MOST_BLOCKS = 1 << 10, 32  # bytes of shared memory that the driver adds to every block; max. blocks per SM
_TOO_OLD = (218, 222, 35, 803)  # invalid PTX, unsupported PTX version, driver older than the runtime, system mismatch


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from CPU builds of torch, as the next
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


TensorMap = ctypes.c_uint64 * 16  # type of a kernel parameter that is a CUtensorMap: 128 opaque bytes, passed as bytes
Folded = ctypes.c_uint64 * 7  # ... that is fold.cuh's struct: six addresses and a float, passed as bytes
_FORMATS = {ctypes.c_void_p: "Q", ctypes.c_int32: "i", ctypes.c_float: "f", TensorMap: "128s", Folded: "56s"}
UNFOLDED = bytes(ctypes.sizeof(Folded))  # the argument of a launch without fused row-wise work


@cache
def _driver() -> ctypes.PyDLL:
    try:
        # PyDLL keeps the interpreter lock: a launch takes 2 us, and releasing and retaking the lock would take as long
        return ctypes.PyDLL("libcuda.so.1")
    except OSError as e:
        raise UnsupportedError("no CUDA driver found (libcuda.so.1); the cuda kernels need an NVIDIA GPU and its driver") from e


def _check(code: int, what: str) -> None:
    if not code:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    detail = text.value.decode() if text.value else f"error {code}"
    if code in _TOO_OLD:
        have = ctypes.c_int()
        _driver().cuDriverGetVersion(ctypes.byref(have))
        have_text = f"{have.value // 1000}.{have.value % 1000 // 10}"
        need = f"CUDA {nvrtc.version()[0]}"
        raise UnsupportedError(
            f"the GPU driver speaks CUDA {have_text}, the kernels were compiled for {need}: update it ({detail})"
        )
    lost = RuntimeError(f"CUDA driver: {what}: {detail}")
    raise lost if device_lost(lost) else UnsupportedError(str(lost))


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """torch's context of the device: the primary one."""
    context = ctypes.c_void_p()
    _check(_driver().cuInit(0), "cuInit")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"no context on device {device}")
    return context


def _make_current(device: int) -> None:
    """Set torch's context in this thread: a thread that has not called the CUDA runtime yet has none."""
    _check(_driver().cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")


class Parameters:
    """Memory for a kernel's parameters: `fill` writes all of them in one call, a launch takes `addresses`."""

    def __init__(self, types: tuple[type, ...]) -> None:
        formats = [_FORMATS[t] for t in types]
        form = struct.Struct("@" + "".join(formats))
        self.fill = partial(form.pack_into, memory := bytearray(form.size), 0)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # "0Q" at the end of a format pads to where a Q would lie
        offsets = [struct.calcsize("@" + "".join(formats[:i]) + "0" + f.lstrip("0123456789")) for i, f in enumerate(formats)]
        self.addresses = (ctypes.c_void_p * len(types))(*(start + offset for offset in offsets))


def keeps_split(on: gpu.Gpu, used: dict[str, int], threads: int, smem: int, per_sm: int = MOST_BLOCKS) -> bool:
    """Whether an SM holds as many blocks with `on.split` bytes of shared memory as with the maximum.

    used: a Cubin's resources. An SM must be idle to change the split between L1 and shared memory, so a kernel with another
    split than its predecessor cannot start early. One split for all kernels, us per step on an H200: 8B in 4 bits 1,259 ->
    1,256, with 16 rows 1,786 -> 1,750; 1B in 4 bits 445 -> 422, in 16 bits 839 -> 732.
    """
    each = smem + used["smem"] + SYSTEM
    most = min(per_sm, on.smem_sm // each, 2048 // threads, gpu.REGISTERS // (-(-used["registers"] // 8) * 8 * threads))
    return most <= 1 or most * each <= on.split


class Kernel:
    """One template instance on one device, ready to launch.

    Args:
        file, expression: what `nvrtc.compiled` takes.
        device: CUDA device index.
        threads: per block.
        parameters: ctypes type of each kernel parameter, in order.
        smem: dynamic shared memory in bytes; `launch` may use less.
        cluster: blocks per cluster along x (1: no clusters).
        serialize: allow programmatic dependent launch (the kernel calls griddepcontrol.wait before it reads x).
        per_sm: max. blocks per SM of its grids.
    """

    def __init__(
        self,
        file: str,
        expression: str,
        device: int,
        threads: int,
        parameters: tuple[type, ...],
        smem: int = 0,
        cluster: int = 1,
        serialize: bool = False,
        per_sm: int = MOST_BLOCKS,
    ) -> None:
        on = gpu.here(device)
        cubin = nvrtc.compiled(file, expression, on.arch)
        driver, self._module, self._function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _make_current(device)
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin.image), f"loading {expression}")
            _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, cubin.symbol.encode()), cubin.symbol)
            if smem:  # also for 48 KB and less: the source's static shared memory counts too
                _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SMEM, smem), f"{smem} bytes of shared memory")
            if on.split and keeps_split(on, cubin.resources, threads, smem, per_sm):
                _check(driver.cuFuncSetAttribute(self._function, _CARVEOUT, 100 * on.split // on.smem_sm), "a split of L1")
        self.name, self.device, self._launch, self._lock = expression, device, driver.cuLaunchKernelEx, threading.Lock()
        self._parameters = Parameters(parameters)
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = _CLUSTER
            attributes[count].value[0:3] = (cluster, 1, 1)
            count += 1
        if serialize:
            attributes[count].id = _SERIALIZE
            attributes[count].value[0] = 1
            count += 1
        self._attributes = attributes
        self._config = _Config(grid=(1, 1, 1), block=(threads, 1, 1), smem=smem, attributes=attributes, count=count)
        self._config_address = ctypes.byref(self._config)

    def __call__(self, grid_x: int, grid_y: int, smem: int, *values: object) -> None:
        """Launch on torch's current stream of the device. Raises UnsupportedError if the driver refuses."""
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(grid_x, grid_y, smem, *values)
        with self._lock:
            self._parameters.fill(*values)
            config = self._config
            config.grid[0], config.grid[1], config.smem = grid_x, grid_y, smem
            config.stream = _raw_stream(self.device)
            code = self._launch(self._config_address, self._function, self._parameters.addresses, None)
            if code == _NO_CONTEXT:
                _make_current(self.device)
                code = self._launch(self._config_address, self._function, self._parameters.addresses, None)
        if code:
            _check(code, f"launching {self.name}")
        return None


@lru_cache(4096)  # a pure function of its arguments: a map holds an address and sizes, nothing of the contents
def tensor_map(
    address: int, element_bytes: int, inner: int, rows: int, row_bytes: int, box: tuple[int, int], swizzle: bool
) -> bytes:
    """A 2-D tensor map for TMA loads: rows of `inner` elements, `box` = (inner, rows) elements a load; outside reads as 0.

    address and row_bytes must be multiples of 16; with swizzle the box is 128 bytes wide and stored 128-byte swizzled.
    """
    scratch = ctypes.create_string_buffer(192)
    aligned = (ctypes.addressof(scratch) + 63) // 64 * 64  # the driver wants 64-byte alignment
    dtype = {1: 0, 2: 1, 4: 2}[element_bytes]  # CU_TENSOR_MAP_DATA_TYPE_UINT8, UINT16, UINT32
    arguments = (
        ctypes.c_void_p(aligned),
        dtype,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(inner, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # not interleaved
        3 if swizzle else 0,  # CU_TENSOR_MAP_SWIZZLE_128B
        2,  # L2 promotion: 128 bytes
        0,  # out of bounds: zeros
    )
    code = _driver().cuTensorMapEncodeTiled(*arguments)
    if code == _NO_CONTEXT:
        _make_current(torch.cuda.current_device())
        code = _driver().cuTensorMapEncodeTiled(*arguments)
    _check(code, "cuTensorMapEncodeTiled")
    return ctypes.string_at(aligned, 128)
