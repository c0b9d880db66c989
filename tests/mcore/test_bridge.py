"""A Megatron-Bridge container gets our context group, attention, data and forward step.

Megatron-Bridge does not install here; what of it this needs (two names) is stood in for. A whole
run of Bridge's own `pretrain` was made by hand: docs/launch.md.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.config import BlockParallelConfig

CONFIG = BlockParallelConfig(
    block_parallel_size=4, block_size=8, bdlm_objective="standard", mask_token_id=120
)


@dataclass
class DatasetProvider:
    """As Bridge has it: how data is loaded, and `finalize` for what depends on it."""

    dataloader_type: str = "single"
    num_workers: int = 2
    finalized: bool = False

    def finalize(self) -> None:
        self.finalized = True


@dataclass
class StreamConfig(DatasetProvider):
    """Like Bridge's GPTDatasetConfig: a token stream."""

    seq_length: int = 64
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = True
    tokenizer: Any = None


@dataclass
class Stream:
    """Two samples of tokens."""

    split: str = "train"

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        tokens = torch.arange(64) + 1 + (index or 0)
        return {"tokens": tokens, "loss_mask": torch.ones(64)}


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module, imported over the stand-in."""
    base = types.ModuleType("megatron.bridge.data.base")
    base.DatasetProvider = DatasetProvider  # type: ignore[attr-defined]
    utils = types.ModuleType("megatron.bridge.data.utils")
    utils.get_dataset_provider = lambda config: (  # type: ignore[attr-defined]
        lambda samples, config: (Stream(), Stream("valid"), None)
    )
    common = types.ModuleType("megatron.bridge.utils.common_utils")
    common.get_world_size_safe = lambda: 8  # type: ignore[attr-defined]
    for name in ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (base, utils, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import megatron_bp.mcore.bridge as ours

    yield ours
    del sys.modules["megatron_bp.mcore.bridge"]


def container(**changes: Any) -> Any:
    """A container whose model is its own transformer configuration, as Bridge's providers are."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class Provider(TransformerConfig):
        seq_length: int = 64
        vocab_size: int = 127
        position_embedding_type: str = "rope"
        seq_len_interpolation_factor: Any = None
        share_embeddings_and_output_weights: bool = False
        transformer_layer_spec: Any = lambda config: get_gpt_layer_local_spec()
        hooks: list[Any] = field(default_factory=list)

        def register_pre_wrap_hook(self, hook: Any) -> None:
            self.hooks.append(hook)

    model = Provider(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=2,
    )
    parts = {
        "model": model,
        "train": SimpleNamespace(micro_batch_size=1, global_batch_size=4),
        "validation": SimpleNamespace(eval_micro_batch_size=None),
        "dataset": StreamConfig(eod_mask_loss=True),
        "checkpoint": SimpleNamespace(load=None, save=None, pretrained_checkpoint=None),
        "rng": SimpleNamespace(seed=7),
        "dist": SimpleNamespace(use_decentralized_pg=False),
        "rerun_state_machine": SimpleNamespace(check_for_nan_in_loss=False),
    }
    return SimpleNamespace(**{**parts, **changes})


def test_the_container_carries_the_context_group_and_our_attention(bridge: Any) -> None:
    from megatron_bp.mcore.core_attention import BlockParallelAttention
    from megatron_bp.mcore.model import require_seats, use_plan_positions

    given = container()
    bridge.use_block_parallel(given, CONFIG)
    model = given.model
    assert model.context_parallel_size == 4
    assert model.hierarchical_context_parallel_sizes == [2, 2]
    assert model.seq_length == 64
    assert model.hooks == [require_seats, use_plan_positions]
    assert "vp_stage" in inspect.signature(model.transformer_layer_spec).parameters
    spec = model.transformer_layer_spec(model, vp_stage=None)
    core = spec.submodules.self_attention.submodules.core_attention
    assert core.func is BlockParallelAttention


def test_the_data_are_the_containers_own_corrupted(bridge: Any) -> None:
    given = container()
    step = bridge.use_block_parallel(given, CONFIG)
    data = given.dataset
    clean = data.clean
    assert (data.seq_length, data.dataloader_type, data.num_workers) == (64, "single", 2)
    data.finalize()
    assert data.finalized
    assert clean.finalized
    assert (clean.eod_mask_loss, clean.create_attention_mask) == (False, False)
    data.tokenizer = SimpleNamespace(vocab_size=127, eod=126)  # as Bridge's setup does
    context = SimpleNamespace(train_samples=2, valid_samples=2, test_samples=0)
    train, valid, test = data.build_datasets(context)
    assert test is None
    sample, again = train[1], valid[1]
    masked = sample["corrupted"][0] == 120
    assert 0 < masked.sum() < 64
    assert torch.equal(sample["clean"], torch.arange(64) + 2)
    assert torch.equal(sample["corrupted"], again["corrupted"])
    assert step.args.eod_mask_loss
    data.tokenizer = SimpleNamespace(vocab_size=127, eod=120)
    with pytest.raises(ValueError, match="120 is also the tokenizer's eod token"):
        data.build_datasets(context)


def test_bridge_gives_its_state_to_the_forward_step(bridge: Any) -> None:
    step = bridge.use_block_parallel(container(), CONFIG)
    assert next(iter(inspect.signature(step).parameters)) == "state"


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({"dist": SimpleNamespace(use_decentralized_pg=True)}, CONFIG, "use_decentralized_pg=Fal"),
        ({}, BlockParallelConfig(), "bdlm_objective='none'"),
        (
            {
                "train": SimpleNamespace(micro_batch_size=2, global_batch_size=4),
                "dataset": StreamConfig(reset_attention_mask=True),
            },
            CONFIG,
            "use --micro-batch-size 1",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(
    bridge: Any, changes: dict[str, Any], config: BlockParallelConfig, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        bridge.use_block_parallel(container(**changes), config)


def test_data_that_are_no_token_stream_are_refused(bridge: Any) -> None:
    with pytest.raises(TypeError, match=r"dataset is DatasetProvider; .* use GPTDatasetConfig"):
        bridge.use_block_parallel(container(dataset=DatasetProvider()), CONFIG)


def test_without_bridge_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="pip install megatron-bridge"):
        import megatron_bp.mcore.bridge  # noqa: F401
