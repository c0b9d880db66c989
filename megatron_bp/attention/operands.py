"""Where the operands of a launch that shares accumulators lie: nine strided views.

The layers of a model ask for the same views in every step. Making one costs the CPU as much as the
arithmetic that says where it lies, so that is done once for each launch and layout.
Letters: B problems and samples, X problems, Z samples, Q rows, S key rows, N query heads, M
key/value heads, H head size. `wide` is the width that sums have for a row: H, or what a kernel
rounds it up to. Specified by tests/attention/test_operands.py.
"""

from functools import lru_cache
from typing import NamedTuple

from megatron_bp.attention.sharing import SharedLaunch
from megatron_bp.attention.views import View


class RowLayout(NamedTuple):
    """How the rows of a row group lie, in whole tiles of `tile` rows.

    Strides of q and dout [B, Q, N, H]; row sums and LSE are contiguous [2, B, N, `padded`], and so
    are sums of dQ [B, N, `padded` * wide]. B is Z, or X * Z with samples of a problem together.
    """

    num_samples: int
    batch: int
    heads: int
    size: int
    wide: int
    tile: int
    padded: int
    q: tuple[int, ...]
    dout: tuple[int, ...]


class KeyLayout(NamedTuple):
    """How the keys of a launch lie, in whole tiles of `tile` keys.

    Strides of k and v [S, Z, M, H]; sums of dK and dV are contiguous [2 * Z * X, M, `padded` *
    wide], with `runs` X runs of keys.
    """

    heads: int
    tile: int
    padded: int
    runs: int
    k: tuple[int, ...]
    v: tuple[int, ...]


class Operands(NamedTuple):
    """Views [X, rows, heads, H] of q, k, v, dout, and [X, heads, rows (* wide)] of the others.

    `lse` and `row_sum` are views of what holds both, `dk` and `dv` of what holds their sums.
    """

    q: View
    k: View
    v: View
    dout: View
    lse: View
    row_sum: View
    dq: View
    dk: View
    dv: View


@lru_cache(maxsize=4096)
def operands(launch: SharedLaunch, rows: RowLayout, keys: KeyLayout, sample: int) -> Operands:
    """The views of a launch's problems of one sample."""
    row_sum, lse = (_known(launch, rows, sample, part) for part in range(2))
    dk, dv = (_key_sums(launch, rows, keys, sample, part) for part in range(2))
    return Operands(
        _rows(launch, rows, rows.q, sample),
        _keys(launch, rows, keys, keys.k, sample),
        _keys(launch, rows, keys, keys.v, sample),
        _rows(launch, rows, rows.dout, sample),
        lse,
        row_sum,
        _row_sums(launch, rows, rows.wide, sample),
        dk,
        dv,
    )


def whole(length: int, tile: int) -> int:
    """`length` rounded up to whole tiles."""
    return -(-length // tile) * tile


def _apart(rows: RowLayout) -> int:
    """Problems of one sample lie so many apart in B."""
    return rows.num_samples if rows.batch > rows.num_samples else 0


def _rows(launch: SharedLaunch, rows: RowLayout, strides: tuple[int, ...], sample: int) -> View:
    batch, row, head, element = strides
    return View(
        (launch.num_problems, launch.num_rows, rows.heads, rows.size),
        (_apart(rows) * batch + launch.row_step * row, row, head, element),
        sample * batch + launch.row * row,
    )


def _row_sums(launch: SharedLaunch, rows: RowLayout, width: int, sample: int) -> View:
    """The last rows' tile may reach beyond them, into the padding."""
    head = rows.padded * width
    return View(
        (launch.num_problems, rows.heads, whole(launch.num_rows, rows.tile) * width),
        (_apart(rows) * rows.heads * head + launch.row_step * width, head, 1),
        sample * rows.heads * head + launch.row * width,
    )


def _known(launch: SharedLaunch, rows: RowLayout, sample: int, part: int) -> View:
    view = _row_sums(launch, rows, 1, sample)
    return view._replace(offset=view.offset + part * rows.batch * rows.heads * rows.padded)


def _keys(
    launch: SharedLaunch, rows: RowLayout, keys: KeyLayout, strides: tuple[int, ...], sample: int
) -> View:
    row, to_sample, head, element = strides
    return View(
        (launch.num_problems, launch.num_keys, keys.heads, rows.size),
        (launch.key_step * row, row, head, element),
        launch.key * row + sample * to_sample,
    )


def _key_sums(
    launch: SharedLaunch, rows: RowLayout, keys: KeyLayout, sample: int, part: int
) -> View:
    head = keys.padded * rows.wide
    run = keys.heads * head
    first, row = divmod(launch.offset, keys.padded)
    num_runs, num_rows = divmod(launch.offset_step, keys.padded)
    at = (part * rows.num_samples + sample) * keys.runs + first
    return View(
        (launch.num_problems, keys.heads, whole(launch.num_keys, keys.tile) * rows.wide),
        (num_runs * run + num_rows * rows.wide, head, 1),
        at * run + row * rows.wide,
    )
