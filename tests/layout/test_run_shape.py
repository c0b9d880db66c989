"""A run that cannot be laid out is refused with every reason; modes follow from the degrees."""

import pytest

from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
    dense_model,
)
from megatron_bp.layout.run_shape import BatchShape, Mode, Policy, Run, Topology, run_problems

MODEL = dense_model("tiny", 4, 32, 48, AttentionShape(4, 2, 16), 64)
BATCH = BatchShape(length=64, block_size=4, global_batch=4)


@pytest.mark.parametrize(
    ("topology", "mode"),
    [
        (Topology(tensor=2), Mode.ONE_RANK),
        (Topology(context=4, shards=4), Mode.CSBP),
        (Topology(context=4, shards=1), Mode.BP),
        (Topology(context=4, shards=2), Mode.HYBRID),
        (Topology(context=4, shards=4, block_owned=False), Mode.CP),
    ],
)
def test_the_degrees_name_the_mode(topology: Topology, mode: Mode) -> None:
    assert topology.mode is mode


def test_a_world_is_the_product_of_its_degrees() -> None:
    assert Topology(tensor=2, context=4, shards=2, pipeline=2, data=3).world == 48


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tensor": 0, "data": -1}, "tensor=0 must be at least 1. data=-1 must be at least 1."),
        ({"context": 4, "shards": 3}, "shards=3 must divide context=4; use 1 or 4."),
        ({"context": 4, "block_owned": False}, "needs shards=1 equal to context=4"),
        ({"expert": 3, "data": 4}, "expert=3 must divide context . data = 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(values: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Topology(**values)


@pytest.mark.parametrize(
    ("topology", "batch", "sentence"),
    [
        (Topology(data=3), BATCH, "global_batch=4 must be a multiple of micro_batch \\* data = 3"),
        (Topology(context=16, shards=16), BATCH, "16 blocks, fewer than 2 \\* context = 32"),
        (Topology(pipeline=3), BATCH, "pipeline \\* virtual = 3 must divide the 4 layers"),
        (Topology(tensor=3), BATCH, "tensor=3 must divide 4 heads, 2 key heads"),
        (Topology(expert=2, data=2), BATCH, "expert=2 needs a model with experts; use 1"),
    ],
)
def test_runs_that_do_not_divide_are_refused(
    topology: Topology, batch: BatchShape, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Run(MODEL, batch, topology)


def test_delta_heads_and_experts_must_divide_too() -> None:
    delta = LayerKind(DeltaNetShape(2, 6, 8, 8), 48)
    experts = LayerKind(AttentionShape(4, 2, 16), 0, ExpertsShape(6, 2, 8))
    model = ModelShape("mixed", 32, 64, ((delta, 1), (experts, 1)))
    found = run_problems(model, BATCH, Topology(tensor=4, expert=4, data=4))
    assert any("2 and 6 heads" in sentence for sentence in found)
    assert any("must divide 6 experts" in sentence for sentence in found)
    assert run_problems(model, BATCH, Topology(tensor=2, expert=2, data=4)) == []


def test_requests_carry_the_mode_and_padding() -> None:
    run = Run(MODEL, BATCH, Topology(tensor=2, context=4, shards=4, block_owned=False))
    request = run.request(window=9)
    assert (request.num_ranks, request.num_clean_shards, request.window) == (4, 4, 9)
    assert request.gather_corrupted
    assert request.row_multiple == 2
    assert run.num_micro_batches == 4


def test_the_last_layer_is_pruned_unless_clean_rows_are_read() -> None:
    assert Run(MODEL, BATCH, Topology()).prunes_last_layer
    assert not Run(MODEL, BATCH, Topology(), Policy(prune_last_layer=False)).prunes_last_layer
    learns = BatchShape(length=64, block_size=4, learns_clean=True)
    assert not Run(MODEL, learns, Topology()).prunes_last_layer


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=0 must be at least 1"):
        ModelShape("none", 0, 64, ())
