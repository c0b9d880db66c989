"""Writes docs/paper.md: the paper's numbers beside what this package predicts for them.

Text only; the model is in published.py. tools/paper_page.py writes the file and a test holds it
equal to what this makes. Specified by tests/planning/test_paper.py.
"""

from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from statistics import median

from megatron_bp.layout.memory import peak_memory
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.run_shape import Policy, Recompute, Run
from megatron_bp.layout.traffic import attention_gib
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import GIB, H200
from megatron_bp.planning.predict import predict
from megatron_bp.planning.published import (
    NUMBERS,
    Setting,
    diffusion_gemma,
    nemotron,
    published_gib,
    published_speedup,
    published_step,
    qwen,
)
from megatron_bp.planning.report import differences
from megatron_bp.planning.search import Candidate, describe, search
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.workload import Workload

K256, K512 = 2**18, 2**19

INTRODUCTION = """# The paper's numbers and ours

Written by `tools/paper_page.py`; do not edit. The paper: "Block Parallelism For Efficient
Distributed Long-Context Diffusion Language Model Training", arXiv 2609.19242.

**What was found of it**: the abstract (https://arxiv.org/abs/2609.19242, repeated at
https://github.com/AkihikoWatanabe/paper_notes/issues/6599), and the traffic, step time and exposed
time that the project had noted from the paper before. Its tables by model, context and degree, its
scaling figures and its ablations could not be reached and are not here. A range in the abstract is
compared with our predictions for the models it is about; which model has which number is unknown.

**How the predictions are made**: their layouts as the project's facts describe them (full
recomputation, blocking gathers, bf16 gradients, a clean copy for each view), counted exactly;
speeds of one H200 as measured here with unmodified packages (FlashAttention 4's mask form,
FlexAttention, matrices at 672 TFLOP/s, NVLink by message size); head size 512 is assumed as
FlexAttention at 256.
No constant was fitted to a number of the paper. Degrees that are not known are assumed: 16 H200,
P = 8, two samples a step (Qwen: TP 2, P = 8, one).
"""


def rounded(value: float, digits: int) -> str:
    """Half away from zero, as tables are rounded: 433.125 is 433.13."""
    step = Decimal(1).scaleb(-digits)
    return str(Decimal(value).quantize(step, ROUND_HALF_UP))


@dataclass(frozen=True)
class Line:
    """A published number beside a prediction, and a likely reason if they differ."""

    what: str
    key: str
    predicted: float
    reason: str = ""

    @property
    def published(self) -> float:
        """The paper's number."""
        return NUMBERS[self.key].value

    @property
    def error(self) -> float:
        """Relative difference."""
        return self.predicted / self.published - 1

    def row(self, digits: int = 2) -> str:
        """A line of a Markdown table."""
        return (
            f"| {self.what} | {self.published:.{digits}f} | {rounded(self.predicted, digits)} | "
            f"{100 * self.error:+.1f} % | {self.reason} |"
        )


def speedup_lines() -> list[Line]:
    """Every published speedup that the model covers, in the abstract's order."""
    small, large = nemotron("14b", K256), diffusion_gemma(K256)
    convert = published_speedup(qwen(K256))
    far = max(
        published_speedup(s)
        for s in (nemotron("14b", K512, 16), diffusion_gemma(K512, 16), qwen(K512))
    )
    return [
        Line(
            "fine-tuning 256K, lowest (ours: Nemotron 14B)",
            "SFT 256K lowest",
            published_speedup(small),
            "inside one node the baseline's extra gathers take 0.6 s of 55 s; a baseline that "
            "spans nodes, needs more TP to fit, or has a slower kernel would explain 1.18",
        ),
        Line(
            "fine-tuning 256K, highest (ours: DiffusionGemma)",
            "SFT 256K highest",
            published_speedup(large),
        ),
        Line("conversion 256K, lowest (ours: Qwen 27B)", "conversion 256K lowest", convert),
        Line("conversion 256K, highest (ours: Qwen 27B)", "conversion 256K highest", convert),
        Line(
            "512K, highest (ours: DiffusionGemma, P 16)",
            "512K highest",
            far,
            "their head-size-512 kernel and the baseline's fit into memory are not known",
        ),
    ]


def speedup_section() -> str:
    """The speedups, their errors and what is not covered."""
    lines = speedup_lines()
    errors = [abs(line.error) for line in lines]
    rows = "\n".join(line.row() for line in lines)
    return f"""
## Speedup of CSBP over the best baseline

| what | paper | predicted | error | likely reason of the difference |
|---|---|---|---|---|
{rows}

Of the five numbers that were found: median error {100 * median(errors):.1f} %, worst \
{100 * max(errors):.1f} % (asked: 10 % and 20 %).
Most of it is balance, not bytes: the baseline's clean rows of DiffusionGemma and Qwen are
contiguous shards, so its last rank has (2P - 1) / P of the mean clean pairs in full layers. Against
a baseline with dual-end clean rows and windowed exchange (`--block-parallel-size 1` here) little is
left inside a node: Nemotron's row is about that.

Not predicted: DFlash2 drafter training, {NUMBERS["DFlash2 512K"].value} at 512K and \
{NUMBERS["DFlash2 1M"].value} at 1M on eight H100. Its features,
anchors and the baseline's ring are not modelled, and this package does not train drafters yet.
"""


