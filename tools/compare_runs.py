#!/usr/bin/env python
"""Prints the losses of one run beside those of others, and their largest difference.

    compare_runs.py two/tb one/tb resumed/tb --limit 1e-5

Reads TensorBoard folders: Megatron's text log averages a run's first two steps. Later runs win
where steps repeat. Exits with 1 if a step is missing or a relative difference is above the limit.
Specified by tests/tools/test_compare_runs.py.
"""

import argparse
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def losses(folder: Path) -> dict[int, float]:
    """Loss of each step that a run wrote."""
    events = EventAccumulator(str(folder)).Reload()
    if "bdlm loss" not in events.Tags()["scalars"]:
        return {}
    return {event.step: event.value for event in events.Scalars("bdlm loss")}


def main() -> int:
    """Returns 0 if the runs agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--limit", type=float, default=1e-5, help="relative, default 1e-5")
    options = parser.parse_args()
    left = losses(options.run)
    right = {step: loss for run in options.others for step, loss in losses(run).items()}
    if not left or left.keys() != right.keys():
        print(f"steps differ: {sorted(left)} in {options.run}, {sorted(right)} in the others")
        return 1
    print(f"{'step':>4}  {'this run':>12}  {'others':>12}  {'difference':>10}")
    worst = 0.0
    for step, loss in sorted(left.items()):
        worst = max(worst, abs(loss - right[step]) / abs(loss))
        print(f"{step:4d}  {loss:12.6f}  {right[step]:12.6f}  {abs(loss - right[step]):10.1e}")
    print(f"largest relative difference {worst:.1e} (limit {options.limit:.0e})")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
