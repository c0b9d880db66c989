"""Starts examples/nemotron_sft.sh on 2 nodes of 8 GPUs with NeMo-Run 0.11.

    pip install nemo_run "leptonai<0.47"        # 0.11.1 does not import with newer ones
    python examples/nemo_run/nemotron_sft.py 14b --account ACCOUNT --partition PARTITION \\
        --container IMAGE --host LOGIN_NODE --user NAME --job-dir /data/nemo_run
    python examples/nemo_run/nemotron_sft.py 14b --dry-run      plans it; prints the job if it can

One Slurm task a GPU, so that SIGTERM reaches the training processes; without --host the jobs are
submitted on this machine. A failed job is queued again up to --retries times and goes on from its
last checkpoint.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/nemotron_sft.sh"
NODES, GPUS = 2, 8


def executor(options: argparse.Namespace) -> Any:
    """The Slurm executor of NeMo-Run for this job."""
    import nemo_run as run

    tunnel = (
        run.SSHTunnel(host=options.host, user=options.user, job_dir=options.job_dir)
        if options.host
        else run.LocalTunnel(job_dir=options.job_dir)
    )
    return run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        nodes=NODES,
        ntasks_per_node=GPUS,
        gpus_per_node=GPUS,
        cpus_per_task=12,
        mem="0",
        exclusive=True,
        time="04:00:00",
        signal="TERM@300",
        container_image=options.container,
        container_mounts=[f"{options.data_root}:{options.data_root}"],
        env_vars={"NODES": str(NODES), "GPUS_PER_NODE": str(GPUS)},
        tunnel=tunnel,
        packager=run.GitArchivePackager(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["3b", "8b", "14b"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--account", default="account")
    parser.add_argument("--partition", default="batch")
    parser.add_argument("--container", help="image with the packages of setup.py")
    parser.add_argument("--data-root", default="/data", help="mounted in the container")
    parser.add_argument("--host", help="login node, reached by SSH")
    parser.add_argument("--user")
    parser.add_argument("--job-dir", default="/data/nemo_run")
    parser.add_argument("--retries", type=int, default=10)
    options = parser.parse_args()
    if options.dry_run:
        planned = subprocess.run([str(ROOT / SCRIPT), options.model, "--dry-run"], cwd=ROOT)
        if planned.returncode:
            return planned.returncode
    try:
        import nemo_run as run
    except ImportError as error:
        if not options.dry_run:
            raise
        print(f"the job itself was not built: {error}", file=sys.stderr)
        return 0
    with run.Experiment(f"nemotron-sft-{options.model}") as experiment:
        slurm = executor(options)
        slurm.retries = options.retries
        # The repository is packed from its root and unpacked where the script starts.
        script = run.Script(inline=f"exec bash {SCRIPT} {options.model}")
        experiment.add(script, executor=slurm, name="train")
        experiment.dryrun() if options.dry_run else experiment.run(detach=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
