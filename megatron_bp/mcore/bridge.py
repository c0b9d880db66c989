"""Trains block diffusion in a job of Megatron-Bridge (NeMo): its configuration and forward step.

    config = recipe()                                  # a ConfigContainer
    step = use_block_parallel(config, BlockParallelConfig(block_parallel_size=8, ...))
    pretrain(config, step)

The container keeps its model, optimizer, checkpoints and schedule; what changes is the layer
specification, the context group, the data and the forward step. Importing this file needs
Megatron-Bridge. Specified by tests/mcore/test_bridge.py.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_bp.config import BlockParallelConfig
from megatron_bp.mcore import adaptor, arguments
from megatron_bp.mcore.dataset import CorruptedDataset, refuse_short_splits
from megatron_bp.mcore.forward_step import DiffusionForwardStep
from megatron_bp.mcore.model import diffusion_spec, require_seats, use_plan_positions

try:
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.data.utils import get_dataset_provider
except ImportError as error:
    raise ImportError(
        "megatron_bp.mcore.bridge needs Megatron-Bridge 0.6 with its own requirements: pip install "
        f"megatron-bridge, or start from NVIDIA's NeMo container ({error})."
    ) from error


def use_block_parallel(container: Any, config: BlockParallelConfig) -> BridgeForwardStep:
    """Returns the forward step for Bridge's `pretrain`, and puts the rest into the container.

    Call it last, when the container is as you want it: parallel degrees, length and batch sizes are
    read here. `container.model.context_parallel_size` is the number of clean shards before, and
    the size of the context group after.
    Raises: ValueError that lists every problem; TypeError for data that Bridge does not read as a
    token stream.
    """
    model = container.model
    args = arguments_of(container, config)
    if getattr(container.dist, "use_decentralized_pg", False):
        raise ValueError(
            "dist.use_decentralized_pg=True makes no groups of clean shards; use "
            "dist.use_decentralized_pg=False"
        )
    if not config.is_diffusion or config.bdlm_data != "stream" or config.bdlm_lora_rank:
        raise ValueError(
            f"bdlm_objective={config.bdlm_objective!r}, bdlm_data={config.bdlm_data!r}, "
            f"bdlm_lora_rank={config.bdlm_lora_rank}: in a Bridge job the objective must be a "
            "block-diffusion one, the data a token stream and the model without our adapters; use "
            "for example bdlm_objective='standard', bdlm_data='stream', bdlm_lora_rank=0"
        )
    arguments.prepare(args, config)
    args.seq_length = args.encoder_seq_length
    arguments.finish(args, config)
    model.context_parallel_size = args.context_parallel_size
    model.hierarchical_context_parallel_sizes = args.hierarchical_context_parallel_sizes
    model.variable_seq_lengths = args.variable_seq_lengths
    model.moe_token_dispatcher_type = args.moe_token_dispatcher_type
    model.transformer_layer_spec = partial(_layer_spec, model.transformer_layer_spec)
    for hook in (require_seats, use_plan_positions):
        if hasattr(model, "register_pre_wrap_hook"):
            model.register_pre_wrap_hook(hook)
        else:
            model.pre_wrap_hooks.append(hook)
    step = BridgeForwardStep(args, config)
    container.dataset = CorruptedData.of(container.dataset, step)
    return step


def arguments_of(container: Any, config: BlockParallelConfig) -> argparse.Namespace:
    """Returns the arguments of a Megatron run that a container stands for.

    What a container has no field for has the default of Megatron's flag.
    """
    from megatron.training.arguments import add_megatron_arguments

    stock = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    defaults = vars(adaptor.add_arguments(stock).parse_args([]))
    model, train = container.model, container.train
    transformer = getattr(model, "transformer", model)
    data, checkpoint = container.dataset, container.checkpoint
    evaluated = getattr(container.validation, "eval_micro_batch_size", None)
    given = {
        "seq_length": model.seq_length,
        "micro_batch_size": train.micro_batch_size,
        "eval_micro_batch_size": evaluated or train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "num_experts": transformer.num_moe_experts,
        "group_query_attention": transformer.num_query_groups is not None,
        "position_embedding_type": model.position_embedding_type,
        "rotary_seq_len_interpolation_factor": model.seq_len_interpolation_factor,
        "reset_attention_mask": bool(getattr(data, "reset_attention_mask", False)),
        "eod_mask_loss": bool(getattr(data, "eod_mask_loss", False)),
        "dataloader_type": data.dataloader_type,
        "load": checkpoint.load,
        "save": checkpoint.save,
        "pretrained_checkpoint": checkpoint.pretrained_checkpoint,
        "seed": container.rng.seed,
        "world_size": dist.get_world_size() if dist.is_initialized() else _world_size(container),
        "check_for_nan_in_loss_and_grad": container.rerun_state_machine.check_for_nan_in_loss,
        "cp_comm_type": [transformer.cp_comm_type or "p2p"],
        "max_seqlen_per_dp_cp_rank": getattr(transformer, "max_seqlen_per_dp_cp_rank", None),
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "padded_vocab_size": model.vocab_size,
    }
    return argparse.Namespace(**{**defaults, **_shape_of(model), **given, **asdict(config)})


class BridgeForwardStep:
    """Our forward step with Bridge's signature; the tokenizer comes with the first data."""

    def __init__(self, args: argparse.Namespace, config: BlockParallelConfig) -> None:
        self.args, self.config = args, config
        self._step: tuple[DiffusionForwardStep, ...] = ()

    def rules(self, tokenizer: Any) -> Any:
        """Returns the rules of corruption with a tokenizer.

        Raises: ValueError if the mask token is not one of the tokenizer's own.
        """
        adaptor.refuse_after_start(self.args, tokenizer)
        return adaptor.corruption_rules(self.args, self.config, tokenizer)

    def __call__(self, state: Any, data_iterator: Any, model: Any) -> Any:
        """Returns the model's output and the function that makes a loss of it."""
        if not self._step:
            tokenizer = state.tokenizer
            # Bridge completes the model's configuration (head size, ...) after ours.
            vars(self.args).update(_shape_of(state.cfg.model))
            self.args.data_parallel_size = state.cfg.data_parallel_size
            valid = adaptor.vocabulary_size(self.args, tokenizer)
            step = DiffusionForwardStep(self.args, self.config, self.rules(tokenizer), valid)
            step.timers = lambda: state.timers
            self._step = (step,)
        return self._step[0](data_iterator, model)


