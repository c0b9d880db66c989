"""The training script starts as a user starts it: help, a two-rank run, a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.mcore.runs import flags, read_scalars

ROOT = Path(__file__).parent.parent
SCRIPT = "examples/pretrain_bdlm.py"


def start(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_help_lists_our_flags_among_those_of_megatron() -> None:
    run = start(SCRIPT, "--help")
    assert run.returncode == 0, run.stderr[-2000:]
    for name in ("--block-parallel-size", "--bdlm-objective", "--context-parallel-size"):
        assert name in run.stdout


def test_two_ranks_train_save_and_log(tmp_path: Path) -> None:
    given = flags(
        "--context-parallel-size 2 --block-parallel-size 2 --train-iters 2 --save-interval 2 "
        f"--save {tmp_path}/saved --load {tmp_path}/saved --tensorboard-dir {tmp_path}/log"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = start(*launch, SCRIPT, *given)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "mode: context-sharded block parallelism" in run.stdout
    assert "world 2 = TP 1 x PP 1 x context group 2 x DP 1" in run.stdout
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text() == "2"
    assert len(read_scalars(tmp_path / "log")) == 2
    again = [*flags(f"--load {tmp_path}/saved --ckpt-step 2 --train-iters 2"), "--block-size", "4"]
    run = start(SCRIPT, *again)
    assert run.returncode != 0
    assert "--block-size 4 differs from 8 in the checkpoint of --load" in run.stderr


def test_a_wrong_setting_ends_the_run_with_its_reason() -> None:
    run = start(SCRIPT, *flags("--attention-dropout 0.1 --load nowhere"))
    assert run.returncode != 0
    assert "2 problems with the arguments" in run.stderr
    assert "use --attention-dropout 0" in run.stderr
    assert "--load nowhere holds no checkpoint" in run.stderr


def test_a_mask_token_outside_the_vocabulary_ends_the_run() -> None:
    run = start(SCRIPT, *flags("--mask-token-id 127"))
    assert run.returncode != 0
    assert "--mask-token-id 127 is outside the vocabulary [0, 127)" in run.stderr


def test_the_end_token_as_mask_token_ends_the_run() -> None:
    run = start(SCRIPT, *flags("--mask-token-id 126"))
    assert run.returncode != 0
    assert "--mask-token-id 126 is also the tokenizer's eod token" in run.stderr
