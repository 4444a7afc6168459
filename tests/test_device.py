"""Device selection and what a device says of itself.

MUSA is a Python-only stand-in, in a process of its own: torch can be given such a device once, for the whole process.
"""

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtmegatron import device as module
from mtmegatron.device import Device, choose_device, flat_zeros
from mtmegatron.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CPU = Device("cpu")


# --- the CPU ---


def test_cpu_by_name_and_its_strings() -> None:
    device = choose_device("cpu", local_rank=3)
    assert device == CPU and device.torch_device == torch.device("cpu")
    assert (device.backend, device.collective_backend_string) == ("gloo", "gloo")
    assert device.zero_size_all_to_all and device.ordered_sum and device.float64 and not (device.native_fp8 or device.narrow_sum)


def test_cpu_has_no_streams_and_a_context_that_does_nothing() -> None:
    assert not CPU.has_streams and CPU.stream() is None and CPU.current_stream() is None
    with CPU.stream_context(CPU.stream()):
        CPU.synchronize()
    CPU.set_current()


def test_cpu_random_state_returns() -> None:
    CPU.manual_seed(5)
    state, first = CPU.rng_state(), torch.rand(3)
    CPU.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    CPU.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a peak that can be reset")
def test_cpu_memory_peak_holds_what_was_freed_until_reset() -> None:
    size = 64 << 20
    CPU.memory_reset_peak()
    before = CPU.memory_peak()
    block = mmap.mmap(-1, size)  # straight from the system: what torch allocates may lie in memory that was freed before
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    slack = 8 << 20  # other threads and the allocator's own pages
    assert before + size - slack < CPU.memory_now() <= CPU.memory_peak()
    block.close()
    assert CPU.memory_peak() > before + size - slack
    CPU.memory_reset_peak()
    assert CPU.memory_now() - slack < CPU.memory_peak() < before + slack
    assert CPU.memory_peak() < CPU.memory_total()


def test_cpu_bf16_follows_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def native(**flags: bool) -> bool:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
        return module._cpu_bf16_units.__wrapped__()

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert native(avx512_bf16=True) and native(amx_bf16=True) and native(bf16=True)
    assert not native(avx2=True, avx512_f=True, avx512_bf16=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not native(avx512_bf16=True)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'gpu'.*auto, cpu, cuda, musa"):
        choose_device("gpu")


@pytest.mark.parametrize("name", ["cuda", "musa"])
def test_absent_device_says_what_is_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "_device_count", lambda type_: 0)
    assert choose_device("auto") == CPU
    with pytest.raises(UserError, match=f"{name} is not there.*cpu"):
        choose_device(name)


@pytest.mark.parametrize(
    "counts, expected", [({"cuda": 2}, "cuda"), ({"musa": 2}, "musa"), ({"cuda": 2, "musa": 2}, "musa"), ({}, "cpu")]
)
def test_auto_prefers_musa_then_cuda(monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], expected: str) -> None:
    monkeypatch.setattr(module, "_device_count", lambda type_: counts.get(type_, 0))
    assert choose_device("auto", local_rank=1).type == expected


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_device_count", lambda type_: 2 if type_ == "cuda" else 0)
    assert choose_device("cuda", 1) == Device("cuda", 1)
    with pytest.raises(UserError, match="local rank 2 .* torch sees 2: start at most 2 processes"):
        choose_device("cuda", 2)


# --- peaks ---


@pytest.mark.parametrize(
    "name, bf16",
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),  # and not 1979e12, which counts zeros of 2:4 sparsity as work
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("MTT S4000", 100e12),
        ("MTT S5000", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40", None),
        ("NVIDIA A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("AMD EPYC", None),
    ],
)
def test_peak_is_the_dense_published_one(monkeypatch: pytest.MonkeyPatch, name: str, bf16: float | None) -> None:
    monkeypatch.setattr(Device, "name", name)
    assert Device("cuda").peak_flops(torch.bfloat16) == bf16
    assert Device("cuda").peak_flops(torch.float16) == bf16


def test_peak_of_float32_follows_the_allowed_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "name", "NVIDIA A100-SXM4-80GB")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert Device("cuda").peak_flops(torch.float32) == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert Device("cuda").peak_flops(torch.float32) == 156e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_no_peak_for_a_dtype_that_the_chip_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "name", "NVIDIA A100-SXM4-80GB")
    assert Device("cuda").peak_flops(torch.float8_e4m3fn) is None
    assert Device("cuda").peak_flops(torch.int8) is None


# --- MUSA without the hardware ---

