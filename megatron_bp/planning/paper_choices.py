"""Where the paper's degrees come in the planner's order, for docs/paper.md.

Specified by tests/planning/test_paper.py.
"""

from dataclasses import dataclass

from megatron_bp.layout.run_shape import Policy
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.published import Setting, diffusion_gemma, nemotron, qwen
from megatron_bp.planning.report import differences
from megatron_bp.planning.search import Candidate, describe, search
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.workload import Workload

K256 = 2**18

CHOICES = (
    ("Nemotron 14B, fine-tuning", "standard", nemotron("14b", K256), 2),
    ("DiffusionGemma, fine-tuning", "standard", diffusion_gemma(K256), 2),
    ("Qwen 27B, conversion", "fast_dllm_v2", qwen(K256), 1),
)


def choice_section() -> str:
    """Where the paper's topology comes in the planner's order, and what is better."""
    rows = []
    for name, objective, setting, samples in CHOICES:
        for width in (4, 2):
            place = rank_of(setting, objective, samples, width)
            rows.append(f"| {name}, {'fp32' if width == 4 else 'bf16'} | {place.row()} |")
    table = "\n".join(rows)
    return f"""
## The planner's choice for the paper's runs (256K, 16 H200)

| run, main gradients | rank of the paper's degrees | its step, s | the planner's first | \
step, s | what the paper's spends more |
|---|---|---|---|---|---|
{table}

Degrees are TP, P and clean shards (EP free, PP 1); each is ranked with its best policy. Megatron
keeps fp32 main gradients and whole weights on every data-parallel rank; the paper's library can
shard them (FSDP, ZeRO) and reduces in bf16, which is how its degrees fit.
"""


@dataclass(frozen=True)
class Place:
    """Where the paper's degrees come: rank from 1 (0: they do not fit), its step, what is first."""

    rank: int
    seconds: float
    more: str
    first: Candidate

    def row(self) -> str:
        """The cells of a line of a Markdown table."""
        run = self.first.run
        text = describe(run.topology, run.batch.micro_batch, run.policy)
        own = (str(self.rank), f"{self.seconds:.1f}") if self.rank else ("does not fit", "-")
        return f"{own[0]} | {own[1]} | {text} | {self.first.step.total:.1f} | {self.more}"


def rank_of(setting: Setting, objective: str, samples: int, main_grad_bytes: int) -> Place:
    """Where the setting's degrees come in a search of 16 H200."""
    workload = Workload(
        model=model_named(setting.model),
        objective=objective,
        length=setting.length,
        block_size=setting.block_size,
        world=16,
        global_batch=samples,
        cluster=Cluster(H200),
    )
    policy = Policy(main_grad_bytes=main_grad_bytes)
    best = search(workload, num_best=10**6, policy=policy).best
    wanted = (setting.tensor, setting.context, setting.context, 1)
    for rank, found in enumerate(best, start=1):
        t = found.run.topology
        if (t.tensor, t.context, t.shards, t.pipeline) == wanted and t.block_owned:
            more = "" if rank == 1 else differences(found.step, best[0].step)
            return Place(rank, found.step.total, more, best[0])
    return Place(0, 0.0, "memory: see below", best[0])
