"""Shows that Megatron loads converted checkpoints bit-exactly and computes transformers' logits.

Needs process groups: only real tensor and pipeline ranks show how Megatron slices a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families import read_model
from megatron_bp.convert.plan import Layout, extra_state_keys
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert import megatron_models as mm
from tests.convert.tiny_models import (
    LLAMA,
    LLAMA3_ROPE,
    QWEN3,
    expected_megatron,
    make_hf,
    read_hf,
    same_bits,
)
from tests.distributed import run_distributed

PADDED_VOCAB = 104  # 101 rows for two ranks, padded
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3}


def _convert(root: Path, name: str, layout: Layout) -> Path:
    hf = root / "hf" / name
    if not hf.exists():
        make_hf(hf, CONFIGS[name])
    target = root / f"{name}_{layout}"
    hf_to_mcore(ImportRequest(hf, target, layout, "keep", overwrite=False), Silent())
    return target


def _wrong_parameters(model: Any, config: dict[str, Any], hf: Path, tp: int, pp: int) -> list[str]:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    first_layer = stage * config["num_hidden_layers"] // pp
    full = expected_megatron(config, read_hf(hf))
    wrong = []
    for name, parameter in model.named_parameters():
        key = mm.checkpoint_name(name, first_layer)
        # A tied model's last pipeline stage holds its own copy of the embedding.
        key = key if key in full else "embedding.word_embeddings.weight"
        part = mm.local_slice(full[key], key, parameter.shape, tp)
        if not same_bits(parameter.data[: part.shape[0]], part):
            wrong.append(name)
    return wrong


def _load_everywhere(rank: int, world_size: int, root: str) -> list[str]:
    wrong = []
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        mm.start(tp, pp)
        for name, config in CONFIGS.items():
            for layout in Layout:
                model = mm.build(config, tp, pp, torch.bfloat16, PADDED_VOCAB)
                mm.load(model, Path(root) / f"{name}_{layout}" / "release")
                case = f"tp{tp} pp{pp} {name} {layout} "
                hf = Path(root) / "hf" / name
                wrong += [case + x for x in _wrong_parameters(model, config, hf, tp, pp)]
                if (tp, pp) == (2, 1) and layout is Layout.PER_LAYER:
                    for kind in OPTIMIZERS:
                        _save_like_training(model, Path(root) / "trained" / name / kind, kind)
    return wrong


# Optimizer format -> whether it keeps its fp32 copies by parameter.
OPTIMIZERS = {"dp_reshardable": False, "fully_reshardable": True, "plain": True}
# The fp32 copies are made to differ from the weights by less than bf16 shows.
MASTER_SCALE = 1 + 2**-12


def _save_like_training(model: Any, root: Path, kind: str) -> None:
    """Saves what a training run saves: homogeneous keys, optimizer, RNG, TP chunks, padded rows."""
    import argparse

    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.enums import AttnBackend
    from megatron.training.checkpointing import get_rng_state

    distributed = kind != "plain"
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        ),
        [ddp],
    )
    for part in optimizer.chained_optimizers:
        name = "shard_fp32_from_float16_groups" if distributed else "fp32_from_float16_groups"
        for copy in itertools.chain.from_iterable(getattr(part, name)):
            copy.data.mul_(MASTER_SCALE)
    metadata = {
        **({"distrib_optim_sharding_type": kind} if distributed else {}),
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    from megatron.training.global_vars import set_args

    args = argparse.Namespace(
        bdlm_objective="standard",
        block_size=16,
        mask_token_id=100,
        attention_backend=AttnBackend.auto,
        data_parallel_random_init=False,
    )
    set_args(args)
    weights = model.sharded_state_dict(metadata=metadata)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, metadata=metadata),
        "rng_state": get_rng_state(
            "torch_dist",
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ),
    }
    folder = root / "iter_0000007"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    del metadata["dp_cp_group"]
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)


@pytest.mark.slow
def test_megatron_loads_and_training_checkpoints_export_bit_exactly(tmp_path: Path):
    for name in CONFIGS:
        for layout in Layout:
            _convert(tmp_path, name, layout)
    wrong = run_distributed(_load_everywhere, 2, str(tmp_path), timeout=240)
    assert wrong == [[], []]
    for name, kind in itertools.product(CONFIGS, OPTIMIZERS):
        trained = tmp_path / "trained" / name / kind
        keys = TorchDistReader(trained / "iter_0000007").tensors
        assert "decoder.layers.mlp.linear_fc1.weight" in keys  # homogeneous, as training writes
        assert keys["embedding.word_embeddings.weight"].shape[0] == PADDED_VOCAB
        assert any(key.startswith("optimizer.") for key in keys)
        request = ExportRequest(
            source=trained,
            target=tmp_path / "back" / f"{name}_{kind}",
            assets=tmp_path / "hf" / name,
            iteration=-1,
            dtype="keep",
            max_shard_bytes=10**9,
            block_size=0,
            mask_token_id=-1,
            overwrite=False,
        )
        request.target.parent.mkdir(exist_ok=True)
        manifest = mcore_to_hf(request, Silent())
        assert manifest["exported_iteration"] == 7
        before, after = read_hf(tmp_path / "hf" / name), read_hf(request.target)
        assert before.keys() == after.keys()
        assert all(same_bits(before[key], after[key]) for key in before)
        config = json.loads((request.target / "config.json").read_text())
        assert (config["block_size"], config["mask_token_id"]) == (16, 100)
        _check_masters(replace(request, target=tmp_path / "masters"), before, OPTIMIZERS[kind])
        if kind != "plain":
            continue
        (tmp_path / "hf" / name / "config.json").write_text(json.dumps({**config, "block_size": 8}))
        with pytest.raises(
            ValueError, match=r"trained with block_size=16, .* says 8; give --block"
        ):
            mcore_to_hf(replace(request, target=tmp_path / "x"), Silent())


def _check_masters(
    request: ExportRequest, weights: dict[str, torch.Tensor], by_parameter: bool
) -> None:
    """The fp32 copies are read for a float32 export if saved by parameter, and else refused."""
    if not by_parameter:
        with pytest.raises(ValueError, match=r"flat buckets \(dp_reshardable\), not by parameter"):
            mcore_to_hf(replace(request, weights="master"), Silent())
    for choice, used in (("auto", by_parameter), ("model", False)):
        manifest = mcore_to_hf(replace(request, dtype="float32", weights=choice), Silent())
        assert manifest["weights"] == ("master" if used else "model")
        found = read_hf(request.target)
        scale = MASTER_SCALE if used else 1.0
        assert all(torch.equal(found[key], weights[key].float() * scale) for key in weights)
        shutil.rmtree(request.target)


PARITY = {
    "llama": {**LLAMA, "torch_dtype": "float32"},
    "llama-rope3-untied": {
        **LLAMA,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
    },
    "qwen3": {**QWEN3, "torch_dtype": "float32"},
}


def _save_transformers_model(directory: Path, config: dict[str, Any]) -> torch.Tensor:
    """Saves a random model whose norms are not 1; returns its logits for fixed tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **settings), attn_implementation="eager"
    ).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        logits = model.eval()(_tokens()).logits
    model.save_pretrained(directory)
    return logits


