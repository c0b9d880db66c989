"""A mask is applied to the tiles that it cuts, and to no other."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bp.attention import contract as package
from tests.stand_ins import import_over

TILE_M, TILE_N = 3, 4


@dataclass(frozen=True)
class Mask:
    """The package's mask, which notes the tiles that it is applied to."""

    tile_m: int
    tile_n: int
    seqlen_info: tuple[int, int]
    window_size_left: int | None = None
    window_size_right: int | None = None

    @property
    def seqlen_q(self) -> int:
        return self.seqlen_info[0]

    @property
    def seqlen_k(self) -> int:
        return self.seqlen_info[1]

    def apply_mask(self, acc_S: list[tuple[int, int]], **named: Any) -> None:
        acc_S.append((named["m_block"], named["n_block"]))


class Kernel:
    """The package's kernel, which hands on what it makes its mask from."""

    def mma(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        return *args, *named.values()


@pytest.fixture(scope="module")
def edges() -> Any:
    """A copy of flash4_edges.py over stand-ins."""
    path = Path(package.__file__).with_name("flash4_edges.py")
    arch = SimpleNamespace(sync_warp=lambda: None)
    members = {
        "cutlass": {},
        "cutlass.cute": {"jit": lambda f: f, "arch": arch},
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.flash_bwd_sm90": {"FlashAttentionBackwardSm90": Kernel},
        "flash_attn.cute.mask": {"AttentionMask": Mask},
    }
    return import_over(path, members)


def cut_tiles(
    num_rows: int, num_keys: int, left: int | None, right: int | None
) -> list[tuple[int, int]]:
    """Tiles in which some existing row does not see some key, one by one."""
    a, c = np.mgrid[: -(-num_rows // TILE_M) * TILE_M, : -(-num_keys // TILE_N) * TILE_N]
    seen = c < num_keys
    if right is not None:
        seen &= c <= a + num_keys - num_rows + right
    if left is not None:
        seen &= c >= a + num_keys - num_rows - left
    tiles = seen.reshape(-1, TILE_M, seen.shape[1] // TILE_N, TILE_N).all((1, 3))
    return [(int(m), int(n)) for m, n in zip(*np.nonzero(~tiles), strict=True)]


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(["none", "causal", "local"]),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_tiles_are_masked_if_and_only_if_they_are_cut(
    edges: Any, num_rows: int, num_keys: int, kind: str, left: int, right: int
) -> None:
    bounds = {"none": (None, None), "causal": (None, 0), "local": (left, right)}[kind]
    local = bounds if kind == "local" else (None, None)
    for whole in (False, True)[: 1 if num_keys % TILE_N else 2]:
        mask = edges.EdgeMask(TILE_M, TILE_N, (num_rows, num_keys), *local, whole=whole)
        masked: list[tuple[int, int]] = []
        for m, n in product(range(-(-num_rows // TILE_M)), range(-(-num_keys // TILE_N))):
            mask.apply_mask(
                masked,
                m_block=m,
                n_block=n,
                mask_causal=kind == "causal",
                mask_local=kind == "local",
            )
        assert masked == cut_tiles(num_rows, num_keys, *bounds)


@pytest.mark.parametrize("whole", [False, True])
def test_the_kernel_makes_its_mask_that_way(edges: Any, whole: bool) -> None:
    kernel = edges.EdgeMaskedBackward()
    kernel.whole = whole
    first, made, last = kernel.mma("before", partial(Mask, 64, 128, window_size_left=7), last=1)
    assert (first, last) == ("before", 1)
    mask = made((5, 6))
    assert isinstance(mask, edges.EdgeMask)
    assert (mask.tile_m, mask.tile_n, mask.window_size_left) == (64, 128, 7)
    assert mask.whole is whole


def test_a_kernel_that_makes_no_mask_is_not_taken(edges: Any) -> None:
    with pytest.raises(AssertionError, match="one mask expected"):
        edges.EdgeMaskedBackward().mma("before", partial(dict))
