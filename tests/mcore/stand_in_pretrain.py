"""A pretraining script as Megatron-LM 0.19 has one: it calls Megatron's entry points and knows
nothing of megatron_bp.

Megatron's wheel ships no script. This one is written from the entry points' signatures alone; the
tests start it as users start theirs.
"""

import functools

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import (
    get_args,
    get_tokenizer,
    inprocess_restart,
    pretrain,
    set_startup_timestamps,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def datasets(num_samples, vp_stage=None):
    """Returns the training, validation and test sets."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def is_built_here():
        ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        return mpu.get_tensor_model_parallel_rank() == 0 and ends

    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, is_built_here, config).build()


def forward_step(data_iterator, model):
    """Returns each token's loss, and what makes one loss of them."""
    sample = next(data_iterator)
    tokens, labels, mask, position_ids = (
        sample[name].to(torch.cuda.current_device()) for name in FIELDS
    )
    # Megatron's own attention without Transformer Engine wants the mask as a tensor.
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens, position_ids, hidden[None, None], labels=labels)
    return losses, functools.partial(loss_of, mask)


def loss_of(mask, losses):
    """Returns the sum of the losses, how many there are, and what is logged."""
    total, count = (losses.float() * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


if __name__ == "__main__":
    set_startup_timestamps(program_start=0.0, main_entry=0.0)
    datasets.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=None, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
    )
