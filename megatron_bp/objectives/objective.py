"""Names everything a block-diffusion objective decides, as one frozen value.

Owns the choices (who sees whom, which labels, which weights, how noise levels are drawn); knows
nothing of arrays, models or ranks. Specified by tests/objectives/test_objective.py.
"""

from dataclasses import dataclass
from enum import StrEnum

from megatron_bp.layout.visibility import CleanRule, CorruptedRule

PRESET = "preset"


class Weight(StrEnum):
    """Weight of a target's cross-entropy."""

    INVERSE_T = "inverse_t"  # 1 / t of the target's block: the bound on the log-likelihood
    NONE = "none"  # 1


class Normalizer(StrEnum):
    """What the sum of weighted cross-entropies is divided by."""

    SUPERVISED = "supervised"  # tokens that could have been targets, each once
    TARGETS = "targets"  # rows that are targets, over all views


class TSampling(StrEnum):
    """How the blocks of one sample get their noise levels t."""

    ANTITHETIC = "antithetic"  # one level in each of num_blocks equal strata, in random order
    INDEPENDENT = "independent"  # uniform, each block by itself


@dataclass(frozen=True)
class Objective:
    """A consistent block-diffusion objective; make one with `make_objective`.

    `label_shift` is 0 if a row predicts its own token, 1 if it predicts the next one. `num_views`
    is the number of corrupted copies that share one clean stream; two views are complementary: what
    one masks, the other shows. Noise levels lie in [`t_min`, `t_max`].

    Raises: ValueError with every inconsistency found.
    """

    name: str
    clean_rule: CleanRule
    corrupted_rule: CorruptedRule
    label_shift: int
    num_views: int
    weight: Weight
    normalizer: Normalizer
    exclude_mask_logit: bool
    t_sampling: TSampling
    t_min: float = 1e-3
    t_max: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.label_shift not in (0, 1):
            problems.append(
                f"label_shift={self.label_shift} must be 0 (own token) or 1 (next token)."
            )
        if self.num_views not in (1, 2):
            problems.append(
                f"num_views={self.num_views} must be 1 or 2 (a pair of complementary views)."
            )
        if not 0.0 < self.t_min <= self.t_max <= 1.0:
            problems.append(
                f"t_min={self.t_min} and t_max={self.t_max} must satisfy 0 < t_min <= t_max <= 1; "
                "use for example t_min=0.001, t_max=1.0."
            )
        if self.num_views == 2 and self.weight is Weight.INVERSE_T:
            # The second view masks a token with probability 1 - t, which may be 0.
            problems.append(
                "weight=inverse_t does not fit num_views=2, where every token is a target exactly "
                "once whatever t is; use weight=none, or num_views=1."
            )
        if problems:
            raise ValueError(f"objective {self.name!r}: " + " ".join(problems))


def make_objective(
    name: str,
    *,
    clean_rule: str = PRESET,
    corrupted_rule: str = PRESET,
    weight: str = PRESET,
    normalizer: str = PRESET,
    t_sampling: str = PRESET,
) -> Objective:
    """The objective called `name` ("standard" or "fast_dllm_v2"), with the choices given.

    An argument left at "preset" takes the published choice of `name`:

    standard      a masked row predicts its own token with weight 1/t, over one view, divided by the
                  supervised tokens; the mask token is never predicted; t antithetic. Unlike the
                  published recipe the strata are in random order along the sequence: in sequence
                  order neighbouring blocks would share their noise level.
    fast_dllm_v2  a row predicts the next token where that is masked, over two complementary views,
                  divided by the targets; t independent for each block.

    Raises: ValueError for an unknown name or choice.
    Source: BD3-LM (arXiv:2503.09573) for standard, Fast-dLLM v2 (arXiv:2509.26328).
    """
    if name not in ("standard", "fast_dllm_v2"):
        raise ValueError(f"objective {name!r} is unknown; use one of 'standard', 'fast_dllm_v2'.")
    shifted = name == "fast_dllm_v2"
    return Objective(
        name=name,
        clean_rule=_choose(
            clean_rule, CleanRule.BLOCK_CAUSAL if shifted else CleanRule.TOKEN_CAUSAL
        ),
        corrupted_rule=_choose(corrupted_rule, CorruptedRule.BIDIRECTIONAL),
        label_shift=1 if shifted else 0,
        num_views=2 if shifted else 1,
        weight=_choose(weight, Weight.NONE if shifted else Weight.INVERSE_T),
        normalizer=_choose(normalizer, Normalizer.TARGETS if shifted else Normalizer.SUPERVISED),
        exclude_mask_logit=not shifted,
        t_sampling=_choose(t_sampling, TSampling.INDEPENDENT if shifted else TSampling.ANTITHETIC),
    )


def _choose[Choice: StrEnum](given: str, preset: Choice) -> Choice:
    kind = type(preset)
    choices = [PRESET, *kind]
    if given not in choices:
        raise ValueError(
            f"{kind.__name__} {given!r} is unknown; use one of {list(map(str, choices))}."
        )
    return preset if given == PRESET else kind(given)
