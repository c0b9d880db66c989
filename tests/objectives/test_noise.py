"""Specifies megatron_bp.objectives.noise: what is drawn, masked, learned and counted."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.blocks import BlockTable, make_blocks
from megatron_bp.objectives.noise import Corruption, Stream, corrupt, noise_levels, uniform
from megatron_bp.objectives.objective import (
    PRESETS,
    Alignment,
    Canvas,
    Normalizer,
    Objective,
    TSampling,
    Views,
    Weight,
    make_objective,
)

MASK = 1000  # never a token of the samples below
PROPERTY = settings(deadline=None, derandomize=True)


@st.composite
def objectives(draw: Any) -> Objective:
    views = draw(st.sampled_from(list(Views)))
    canvas = draw(st.sampled_from([x for x in Canvas if views is Views.SINGLE or x != "uniform"]))
    plain = views is Views.SINGLE and canvas is not Canvas.UNIFORM
    weight = draw(st.sampled_from([x for x in Weight if plain or x is not Weight.INVERSE_T]))
    sums = [Normalizer.SUPERVISED, Normalizer.TARGETS]
    is_mean = weight is Weight.BLOCK_MEAN
    return replace(
        make_objective("standard"),
        alignment=draw(st.sampled_from(list(Alignment))),
        views=views,
        canvas=canvas,
        weight=weight,
        normalizer=Normalizer.BLOCKS if is_mean else draw(st.sampled_from(sums)),
        t_sampling=draw(st.sampled_from(list(TSampling))),
        ar_loss_weight=draw(st.sampled_from((0.0, 0.5))),
    )


@st.composite
def samples(draw: Any) -> dict[str, Any]:
    length = draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
    edges = [0, *cuts, length]
    documents = tuple(pairwise(edges))
    return {
        "tokens": np.array(
            draw(st.lists(st.integers(0, MASK - 1), min_size=length, max_size=length))
        ),
        "supervised": np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length))),
        "blocks": make_blocks(length, draw(st.integers(1, 9)), documents),
        "mask_token_id": MASK,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "sample_index": draw(st.integers(0, 2**64 - 1)),
        "vocab_size": MASK,
    }


def make_sample(length: int, block_size: int, **changes: Any) -> dict[str, Any]:
    sample = {
        "tokens": np.arange(length) % MASK,
        "supervised": np.ones(length, dtype=bool),
        "blocks": make_blocks(length, block_size),
        "mask_token_id": MASK,
        "seed": 1234,
        "sample_index": 7,
        "vocab_size": MASK,
    }
    return sample | changes


def by_hand(sample: dict[str, Any], objective: Objective) -> Corruption:
    """The definition, row by row."""
    tokens, blocks = sample["tokens"], sample["blocks"]
    key = {"seed": sample["seed"], "sample_index": sample["sample_index"]}
    length, views, shift = blocks.length, objective.num_views, objective.label_shift
    draws = uniform(Stream.TOKEN, length, **key)
    shown = np.floor(uniform(Stream.REPLACEMENT, length, **key) * MASK).astype(int)
    levels = noise_levels(blocks, objective, **key)
    block_of = [
        next(b for b in range(blocks.num_blocks) if blocks.start[b] <= p < blocks.stop[b])
        for p in range(length)
    ]
    may_change = [
        bool(sample["supervised"][p])
        and not (objective.canvas == "seed_and_mask" and p in blocks.start)
        for p in range(length)
    ]
    changed = [
        [may_change[p] and (draws[p] < levels[block_of[p]]) == (v == 0) for p in range(length)]
        for v in range(views)
    ]
    labels, weights = np.zeros((views, length), dtype=np.int64), np.zeros((views, length))
    counted, bucket = np.zeros((views, length), dtype=bool), np.zeros((views, length), np.int64)
    next_labels = np.full(length, -1)

    def goal_of(row: int, ahead: int) -> int:
        goal = row + ahead
        inside = goal < length and (
            blocks.document[block_of[goal]] == blocks.document[block_of[row]]
        )
        return goal if inside else -1

    for v in range(views):
        goals = {row: goal_of(row, shift) for row in range(length)}
        is_target = {
            row: goal >= 0
            and may_change[goal]
            and (changed[v][goal] or objective.canvas == "uniform")
            for row, goal in goals.items()
        }
        block_targets = [block_of[goals[row]] for row in range(length) if is_target[row]]
        for row, goal in goals.items():
            if objective.normalizer is Normalizer.SUPERVISED and v == 0:
                counted[v, row] = goal >= 0 and may_change[goal]
            if not is_target[row]:
                continue
            block = block_of[goal]
            if objective.normalizer is Normalizer.TARGETS:
                counted[v, row] = True
            if objective.normalizer is Normalizer.BLOCKS:
                counted[v, row] = all(
                    block_of[goals[other]] != block for other in range(row) if is_target[other]
                )
            labels[v, row] = tokens[goal]
            weights[v, row] = {
                Weight.INVERSE_T: 1 / levels[block],
                Weight.NONE: 1,
                Weight.BLOCK_MEAN: 1 / block_targets.count(block),
            }[objective.weight]
            unit = (levels[block] - objective.t_min) / (objective.t_max - objective.t_min)
            bucket[v, row] = sum(unit >= edge for edge in (0.25, 0.5, 0.75))
    for row in range(length):
        goal = goal_of(row, 1)
        if objective.ar_loss_weight and goal >= 0 and sample["supervised"][goal]:
            next_labels[row] = tokens[goal]
    replaced = shown if objective.canvas == "uniform" else MASK
    return Corruption(
        tokens=np.array([np.where(changed[v], replaced, tokens) for v in range(views)]),
        labels=labels,
        weights=weights,
        counted=counted,
        bucket=bucket,
        next_labels=next_labels,
        normalizer=int(counted.sum()),
        t=levels[block_of],
    )


def philox_word(index: int, stream: int, seed: int, sample_index: int) -> int:
    """Philox4x64-10 (Salmon et al. 2011), written from the paper as an independent oracle."""
    word = 2**64 - 1
    c0, c1, c2, c3 = index // 4 + 1, 0, 0, stream
    k0, k1 = seed, sample_index
    for _ in range(10):
        low, high = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & word, (low >> 64) ^ c3 ^ k1, low & word
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & word, (k1 + 0xBB67AE8584CAA73B) & word
    return (c0, c1, c2, c3)[index % 4]


@PROPERTY
@given(
    st.sampled_from(list(zip(Stream, range(4), strict=True))),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_a_draw_is_a_pure_function_of_seed_sample_stream_and_index(
    stream: tuple[Stream, int], seed: int, sample_index: int
) -> None:
    draws = uniform(stream[0], 11, seed=seed, sample_index=sample_index)
    words = [philox_word(i, stream[1], seed, sample_index) for i in range(11)]
    assert draws.tolist() == [(word >> 11) / 2**53 for word in words]


@PROPERTY
@given(samples(), objectives())
def test_a_corruption_is_what_its_definition_says_row_by_row(
    sample: dict[str, Any], objective: Objective
) -> None:
    with np.errstate(all="raise"):
        got = corrupt(**sample, objective=objective)
    want = by_hand(sample, objective)
    for name in ("tokens", "labels", "weights", "counted", "bucket", "next_labels", "t"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert got.normalizer == want.normalizer


@PROPERTY
@given(samples(), objectives())
def test_weights_of_a_block_mean_sum_to_the_blocks(
    sample: dict[str, Any], objective: Objective
) -> None:
    objective = replace(objective, weight=Weight.BLOCK_MEAN, normalizer=Normalizer.BLOCKS)
    got = corrupt(**sample, objective=objective)
    assert got.weights.sum() == pytest.approx(got.normalizer, abs=1e-12)


@PROPERTY
@given(samples())
def test_two_views_make_each_token_a_target_once_but_for_the_first_of_a_document(
    sample: dict[str, Any],
) -> None:
    got = corrupt(**sample, objective=make_objective("fast_dllm_v2"))
    blocks: BlockTable = sample["blocks"]
    views, rows = np.nonzero(got.weights)
    wanted = set(np.flatnonzero(sample["supervised"])) - set(blocks.document_start)
    assert sorted(rows + 1) == sorted(wanted)
    assert (got.tokens[views, rows + 1] == MASK).all()  # what is predicted is not shown
    assert (got.labels[views, rows] == sample["tokens"][rows + 1]).all()
    assert got.normalizer == len(wanted)


@PROPERTY
@given(samples(), objectives())
def test_only_supervised_tokens_change_and_two_views_share_them_out(
    sample: dict[str, Any], objective: Objective
) -> None:
    got = corrupt(**sample, objective=objective)
    changed = got.tokens != sample["tokens"]
    assert not (changed & ~sample["supervised"]).any()
    if objective.canvas is not Canvas.UNIFORM:
        assert (got.tokens[changed] == MASK).all()
    if objective.canvas is Canvas.SEED_AND_MASK:
        assert not changed[:, sample["blocks"].start].any()
    if objective.views is Views.COMPLEMENTARY and objective.canvas is Canvas.ALL_MASKED:
        assert (changed.sum(0) == sample["supervised"]).all()


@PROPERTY
@given(samples(), objectives(), st.integers(1, 7))
def test_ranks_that_split_the_rows_split_the_normalizer(
    sample: dict[str, Any], objective: Objective, num_ranks: int
) -> None:
    got = corrupt(**sample, objective=objective)
    shares = [int(got.counted[:, rank::num_ranks].sum()) for rank in range(num_ranks)]
    assert sum(shares) == got.normalizer
    assert (got.weights[~got.counted] == 0).all() or objective.normalizer != "targets"


@PROPERTY
@given(samples(), st.data())
def test_noise_of_a_block_does_not_depend_on_what_follows_it(
    sample: dict[str, Any], data: st.DataObject
) -> None:
    objective = make_objective("fast_dllm_v2")
    blocks: BlockTable = sample["blocks"]
    whole = corrupt(**sample, objective=objective)
    length = int(data.draw(st.sampled_from(list(blocks.stop))))
    spans = [
        (int(lo), min(int(hi), length))
        for lo, hi in zip(
            np.unique(blocks.document_start),
            [*np.unique(blocks.document_start)[1:], blocks.length],
            strict=True,
        )
        if lo < length
    ]
    part = dict(sample, blocks=make_blocks(length, blocks.block_size, tuple(spans)))
    part |= {"tokens": sample["tokens"][:length], "supervised": sample["supervised"][:length]}
    got = corrupt(**part, objective=objective)
    np.testing.assert_array_equal(got.tokens, whole.tokens[:, :length])
    np.testing.assert_array_equal(got.t, whole.t[:length])


def test_token_draws_do_not_depend_on_block_size_or_level_sampling() -> None:
    half = replace(make_objective("standard"), t_min=0.5, t_max=0.5)
    got = [
        corrupt(**make_sample(64, size), objective=replace(half, t_sampling=sampling)).tokens
        for size in (1, 8, 64)
        for sampling in TSampling
    ]
    assert all((tokens == got[0]).all() for tokens in got)


def test_other_seeds_and_samples_draw_other_noise() -> None:
    seeds = [{"seed": 1}, {"seed": 2}, {"sample_index": 1}, {"sample_index": 2}]
    masks = {
        corrupt(
            **make_sample(256, 8, **seed), objective=make_objective("standard")
        ).tokens.tobytes()
        for seed in seeds
    }
    assert len(masks) == len(seeds)


def test_the_masked_share_of_each_block_is_close_to_its_level() -> None:
    size = 20_000
    for name in ("standard", "fast_dllm_v2"):
        got = corrupt(**make_sample(8 * size, size), objective=make_objective(name))
        level = got.t[::size]
        share = (got.tokens[0] == MASK).reshape(8, size).mean(1)
        tolerance = 5 * np.sqrt(level * (1 - level) / size)  # five standard deviations
        assert (abs(share - level) <= tolerance).all()


def test_inverse_t_weights_sum_to_the_supervised_tokens_on_average() -> None:
    # E[masked / t] = 1; its variance E[1/t] - 1 = 5.9 for t uniform in [1e-3, 1]; 64 * 4096 tokens
    objective = make_objective("standard")
    ratios = []
    for index in range(64):
        got = corrupt(**make_sample(4096, 16, sample_index=index), objective=objective)
        ratios.append(got.weights.sum() / got.normalizer)
    assert abs(np.mean(ratios) - 1) < 5 * np.sqrt(5.9 / (64 * 4096))


@PROPERTY
@given(st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_antithetic_levels_hit_every_stratum_once(
    num_blocks: int, seed: int, sample_index: int
) -> None:
    objective = make_objective("standard")
    t = noise_levels(
        make_blocks(4 * num_blocks, 4), objective, seed=seed, sample_index=sample_index
    )
    assert ((t >= objective.t_min) & (t <= objective.t_max)).all()
    unit = np.sort((t - objective.t_min) / (objective.t_max - objective.t_min))
    np.testing.assert_allclose(np.diff(unit), 1 / num_blocks, atol=1e-12)


def test_antithetic_levels_are_not_ordered_along_the_sequence() -> None:
    # The lag-one correlation of 256 random values has standard deviation 1/16; in sequence order it
    # is 1.
    objective, blocks = make_objective("standard"), make_blocks(1024, 4)
    orders = set()
    for index in range(8):
        t = noise_levels(blocks, objective, seed=3, sample_index=index)
        assert abs(np.corrcoef(t[:-1], t[1:])[0, 1]) < 5 / 16
        order = np.argsort(t)
        # u rotates the order; rolled to begin with block 0 it is the permutation's own
        orders.add(np.roll(order, -np.flatnonzero(order == 0)[0]).tobytes())
    assert len(orders) == 8


def test_an_independent_level_is_the_draw_at_the_start_of_its_block() -> None:
    objective = replace(make_objective("fast_dllm_v2"), t_min=0.25, t_max=0.75)
    blocks = make_blocks(11, 4, ((0, 5), (5, 11)))
    draws = uniform(Stream.LEVEL, 11, seed=1, sample_index=2)[[0, 4, 5, 9]]
    levels = noise_levels(blocks, objective, seed=1, sample_index=2)
    np.testing.assert_array_equal(levels, 0.25 + 0.5 * draws)


@pytest.mark.parametrize("sampling", list(TSampling))
def test_levels_of_every_block_are_uniform_over_samples(sampling: TSampling) -> None:
    objective = replace(make_objective("standard"), t_sampling=sampling, t_min=0.2, t_max=0.8)
    t = np.array(
        [
            noise_levels(make_blocks(32, 8), objective, seed=5, sample_index=index)
            for index in range(4000)
        ]
    )
    unit = (t - 0.2) / 0.6
    five_sigma = 5 / np.sqrt(12 * 4000)
    assert (abs(unit.mean(0) - 0.5) < five_sigma).all()
    assert (abs((unit**2).mean(0) - 1 / 3) < five_sigma).all()
    assert (abs((unit < 0.25).mean(0) - 0.25) < five_sigma * 1.5).all()


def test_an_example_with_two_documents_reads_as_expected() -> None:
    tokens = np.array([10, 11, 12, 20, 21, 22])
    supervised = np.array([True, True, True, True, False, True])
    sample = make_sample(6, 2, tokens=tokens, supervised=supervised)
    sample["blocks"] = make_blocks(6, 2, ((0, 3), (3, 6)))
    objective = replace(make_objective("fast_dllm_v2"), t_min=1.0, t_max=1.0)
    got = corrupt(**sample, objective=objective)
    assert got.tokens.tolist() == [[MASK, MASK, MASK, MASK, 21, MASK], tokens.tolist()]
    assert got.labels.tolist() == [[11, 12, 0, 0, 22, 0], [0] * 6]
    assert got.weights.tolist() == [[1, 1, 0, 0, 1, 0], [0] * 6]
    assert got.normalizer == 3
    standard = replace(make_objective("standard"), t_min=1.0, t_max=1.0)
    got = corrupt(**sample, objective=standard)
    assert got.labels.tolist() == [[10, 11, 12, 20, 0, 22]]
    assert got.counted.tolist() == [supervised.tolist()]


def test_a_uniform_canvas_replaces_with_every_token_of_the_vocabulary() -> None:
    objective = make_objective("llada2", canvas="uniform", t_min=1.0)
    size = 20_000
    got = corrupt(**make_sample(size, 8, vocab_size=10), objective=objective)
    counts = np.bincount(got.tokens[0], minlength=10)
    assert len(counts) == 10
    assert (abs(counts / size - 0.1) <= 5 * np.sqrt(0.09 / size)).all()  # five sigma
    assert got.normalizer == size
    assert (got.weights == 1).all()


def test_seeds_are_never_masked_and_never_targets() -> None:
    objective = make_objective("fast_dllm_v2", canvas="seed_and_mask", t_min=1.0)
    got = corrupt(**make_sample(10, 4), objective=objective)
    assert np.flatnonzero(got.tokens[0] == MASK).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert np.flatnonzero(got.weights[0]).tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert got.labels[0].tolist() == [1, 2, 3, 0, 5, 6, 7, 0, 9, 0]


def test_next_tokens_are_predicted_inside_a_document_only() -> None:
    tokens = np.array([10, 11, 12, 20, 21, 22])
    supervised = np.array([True, True, True, True, False, True])
    sample = make_sample(6, 2, tokens=tokens, supervised=supervised)
    sample["blocks"] = make_blocks(6, 2, ((0, 3), (3, 6)))
    got = corrupt(**sample, objective=make_objective("nemotron_labs"))
    assert got.next_labels.tolist() == [11, 12, -1, -1, 22, -1]
    got = corrupt(**sample, objective=make_objective("standard"))
    assert got.next_labels.tolist() == [-1] * 6


def test_a_uniform_canvas_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=0 must be at least 1 for canvas=uniform"):
        corrupt(
            **make_sample(8, 4, vocab_size=0), objective=make_objective("llada2", canvas="uniform")
        )


@pytest.mark.parametrize("name", PRESETS)
def test_a_sample_with_nothing_to_learn_counts_nothing(name: str) -> None:
    sample = make_sample(12, 4, supervised=np.zeros(12, dtype=bool))
    got = corrupt(**sample, objective=make_objective(name))
    assert got.normalizer == 0
    assert (got.next_labels == -1).all()
    assert not got.counted.any()
    assert (got.weights == 0).all()
    assert (got.tokens == sample["tokens"]).all()


def test_supervising_a_mask_token_is_refused_where_it_cannot_be_predicted() -> None:
    sample = make_sample(8, 4, mask_token_id=5)
    with pytest.raises(ValueError, match=r"position 5 is mask_token_id=5 and supervised"):
        corrupt(**sample, objective=make_objective("standard"))
    corrupt(**sample, objective=make_objective("fast_dllm_v2"))
    sample["supervised"] = sample["tokens"] != 5
    corrupt(**sample, objective=make_objective("standard"))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mask_token_id": -1}, ValueError, "mask_token_id=-1 must be a token id"),
        ({"seed": -1}, ValueError, r"seed=-1 must be in \[0, 2\*\*64\)"),
        ({"sample_index": 2**64}, ValueError, "sample_index=18446744073709551616 must be in"),
        ({"tokens": np.arange(9)}, ValueError, r"both must have the shape \(8,\)"),
        ({"supervised": np.ones((1, 8), bool)}, ValueError, r"both must have the shape \(8,\)"),
        ({"tokens": np.zeros(8)}, TypeError, "tokens must be an integer array"),
        ({"supervised": np.ones(8)}, TypeError, "supervised a bool array"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        corrupt(**make_sample(8, 4, **change), objective=make_objective("standard"))


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_tokens_of_any_integer_type_give_the_same_int64_corruption(dtype: type) -> None:
    sample = make_sample(32, 4)
    want = corrupt(**sample, objective=make_objective("standard"))
    sample["tokens"] = sample["tokens"].astype(dtype)
    got = corrupt(**sample, objective=make_objective("standard"))
    for name in ("tokens", "labels"):
        assert getattr(got, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_inputs_are_left_as_they_were() -> None:
    sample = make_sample(8, 4)
    for name in ("tokens", "supervised"):
        sample[name].flags.writeable = False
    corrupt(**sample, objective=make_objective("fast_dllm_v2"))
