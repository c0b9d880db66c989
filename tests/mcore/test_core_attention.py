"""The core-attention adapter picks a layer's window; `PlanRotary` gives the stock table's rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.mcore.core_attention import layer_window


@pytest.mark.parametrize(
    ("window", "skip", "wanted"),
    [
        (None, None, [0, 0, 0, 0]),
        ((9, 0), None, [10, 10, 10, 10]),
        ((9, 0), 2, [10, 0, 10, 0]),
        ((9, 0), [1, 1, 0, 1], [10, 10, 0, 10]),
        ((-1, 0), None, [0, 0, 0, 0]),
        ((0, 0), None, [1, 1, 1, 1]),
    ],
)
def test_a_layer_has_the_window_that_megatron_gives_it(
    window: Any, skip: Any, wanted: list[int]
) -> None:
    config = SimpleNamespace(window_size=window, window_attn_skip_freq=skip)
    assert [layer_window(config, layer) for layer in (1, 2, 3, 4)] == wanted


def rotary(kind: str, **changes: Any) -> Any:
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    if kind == "yarn":
        return YarnRotaryEmbedding(
            16, scaling_factor=4.0, original_max_position_embeddings=64, use_cpu_initialization=True
        )
    return rotary_pos_embedding.RotaryEmbedding(16, 1.0, use_cpu_initialization=True, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("rope", {}),
        ("rope", {"rotary_interleaved": True}),
        ("rope", {"rope_scaling": True}),
        ("yarn", {}),
    ],
)
def test_rotary_rows_are_those_of_the_stock_table(
    monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    from megatron_bp.mcore.model import PlanRotary, table_is_linear

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = rotary(kind, **changes)
    assert table_is_linear(stock)
    params = carrier(torch.tensor([5, 0, 1000, 7]))
    wrapped = PlanRotary(stock)
    assert wrapped.get_rotary_seq_len(None, None, None, None, params) is params
    got, table = wrapped(params, packed_seq=False, cp_group=None), stock.get_emb(1001)
    if kind == "yarn":
        assert got[1] == table[1]
        got, table = got[0], table[0]
    assert torch.equal(got, table[params.layout.position])


def test_a_table_that_is_not_linear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_bp.mcore.model import use_plan_positions

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = rotary("rope")
    stock.get_emb = lambda length, offset=0: (
        torch.arange(length).float().sqrt()[:, None, None, None]
    )
    with pytest.raises(ValueError, match="use --position-embedding-type rope or yarn"):
        use_plan_positions([SimpleNamespace(rotary_pos_emb=stock)])


def carrier(position: torch.Tensor) -> Any:
    from megatron_bp.mcore.carrier import make_params

    plan = SimpleNamespace(request=SimpleNamespace(length=len(position)))
    layout: Any = SimpleNamespace(position=position, plan=plan)
    return make_params(layout)
