"""The split of a trace gives every instant to one part, and communication is exposed only alone."""

import random
from typing import Any

import pytest

from megatron_bp.mcore import step_trace
from megatron_bp.mcore.step_trace import ATTENTION, LINEARS, LOSS, OPTIMIZER, OTHER, split_of

Event = dict[str, Any]


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(number: int, at: float, name: str, ts: float, dur: float, **args: Any) -> list[Event]:
    """A launch on thread 1 at `at` and its kernel."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", at, 0.5, correlation=number),
        span("kernel", name, ts, dur, tid=7, correlation=number, **args),
    ]


def trace(*events: Event | list[Event]) -> dict[str, Any]:
    flat = [e for event in events for e in (event if isinstance(event, list) else [event])]
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *flat]}


def test_a_kernel_belongs_to_the_range_that_launched_it() -> None:
    found = split_of(
        trace(
            span("user_annotation", "bench/attention", 0, 10),
            span("cpu_op", "_BlockParallelAttentionBackward", 20, 10),
            span("user_annotation", "bench/loss", 40, 10),
            span("user_annotation", "bench/optimizer", 60, 10),
            launched(1, 1, "flash", 100, 1000),
            launched(2, 21, "flash_bwd_gemm", 1100, 2000),
            launched(3, 35, "nvjet_tst", 3100, 4000),
            launched(4, 41, "sm90_gemm", 7100, 300),
            launched(5, 61, "adam", 7400, 50),
            launched(6, 80, "norm", 7450, 7),
            launched(7, 81, "triton_tem_fused_flex_attention_0", 7457, 100),
        )
    )
    assert found.computing_ms == pytest.approx(
        {ATTENTION: 3.1, LINEARS: 4.0, LOSS: 0.3, OPTIMIZER: 0.05, OTHER: 0.007}
    )
    assert found.wall_ms == pytest.approx(7.457)
    assert found.idle_ms == pytest.approx(0)


def test_ranges_of_other_threads_and_ended_ones_do_not_count() -> None:
    found = split_of(
        trace(
            span("user_annotation", "bench/loss", 0, 10, tid=2),
            span("user_annotation", "bench/attention", 0, 5),
            launched(1, 6, "norm", 100, 10),
        )
    )
    assert found.computing_ms[OTHER] == pytest.approx(0.01)


def test_the_innermost_range_wins() -> None:
    found = split_of(
        trace(
            span("user_annotation", "bench/loss", 0, 20),
            span("user_annotation", "bench/attention", 5, 5),
            launched(1, 6, "a", 100, 10),
            launched(2, 12, "b", 110, 20),
        )
    )
    assert (found.computing_ms[ATTENTION], found.computing_ms[LOSS]) == pytest.approx((0.01, 0.02))


def test_communication_is_exposed_while_nothing_computes() -> None:
    gather = {"dtype": "BFloat16", "Group size": 4, "Collective name": "_allgather_base"}
    found = split_of(
        trace(
            span("user_annotation", "bench/attention", 0, 10),
            launched(1, 1, "ncclDevKernel_AllGather", 100, 50, **gather, **{"In msg nelems": 10}),
            launched(2, 2, "flash", 120, 20),
            launched(3, 20, "ncclDevKernel_ReduceScatter", 160, 10),
        )
    )
    assert found.exposed_ms == pytest.approx({ATTENTION: 0.03, OTHER: 0.01})
    assert found.wire_ms == pytest.approx({ATTENTION: 0.05, OTHER: 0.01})
    assert found.idle_ms == pytest.approx(0.01)
    assert found.sent_bytes(ATTENTION) == 10 * 3 * 2


def test_bytes_count_as_the_cost_model_does() -> None:
    def sent(name: str, **elements: int) -> int:
        args = {"dtype": "Float", "Group size": 4, "Collective name": name}
        named = {key.replace("_", " "): value for key, value in elements.items()}
        return split_of(trace(launched(1, 1, "ncclDevKernel", 100, 1, **args, **named))).sent_bytes(
            OTHER
        )

    assert sent("_allgather_base", In_msg_nelems=5, Out_msg_nelems=20) == 5 * 3 * 4
    assert sent("_reduce_scatter_base", In_msg_nelems=20, Out_msg_nelems=5) == 5 * 3 * 4
    assert sent("all_to_all", In_msg_nelems=8, Out_msg_nelems=9) == 8 * 4


def test_parts_exposed_and_idle_add_up_to_the_wall_for_any_trace() -> None:
    rng = random.Random(3)
    for _ in range(50):
        events = [
            launched(i, rng.uniform(0, 100), rng.choice(["gemm", "norm", "ncclDevKernel"]),
                     rng.uniform(200, 400), rng.uniform(1, 60))
            for i in range(rng.randint(1, 12))
        ]  # fmt: skip
        events += [[span("user_annotation", "bench/attention", 0, rng.uniform(0, 100))]]
        found = split_of(trace(*events))
        assert sum(found.computing_ms.values()) + sum(
            found.exposed_ms.values()
        ) + found.idle_ms == pytest.approx(found.wall_ms)
        assert found.idle_ms > -1e-9
        assert all(found.exposed_ms[part] <= found.wire_ms[part] + 1e-9 for part in found.wire_ms)


def test_a_trace_without_a_device_has_no_times() -> None:
    found = split_of(trace(span("cpu_op", "aten::mm", 0, 5)))
    assert found.wall_ms == 0
    assert set(found.computing_ms) == set(step_trace.COMPUTING)
    assert found.as_dict()["sent_bytes"] == {ATTENTION: 0, OTHER: 0}
