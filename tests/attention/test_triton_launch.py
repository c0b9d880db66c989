"""Launches reach the kernel that Triton would choose, and look for it once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

launcher = pytest.importorskip("megatron_bp.attention.triton_launch")
GRID = (3, 2, 1)
STREAM = 77


class Kernel:
    """Notes what it is asked, as a triton.JITFunction would be."""

    def __init__(self) -> None:
        self.normal: list[tuple[Any, ...]] = []
        self.looked: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args, **options: self.normal.append((grid, args, options))

    def warmup(self, *args: Any, **options: Any) -> Any:
        self.looked.append((args, options))
        return Compiled(self)


class Compiled:
    """A kernel as Triton compiles it: loaded when it is asked for its grid."""

    packed_metadata = "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> None:
        self.function = f"loaded for {grid}"

    def run(self, *given: Any) -> None:
        """As Triton calls it: grid, stream, function, metadata, hooks, arguments."""
        head = (*GRID, STREAM, f"loaded for {GRID}", "metadata", None, None, None)
        assert given[: len(head)] == head
        self._kernel.fast.append(given[len(head) :])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launcher.triton, "JITFunction", Kernel)
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launcher.triton.runtime, "driver", SimpleNamespace(active=active))
    return Kernel()


def start(kernel: Any, x: torch.Tensor, number: int = 7, registers: int = 0) -> None:
    resources = launcher.Resources(num_warps=8, num_stages=1, registers=registers)
    launcher.launch(kernel, GRID, (x, x), (number, 0.5), (True, 64), resources)


def test_a_launch_passes_addresses_numbers_and_constants_in_order(kernel: Kernel) -> None:
    x = torch.zeros(8, dtype=torch.bfloat16)
    start(kernel, x)
    options = {"grid": GRID, "num_warps": 8, "num_stages": 1}
    assert kernel.looked == [((torch.bfloat16, torch.bfloat16, 7, 0.5, True, 64), options)]
    assert kernel.fast == [(x.data_ptr(), x.data_ptr(), 7, 0.5, True, 64)]
    assert not kernel.normal


def test_a_kernel_is_looked_for_once_for_all_tensors_of_its_kind(kernel: Kernel) -> None:
    for _ in range(3):
        start(kernel, torch.zeros(8))
    assert (len(kernel.looked), len(kernel.fast)) == (1, 3)


def test_other_numbers_dtypes_or_resources_look_for_another_kernel(kernel: Kernel) -> None:
    start(kernel, torch.zeros(8))
    start(kernel, torch.zeros(8), number=8)
    start(kernel, torch.zeros(8, dtype=torch.float16))
    start(kernel, torch.zeros(8), registers=128)
    assert len(kernel.looked) == 4
    assert kernel.looked[-1][1]["maxnreg"] == 128


def test_tensors_at_odd_addresses_are_left_to_triton(kernel: Kernel) -> None:
    x = torch.zeros(8)[1:]
    start(kernel, x)
    assert not kernel.looked
    (grid, args, options), *_ = kernel.normal
    assert (grid, args[2:], options) == (
        GRID,
        (7, 0.5, True, 64),
        {"num_warps": 8, "num_stages": 1},
    )
    assert args[0] is x


def test_an_interpreted_kernel_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.triton, "JITFunction", type(None))
    kernel = Kernel()
    start(kernel, torch.zeros(8))
    assert len(kernel.normal) == 1
