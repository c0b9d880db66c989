"""Launch files for clusters: each plans its own flags without a GPU, fits, and starts these flags.

`python`, `srun` and `sbatch` are stand-ins on the PATH that write down what they were given, so a
file is run as it is in milliseconds; its flags are then planned in a process with Megatron.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.families.ministral3 import _DEFAULT_ROPE, read_nemotron_labs_shape
from megatron_bp.convert.families.qwen3 import QWEN3
from megatron_bp.convert.megatron_args import megatron_flags
from megatron_bp.mcore.dry_run_shape import Cluster
from tests.mcore.forks import Megatron

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SBATCH = EXAMPLES / "slurm/nemotron_sft.sbatch"
JOBSET = EXAMPLES / "kubernetes/nemotron_sft.yaml"
SIZES = ("3b", "8b", "14b")
GPU_GIB = 80.0

STAND_IN = """#!{python}
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH",
         "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "NODES")
line = [os.path.basename(sys.argv[0]), sys.argv[1:], {{n: os.environ.get(n) for n in names}}]
with open({log!r}, "a") as file:
    print(json.dumps(line), file=file)
if line[0] == "sbatch":
    print(41 + len(open({log!r}).readlines()))
"""


class Started:
    """One run of a launch file: how it ended, and the commands it started."""

    def __init__(self, folder: Path, command: Sequence[str], **given: str) -> None:
        log = folder / "started"
        log.unlink(missing_ok=True)
        for name in ("python", "srun", "sbatch"):
            (folder / name).write_text(STAND_IN.format(python=sys.executable, log=str(log)))
            (folder / name).chmod(0o755)
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        path = f"{folder}:/usr/bin:/bin"
        environment = {**kept, "PATH": path, "TMPDIR": str(folder), **given}
        self.ended = subprocess.run(
            [*command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        lines = log.read_text().splitlines() if log.exists() else []
        self.commands: list[tuple[str, list[str], dict[str, str]]] = [
            tuple(json.loads(line)) for line in lines
        ]

    def planned(self) -> tuple[Cluster, list[str]]:
        """The cluster and flags given to tools/dry_run.py, the only command that is started."""
        assert self.ended.returncode == 0, self.ended.stderr
        ((name, (tool, *given), _),) = self.commands
        assert (name, tool) == ("python", "tools/dry_run.py")
        own, flags = given[: given.index("--")], given[given.index("--") + 1 :]
        values = dict(zip(own[::2], own[1::2], strict=True))
        gpus, node = int(values["--num-gpus"]), int(values["--gpus-per-node"])
        return Cluster(gpus, node, float(values["--gpu-memory-gib"]), 6.0), flags


def _plan(flags: list[str], cluster: Cluster) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    from megatron_bp.mcore.dry_run import dry_run, validated

    report = dry_run(flags, cluster)
    args = vars(validated(flags, cluster)[0])
    kept = {name: value for name, value in args.items() if isinstance(value, int | float | str)}
    return report.text, report.problems, kept


def jobset() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Job of the JobSet, and its container."""
    described = yaml.safe_load(JOBSET.read_text())
    (job,) = described["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return described, container


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def launch_files() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Every launch file with its --dry-run: the command and its environment."""
    _, container = jobset()
    files: dict[str, tuple[list[str], dict[str, str]]] = {
        "kubernetes": ([*container["command"], "--dry-run"], environment_of(container)),
        "qwen3 on slurm": (["examples/slurm/qwen3_to_bdlm.sh", "--dry-run"], {}),
    }
    nemo_run = [sys.executable, "examples/nemo_run/nemotron_sft.py"]
    for size in SIZES:
        files[f"nemo_run {size}"] = ([*nemo_run, size, "--dry-run"], {})
        files[f"slurm {size}"] = ([str(SBATCH), size, "--dry-run"], {})
    return files


@pytest.mark.parametrize("name", launch_files())
def test_each_launch_file_plans_its_flags_and_fits_16_gpus(
    tmp_path: Path, megatron: Megatron, name: str
) -> None:
    command, environment = launch_files()[name]
    cluster, flags = Started(tmp_path, command, **environment).planned()
    assert cluster == Cluster(16, 8, GPU_GIB, 6.0)
    text, problems, args = megatron.call(_plan, flags, cluster)
    assert problems == ()
    assert "over 2 nodes" in text
    # What a job must have to be started again and again by a scheduler.
    assert flags[flags.index("--load") + 1] == flags[flags.index("--save") + 1]
    assert "--pretrained-checkpoint" in flags
    for switch in ("exit_signal_handler", "async_save", "dist_ckpt_optim_fully_reshardable"):
        assert args[switch], switch


def test_what_does_not_fit_ends_a_launch_file_with_flags_that_do() -> None:
    command = [str(SBATCH), "14b", "--dry-run"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "GPU_MEMORY_GIB": "40", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 1, ended.stderr
    assert "has 40; it would fit" in ended.stderr
    assert "--tensor-model-parallel-size" in ended.stderr
    assert "memory of the fullest GPU" in ended.stdout


def test_the_flags_of_the_models_are_those_that_a_conversion_writes(tmp_path: Path) -> None:
    layers = {"3b": (26, 3072, 9216, True), "8b": (34, 4096, 14336, False)}
    layers["14b"] = (40, 5120, 16384, False)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    for size, (depth, hidden, inner, tied) in layers.items():
        config = {
            **heads,
            "model_type": "nemotron_labs_diffusion",
            "num_hidden_layers": depth,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "vocab_size": 131072,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": tied,
            "rope_parameters": _DEFAULT_ROPE,
        }
        settings = BdlmSettings("nemotron_labs", 32, "preset", "", 100)
        command = ["examples/nemotron_sft.sh", size, "--dry-run"]
        _, flags = Started(tmp_path, command).planned()
        assert_written(
            flags, megatron_flags(read_nemotron_labs_shape(config), settings, torch.bfloat16)
        )
    config = {
        **heads,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
    }
    settings = BdlmSettings("sdar", 32, "preset", "", 151669)
    _, flags = Started(tmp_path, ["examples/qwen3_to_bdlm.sh", "train", "--dry-run"]).planned()
    assert_written(flags, megatron_flags(QWEN3.read_shape(config), settings, torch.bfloat16))


def assert_written(flags: list[str], written: dict[str, Any]) -> None:
    """Every flag of a conversion is among `flags`, but those of a first load."""
    skipped = ("finetune", "exit-on-missing-checkpoint", "ckpt-format", "clean-rule")
    for name, value in written.items():
        if name in skipped:
            continue
        assert f"--{name}" in flags, name
        if value is not True:
            assert flags[flags.index(f"--{name}") + 1] == str(value), name
    other = "--untie-embeddings-and-output-weights"
    assert (other in flags) == ("untie-embeddings-and-output-weights" in written)


def test_the_header_of_the_slurm_job_agrees_with_its_plan() -> None:
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert f"export NODES={options['nodes']} GPUS_PER_NODE={options['gpus-per-node']}" in text
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "TERM@300"  # Megatron's --exit-signal-handler saves and ends
    assert "requeue" in options
    assert options["open-mode"] == "append"


def test_slurm_starts_one_process_a_gpu_with_the_planned_flags(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)}
    image = {"CONTAINER": "image.sqsh", "DATA_ROOT": "/lustre"}
    ((name, given, _),) = Started(tmp_path, [str(SBATCH), "8b"], **job, **image).commands
    assert (name, given[-2:]) == ("srun", ["examples/nemotron_sft.sh", "8b"])
    assert f"--container-mounts=/lustre:/lustre,{ROOT}:{ROOT}" in given
    task = {"SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NTASKS": "16"}
    head = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.5"}
    ((name, given, environment),) = Started(tmp_path, given[-2:], **task, **head).commands
    assert (name, given[0]) == ("python", "examples/pretrain_bdlm.py")
    _, flags = Started(tmp_path, ["examples/nemotron_sft.sh", "8b", "--dry-run"]).planned()
    assert given[1:] == flags
    assert environment["RANK"] == "11"
    assert environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == "16"
    assert environment["MASTER_ADDR"] == "10.0.0.5"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["PYTHONPATH"] == str(ROOT)


def test_four_slurm_jobs_of_a_conversion_wait_for_one_another(tmp_path: Path) -> None:
    commands = Started(tmp_path, ["examples/slurm/qwen3_to_bdlm.sh"]).commands
    wrapped = [
        next(word for word in given if word.startswith("--wrap=")) for _, given, _ in commands
    ]
    steps = ["convert", "preprocess", "train", "export"]
    assert [shlex.split(wrap)[-1] for wrap in wrapped] == steps
    waits = [[w for w in given if w.startswith("--dependency")] for _, given, _ in commands]
    assert waits == [[], *([f"--dependency=afterok:{job}"] for job in (42, 43, 44))]
    assert "--gpus-per-node=8" in commands[2][1]
    assert "--gpus-per-node=8" not in commands[0][1]


def test_every_step_of_a_conversion_exists_and_names_its_inputs(tmp_path: Path) -> None:
    steps = ("convert", "preprocess", "export")
    runs = [Started(tmp_path, ["examples/qwen3_to_bdlm.sh", step]).commands for step in steps]
    tools = [commands[0][1][0] for commands in runs]
    assert tools == [
        f"tools/{name}.py" for name in ("convert_checkpoint", "preprocess", "convert_checkpoint")
    ]
    wrong = Started(tmp_path, ["examples/qwen3_to_bdlm.sh", "trian"])
    assert wrong.ended.returncode == 2
    assert "use convert, preprocess, train or export" in wrong.ended.stderr


def test_kubernetes_starts_torchrun_on_each_node_with_time_to_save(tmp_path: Path) -> None:
    described, container = jobset()
    assert (described["apiVersion"], described["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = described["spec"]["replicatedJobs"]
    spec, environment = job["template"]["spec"], environment_of(container)
    assert spec["completions"] == spec["parallelism"] == int(environment["NODES"])
    assert spec["completionMode"] == "Indexed"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["GPUS_PER_NODE"])
    # Pods are <jobset>-<job>-<index>-<pod>.<jobset>; rank 0 is on the first.
    name = described["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    started = Started(tmp_path, container["command"], **environment, JOB_COMPLETION_INDEX="1")
    ((_, given, seen),) = started.commands
    assert given[:2] == ["-m", "torch.distributed.run"]
    assert given[given.index("--node-rank") + 1] == "1"
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(seen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    _, flags = Started(tmp_path, ["examples/nemotron_sft.sh", "14b", "--dry-run"]).planned()
    assert given[given.index("examples/pretrain_bdlm.py") + 1 :] == flags


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    wrong = Started(tmp_path, ["examples/nemotron_sft.sh", "70b"])
    assert wrong.ended.returncode == 2
    assert "use 3b, 8b or 14b" in wrong.ended.stderr
