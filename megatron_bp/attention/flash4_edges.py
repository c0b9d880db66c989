"""FlashAttention 4's backward kernel on Hopper, which masks only those tiles that a mask cuts.

The package's compares the keys of every tile with its bounds and with their number, also where
nothing is masked. At head size 128 a thread has 40 selections beside 40 exponentials a tile without
a mask, and 64 with as many comparisons beside 32 under a window. Here a tile that is not cut goes
around them, and where keys fill whole tiles an unmasked launch has none.
Specified by tests/attention/test_tile_edges.py and test_gpu_shared.py.
Source: flash-attn-4 (flash_attn.cute.flash_bwd_sm90), https://github.com/Dao-AILab/flash-attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass.cute as cute
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.mask import AttentionMask

from megatron_bp.attention.tile_edges import Span, beyond_keys, left_of, right_of


@dataclass(frozen=True)
class EdgeMask(AttentionMask):
    """The package's mask, applied to tiles that it cuts.

    `whole`: keys fill whole tiles, so none reaches beyond them.
    """

    whole: bool = False

    def apply_mask(self, acc_S: Any, **named: Any) -> None:
        """See AttentionMask."""
        m_block, n_block = named["m_block"], named["n_block"]
        rows = Span(m_block * self.tile_m, (m_block + 1) * self.tile_m)
        keys = Span(n_block * self.tile_n, (n_block + 1) * self.tile_n)
        shift = self.seqlen_k - self.seqlen_q
        cuts = [] if self.whole else [beyond_keys(keys, self.seqlen_k)]
        if named["mask_causal"]:
            cuts.append(right_of(rows, keys, shift, 0))
        if named["mask_local"]:
            cuts.append(right_of(rows, keys, shift, self.window_size_right))
            cuts.append(left_of(rows, keys, shift, self.window_size_left))
        if cuts:
            is_cut = cuts[0]
            for cut in cuts[1:]:
                is_cut = is_cut | cut
            _where(is_cut, partial(AttentionMask.apply_mask, self, acc_S, **named))


@cute.jit
def _where(condition: Any, run: Callable[[], None]) -> None:
    """Runs something behind a branch."""
    if condition:
        # A branch around nothing but selections would be turned into selections.
        cute.arch.sync_warp()
        run()


class EdgeMaskedBackward(FlashAttentionBackwardSm90):
    """The package's kernel with that mask."""

    whole = False

    def mma(self, *args: Any, **named: Any) -> Any:
        """See FlashAttentionBackwardSm90, which makes its mask from an argument."""
        made = [x for x in args if isinstance(x, partial) and x.func is AttentionMask]
        assert len(made) == 1, f"one mask expected among the arguments, not {made}"
        mask = partial(EdgeMask, *made[0].args, **made[0].keywords, whole=self.whole)
        return super().mma(*(mask if x is made[0] else x for x in args), **named)
