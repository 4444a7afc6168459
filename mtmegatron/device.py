"""The hardware, behind one object: cpu, cuda or musa.

Notable:
- The only file that knows the names of device types and of their collective libraries. All others ask a `Device`.
- MUSA is found by its own module, never through the namespace of another vendor. Nothing here patches torch.
- A function of a device module is probed for, not assumed: the modules differ in what they have.
- What a backend cannot do is a field of `_Kind`, so that no other file has to know which library it is talking to.
- Peak rates are the published dense ones. A chip, or a dtype on it, without a published number has no peak, and then no
  utilisation is printed.
"""

import contextlib
import ctypes
import importlib
import mmap
import os
import re
import resource
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ContextManager

import torch

from mtmegatron.errors import UserError


@dataclass(frozen=True)
class _Kind:
    """What is true of a device type, whatever the chip. Compute capabilities are (major, minor); None: never."""

    backend: str
    zero_size_all_to_all: bool
    ordered_sum: bool
    narrow_sum: bool
    float64: bool
    bf16_from: tuple[int, int] | None
    fp8_from: tuple[int, int] | None
    mixed_products: bool = False


_KINDS = {
    "cpu": _Kind("gloo", zero_size_all_to_all=True, ordered_sum=True, narrow_sum=False, float64=True, bf16_from=None, fp8_from=None),
    "cuda": _Kind("nccl", True, ordered_sum=False, narrow_sum=False, float64=True, bf16_from=(8, 0), fp8_from=(8, 9), mixed_products=True),
    # Its all-to-all with an empty side was known to hang between nodes, its sums of bf16 to cost quality; float64 is emulated and slow.
    "musa": _Kind("mccl", False, ordered_sum=False, narrow_sum=True, float64=False, bf16_from=(2, 2), fp8_from=(3, 1)),
}

_LARGE_PAGE = 1 << 21  # bytes

_ACCELERATORS = ("musa", "cuda")  # in the order in which "auto" looks for them

