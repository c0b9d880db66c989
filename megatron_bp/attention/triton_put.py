"""How Triton kernels put what they computed to where it belongs.

Specified by the tests of the kernels that use it (tests/attention/test_passes.py, test_small.py,
test_triton_untile.py).
"""

import triton
import triton.language as tl

ADDS = tl.constexpr(0)
WRITES = tl.constexpr(1)
RACES = tl.constexpr(2)
"""A result is added to what is there, put over it, or added where others may add too (fp32). So a
kernel's constant STORE, False or True, says ADDS or WRITES."""


@triton.jit
def put(at, value, keep, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Puts `value`, fp32, in the dtype of the addresses `at`, where `keep` holds."""
    if HOW == RACES:
        tl.atomic_add(at, value, mask=keep, sem="relaxed")
    else:
        if HOW == ADDS:
            value += tl.load(at, mask=keep, other=0.0).to(tl.float32)
        tl.store(at, value.to(at.dtype.element_ty), mask=keep)
