"""FlashAttention 4's forward calls the kernel that the entry point would, over stand-ins.

The package is not needed: its entry point is replaced by one that derives a key from its arguments,
looks it up in a cache of kernels and calls what it finds, as the real one does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_bp.attention as package
from tests.stand_ins import import_over


class Entry:
    """The entry point: counts its calls; kernels note what they are called with."""

    def __init__(self) -> None:
        self.compile_cache: Any = {}
        self.calls = 0
        self.kernel_calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        self.calls += 1
        if options.pop("fail", False):
            raise RuntimeError("refused")
        window = options.get("window_size_left"), options.get("window_size_right")
        causal, lengths = options.get("causal", False), options.get("seqused_k")
        key = (q.dtype, q.shape[3], q.shape[2] // k.shape[2], causal, *(x is None for x in window))
        key = (*key, lengths is None, options.get("tile_mn"), 0 in k.stride())
        if 0 in k.shape:
            options["out"].zero_()
            return
        if key not in self.compile_cache:
            self.compile_cache[key] = lambda *given: self.kernel_calls.append((key, given))
        out, lse, scale = options["out"], options["lse"], options["softmax_scale"]
        nothing = (None, None, None)
        tail = (None, *window, None, None, "aux", None, None)
        self.compile_cache[key](q, k, v, out, lse, scale, *nothing, lengths, *tail)


@pytest.fixture
def entry() -> Entry:
    """A fresh entry point."""
    return Entry()


@pytest.fixture
def forward(entry: Entry) -> Any:
    """A copy of flash4_forward.py over the stand-ins; the one that others import is untouched."""
    members: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"_flash_attn_fwd": entry, "_get_device_arch": lambda: 90},
        "flash_attn.cute.utils": {"AuxData": lambda *_: "aux"},
    }
    return import_over(Path(package.__file__).with_name("flash4_forward.py"), members)


def call(
    forward: Any,
    rows: int = 8,
    keys: int = 16,
    lengths: bool = False,
    shift: int = 0,
    size: int = 16,
    problems: int = 2,
    **options: Any,
) -> tuple[Any, ...]:
    """Runs a call whose q begins `shift` elements into its memory; returns its tensors."""
    flat = torch.zeros(problems * rows * 4 * size + shift, dtype=torch.bfloat16)
    q = flat[shift:].view(problems, rows, 4, size)
    kv = torch.zeros(1, keys, 2, 2, size, dtype=torch.bfloat16)
    k, v = (kv[:, :, i].expand(problems, -1, -1, -1) for i in range(2))
    into = torch.zeros_like(q), torch.zeros(problems, 4, rows)
    used = (torch.full((problems,), keys, dtype=torch.int32),) if lengths else ()
    forward.run(forward.Inputs(q, k, v, used), 0.5, into, options)
    return q, k, v, *into, *used


OPTIONS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": False, "tile_mn": (128, 176)},
    {"causal": False, "window_size_left": 3, "window_size_right": 0},
    {"causal": False, "window_size_left": None, "window_size_right": 2},
    {"causal": False, "lengths": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_second_call_of_a_kind_is_the_entry_points_without_it(
    forward: Any, entry: Entry, options: dict[str, Any]
) -> None:
    call(forward, **options)
    tensors = call(forward, **options)
    assert entry.calls == 1
    (key, first), (key2, second) = entry.kernel_calls
    assert key == key2
    assert first[5:9] == second[5:9]
    assert first[10:] == second[10:]
    assert [x.data_ptr() for x in second[:5]] == [x.data_ptr() for x in tensors[:5]]
    assert (second[9] is None) == (len(tensors) == 5)
    assert second[9] is None or second[9] is tensors[5]


def test_another_kind_goes_through_the_entry_point_first(forward: Any, entry: Entry) -> None:
    for options in OPTIONS:
        call(forward, **options)
    call(forward, rows=9, causal=False)
    call(forward, size=32, causal=False)
    assert entry.calls == len(OPTIONS) + 2
    call(forward, rows=9, causal=False)
    assert entry.calls == len(OPTIONS) + 2


@pytest.mark.parametrize("unusual", [{"shift": 1}, {"size": 12}, {"keys": 0}])
def test_what_the_entry_point_copies_or_ends_early_always_goes_through_it(
    forward: Any, entry: Entry, unusual: dict[str, int]
) -> None:
    for _ in range(3):
        call(forward, causal=False, **unusual)
    assert entry.calls == 3


def test_other_architectures_always_go_through_it(forward: Any, entry: Entry) -> None:
    forward.interface._get_device_arch = lambda: 100
    for _ in range(2):
        call(forward, causal=False)
    assert entry.calls == 2


def test_a_refused_call_leaves_the_packages_cache_in_place(forward: Any, entry: Entry) -> None:
    cache = entry.compile_cache
    with pytest.raises(RuntimeError, match="refused"):
        call(forward, causal=False, fail=True)
    assert entry.compile_cache is cache
    call(forward, causal=False)
    call(forward, causal=False)
    assert entry.calls == 2


def test_a_kernel_that_needs_gradients_gets_tensors_without(forward: Any, entry: Entry) -> None:
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    into = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 8)
    for _ in range(2):
        forward.run(forward.Inputs(q, k, k), 1.0, into, {"causal": True})
    assert not entry.kernel_calls[1][1][0].requires_grad
