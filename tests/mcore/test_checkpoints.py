"""A tracker file cut short by a kill is mended; what would mix two runs is refused."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from megatron_bp.config import BlockParallelConfig
from megatron_bp.mcore.checkpoints import (
    TRACKER,
    checkpoint_problems,
    complete_iterations,
    iteration_folder,
    mend_tracker,
    optimizer_problems,
)
from tests.mcore.parsing import parsed

CONFIG = BlockParallelConfig(bdlm_objective="standard", mask_token_id=120, block_size=8)
DESCRIBED = json.dumps({"sharded_backend": "torch_dist"})


def saved(folder: Path, iteration: int, described: str = DESCRIBED, finished: int = 0) -> None:
    """A checkpoint as far as these files tell, with the time (s) at which it was finished."""
    path = iteration_folder(folder, iteration)
    path.mkdir()
    (path / ".metadata").write_bytes(b"x")
    (path / "metadata.json").write_text(described)
    os.utime(path / "metadata.json", (finished, finished))


def test_only_checkpoints_whose_last_file_is_whole_are_complete(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    saved(tmp_path, 12)
    saved(tmp_path, 14, described="")  # killed between opening metadata.json and writing it
    iteration_folder(tmp_path, 16).mkdir()  # killed while writing tensors
    (tmp_path / "iter_latest").mkdir()
    saved(tmp_path, 18)
    (iteration_folder(tmp_path, 18) / ".metadata").unlink()
    assert complete_iterations(tmp_path) == [4, 12]


@pytest.mark.parametrize("cut", ["", "\n", "1\x00"])
def test_a_tracker_cut_short_names_what_was_completed_last(tmp_path: Path, cut: str) -> None:
    """Last in time: after a roll-back the higher iteration is of the run that was given up."""
    saved(tmp_path, 4, finished=300)
    saved(tmp_path, 6, finished=200)
    (tmp_path / TRACKER).write_text(cut)
    args = parsed(f"--load {tmp_path} --save {tmp_path}/../{tmp_path.name}")
    assert "wrote 4" in mend_tracker(args)
    assert (tmp_path / TRACKER).read_text() == "4"
    assert mend_tracker(args) == ""
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000004", "iter_0000006", TRACKER}


@pytest.mark.parametrize("text", ["4", "4\n", "release"])
def test_a_whole_tracker_is_left_alone(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 6)
    (tmp_path / TRACKER).write_text(text)
    assert mend_tracker(parsed(f"--load {tmp_path} --save {tmp_path}")) == ""
    assert (tmp_path / TRACKER).read_text() == text


def test_a_first_start_has_nothing_to_mend(tmp_path: Path) -> None:
    assert mend_tracker(parsed(f"--load {tmp_path}/run --save {tmp_path}/run")) == ""
    assert mend_tracker(parsed()) == ""


def test_a_folder_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    saved(tmp_path, 6)
    (tmp_path / TRACKER).write_text("")
    for save in ("", f"--save {tmp_path}/mine"):
        with pytest.raises(ValueError, match="so write 6 into this file"):
            mend_tracker(parsed(f"--load {tmp_path} {save}"))
    assert (tmp_path / TRACKER).read_text() == ""


def test_a_tracker_without_a_complete_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ValueError, match="remove this file to start anew"):
        mend_tracker(parsed(f"--load {tmp_path} --save {tmp_path}"))


def test_writing_over_the_checkpoint_that_the_tracker_names_is_refused(tmp_path: Path) -> None:
    for iteration in (2, 4, 6):
        saved(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("6")
    given = f"--load {tmp_path} --ckpt-step 2"
    (problem,) = checkpoint_problems(parsed(f"{given} --save {tmp_path}"), CONFIG)
    assert "write over the later checkpoint(s) 4, 6" in problem
    assert "write 2 into that file and drop --ckpt-step" in problem
    assert checkpoint_problems(parsed(given), CONFIG) == []
    assert checkpoint_problems(parsed(f"{given} --save {tmp_path}/other"), CONFIG) == []
    (tmp_path / TRACKER).write_text("2")
    assert checkpoint_problems(parsed(f"{given} --save {tmp_path}"), CONFIG) == []


def test_an_asynchronous_save_that_megatron_would_switch_off_is_refused() -> None:
    (problem,) = checkpoint_problems(parsed("--async-save"), CONFIG)
    assert "add --use-persistent-ckpt-worker" in problem
    both = parsed("--async-save --use-persistent-ckpt-worker")
    assert checkpoint_problems(both, CONFIG) == []


DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
TP = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("saved", "run", "said"),
    [
        ("", DISTRIBUTED, "was saved without --use-distributed-optimizer"),
        (RESHARDABLE, "", "add --use-distributed-optimizer, or"),
        (
            DISTRIBUTED,
            f"{RESHARDABLE} {TP}",
            "saved at TP 1 x PP 1 without --dist-ckpt-optim-fully",
        ),
        (f"{DISTRIBUTED} {TP}", DISTRIBUTED, "use --tensor-model-parallel-size 2 --pipeline-"),
    ],
)
def test_an_optimizer_state_of_another_form_is_refused(saved: str, run: str, said: str) -> None:
    (problem,) = optimizer_problems(parsed(f"{run} --load run"), parsed(saved))
    assert said in problem
    for way_out in ("--no-load-optim", "--finetune"):
        assert optimizer_problems(parsed(f"{run} --load run {way_out}"), parsed(saved)) == []


@pytest.mark.parametrize(
    ("saved", "run"),
    [
        ("", TP),
        (RESHARDABLE, f"{DISTRIBUTED} {TP}"),
        (DISTRIBUTED, f"{DISTRIBUTED} --context-parallel-size 2 --block-parallel-size 2"),
        (f"{DISTRIBUTED} --no-save-optim", TP),
    ],
)
def test_an_optimizer_state_that_can_move_is_not_refused(saved: str, run: str) -> None:
    assert optimizer_problems(parsed(f"{run} --load run"), parsed(saved)) == []


def test_a_converted_checkpoint_has_no_optimizer_state() -> None:
    converted = argparse.Namespace(no_save_optim=True)
    for saved in (converted, argparse.Namespace()):
        assert optimizer_problems(parsed(f"{DISTRIBUTED} --load run"), saved) == []
