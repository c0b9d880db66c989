"""The ways to run a training step that the step benchmark compares, and their Megatron flags.

A case is MODE/RECIPE: how rows and blocks are split over ranks, and how a rank computes. Knows no
model and no device. Specified by tests/mcore/test_step_bench.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron_bp.layout.model_shape import (
    AttentionShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
    dense_model,
)
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.objectives.objective import make_objective

MASK_ID = 100  # as in the released Nemotron block-diffusion models
_QK_NORM = AttentionShape(16, 8, 128, qk_norm=True)

# Beside those of megatron_bp/planning/shapes.py. Source: their configurations in transformers.
SHAPES = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            dense_model("qwen3-0.6b", 28, 1024, 3072, _QK_NORM, 151936),
            dense_model("qwen3-1.7b", 28, 2048, 6144, _QK_NORM, 151936),
            dense_model("qwen3-8b", 36, 4096, 12288, replace(_QK_NORM, num_heads=32), 151936),
            ModelShape(
                "qwen3-30b-a3b",
                2048,
                151936,
                (
                    (
                        LayerKind(
                            AttentionShape(32, 4, 128, qk_norm=True), 0, ExpertsShape(128, 8, 768)
                        ),
                        48,
                    ),
                ),
            ),
            dense_model("tiny", 2, 64, 96, AttentionShape(4, 2, 16), 256),
        )
    }
)

RECOMPUTE = (
    "--recompute-granularity", "full",
    "--recompute-method", "uniform",
    "--recompute-num-layers", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """How a sample is split over P ranks: shares of P for the two parallel sizes (0: size 1)."""

    context: float
    block: float
    extra: tuple[str, ...] = ()

    def flags(self, num_ranks: int) -> tuple[str, ...]:
        """Returns the two parallel sizes.

        Raises: ValueError for a number of ranks that the mode cannot use.
        """
        context, block = (int(share * num_ranks) or 1 for share in (self.context, self.block))
        if max(context, block) != num_ranks or self.context * num_ranks % 1:
            raise ValueError(
                f"{self} cannot split a sample over num_ranks={num_ranks}; use mode one for 1 "
                "rank, and for several another mode (hybrid for an even number)."
            )
        sizes = "--context-parallel-size", str(context), "--block-parallel-size", str(block)
        return *sizes, *self.extra


MODES = {
    "one": Mode(0, 0),
    "csbp": Mode(1, 1),
    "csbp-blocking": Mode(1, 1, ("--no-bp-overlap",)),
    "contiguous": Mode(1, 1, ("--bp-ownership", str(Ownership.CONTIGUOUS))),
    "bp": Mode(0, 1),
    "hybrid": Mode(0.5, 1),
    "cp": Mode(1, 0),
    "cp-plain": Mode(1, 0, ("--no-bp-overlap", "--no-bp-windowed-exchange")),
}
"""`cp` is conventional context parallelism, its exchange overlapped; `cp-plain` waits for it."""


@dataclass(frozen=True)
class Recipe:
    """How a rank computes a step.

    `flex` is FlexAttention under autograd; `separate_views` gives each corrupted view a clean
    stream of its own, as two micro-batches.
    """

    flags: tuple[str, ...]
    flex: bool = False
    separate_views: bool = False


KEEP = (*RECOMPUTE, "--bp-recompute-attention", "keep")
RERUN = (*RECOMPUTE, "--bp-recompute-attention", "rerun")
NO_PRUNE = ("--no-bp-prune-last-layer",)

RECIPES = {
    "ours": Recipe(KEEP),
    "ours-unpruned": Recipe((*KEEP, *NO_PRUNE)),
    "keep-keys": Recipe((*KEEP, "--bp-clean-kv", "keep")),
    "no-recompute": Recipe(()),
    "regather": Recipe(("--bp-clean-kv", "regather")),
    "recompute-all": Recipe(RERUN),
    "flex": Recipe((*RERUN, *NO_PRUNE), flex=True),
    "flex-pruned": Recipe(RERUN, flex=True),
    "flex-no-recompute": Recipe((), flex=True),
    "flex-separate": Recipe((*RERUN, *NO_PRUNE), flex=True, separate_views=True),
    "ours-separate": Recipe(KEEP, separate_views=True),
}
"""`flex` is the usual recipe: FlexAttention, full recomputation, every row of every layer."""


@dataclass(frozen=True)
class Case:
    """One way to run the step."""

    mode: str
    recipe: str

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Returns the case MODE/RECIPE.

        Raises: ValueError for unknown names.
        """
        mode, _, recipe = text.partition("/")
        if mode not in MODES or recipe not in RECIPES:
            raise ValueError(
                f"case {text!r} must be MODE/RECIPE with a mode of {', '.join(MODES)} and a recipe "
                f"of {', '.join(RECIPES)}; use for example csbp/ours."
            )
        return cls(mode, recipe)

    @property
    def name(self) -> str:
        """MODE/RECIPE."""
        return f"{self.mode}/{self.recipe}"


def cases_at(texts: Sequence[str], length: int) -> list[Case]:
    """The cases to run at a length; a text is MODE/RECIPE, or MODE/RECIPE@L,L for some lengths."""
    parted = [text.partition("@") for text in texts]
    return [Case.parse(x) for x, _, at in parted if not at or str(length) in at.split(",")]