def _tokens() -> torch.Tensor:
    return torch.randint(0, 101, (2, 33), generator=torch.Generator().manual_seed(5))


def _megatron_logits(rank: int, world_size: int, root: str) -> dict[str, Any]:
    mm.start(1, 1)
    found = {}
    tokens = _tokens()
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    causal = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for name, config in PARITY.items():
        model = mm.build(config, 1, 1, torch.float32, 101).eval()
        asked = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        mm.load(model, Path(root) / name / "m" / "release")
        with torch.no_grad():
            logits = model(tokens, positions, causal)
        objects = [getattr(entry, "unique_key", "") for entry in asked.values()]
        found[name] = (logits, sorted(key for key in objects if key))
    return found


@pytest.mark.slow
def test_logits_equal_those_of_transformers_in_fp32(tmp_path: Path):
    # Both use half-split (NeoX) rotary pairs, so no row permutation is needed. Measured: 1e-6; a
    # rope base that is off by a tenth gives 4e-2.
    expected = {}
    for name, config in PARITY.items():
        expected[name] = _save_transformers_model(tmp_path / name / "hf", config)
        request = ImportRequest(
            tmp_path / name / "hf", tmp_path / name / "m", Layout.PER_LAYER, "keep", overwrite=False
        )
        hf_to_mcore(request, Silent())
    (found,) = run_distributed(_megatron_logits, 1, str(tmp_path))
    for name, config in PARITY.items():
        logits, objects = found[name]
        assert logits.std() > 0.1
        difference = float((logits - expected[name]).abs().max())
        assert difference <= 1e-4, (name, difference)
        # Every extra state that Megatron's local spec asks for is in what we write.
        family, shape = read_model(config)
        assert set(objects) <= set(extra_state_keys(family, shape, Layout.PER_LAYER))
        assert objects
