"""The launcher starts a script as Python does, with our flags in Megatron's parser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bp import launch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "no script was given; name one"),
        (["nowhere.py", "--seed", "1"], "nowhere.py is not a file; name one"),
        (["--block-parallel-size", "2"], "--block-parallel-size is not a file"),
    ],
)
def test_without_a_script_the_usage_is_shown(given: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_bp\.launch SCRIPT") as end:
        launch.main(given)
    assert says in str(end.value)


def test_a_script_sees_its_folder_its_arguments_and_our_flags(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'from beside the script'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from beside import WORD\n"
        "from megatron.training.arguments import parse_args\n"
        "print(__name__, WORD, sys.argv[0])\n"
        "print('block size is', parse_args(ignore_unknown_args=True).block_size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "megatron_bp.launch", str(script), "--block-size", "48"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert f"__main__ from beside the script {script}\n" in done.stdout
    assert "block size is 48\n" in done.stdout
