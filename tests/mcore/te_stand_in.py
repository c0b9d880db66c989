"""A stand-in for Transformer Engine on a machine where it does not import (no CUDA).

Gives Megatron's own Transformer Engine layers (its classes, specification, checkpoint code) plain
torch modules to derive from: one rank, no fp8. It is for wiring and state; what Transformer Engine
itself computes is tested on a GPU (test_gpu_te.py). `install()` must run before megatron is
imported, in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VERSION = "2.6.0"  # above it Megatron asks for more than the stand-in has


class _Base(nn.Module):
    """Has an extra state, empty without fp8, as every module of Transformer Engine has."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(_Base):
    def __init__(self, normalized_shape: int, eps: float, params_dtype: Any, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: Any,
        params_dtype: Any,
        bias: bool,
        parallel_mode: str | None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode = parallel_mode
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        init_method(self.weight)

    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Tensor:
        return functional.linear(x, self.weight)


class LayerNormLinear(Linear):
    def __init__(self, *args: Any, eps: float, normalization: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert normalization == "RMSNorm"
        size, dtype = kwargs["in_features"], kwargs["params_dtype"]
        self.layer_norm_weight, self.eps = nn.Parameter(torch.ones(size, dtype=dtype)), eps

    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Tensor:
        weight = self.layer_norm_weight
        return super().forward(functional.rms_norm(x, weight.shape, weight, self.eps))


class DotProductAttention(_Base):
    """Causal attention of torch, without dropout and windows."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int,
        attention_dropout: float,
        softmax_scale: float | None,
        cp_comm_type: str = "p2p",
        **_: Any,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0
        assert cp_comm_type in ("p2p", "a2a", "all_gather")
        self.scale, self.repeats = softmax_scale, num_attention_heads // num_gqa_groups

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Tensor:
        assert kwargs["attn_mask_type"] == "causal"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = (x.repeat_interleave(self.repeats, 1) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Module(types.ModuleType):
    """A module in which every other class exists, empty, to be derived from."""

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        made = type(name, (_Base,), {})
        setattr(self, name, made)
        return made


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in for Transformer Engine does not have this")


def install() -> None:
    """Makes `import transformer_engine` give the stand-in."""
    assert "megatron.core" not in sys.modules, "Megatron asks for Transformer Engine at import"
    whole = _Module("transformer_engine")
    parts = {
        name: _Module(f"transformer_engine.{name}")
        for name in (
            "pytorch",
            "pytorch.distributed",
            "pytorch.fp8",
            "pytorch.graph",
            "pytorch.module",
            "pytorch.module.base",
            "pytorch.ops",
            "pytorch.tensor",
            "common",
            "common.recipe",
        )
    }
    contents: dict[str, Any] = {
        "DotProductAttention": DotProductAttention,
        "LayerNormLinear": LayerNormLinear,
        "Linear": Linear,
        "RMSNorm": RMSNorm,
        "fp8_autocast": contextlib.nullcontext,
        "fp8_model_init": contextlib.nullcontext,
    }
    vars(whole)["__version__"] = VERSION
    vars(parts["pytorch"]).update(contents)
    vars(parts["pytorch.fp8"]).update(fp8_autocast=contextlib.nullcontext, fp8_model_init=None)
    for name in ("activation_recompute_forward", "checkpoint", "get_all_rng_states"):
        setattr(parts["pytorch.distributed"], name, _missing)
    parts["pytorch.distributed"].is_fp8_activation_recompute_enabled = lambda: False
    sys.modules["transformer_engine"] = whole
    for name, part in parts.items():
        part.__path__ = []  # type: ignore[attr-defined]
        parent, _, last = name.rpartition(".")
        setattr(parts[parent] if parent else whole, last, part)
        sys.modules[part.__name__] = part
    whole.__path__ = []  # type: ignore[attr-defined]