# Dense FLOP/s with fp32 accumulation, from the vendors' data sheets and white papers. "16" is both 16-bit formats and
# "fp8" both 8-bit ones; "tf32" is float32 when torch may round the inputs. The first pattern found in the name wins.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bA100\b(?!.*MIG)", {"16": 312e12, "tf32": 156e12, "32": 19.5e12}),
    (r"\bH[12]00 NVL$", {"16": 835.5e12, "fp8": 1671e12}),
    (r"\bH100 PCIe$", {"16": 756e12, "fp8": 1513e12, "tf32": 378e12}),
    (r"\bH100\b.*HBM3$|\bH200$", {"16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12, "32": 66.9e12}),
    (r"\bB200$", {"16": 2250e12, "fp8": 4500e12}),
    (r"\bL40S$", {"16": 362.05e12, "fp8": 733e12, "tf32": 183e12, "32": 91.6e12}),
    (r"\bRTX 4090$", {"16": 165.2e12, "fp8": 330.3e12, "tf32": 82.6e12, "32": 82.6e12}),
    (r"\bMTT S4000$", {"16": 100e12, "tf32": 50e12, "32": 25e12}),
)


@dataclass(frozen=True)
class Device:
    """One device of this process. Made by `choose_device`; passed, never looked up."""

    type: str
    index: int = 0

    # --- what it is ---

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def name(self) -> str:
        """The chip's name as its driver or the operating system gives it; the type where there is none."""
        return _cpu_name() if self.type == "cpu" else self._call("get_device_name", self.index, default=self.type)

    @property
    def backend(self) -> str:
        """The collective library for tensors on this device."""
        return self._kind.backend

    @property
    def collective_backend_string(self) -> str:
        """What `init_process_group` takes: host tensors always have Gloo, beside the device's own library."""
        host = _KINDS["cpu"].backend
        return host if self.type == "cpu" else f"cpu:{host},{self.type}:{self.backend}"

    def take_one_thread(self) -> None:
        """Operators of this process on the host run in one thread, so that how threads share the work changes no sum."""
        torch.set_num_threads(1)

    # --- what it can do ---

    @property
    def zero_size_all_to_all(self) -> bool:
        """False: an all-to-all must not have an empty leg."""
        return self._kind.zero_size_all_to_all

    @property
    def ordered_sum(self) -> bool:
        """True: make a reduce-scatter of an all-to-all and a sum in rank order (exact, and faster than Gloo's own)."""
        return self._kind.ordered_sum

    @property
    def narrow_sum(self) -> bool:
        """True: the library adds 16-bit floats in 16 bits, so the mesh adds them itself."""
        return self._kind.narrow_sum

    @property
    def float64(self) -> bool:
        """Whether float64 runs in hardware, so that norms and proofs may use it."""
        return self._kind.float64

    @property
    def native_bf16_matmul(self) -> bool:
        """Whether a bfloat16 matrix product is at least as fast as a float32 one."""
        return _cpu_bf16_units() if self.type == "cpu" else self._capability_from(self._kind.bf16_from)

    @property
    def mixed_products(self) -> bool:
        """Whether torch multiplies 16-bit numbers into a float32 result here, without rounding it in between."""
        return self._kind.mixed_products and self.native_bf16_matmul

    @property
    def native_fp8(self) -> bool:
        """Whether the chip multiplies 8-bit floats itself."""
        return self._capability_from(self._kind.fp8_from)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Published dense FLOP/s of matrix products in `dtype`; None where none is known: then print no utilisation.

        float32 counts as TF32 when `torch.set_float32_matmul_precision` allows it. Numbers with sparsity are not used.
        """
        column = _peak_column(dtype)
        return next((peaks.get(column) for pattern, peaks in _PEAKS if re.search(pattern, self.name)), None)

    # --- streams ---

    @property
    def has_streams(self) -> bool:
        return self.type != "cpu" and hasattr(self._module, "Stream")

    def stream(self) -> Any | None:
        """A new stream, or None where work runs in program order."""
        return self._module.Stream(device=self.torch_device) if self.has_streams else None

    def current_stream(self) -> Any | None:
        return self._module.current_stream(self.torch_device) if self.has_streams else None

    def stream_context(self, stream: Any | None) -> ContextManager[Any]:
        """Work inside goes to `stream`; with None it stays where it is."""
        return contextlib.nullcontext() if stream is None else self._module.stream(stream)

    def synchronize(self) -> None:
        """Wait until all work on the device is done. A CPU is always done."""
        if self.type != "cpu":
            self._call("synchronize", self.index)

    def set_current(self) -> None:
        """Make this the device that torch and the collective library use by default in this process."""
        if self.type == "cpu":
            _keep_freed_memory()
        else:
            self._call("set_device", self.index)

    # --- memory, in bytes ---

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the host, pinned where the device reads them by itself, beside its work."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.type != "cpu")

    def memory_now(self) -> int:
        """Allocated tensors on a device; resident memory of this process on a CPU."""
        return _resident("VmRSS") if self.type == "cpu" else self._call("memory_allocated", self.index, default=0)

    def memory_peak(self) -> int:
        """The largest `memory_now` since the start or the last `memory_reset_peak`."""
        return _resident("VmHWM") if self.type == "cpu" else self._call("max_memory_allocated", self.index, default=0)

    def memory_reset_peak(self) -> None:
        """Start a new peak. No effect on a CPU without Linux's /proc: there the peak is that of the whole process."""
        if self.type == "cpu":
            _reset_resident_peak()
        else:
            self._call("reset_peak_memory_stats", self.index)

    def memory_total(self) -> int:
        """All memory of the device; on a CPU what machine or container may use. 0 where the backend does not tell."""
        if self.type == "cpu":
            return _host_memory()
        return self._call("mem_get_info", self.index, default=(0, 0))[1]

    # --- random numbers ---

    def manual_seed(self, seed: int) -> None:
        """Seed the default generators of the host and of this device. Other devices are not touched."""
        torch.default_generator.manual_seed(seed)
        if self.type != "cpu":
            self._call("manual_seed", seed)

    def rng_state(self) -> torch.Tensor:
        """State of the device's default generator, a ByteTensor on the host."""
        return torch.get_rng_state() if self.type == "cpu" else self._module.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        if self.type == "cpu":
            torch.set_rng_state(state)
        else:
            self._module.set_rng_state(state, self.torch_device)

    # --- how it reaches torch ---

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.type]

    @property
    def _module(self) -> ModuleType:
        return torch.get_device_module(self.type)

    def _call(self, function: str, *arguments: Any, default: Any = None) -> Any:
        """Call a function of torch's module for this type; `default` where the backend does not have it."""
        found = getattr(self._module, function, None)
        return default if found is None else found(*arguments)

    def _capability_from(self, least: tuple[int, int] | None) -> bool:
        if least is None:
            return False
        return tuple(self._call("get_device_capability", self.index, default=(0, 0))) >= least