FAKE_MUSA = """
import contextlib, json, sys
import torch
import torch.distributed as dist
from torch.utils import backend_registration

calls, cuda_callers = [], []

class Musa(backend_registration._DummyBackendModule):
    '''What torch_musa's module has, as far as a Device asks. It lacks mem_get_info, as an old version might.'''
    class Stream:
        def __init__(self, device): calls.append(("Stream", str(device)))
    @staticmethod
    def stream(stream): return contextlib.nullcontext("inside")
    def current_stream(self, device): return "current"
    def device_count(self): return 2
    def get_device_name(self, index): return "MTT S4000"
    def get_device_capability(self, index): return (2, 2)
    def set_device(self, index): calls.append(("set_device", index))
    def synchronize(self, index): calls.append(("synchronize", index))
    def memory_allocated(self, index): return 10
    def max_memory_allocated(self, index): return 20
    def reset_peak_memory_stats(self, index): calls.append(("reset", index))
    def manual_seed(self, seed): calls.append(("seed", seed))
    def get_rng_state(self, device): return torch.zeros(1, dtype=torch.uint8)
    def set_rng_state(self, state, device): calls.append(("state", str(device)))

backend_registration._setup_privateuseone_for_python_backend("musa", backend_module=Musa())

def watch(name, function):
    def called(*arguments, **named):
        caller = sys._getframe(1).f_code.co_filename
        if "mtmegatron" in caller:
            cuda_callers.append((name, caller))
        return function(*arguments, **named)
    return called

for name, function in list(vars(torch.cuda).items()):
    if callable(function) and not isinstance(function, type):
        setattr(torch.cuda, name, watch(name, function))

created = []
def mccl(store, rank, size, timeout):
    created.append((rank, size, timeout.total_seconds()))
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("mccl", mccl, devices=["musa"])

from mtmegatron.device import choose_device
from mtmegatron.launch import Process, start_group, stop_group

device = choose_device("auto", local_rank=1)
stream = device.stream()
with device.stream_context(stream) as inside:
    device.synchronize()
device.memory_reset_peak()
device.manual_seed(7)
seeded = torch.initial_seed()
device.set_rng_state(device.rng_state())
store = start_group(Process(), device, timeout_s=5)
x = torch.ones(1)
dist.all_reduce(x)
config = str(dist.get_backend_config())
stop_group()
print(json.dumps({
    "device": [device.type, device.index, str(device.torch_device), device.name],
    "backend": [device.backend, device.collective_backend_string, config],
    "quirks": [device.zero_size_all_to_all, device.ordered_sum, device.float64, device.narrow_sum],
    "native": [device.native_bf16_matmul, device.native_fp8, device.peak_flops(torch.bfloat16)],
    "memory": [device.memory_now(), device.memory_peak(), device.memory_total()],
    "streams": [device.has_streams, inside, device.current_stream()],
    "seeded": seeded, "sum": x.item(), "calls": calls, "created": created, "cuda_callers": cuda_callers,
    "cpu": choose_device("cpu").type,
}))
"""


@pytest.fixture(scope="module")
def musa() -> dict:
    command = [sys.executable, "-c", FAKE_MUSA]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_auto_finds_musa_without_asking_cuda(musa: dict) -> None:
    assert musa["device"] == ["musa", 1, "musa:1", "MTT S4000"]
    assert musa["cuda_callers"] == []
    assert musa["cpu"] == "cpu"


def test_musa_group_starts_with_mccl_beside_gloo(musa: dict) -> None:
    assert musa["backend"] == ["mccl", "cpu:gloo,musa:mccl", "cpu:gloo,musa:mccl"]
    assert musa["created"] == [[0, 1, 5.0]] and musa["sum"] == 1.0


def test_musa_quirks_and_chip(musa: dict) -> None:
    assert musa["quirks"] == [False, False, False, True]
    assert musa["native"] == [True, False, 100e12]


def test_musa_module_is_called_with_this_ranks_device(musa: dict) -> None:
    used = [["Stream", "musa:1"], ["synchronize", 1], ["reset", 1], ["seed", 7], ["state", "musa:1"]]
    assert musa["calls"] == [*used, ["set_device", 1]]
    assert musa["streams"] == [True, "inside", "current"]
    assert musa["seeded"] == 7


def test_what_the_module_lacks_has_a_default(musa: dict) -> None:
    assert musa["memory"] == [10, 20, 0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [0, 5, (1 << 20) + 3])
def test_flat_buffers_are_zeros_whatever_their_size(size, device):
    buffers = [flat_zeros(size, dtype, torch.device(device)) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    assert [b.shape for b in buffers] == [(size,)] * 3 and all(b.is_meta or not b.any() for b in buffers)
    for buffer in buffers:
        buffer.fill_(1)  # every page is there
