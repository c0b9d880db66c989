"""In Transformer Engine layers our attention is a stock one with the same state, and exact.

Transformer Engine does not import on a CPU: a stand-in takes its place under Megatron's own
classes. What it computes itself is tested on a GPU (test_gpu_te.py).
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.distributed import run_distributed
from tests.mcore.te_runs import Logged, bits, train_te_jobs
from tests.mcore.te_step import Step, differences, steps_and_reference


def test_loss_and_gradients_are_those_of_the_dense_reference() -> None:
    """Also if layers run twice, with their attention kept."""
    steps = [Step("dense", torch.float64, 128, recompute=twice) for twice in (False, True)]
    answers, wanted = run_distributed(steps_and_reference, 1, steps)[0]
    for answer in answers:
        errors = differences(answer, wanted)
        assert max(errors.values()) < 1e-10, errors
        assert len(errors) > 15
    assert answers[0].num_attention_runs == answers[1].num_attention_runs > 0


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed")
def test_without_transformer_engine_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"needs Transformer Engine.*'megatron-bp\[te\]'"):
        import megatron_bp.mcore.te_attention  # noqa: F401


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return train_te_jobs(tmp_path_factory.mktemp("jobs"), stand_in=True)


def test_next_token_training_is_stock_bit_for_bit(logged: Logged) -> None:
    assert len(logged["stock"]) == 5
    assert bits(logged["ours"]) == bits(logged["stock"])


@pytest.mark.parametrize("name", ["stock", "ours", "diffusion"])
def test_a_checkpoint_loads_with_block_parallelism_on_or_off(logged: Logged, name: str) -> None:
    stock = bits(logged[f"stock from {name}"])
    assert bits(logged[f"ours from {name}"]) == stock
    if name != "diffusion":
        assert stock == bits(logged["stock"])[2:4]
        assert bits(logged[f"diffusion from {name}"]) == bits(logged["diffusion from stock"])
    else:
        assert len({stock[0], bits(logged["stock from stock"])[0], bits(logged["stock"])[0]}) == 3