def choose_device(name: str = "auto", local_rank: int = 0) -> Device:
    """The device of the process with this rank on its node: cpu, cuda, musa, or auto (musa, else cuda, else cpu).

    Raises: UserError for an unknown name, a type that this machine lacks, or more local ranks than devices.
    """
    if name != "auto" and name not in _KINDS:
        raise UserError(f"device: {name!r} is not known: use auto, {', '.join(_KINDS)}")
    if name == "auto":
        name = next((type_ for type_ in _ACCELERATORS if _device_count(type_)), "cpu")
    if name == "cpu":
        return Device("cpu")
    count = _device_count(name)
    if count == 0:
        here = ", ".join([*filter(_device_count, _ACCELERATORS), "cpu"])
        raise UserError(f"device: {name} is not there, torch sees only {here} on this machine: use one of these")
    if local_rank >= count:
        raise UserError(
            f"device: local rank {local_rank} needs a {name} device of its own and torch sees {count}: start at most "
            f"{count} processes on this node, or use device cpu"
        )
    return Device(name, local_rank)


def _device_count(type_: str) -> int:
    """Usable devices of a type; 0 when torch was built without it, its plug-in is absent, or no driver answers."""
    if type_ == "musa":
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("torch_musa")  # older torch does not load the plug-in by itself
    module = getattr(torch, type_, None)
    return module.device_count() if module is not None and module.is_available() else 0


def _peak_column(dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if dtype in (torch.bfloat16, torch.float16):
        return "16"
    return "fp8" if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else str(dtype)


@lru_cache
def _cpu_bf16_units() -> bool:
    """Whether the CPU has bfloat16 dot products that oneDNN uses.

    Measured with torch 2.13, one thread, 512 x 512: with avx512_bf16 224 GFLOP/s in bfloat16 and 105 in float32; with
    oneDNN held to plain AVX-512 about 36. Its own "bf16 is supported" is True in both cases: so ask for instructions.
    """
    read = getattr(torch.cpu, "get_capabilities", None)
    flags = read() if read else {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    units = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's name
    return torch.backends.mkldnn.is_available() and any(flags.get(unit) for unit in units)


@lru_cache
def _keep_freed_memory() -> None:
    """Tells glibc to keep freed buffers in the process, as accelerator allocators do.

    By default each large tensor is mapped anew and its pages are faulted in at every use: half of the time of an elementwise operator. Another
    C library without mallopt is left as it is."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 26)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(ctypes.c_int(option), ctypes.c_int(value))


def flat_zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat buffer of zeros; in host memory the kernel is asked for pages of 2 MiB before anything is written to it. Shapes: [size].

    A pass over a large buffer misses its small pages so often that with large ones a norm takes three quarters of the time and an update of Adam
    seven eighths (measured). A system without them is left as it is."""
    x = torch.empty(size, dtype=dtype, device=device)
    if x.device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            start = -(-x.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
            inside = (x.data_ptr() + x.nbytes - start) // _LARGE_PAGE * _LARGE_PAGE
            if inside > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(inside), mmap.MADV_HUGEPAGE)
    return x.zero_()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return found[1].strip()
    return "cpu"


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes. Not `getrusage` first: its peak includes the parent's before exec."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_resident_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak resident set size to the present one


def _host_memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical
