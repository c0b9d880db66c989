"""The forward step of a block-diffusion objective: batch, model, loss of the target rows.

The head sees target rows only, and the loss is divided by a whole-sample count that every rank
knows, never by a rank's own count: that would make the gradient depend on the layout. Specified by
tests/mcore/test_forward_step.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_timers
from megatron.training.utils import is_first_or_last_pipeline_stage, print_rank_0
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, GradWire
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.keeping import KEYS_ONLY, Keeping
from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.cost import owned_imbalance
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.mcore.batch import CLEAN, Batch, LayoutSource, Targets, receive_batch
from megatron_bp.mcore.carrier import Layout, make_layout, make_params, row_multiple
from megatron_bp.mcore.dataset import CorruptionRules, Sample
from megatron_bp.mcore.expert_rows import every_row_counts
from megatron_bp.mcore.model import local_row_mask
from megatron_bp.mcore.next_token import refuse_not_finite
from megatron_bp.mcore.parallel_state import Links, make_block_groups
from megatron_bp.mcore.recompute import decide
from megatron_bp.mcore.throughput import Meter
from megatron_bp.objectives.accuracy import label_wins
from megatron_bp.objectives.loss import (
    LOCAL,
    LossOptions,
    check_labels,
    linear_cross_entropy,
    weighted_cross_entropy,
)
from megatron_bp.objectives.objective import Objective, Scope

# What the head returns: the weighted sum, each target's loss, in evaluation whether its label won.
Scores = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TargetHead:
    """What the output processor needs: which rows are targets, and how the loss is computed.

    `is_ready`: `get_ready` found places and checked labels before the model ran.
    """

    targets: Targets
    num_valid_vocab: int
    excluded_id: int
    chunk_rows: int
    with_accuracy: bool
    is_ready: bool = False

    def get_ready(self) -> TargetHead:
        """This head, with all that needs an answer of the device done.

        Before the model runs the device is idle; after it, waiting for an answer would let the
        device run dry between forward and backward.
        """
        check_labels(self.targets.picked_labels, self.options(0))
        return replace(self, is_ready=True)

    def options(self, vocab_start: int) -> LossOptions:
        """The loss's options on the rank whose vocabulary begins at an id."""
        return LossOptions(
            vocab_start=vocab_start,
            num_valid_vocab=self.num_valid_vocab,
            excluded_id=self.excluded_id,
            chunk_rows=self.chunk_rows,
            labels_checked=self.is_ready,
        )


def score_targets(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Any, **_: Any
) -> Scores:
    """Returns sum(weight * loss), the losses [R] and right answers [R] (an output processor).

    R may be 0; the sum then still hangs on the graph, so that every rank takes part in backward.
    """
    head: TargetHead = context
    # The layer itself is not called, so what waits for its call must be: with
    # --overlap-param-gather the weight may still be on its way from the ranks that own it.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    group = parallel_state.get_tensor_model_parallel_group()
    if output_layer.sequence_parallel:
        # The loss sums the gradient over the group itself: the way back is a plain split.
        hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False
        )
    weight = output_layer.weight if output_weight is None else output_weight
    targets = head.targets
    rows = hidden_states[-len(targets.is_target) :][targets.places].to(weight.dtype)
    options = head.options(group.rank() * len(weight))
    over = group if group.size() > 1 else LOCAL
    operands = (rows, weight, targets.picked_labels)
    row_weight = targets.weights[targets.places]
    if rows.dtype == torch.float16:  # its gradients need the scale of the loss, known in backward
        losses = linear_cross_entropy(*operands, options=options, group=over)
        total = (losses.double() * row_weight).sum()
    else:
        total, losses = weighted_cross_entropy(*operands, row_weight, options=options, group=over)
    wins = targets.is_target.new_empty(0)
    if head.with_accuracy:
        wins = label_wins(*operands, options=options, group=over)
    return total, losses.detach(), wins


class DiffusionForwardStep:
    """Megatron's forward step for one run; call it with a data iterator and a model chunk."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: BlockParallelConfig,
        rules: CorruptionRules,
        num_valid_vocab: int,
    ) -> None:
        self.args, self.config, self.rules = args, config, rules
        self.num_valid_vocab = num_valid_vocab
        self.timers: Callable[[], Any] = get_timers  # another trainer has its own
        self._decided: tuple[Keeping, ...] = ()  # by the first training micro-batch
        self._meter = Meter(args, config)

    def __call__(self, data_iterator: Iterator[Sample], model: Any) -> tuple[Any, partial[Any]]:
        """Returns the model's output and the function that makes a loss of it."""
        training = model.training
        if not training:
            self._meter.pause()
        timers = self.timers()
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        if not is_first_or_last_pipeline_stage(vp_stage) and not self.rules.split_documents:
            params = make_params(self.layouts.common, self._keeping(model))
            mask = self._row_mask(self.layouts.common, self._micro_batch_size(training), vp_stage)
            return model(None, None, None, packed_seq_params=params, **mask), partial(_no_loss)
        timers("batch-generator", log_level=2).start()
        batch = self._receive(data_iterator, training)
        layout = self.layouts.of(batch)
        timers("batch-generator").stop()
        targets = batch.targets(layout, self.rules.objective)
        head = TargetHead(
            targets,
            self.num_valid_vocab,
            self.rules.mask_token_id if self.rules.objective.exclude_mask_logit else -1,
            self.config.bp_loss_chunk_rows,
            with_accuracy=not training,
        )
        has_head = bool(get_attr_wrapped_model(model, "post_process"))
        output = model(
            batch.tokens(layout),
            layout.position.expand(len(batch.streams), -1),
            None,
            packed_seq_params=make_params(layout, self._keeping(model)),
            output_processor=score_targets,
            output_processor_context=head.get_ready() if has_head else head,
            **self._row_mask(layout, len(batch.streams), vp_stage),
        )
        return output, partial(self._loss, targets, layout, training)

    @cached_property
    def layouts(self) -> LayoutSource:
        """The layouts of this run; Megatron's process groups must exist."""
        args, config, objective = self.args, self.config, self.rules.objective
        groups = make_block_groups(links=Links(config.bp_hierarchical_gather, config.bp_overlap))
        request = PlanRequest(
            length=args.seq_length,
            block_size=self.rules.block_size,
            num_ranks=groups.num_ranks,
            num_clean_shards=groups.num_clean_shards,
            num_views=objective.num_views,
            clean_rule=objective.clean_rule,
            corrupted_rule=objective.corrupted_rule,
            # One block-parallel rank and several context ranks: the conventional baseline, where
            # corrupted keys travel as well.
            gather_corrupted=groups.num_ranks > 1 and config.block_parallel_size == 1,
            row_multiple=row_multiple(args),
            ownership=Ownership(config.bp_ownership),
            windowed_exchange=config.bp_windowed_exchange,
        )
        options = AttentionOptions(
            softmax_scale=1.0,  # each layer puts its own
            strategy=Strategy(config.bp_attention_strategy),
            kernel=config.bp_attention_kernel,
            grad_wire=GradWire(config.bp_grad_wire_dtype),
            deterministic=args.deterministic_mode,
        )
        # Experts balance the load of all rows: their auxiliary loss reads the last layer's clean
        # rows too, so these are computed; as for a next-token loss.
        prune = config.bp_prune_last_layer and not (args.num_experts or objective.learns_clean)
        common = make_layout(request, groups, options, prune, _device())
        return LayoutSource(
            common,
            self.rules,
            config.document_positions == "restart",
            config.bdlm_length_multiple,
        )

    def _keeping(self, model: Any) -> Keeping:
        """What this micro-batch's layers keep for backward; nothing without one."""
        if not model.training:
            return KEYS_ONLY
        if not self._decided:
            keeping, text = decide(self.args, self.config, self.layouts.common, model)
            print_rank_0("attention between forward and backward:\n" + text)
            self._decided = (keeping,)
        return self._decided[0]

    def _receive(self, samples: Iterator[Sample], training: bool) -> Batch:
        return receive_batch(
            samples,
            (
                self._micro_batch_size(training),
                self.rules.objective.num_views,
                self.args.seq_length,
            ),
            _device(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_src_rank(),
        )

    def _micro_batch_size(self, training: bool) -> int:
        args = self.args
        return int(args.micro_batch_size if training else args.eval_micro_batch_size)

    def _row_mask(self, layout: Layout, num_samples: int, vp_stage: Any) -> dict[str, Tensor]:
        """Rows that expert statistics skip, if there are experts and such rows on any rank."""
        if not self.args.num_experts or every_row_counts(layout.plan):
            return {}
        # The first stage deals the mask over tensor-parallel ranks together with the embedding.
        is_first = parallel_state.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        )
        dealt = self.args.sequence_parallel and not is_first
        return {"padding_mask": local_row_mask(layout.moe_ignores(), num_samples, dealt)}

    def _loss(
        self, targets: Targets, layout: Layout, training: bool, scores: Scores
    ) -> tuple[Any, ...]:
        """Returns what Megatron's schedules take: (loss, report), or (sum, count, report).

        loss = mean over samples of the objective's loss of a sample; this is this rank's part of
        it. Megatron's factors (times P, then averaged over data and context ranks) make it the sum
        over the context group and the mean over data ranks. With scope GLOBAL it is a sum, and
        Megatron divides by the counts of all ranks and micro-batches.
        """
        loss, num_samples = scores[0], targets.is_target.shape[1]
        per_batch = self.rules.objective.scope is Scope.GLOBAL
        if per_batch:
            count = targets.num_counted.double()
        else:
            loss = loss / num_samples
            count = torch.ones_like(loss) / self.layouts.common.groups.num_ranks
        if self.args.check_for_nan_in_loss_and_grad:
            refuse_not_finite(loss)
        report = {"bdlm loss": torch.stack([loss.detach(), count])}
        report |= target_report(targets, scores, self.rules.objective, not training)
        if training:
            report |= self._meter.report(layout, targets.is_target)
            if layout.groups.num_ranks > 1:
                one = torch.ones((), dtype=torch.float64, device=loss.device)
                report["attention imbalance"] = torch.stack(
                    [one * owned_imbalance(layout.plan), one]
                )
        if per_batch:
            return loss, targets.num_counted.to(torch.int), report
        return loss, report


def target_report(
    targets: Targets, scores: Scores, objective: Objective, with_accuracy: bool
) -> dict[str, Tensor]:
    """Returns pairs (sum, count) of this rank; Megatron adds both up before it divides.

    A quarter of the noise levels without a target in the whole batch is reported as NaN.
    """
    _, losses, wins = scores
    bucket = targets.bucket[targets.places]
    sums = torch.zeros(CLEAN + 1, dtype=torch.float64, device=losses.device)
    counts = sums.index_add(0, bucket, torch.ones_like(losses, dtype=torch.float64))
    pairs = torch.stack([sums.index_add(0, bucket, losses.double()), counts], 1)
    masked = counts[:CLEAN].sum()
    report = {"masked fraction": torch.stack([masked, targets.num_rows.double()])}
    for pair, name in zip(pairs, objective.bucket_names, strict=False):
        report[f"loss at t {name}"] = pair
    if objective.learns_clean:
        report["next token loss"] = pairs[CLEAN]
    if with_accuracy:
        right = (wins & (bucket < CLEAN)).sum().double()
        report["masked token accuracy"] = torch.stack([right, masked])
    return report


def _no_loss(output: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("a middle pipeline stage has no loss")


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())