def traffic_section() -> str:
    """Published traffic, what our formulas give, and what our design needs."""
    small, large = nemotron("14b", K256), diffusion_gemma(K256)
    lines = [
        Line("Nemotron 14B, CP", "nemotron-14b CP GiB", published_gib(small, False)),
        Line("Nemotron 14B, CSBP", "nemotron-14b CSBP GiB", published_gib(small, True)),
        Line(
            "DiffusionGemma, CP as published", "diffusiongemma CP GiB", published_gib(large, False)
        ),
        Line("DiffusionGemma, CSBP", "diffusiongemma CSBP GiB", published_gib(large, True)),
    ]
    rows = "\n".join(line.row() for line in lines)
    ours = "\n".join(f"| {name} | {gib:.2f} | {why} |" for name, gib, why in our_traffic())
    return f"""
## Attention traffic at 256K, P = 8, GiB a GPU and step

| what | paper | formula | error | |
|---|---|---|---|---|
{rows}

A pass of one layer sends A = 2 L (P - 1) / P * h_kv * d * 2 bytes (K and V); a windowed pass
(W - 1)(2P - 2) / P rows instead of L (P - 1) / P. CSBP: forward, recomputation and reduction, 3 A;
CP: 3 A of both copies. DiffusionGemma's encoder and decoder gather apart, so clean keys take 6
passes, and corrupted ones 3 more in CP.

What our design sends (bf16 gradients on the wire, `--bp-grad-wire-dtype model`; fp32, the default,
doubles the reduction alone):

| what | GiB | why |
|---|---|---|
{ours}
"""


def our_traffic() -> list[tuple[str, float, str]]:
    """(Name, GiB, reason) of what this package's design sends in the same runs."""
    rows = []
    kept = Policy(grad_wire_bytes=2)
    for name, setting in (("Nemotron 14B", nemotron("14b", K256)),):
        run = replace(setting.run(True), policy=kept)
        rows.append((f"{name}, keys kept", attention_gib(run), "no gather in backward: 2 A"))
    gemma = diffusion_gemma(K256).run(True)
    one, shared = replace(gemma, policy=kept), replace(kept, shared_kv_wire=True)
    rows += [
        (
            "DiffusionGemma, clean and corrupted pass share a gather",
            attention_gib(gemma),
            "3 passes instead of 6: both read the same clean keys of a layer",
        ),
        ("the same, keys kept", attention_gib(one), "2 passes"),
        (
            "the same, keys kept, K = V sent once",
            attention_gib(replace(gemma, policy=shared)),
            "full layers project K and V as one tensor: half of their A",
        ),
    ]
    honest = replace(diffusion_gemma(K256).run(False).topology, windowed_exchange=True)
    baseline = replace(gemma, topology=honest)
    rows.append(
        (
            "DiffusionGemma, an honest CP (windowed clean keys, shared gather)",
            attention_gib(baseline),
            "corrupted copies still travel whole: 3 A a layer",
        )
    )
    return rows


def step_section() -> str:
    """The published step and its exposed part."""
    step = published_step(nemotron("14b", K256), True)
    lines = [
        Line("step, s", "256K step s", step.seconds),
        Line(
            "exposed communication, s",
            "256K exposed s",
            step.exposed,
            "NVLink inside one node alone gives this little; theirs may include waiting for slower "
            "ranks, the data-parallel reduction, or groups over the network",
        ),
    ]
    rows = "\n".join(line.row() for line in lines)
    ours = Run(
        model_named("nemotron-14b"),
        nemotron("14b", K256).run(True).batch,
        nemotron("14b", K256).run(True).topology,
        Policy(
            main_grad_bytes=2,
            grad_wire_bytes=2,
            recompute=Recompute.FULL_KEEP_ATTENTION,
            keep_gathered=False,
        ),
    )
    mine = predict(ours, Cluster(H200))
    return f"""
## A CSBP step at 256K

| what | paper | predicted | error | likely reason of the difference |
|---|---|---|---|---|
{rows}

The model and degrees of this profile are not in our notes; Nemotron 14B, P = 8, two samples on 16
H200 is assumed because it fits. The same run with this package's launches, attention kept over
recomputation and overlapped gathers is predicted at {mine.total:.1f} s, of which \
{mine.exposed_context:.2f} s wait for keys.
"""


def ablation_section() -> str:
    """Predictions for the paper's ablations, whose published values were not found."""
    rows = []
    for setting, name in ((nemotron("14b", K256), "Nemotron 14B"), (qwen(K256), "Qwen 27B")):
        plain = setting.run(True)
        base = predict(plain, Cluster(H200)).total
        pure = replace(plain, topology=replace(plain.topology, shards=1))
        contiguous = replace(
            plain, topology=replace(plain.topology, ownership=Ownership.CONTIGUOUS)
        )
        for what, run in (("CSBP", plain), ("pure BP", pure), ("contiguous owners", contiguous)):
            memory = peak_memory(run).total / GIB
            fits = "" if memory <= H200.memory_gib - H200.reserve_gib else " (does not fit)"
            seconds = predict(run, Cluster(H200)).total
            rows.append(
                f"| {name} | {what} | {seconds:.1f} | {seconds / base:.2f} | {memory:.0f}{fits} |"
            )
    table = "\n".join(rows)
    return f"""
## Ablations at 256K, P = 8 (predictions only)

Published values were not found. Full recomputation, our launches.

| model | variant | step, s | to CSBP | GiB |
|---|---|---|---|---|
{table}

Pure BP computes every clean row on every rank; contiguous owners give the last rank (2P - 1) / P of
the mean pairs.
"""


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


def page() -> str:
    """The whole page."""
    sections = (
        traffic_section,
        step_section,
        speedup_section,
        ablation_section,
        choice_section,
    )
    return INTRODUCTION + "".join(section() for section in sections)
