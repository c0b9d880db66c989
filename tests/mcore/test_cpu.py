"""Megatron's CUDA spellings mean the CPU after `enable_cpu()`, and only then.

Everything runs in child processes, because enabling changes torch for the whole process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_bp.mcore import cpu

ENABLE = "import torch; from megatron_bp.mcore import cpu; cpu.enable_cpu(); cpu.enable_cpu()\n"


def check(code: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENABLE + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_it_refuses_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match=r"CUDA device.*must run where there is none"):
        cpu.enable_cpu()
    assert torch.cuda.current_device is before


def test_importing_it_changes_nothing_and_loads_no_megatron() -> None:
    code = (
        "import sys, torch; before = torch.cuda.current_device\n"
        "from megatron_bp.mcore import cpu, versions\n"
        "assert torch.cuda.current_device is before\n"
        "assert not any(name.split('.')[0] == 'megatron' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_device_spellings_random_state_norms_and_splits() -> None:
    """One process for all, since importing Megatron takes most of the time."""
    check(
        """
t = torch.zeros(2, device="cuda:0", dtype=torch.bfloat16)
assert t.device.type == "cpu" and t.cuda() is t and t.pin_memory() is t
assert t.to("cuda") is t and t.to(device="cuda") is t
assert torch.tensor([1.0], device="cuda", pin_memory=True).device.type == "cpu"
assert t.type() == "torch.cuda.BFloat16Tensor" and t.float().type() == "torch.cuda.FloatTensor"
assert torch.cuda.current_device() == torch.device("cpu") and not torch.cuda.is_available()

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker(); tracker.add("here", 5)
with tracker.fork("here"):
    inside = torch.rand(3)
torch.manual_seed(5)
assert torch.equal(inside, torch.rand(3))

from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
for marked in (True, False):
    config = SimpleNamespace(layernorm_zero_centered_gamma=False, persist_layer_norm=False,
        sequence_parallel=marked, memory_efficient_layer_norm=False, normalization="RMSNorm")
    norm = WrappedTorchNorm(config, 8)
    assert type(norm) is torch.nn.RMSNorm and norm.weight.sequence_parallel is marked

from megatron.core.transformer.moe import token_dispatcher
splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True)
assert splits.tolist() == [2, 3] and not torch.is_tensor(splits)

from megatron.core.datasets import utils
utils.compile_helpers()  # the wheel's own would leave the process
"""
    )


def test_compiled_functions_run_eagerly() -> None:
    check(
        """
calls = []
@torch.compile
def double(x):
    calls.append(torch.compiler.is_compiling())
    return 2 * x
assert double(torch.ones(1)).item() == 2 and calls == [False]
"""
    )
