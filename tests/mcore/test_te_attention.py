"""In Transformer Engine layers our attention is a stock one with the same state, and exact.

Transformer Engine does not import on a CPU: a stand-in takes its place under Megatron's own
classes. What it computes itself is tested on a GPU (test_gpu_te.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.mcore.te_runs import Logged, bits, train_te_jobs
from tests.mcore.te_step import Answer, Step, differences, reference_step, run_steps

ROOT = Path(__file__).parents[2]
LENGTH = 256


@pytest.fixture(scope="module")
def reference() -> Answer:
    answer: Answer = run_distributed(reference_step, 1, LENGTH)[0]
    return answer


def test_loss_and_gradients_are_those_of_the_dense_reference(reference: Answer) -> None:
    steps = [Step("dense", torch.float64, LENGTH)]
    (got,) = run_distributed(run_steps, 1, steps, True)[0]
    errors = differences(got, reference)
    # RMSNorm, rotary tables and softmax of the two layer kinds round differently in fp64.
    assert max(errors.values()) < 1e-10, errors
    assert len(errors) > 15


def test_without_transformer_engine_the_error_says_what_to_install() -> None:
    code = "import megatron_bp.mcore.te_attention"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert "ImportError: TEBlockParallelAttention needs Transformer Engine" in done.stderr
    assert "pip install 'megatron-bp[te]'" in done.stderr


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
