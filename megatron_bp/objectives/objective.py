"""Names everything a block-diffusion objective decides, as one frozen value, and the presets.

Owns the choices (who sees whom, what is corrupted, which labels, which weights, how noise levels
are drawn); knows nothing of arrays, models or ranks. The masking probability of a block is its
level t itself (the log-linear schedule), which every preset uses. Specified by
tests/objectives/test_objective.py; each preset's loss by tests/objectives/test_presets.py.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from megatron_bp.layout.visibility import CleanRule, CorruptedRule

PRESET = "preset"
NUM_BUCKETS = 4  # quarters of the noise levels, for which losses are reported one by one


class Alignment(StrEnum):
    """Which token a corrupted row predicts."""

    SAME_POSITION = "same_position"  # its own
    SHIFTED = "shifted"  # the next one: what a next-token model's rows already do


class Canvas(StrEnum):
    """What a corrupted view shows in the place of a corrupted token, and what can be corrupted.

    Names as in MaxText (AI-Hypercomputer/maxtext PR 4737); uniform as in DiffusionGemma.
    """

    ALL_MASKED = "all_masked"  # the mask token; any token of a block
    SEED_AND_MASK = "seed_and_mask"  # the mask token; never the first token of a block, the seed
    UNIFORM = "uniform"  # a random token, perhaps its own: so every token of the view is a target


class Views(StrEnum):
    """The corrupted copies of a sample over one shared clean stream."""

    SINGLE = "single"
    COMPLEMENTARY = "complementary"  # two: what one masks, the other shows


class Weight(StrEnum):
    """Weight of a target's cross-entropy."""

    INVERSE_T = "inverse_t"  # 1 / t of the target's block: the bound on the log-likelihood
    NONE = "none"  # 1
    BLOCK_MEAN = "block_mean"  # 1 / targets of its block (in its view): every block weighs the same


class Normalizer(StrEnum):
    """What the sum of weighted cross-entropies is divided by."""

    SUPERVISED = "supervised"  # tokens that could have been targets, each once
    TARGETS = "targets"  # rows that are targets, over all views
    BLOCKS = "blocks"  # blocks with a target, over all views


class Scope(StrEnum):
    """Over what a sum is divided by its normalizer."""

    EXAMPLE = "example"  # each sample by its own; the batch's loss is the mean over samples
    GLOBAL = "global"  # the batch's sum by the batch's normalizer (--calculate-per-token-loss)


class TSampling(StrEnum):
    """How the blocks of one sample get their noise levels t."""

    ANTITHETIC = "antithetic"  # one level in each of num_blocks equal strata, in random order
    INDEPENDENT = "independent"  # uniform, each block by itself


@dataclass(frozen=True)
class Objective:
    """A consistent block-diffusion objective; make one with `make_objective`.

    loss of a sample = diffusion_loss_weight * sum over targets (weight * CE) / normalizer
                     + ar_loss_weight * mean over next tokens CE    (on the clean stream)

    Noise levels lie in [`t_min`, `t_max`]. `exclude_mask_logit` gives the mask token probability 0.
    With scope GLOBAL both sums are divided by the batch's normalizer.

    Raises: ValueError with every inconsistency found.
    """

    name: str
    clean_rule: CleanRule = CleanRule.BLOCK_CAUSAL
    corrupted_rule: CorruptedRule = CorruptedRule.BIDIRECTIONAL
    alignment: Alignment = Alignment.SAME_POSITION
    canvas: Canvas = Canvas.ALL_MASKED
    views: Views = Views.SINGLE
    weight: Weight = Weight.INVERSE_T
    normalizer: Normalizer = Normalizer.SUPERVISED
    scope: Scope = Scope.EXAMPLE
    exclude_mask_logit: bool = False
    t_sampling: TSampling = TSampling.INDEPENDENT
    t_min: float = 1e-3
    t_max: float = 1.0
    diffusion_loss_weight: float = 1.0
    ar_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        problems = _range_problems(self) + _combination_problems(self)
        if problems:
            raise ValueError(f"objective {self.name!r}: " + " ".join(problems))

    @property
    def label_shift(self) -> int:
        """How far the predicted token is from the row that predicts it (tokens)."""
        return int(self.alignment is Alignment.SHIFTED)

    @property
    def num_views(self) -> int:
        """Corrupted copies of a sample."""
        return 2 if self.views is Views.COMPLEMENTARY else 1

    @property
    def learns_clean(self) -> bool:
        """Whether clean rows have a loss, so that the last layer must compute them."""
        return self.ar_loss_weight > 0

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """The quarters of [t_min, t_max] as "lowest-highest level"; one if there is one level."""
        width = self.t_max - self.t_min
        if width == 0:
            return (f"{self.t_min:.2f}",)
        digits = 2 if width >= NUM_BUCKETS * 0.01 else 6
        edges = [self.t_min + width * i / NUM_BUCKETS for i in range(NUM_BUCKETS + 1)]
        return tuple(f"{lo:.{digits}f}-{hi:.{digits}f}" for lo, hi in pairwise(edges))


def _range_problems(objective: Objective) -> list[str]:
    problems = []
    t_min, t_max = objective.t_min, objective.t_max
    if not 0.0 < t_min <= t_max <= 1.0:
        problems.append(
            f"t_min={t_min} and t_max={t_max} must satisfy 0 < t_min <= t_max <= 1; "
            "use for example t_min=0.001, t_max=1.0."
        )
    if not 0.0 < objective.diffusion_loss_weight < float("inf"):
        problems.append(
            f"diffusion_loss_weight={objective.diffusion_loss_weight} must be positive and finite; "
            "use for example 1.0."
        )
    if not 0.0 <= objective.ar_loss_weight < float("inf"):
        problems.append(
            f"ar_loss_weight={objective.ar_loss_weight} must be finite and not negative; use 0.0 "
            "for no next-token loss on the clean stream."
        )
    return problems


def _combination_problems(objective: Objective) -> list[str]:
    problems = []
    inverse_t = objective.weight is Weight.INVERSE_T
    if objective.views is Views.COMPLEMENTARY and inverse_t:
        # The second view masks a token with probability 1 - t, which may be 0.
        problems.append(
            "weight=inverse_t does not fit views=complementary, where every token is a target "
            "exactly once whatever t is; use weight=none, or views=single."
        )
    if objective.canvas is Canvas.UNIFORM and (inverse_t or objective.views is Views.COMPLEMENTARY):
        problems.append(
            "canvas=uniform makes every token a target whatever t is, so it needs views=single and "
            "a weight other than inverse_t; use the preset llada2 with canvas=uniform."
        )
    if (objective.weight is Weight.BLOCK_MEAN) != (objective.normalizer is Normalizer.BLOCKS):
        problems.append(
            f"weight={objective.weight} with normalizer={objective.normalizer} is no mean; use "
            "weight=block_mean and normalizer=blocks together."
        )
    if objective.ar_loss_weight > 0 and objective.clean_rule is not CleanRule.TOKEN_CAUSAL:
        problems.append(
            f"ar_loss_weight={objective.ar_loss_weight} needs clean_rule=token_causal: a "
            f"{objective.clean_rule} clean row sees the token that it is to predict."
        )
    if (
        objective.ar_loss_weight > 0
        and objective.scope is Scope.GLOBAL
        and objective.normalizer is not Normalizer.SUPERVISED
    ):
        problems.append(
            f"scope=global has one denominator for both losses, and normalizer="
            f"{objective.normalizer} does not count next tokens; use normalizer=supervised, "
            "scope=example (no --calculate-per-token-loss), or ar_loss_weight=0."
        )
    return problems


STANDARD = Objective(
    # BD3-LM's loss with the token-causal clean stream of the CSBP paper (section 3.2). Unlike the
    # published recipe the strata are in random order along the sequence: in sequence order
    # neighbouring blocks would share their noise level.
    name="standard",
    clean_rule=CleanRule.TOKEN_CAUSAL,
    exclude_mask_logit=True,
    t_sampling=TSampling.ANTITHETIC,
)

BD3LM = Objective(
    # BD3-LM (arXiv:2503.09573): block-causal clean stream, 1/t, mask logit -inf ("subs"), levels
    # antithetic. Its clipped schedules are ranges of t. Strata in random order, as in STANDARD.
    name="bd3lm",
    exclude_mask_logit=True,
    t_sampling=TSampling.ANTITHETIC,
)

FAST_DLLM_V2 = Objective(
    # Fast-dLLM v2 (arXiv:2509.26328): shifted labels, two complementary views, the plain mean over
    # targets; p = (1 - 0.001) r + 0.001 with r uniform for each block.
    name="fast_dllm_v2",
    alignment=Alignment.SHIFTED,
    views=Views.COMPLEMENTARY,
    weight=Weight.NONE,
    normalizer=Normalizer.TARGETS,
)

SDAR = Objective(
    # SDAR (arXiv:2510.06303): BD3-LM's loss on a converted next-token model, CE / t over the
    # supervised tokens, levels independent, plain softmax. Published with block size 4.
    name="sdar",
)

LLADA2 = Objective(
    # LLaDA2.0 (arXiv:2512.15745) as its training code (inclusionAI/dFactory) has it: one view (the
    # report's complementary views are not in that code, dFactory issue 15), no weight, the mean
    # over masked tokens, block size 32. The report's narrow band of levels is a range of t.
    name="llada2",
    weight=Weight.NONE,
    normalizer=Normalizer.TARGETS,
)

NEMOTRON_LABS = Objective(
    # Nemotron-Labs-Diffusion (NVIDIA-NeMo Automodel PR 2273, Megatron-Bridge PR 4447): joint loss
    # 0.3 * CE / p on masked tokens + 1.0 * next-token CE on a token-causal clean stream.
    name="nemotron_labs",
    clean_rule=CleanRule.TOKEN_CAUSAL,
    diffusion_loss_weight=0.3,
    ar_loss_weight=1.0,
)

PRESETS = {
    preset.name: preset for preset in (STANDARD, BD3LM, FAST_DLLM_V2, SDAR, LLADA2, NEMOTRON_LABS)
}


def make_objective(name: str, **choices: Any) -> Objective:
    """The preset called `name`, with the choices given: fields of `Objective` by name.

    A choice is the value of an enum ("block_causal"), a number, or "preset" to keep the preset's.

    Raises: ValueError for an unknown preset, field or choice, or an inconsistent combination.
    """
    if name not in PRESETS:
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"objective {name!r} is unknown; use one of {known}.")
    preset = PRESETS[name]
    known_fields = [field.name for field in fields(Objective) if field.name != "name"]
    for field in choices:
        if field not in known_fields:
            raise ValueError(f"{field} is no choice of an objective; use {known_fields}.")
    given = {field: value for field, value in choices.items() if value != PRESET}
    changes = {field: _choose(value, getattr(preset, field)) for field, value in given.items()}
    return replace(preset, **changes)


def _choose(given: Any, preset: Any) -> Any:
    kind = type(preset)
    if not isinstance(preset, StrEnum):
        return kind(given)
    choices = [PRESET, *kind]  # type: ignore[misc]
    if given not in choices:
        raise ValueError(
            f"{kind.__name__} {given!r} is unknown; use one of {list(map(str, choices))}."
        )
    return kind(given)