@dataclass
class CorruptedData(DatasetProvider):
    """The datasets of a Bridge configuration with their samples corrupted."""

    clean: Any = None
    step: Any = None
    tokenizer: Any = None  # Bridge sets it before the datasets are built
    seq_length: int = 0

    @staticmethod
    def of(clean: Any, step: BridgeForwardStep) -> CorruptedData:
        """Returns the corrupted data of a configuration, which is loaded as it says.

        Raises: TypeError if it is not a token stream (GPTDatasetConfig).
        """
        if not hasattr(clean, "eod_mask_loss"):
            raise TypeError(
                f"container.dataset is {type(clean).__name__}; block diffusion corrupts token "
                "streams, so use GPTDatasetConfig (or its mock)"
            )
        kept = {field.name: getattr(clean, field.name) for field in fields(DatasetProvider)}
        return CorruptedData(**kept, clean=clean, step=step, seq_length=clean.seq_length)

    def finalize(self) -> None:
        """Completes the configuration of the clean data and of its loading."""
        super().finalize()
        self.clean.eod_mask_loss = self.clean.reset_attention_mask = False  # ours to treat
        self.clean.create_attention_mask = False
        self.clean.finalize()

    def build_datasets(self, context: Any) -> tuple[Any, ...]:
        """Returns train, validation and test set.

        Raises: ValueError if a split that will be read has fewer tokens than one sample.
        """
        samples = [context.train_samples, context.valid_samples, context.test_samples]
        self.clean.tokenizer = self.tokenizer
        rules = self.step.rules(self.tokenizer)
        datasets = get_dataset_provider(self.clean)(samples, self.clean)
        refuse_short_splits(datasets, samples, self.seq_length)
        return tuple(part and CorruptedDataset(part, rules) for part in datasets)


def _shape_of(model: Any) -> dict[str, Any]:
    transformer = getattr(model, "transformer", model)
    return {field.name: getattr(transformer, field.name) for field in fields(TransformerConfig)}


def _layer_spec(stock: Any, config: Any, vp_stage: int | None = None) -> Any:
    if callable(stock):
        named = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(stock).parameters else {}
        stock = stock(config, **named)
    return diffusion_spec(stock, getattr(config, "transformer", config))


def _world_size(container: Any) -> int:
    """The processes of a job that has not started: what Bridge itself would ask for."""
    from megatron.bridge.utils.common_utils import get_world_size_safe

    return int(get_world_size_safe())
