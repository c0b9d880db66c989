"""Data parallelism of the exactness check: Megatron's DDP as a run has it, made checkable.

With `overlap` the buffers are those of the distributed optimizer: each rank owns a share of every
bucket of parameters and gradients, gradients are reduce-scattered during backward and parameters
gathered during forward. Used by exactness.py; specified by tests/tools/test_check_exact.py.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_bp.mcore.exactness_problem import Layout

BUCKET_NUMBERS = 2000  # a fraction of the tiny model, so that there are several buckets


def distribute(
    chunks: list[GPTModel], config: TransformerConfig, layout: Layout
) -> list[DistributedDataParallel]:
    """Wraps model chunks and tells Megatron's schedule about them, as its training loop does.

    With `overlap` every rank forgets the parameters that others own: the forward pass must gather
    them.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap,
        use_distributed_optimizer=layout.overlap,
        bucket_size=BUCKET_NUMBERS if layout.overlap else None,
    )
    wrapped = [DistributedDataParallel(config, options, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    if layout.overlap:
        skips = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = skips if len(skips) > 1 else skips[0]
        for shares, mine, _ in _shares(wrapped, "param_data"):
            for owner, share in enumerate(shares):
                if owner != mine:
                    share.fill_(float("nan"))
    return wrapped


def gather_gradients(wrapped: list[DistributedDataParallel]) -> None:
    """Brings the reduced gradients of all owners to every rank."""
    for shares, mine, group in _shares(wrapped, "grad_data"):
        dist.all_gather(shares, shares[mine].clone(), group=group)


def _shares(
    wrapped: list[DistributedDataParallel], data: str
) -> Iterator[tuple[list[Tensor], int, dist.ProcessGroup]]:
    """For each bucket the owners' shares, this rank's number, and the group of owners."""
    for chunk in wrapped:
        groups: list[Any] = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        for group in groups:
            size = group.intra_distributed_optimizer_instance_size
            for bucket in group.buckets:
                yield (
                    shard_buffer(getattr(bucket, data), size),
                    group.intra_distributed_optimizer_instance_rank,
                    group.intra_distributed_optimizer_instance_group,
                )
