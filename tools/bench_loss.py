#!/usr/bin/env python
"""Benchmark the vocabulary loss beside its three matrix products alone and other libraries.

    tools/bench_loss.py --shape nemotron-14b --rows 65536 --chunk-rows 2048 --json out.json

Random bf16 inputs, mean loss, medians of --repeats. `of products` is the time of the three products
(whole matrices, bf16 results) over that of forward and backward together. `extra GiB` is the peak
beyond inputs and bf16 gradients. Errors are relative L2 against float64 on the same inputs, over
sampled rows of gradients of the whole problem.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_bp.objectives import LossOptions, linear_cross_entropy, weighted_cross_entropy
from megatron_bp.objectives.bench import Problem, make_problem

PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
# hidden size, vocabulary
SHAPES = {
    "nemotron-3b": (3072, 131072),
    "nemotron-8b": (4096, 131072),
    "nemotron-14b": (5120, 131072),
    "qwen3.5-27b": (5120, 248320),
    "diffusiongemma": (2816, 262144),
}


def installed(name: str) -> str:
    """Version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def recomputed(x: Problem, chunk_rows: int) -> Tensor:
    """Logits computed again in backward."""
    options = LossOptions(vocab_start=0, num_valid_vocab=len(x.weight), chunk_rows=chunk_rows)
    return linear_cross_entropy(x.hidden, x.weight, x.labels, options=options).mean()


def in_forward(x: Problem, chunk_rows: int) -> Tensor:
    """Gradients computed in forward."""
    options = LossOptions(vocab_start=0, num_valid_vocab=len(x.weight), chunk_rows=chunk_rows)
    row_weight = torch.full_like(x.labels, 1 / len(x.labels), dtype=torch.float32)
    return weighted_cross_entropy(x.hidden, x.weight, x.labels, row_weight, options=options)[0]


def liger(x: Problem, sums: torch.dtype | None) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy, weight gradient summed in its own type or fp32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    settings = (None, None, -100, 0.0, 0.0, "mean", None, False, sums)
    result = LigerFusedLinearCrossEntropyFunction.apply(x.hidden, x.weight, x.labels, *settings)
    return result[0]


def cce(x: Problem, filter_eps: str | None) -> Tensor:
    """cut-cross-entropy; "high" (its default) drops small gradients, None keeps all."""
    import cut_cross_entropy

    return cut_cross_entropy.linear_cross_entropy(
        x.hidden, x.weight, x.labels, filter_eps=filter_eps
    )


def plain(x: Problem) -> Tensor:
    """Plain torch: all logits, in float32."""
    return functional.cross_entropy((x.hidden @ x.weight.t()).float(), x.labels)


OTHERS: dict[str, Callable[[Problem], Tensor]] = {
    "liger": partial(liger, sums=None),
    "liger_fp32": partial(liger, sums=torch.float32),
    "cce": partial(cce, filter_eps="high"),
    "cce_unfiltered": partial(cce, filter_eps=None),
    "torch": plain,
}
OURS = {"in_forward": in_forward, "recomputed": recomputed}


def measure(name: str, mean_loss: Callable[[], Tensor], x: Problem, args: argparse.Namespace,
            products_ms: float) -> dict[str, object]:  # fmt: skip
    """One line of the table."""
    peak = x.peak_extra_bytes(mean_loss)
    errors = x.errors(mean_loss)
    forward, backward, both = x.loss_ms(mean_loss, args.repeats)
    print(f"{name:18}{forward:9.1f}{backward:9.1f}{both:9.1f}{products_ms / both:13.3f}"
          f"{peak / 2**30:11.3f}  ", *(f"{e:.1e}" for e in errors), flush=True)  # fmt: skip
    return {"name": name, "forward_ms": forward, "backward_ms": backward, "both_ms": both,
            "of_products": products_ms / both, "peak_extra_bytes": peak,
            "errors": errors}  # fmt: skip


def main(argv: list[str]) -> None:
    """Measure, print, write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", default="nemotron-14b", choices=list(SHAPES))
    p.add_argument("--rows", type=int, default=65536, help="target rows")
    p.add_argument("--chunk-rows", type=int, nargs="+", default=[2048], help="of our forms")
    p.add_argument("--run", nargs="+", default=[*OURS, *OTHERS], choices=[*OURS, *OTHERS])
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--json", type=Path)
    args = p.parse_args(argv)
    x = make_problem(args.rows, *SHAPES[args.shape], "cuda")
    products = x.product_ms(args.repeats)
    print("products alone, ms: logits {:.2f}, d hidden {:.2f}, d weight {:.2f}, all {:.2f}".format(
        *products))  # fmt: skip
    print(f"{'':18}{'forward':>9}{'backward':>9}{'both ms':>9}{'of products':>13}{'extra GiB':>11}"
          "  errors of loss, d hidden, d weight")  # fmt: skip
    lines = []
    runs = {f"{n}/{c}": partial(OURS[n], x, c) for n in args.run if n in OURS
            for c in args.chunk_rows}  # fmt: skip
    runs |= {n: partial(OTHERS[n], x) for n in args.run if n in OTHERS}
    for name, mean_loss in runs.items():
        torch.cuda.empty_cache()
        try:
            lines.append(measure(name, mean_loss, x, args, products[-1]))
        except Exception as error:
            print(f"{name:18} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            x.drop_gradients()
    if args.json:
        record = {"command": shlex.join(["tools/bench_loss.py", *argv]),
                  "device": torch.cuda.get_device_name(),
                  "versions": {name: installed(name) for name in PACKAGES},
                  "products_ms": products, "results": lines}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
