"""With the next-token objective, the run is Megatron's own, bit for bit.

Megatron's wheel has no pretraining script, so the stock run is put together here from Megatron's
pieces, without any file of this package but `cpu`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.mcore.runs import MODEL, as_job, read_scalars

STEPS = ["--train-iters", "10"]


def test_ten_steps_equal_stock_megatron_bit_for_bit(tmp_path: Path) -> None:
    given = [*MODEL, *STEPS]
    run_distributed(_both, 1, given, str(tmp_path), timeout=200.0)
    ours, stock = read_scalars(tmp_path / "ours"), read_scalars(tmp_path / "stock")
    assert len(ours) == len(stock) == 10
    for tag in ("lm loss", "grad-norm"):
        assert [step[tag] for step in ours] == [step[tag] for step in stock]
    assert ours[-1]["lm loss"] < ours[0]["lm loss"]


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_equal_stock_megatron(tmp_path: Path) -> None:
    given = [*MODEL, *["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]]
    run_distributed(_both, 4, given, str(tmp_path), timeout=300.0)
    ours, stock = read_scalars(tmp_path / "ours"), read_scalars(tmp_path / "stock")
    assert [step["lm loss"] for step in ours] == [step["lm loss"] for step in stock]


def _both(rank: int, num_ranks: int, given: list[str], folder: str) -> None:
    from megatron_bp.mcore.adaptor import train

    as_job(rank, num_ranks, [*given, "--tensorboard-dir", f"{folder}/ours"], train)
    as_job(rank, num_ranks, [*given, "--tensorboard-dir", f"{folder}/stock"], _train_stock)


def _train_stock() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_bp.mcore.cpu import CPU_FLAG_DEFAULTS

    def cpu_flags(parser: Any) -> Any:
        parser.set_defaults(**CPU_FLAG_DEFAULTS)
        return parser

    args = parse_and_validate_args(cpu_flags)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    _stock_datasets.is_distributed = True
    pretrain(container, _stock_datasets, ModelType.encoder_or_decoder, _stock_forward_step)


def _stock_datasets(num_samples: Any, vp_stage: Any = None) -> Any:
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    here = mpu.get_tensor_model_parallel_rank() == 0 and ends
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: here, config).build()


def _stock_forward_step(data_iterator: Any, model: Any) -> Any:
    from megatron.core import mpu

    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    sample = [next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None]
    torch.distributed.broadcast_object_list(
        sample,
        mpu.get_tensor_model_parallel_src_rank(),
        group=mpu.get_tensor_model_parallel_group(),
    )
    tokens, labels, loss_mask, attention_mask, position_ids = (sample[0][name] for name in names)
    losses = model(tokens, position_ids, attention_mask, labels=labels)

    def loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        mask = loss_mask.reshape(-1)
        total, count = (losses.float().reshape(-1) * mask).sum(), mask.sum()
        report = {"lm loss": torch.stack([total.detach(), count])}
        return total, count.to(torch.int), report

    return losses, functools.partial(loss, loss_mask)