def cut(shape: ModelShape, num_layers: int) -> ModelShape:
    """Returns the shape with `num_layers` of its layers.

    Raises: ValueError for a shape whose layers are not all alike, or not softmax attention.
    """
    if len(shape.layers) != 1 or not isinstance(shape.layers[0][0].mixer, AttentionShape):
        raise ValueError(
            f"shape {shape.name} has several kinds of layers, which no Megatron GPT model has; use "
            "for example nemotron-8b."
        )
    return replace(shape, layers=((shape.layers[0][0], num_layers),))


def mask_id(shape: ModelShape) -> int:
    """Returns a token id that random samples do not hold."""
    return min(MASK_ID, shape.vocab - 2)


def model_flags(shape: ModelShape, length: int) -> list[str]:
    """Megatron's flags for a model of a shape whose layers are alike, at a sequence length."""
    (kind, num_layers), = shape.layers  # fmt: skip
    attention, experts = kind.mixer, kind.experts
    assert isinstance(attention, AttentionShape), shape.name
    values = {
        "--num-layers": num_layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": kind.ffn or experts.ffn,
        "--num-attention-heads": attention.num_heads,
        "--num-query-groups": attention.num_kv_heads,
        "--kv-channels": attention.head_size,
        "--vocab-size": shape.vocab,
        "--mask-token-id": mask_id(shape),
        "--seq-length": length,
        "--max-position-embeddings": length,
        "--position-embedding-type": "rope",
        "--rotary-base": 1000000,
        "--normalization": "RMSNorm",
        "--tokenizer-type": "NullTokenizer",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        "--micro-batch-size": 1,
        "--train-iters": 1000,
        "--lr": 1e-4,
        "--min-lr": 1e-4,
        "--lr-decay-style": "constant",
        "--eval-iters": 0,
        "--seed": 1234,
        "--num-workers": 0,
        "--distributed-timeout-minutes": 2,
        "--rerun-mode": "disabled",
    }
    if experts.num_experts:
        values |= {
            "--num-experts": experts.num_experts,
            "--moe-router-topk": experts.top_k,
            "--moe-ffn-hidden-size": experts.ffn,
            "--moe-router-load-balancing-type": "aux_loss",
            "--moe-aux-loss-coeff": 1e-3,
            "--moe-token-dispatcher-type": "alltoall",
        }
    switches = {
        "--group-query-attention": True,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--mock-data": True,
        "--no-gradient-accumulation-fusion": True,  # its kernel is apex's
        "--untie-embeddings-and-output-weights": not shape.tied,
        "--moe-grouped-gemm": experts.num_experts > 0,
        "--qk-layernorm": attention.qk_norm,
    }
    given = [str(x) for pair in values.items() for x in pair]
    return given + [name for name, is_on in switches.items() if is_on]


@dataclass(frozen=True)
class Job:
    """What is trained, the same for all cases.

    `shape` has equal layers (`cut`). `num_ranks` P share a sample and `data` groups of P have their
    own; `extra` are flags of Megatron for every case. Units: `length`, `block_size` tokens.
    """

    shape: ModelShape
    length: int
    block_size: int
    objective: str
    num_ranks: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    extra: tuple[str, ...] = ()

    def flags(self, case: Case) -> list[str]:
        """All flags of a case."""
        recipe = RECIPES[case.recipe]
        values = {
            "--block-size": self.block_size,
            "--bdlm-objective": self.objective,
            "--global-batch-size": self.data * (2 if recipe.separate_views else 1),
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
        }
        return [
            *model_flags(self.shape, self.length),
            *(str(x) for pair in values.items() for x in pair),
            *MODES[case.mode].flags(self.num_ranks),
            *recipe.flags,
            *self.extra,
        ]

    def run(self, case: Case, target_share: float) -> Run:
        """The case as the planner sees it.

        `target_share` of all corrupted rows are targets. Separate views are counted as they should
        be trained, over one clean stream.
        """
        objective, recipe = make_objective(self.objective), RECIPES[case.recipe]
        mode, flags = MODES[case.mode], recipe.flags
        recompute = Recompute.NONE
        if "--recompute-granularity" in flags:
            recompute = Recompute.FULL if "rerun" in flags else Recompute.FULL_KEEP_ATTENTION
        return Run(
            model=self.shape,
            batch=BatchShape(
                length=self.length,
                block_size=self.block_size,
                num_views=objective.num_views,
                clean_rule=objective.clean_rule,
                corrupted_rule=objective.corrupted_rule,
                global_batch=self.data,
                target_share=target_share,
                learns_clean=objective.learns_clean,
            ),
            topology=Topology(
                tensor=self.tensor,
                pipeline=self.pipeline,
                context=self.num_ranks,
                shards=int(mode.context * self.num_ranks) or 1,
                data=self.data,
                block_owned=mode.block > 0 or self.num_ranks == 1,
                ownership=(
                    Ownership.CONTIGUOUS if "--bp-ownership" in mode.extra else Ownership.DUAL_END
                ),
            ),
            policy=Policy(
                recompute=recompute,
                keep_gathered="regather" not in flags
                and ("--bp-clean-kv" in flags or recompute is Recompute.NONE),
                prune_last_layer=NO_PRUNE[0] not in flags,
                shard_optimizer="--use-distributed-optimizer" in self.extra,
                overlap_data_parallel="--overlap-grad-reduce" in self.extra,
                checks_for_nan="--no-check-for-nan-in-loss-and-grad" not in self.extra,
            ),
        )
