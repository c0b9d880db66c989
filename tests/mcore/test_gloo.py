"""Gradients that travel one buffer at a time train what coalesced ones train, bit for bit."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron_bp.mcore.gloo import _each_by_itself, use_gloo_on_gpus
from tests.distributed import run_distributed
from tests.mcore.runs import as_job, flags, read_scalars

TWO = "--context-parallel-size 2 --block-parallel-size 2"
KINDS = {"reduced": TWO, "sharded": f"{TWO} --use-distributed-optimizer"}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("logs")
    run_distributed(_jobs, 2, str(folder), timeout=200.0)
    return {path.name: read_scalars(path) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_single_operations_train_what_coalesced_ones_train(logged: dict, kind: str) -> None:
    coalesced, singly = logged[f"{kind} coalesced"], logged[f"{kind} singly"]
    assert len(singly) == 4
    for name in ("bdlm loss", "grad-norm"):
        assert [step[name] for step in singly] == [step[name] for step in coalesced]
    assert coalesced[0]["bdlm loss"] != coalesced[1]["bdlm loss"]


def _jobs(rank: int, num_ranks: int, folder: str) -> None:
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_bp.mcore.adaptor import train
    from megatron_bp.mcore.gloo import issue_singly

    stock, entered = param_and_grad_buffer._coalescing_manager, []

    def counted(*given: Any, **named: Any) -> Any:
        entered.append(given)
        return stock(*given, **named)

    def job(name: str, given: str) -> None:
        as_job(rank, num_ranks, [*flags(given), "--tensorboard-dir", f"{folder}/{name}"], train)

    param_and_grad_buffer._coalescing_manager = counted
    for kind, given in KINDS.items():
        job(f"{kind} coalesced", given)
    assert len(entered) >= 8
    entered.clear()
    issue_singly()
    for kind, given in KINDS.items():
        job(f"{kind} singly", given)
    assert not entered


def test_operations_that_are_waited_for_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(
        distributed_backend="gloo", overlap_grad_reduce=True, overlap_param_gather=True
    )
    use_gloo_on_gpus(args)  # not on a GPU: gloo has them
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="--overlap-grad-reduce and --overlap-param-gather need"):
        use_gloo_on_gpus(args)
    args.distributed_backend = "nccl"
    use_gloo_on_gpus(args)
    with pytest.raises(ValueError, match="cannot be asynchronous"), _each_by_itself(async_ops=True):
        pass


def test_over_gloo_on_gpus_operations_are_issued_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import param_and_grad_buffer

    stock = param_and_grad_buffer._coalescing_manager
    monkeypatch.setattr(param_and_grad_buffer, "_coalescing_manager", stock)  # is put back
    args = argparse.Namespace(overlap_grad_reduce=False, overlap_param_gather=False)
    for on_gpu, backend, wanted in (
        (False, "gloo", stock),
        (True, "nccl", stock),
        (True, "gloo", _each_by_itself),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        args.distributed_backend = backend
        use_gloo_on_gpus(args)
        assert param_and_grad_buffer._coalescing_manager is wanted
