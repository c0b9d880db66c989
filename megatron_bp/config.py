"""Holds every knob of block parallelism, with its unit, its default and the reason for the default.

Knows no torch and no megatron; `mcore/arguments.py` generates the command-line flags from the
fields here and checks them against the rest of a run. Specified by tests/test_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

OBJECTIVES = ("none", "standard", "bd3lm", "fast_dllm_v2", "sdar", "llada2", "nemotron_labs")
CANVASES = ("preset", "all_masked", "seed_and_mask", "uniform")
CLEAN_RULES = ("preset", "token_causal", "block_causal")
STRATEGIES = ("native", "interval")
WIRE_DTYPES = ("fp32", "model")
RECOMPUTE_ATTENTION = ("auto", "keep", "rerun")
CLEAN_KV = ("auto", "keep", "regather")
OWNERSHIPS = ("dual_end", "contiguous")
DATA_KINDS = ("stream", "sft")
POSITIONS = ("restart", "run_on")

PRESET = "preset"  # take the objective's own clean rule
BLOCK_PARALLEL = "block_parallel"  # as --cp-comm-type names it in a patched Megatron (patches/)
NOT_GIVEN = -1  # for ids, seeds and weights, which are never negative


def _knob(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class BlockParallelConfig:
    """The knobs of one run.

    Raises: ValueError that lists every problem of the values themselves.
    """

    block_parallel_size: int = _knob(
        1,
        "Number of ranks that share one sample by owning its blocks (ranks). They are the ranks of "
        "the "
        "context-parallel axis: the world is TP x PP x max(CP, BP) x DP. Equal to "
        "--context-parallel-size: clean rows are sharded too; 1 context shard: they are "
        "replicated. "
        "Default 1: stock Megatron.",
    )
    block_size: int = _knob(
        32, "Tokens of one block (tokens). Default 32, which released block-diffusion models use."
    )
    bdlm_objective: str = _knob(
        "none",
        "Training objective. Default none: plain next-token training, bit-identical to stock "
        "Megatron.",
        OBJECTIVES,
    )
    mask_token_id: int = _knob(
        NOT_GIVEN,
        "Token id that replaces a masked token (id). Required by every objective but none; there "
        "is no "
        "default, because a wrong id trains silently.",
    )
    clean_rule: str = _knob(
        PRESET,
        "Which clean tokens a clean token sees. Default preset: what the objective's authors use.",
        CLEAN_RULES,
    )
    bdlm_canvas: str = _knob(
        PRESET,
        "What a corrupted token is shown as: all_masked, the mask token; seed_and_mask, the same "
        "but a block's first token stays clean; uniform, a random token. Default preset: what the "
        "objective's authors use.",
        CANVASES,
    )
    bdlm_noise_range: str = _knob(
        PRESET,
        "Lowest and highest noise level t as two numbers, for example 0.3,0.8 (probability that a "
        "token is corrupted). Default preset: 0.001,1.0, all levels.",
    )
    bdlm_ar_loss_weight: float = _knob(
        -1.0,
        "Weight of the mean next-token loss on the clean stream, which needs a token-causal clean "
        "rule (1.0 in nemotron_labs, 0 in the other presets). Default -1: the preset's.",
    )
    bp_attention_strategy: str = _knob(
        "native",
        "native: unmasked and causal launches of a vendor kernel, merged by log-sum-exp; interval: "
        "one "
        "masked launch. Default native: the speed of dense causal attention.",
        STRATEGIES,
    )
    bp_attention_kernel: str = _knob(
        "auto",
        "Attention kernel by name. Default auto: the fastest one that this machine, dtype and head "
        "size "
        "allow; its name is printed.",
    )
    bp_grad_wire_dtype: str = _knob(
        "fp32",
        "Dtype of clean key/value gradients on the wire. Default fp32: sums over ranks lose "
        "nothing; "
        "model: the parameters' dtype, half the bytes in bf16.",
        WIRE_DTYPES,
    )
    bp_recompute_attention: str = _knob(
        "auto",
        "Attention of layers that --recompute-granularity full runs again. keep: its output and "
        "LSE stay from the first run, so the second one computes and gathers nothing; rerun: it "
        "computes and gathers again. Default auto: keep if device memory allows (the bytes are "
        "printed).",
        RECOMPUTE_ATTENTION,
    )
    bp_clean_kv: str = _knob(
        "auto",
        "Gathered clean keys and values until backward. keep: they stay; regather: they are "
        "gathered again, while the layer above (or the rest of the layer, under recompute) "
        "computes. Default auto: regather with --recompute-granularity full, else keep, which "
        "sends least.",
        CLEAN_KV,
    )
    bp_hierarchical_gather: int = _knob(
        0,
        "Ranks of a node: where clean shards span nodes, gather and reduce in two steps, so that "
        "rows cross once per node (ranks; -1 tells nodes by host name). Default 0, one flat "
        "collective, which suits one node.",
    )
    bp_ownership: str = _knob(
        "dual_end",
        "Which blocks a rank owns. dual_end: from both ends, or by cost for packed documents; "
        "contiguous: neighbouring ones, for comparison only. Default dual_end: all ranks have "
        "equally many attention pairs.",
        OWNERSHIPS,
    )
    bp_windowed_exchange: bool = _knob(
        True,
        "In sliding-window layers send clean rows only to ranks that see them, in conventional "
        "context parallelism too. Default on: it changes no result; off gathers everything, for "
        "comparison.",
    )
    bp_overlap: bool = _knob(
        True,
        "Compute while clean rows and their gradients travel. Default on: it changes no result; "
        "off waits for each collective at once, for comparison.",
    )
    bp_loss_chunk_rows: int = _knob(
        1024,
        "Rows of logits that exist at a time in the loss (rows). Default 1024: large enough for "
        "full "
        "matrix-multiply speed, 1024 x vocabulary numbers of memory.",
    )
    bp_peak_tflops: float = _knob(
        0.0,
        "What --log-throughput measures utilization against (TFLOP/s of one GPU, dense, in the "
        "parameters' dtype). Default 0: the bf16 peak of A100, H100, H200 and B200 by name; on "
        "other devices utilization is left out.",
    )
    bdlm_noise_seed: int = _knob(
        NOT_GIVEN,
        "Seed of the corruption noise. Default -1: the value of --seed, so one seed names a run.",
    )
    bdlm_data: str = _knob(
        "stream",
        "What a sample is. stream: --seq-length tokens of Megatron's document stream, which cuts "
        "documents; sft: whole documents, packed and kept apart, with PREFIX_mask saying which "
        "tokens are learnt. Default stream: stock Megatron's data.",
        DATA_KINDS,
    )
    document_positions: str = _knob(
        "restart",
        "Rotary positions of packed documents: counted from each document's start, or running on "
        "through the sample. Default restart: what a document sees when it is used alone.",
        POSITIONS,
    )
    bdlm_length_multiple: int = _knob(
        0,
        "Compute a packed sample only up to the multiple of this many tokens that holds its "
        "documents (tokens). Default 0: all --seq-length tokens, the same shape in every step.",
    )
    bp_prune_last_layer: bool = _knob(
        True,
        "In the last layer, skip attention, projection and MLP of clean rows, whose output no loss "
        "reads (their keys and values stay). Default on: it changes no result. Without effect with "
        "--num-experts or a next-token loss, which read them.",
    )
    bdlm_lora_rank: int = _knob(
        0,
        "Rank of the low-rank adapters on attention and MLP linear layers; the base model, given "
        "as --pretrained-checkpoint (or --load with --finetune), is frozen, and --save and --load "
        "hold adapters only. A usual rank is 16. Default 0: no adapters, every weight is trained.",
    )
    bdlm_lora_alpha: float = _knob(
        32.0,
        "What adapters are scaled by, times their rank. Default 32: twice the usual rank 16.",
    )

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError(list_problems(problems))

    @property
    def is_diffusion(self) -> bool:
        """Whether a block-diffusion objective is trained (else Megatron runs as it is)."""
        return self.bdlm_objective != "none"

    def objective_choices(self) -> dict[str, Any]:
        """Returns the choices that replace the preset's, by their names in `Objective`."""
        choices: dict[str, Any] = {"clean_rule": self.clean_rule, "canvas": self.bdlm_canvas}
        if self.bdlm_noise_range != PRESET:
            choices["t_min"], choices["t_max"] = _numbers(self.bdlm_noise_range)
        if self.bdlm_ar_loss_weight != NOT_GIVEN:
            choices["ar_loss_weight"] = self.bdlm_ar_loss_weight
        return choices

    def problems(self) -> list[str]:
        """Returns one sentence for each problem of the values themselves."""
        found = []
        for knob in fields(self):
            value = getattr(self, knob.name)
            choices = knob.metadata["choices"]
            if choices and value not in choices:
                found.append(
                    f"{flag(knob.name)} {value} is unknown; use one of {', '.join(choices)}"
                )
        for name in ("block_parallel_size", "block_size", "bp_loss_chunk_rows"):
            value = getattr(self, name)
            if value < 1:
                found.append(
                    f"{flag(name)} {value} must be at least 1; use {type(self).default(name)}"
                )
        if self.bdlm_noise_range != PRESET and len(_numbers(self.bdlm_noise_range)) != 2:
            found.append(
                f"--bdlm-noise-range {self.bdlm_noise_range} must be two numbers, lowest and "
                "highest level; use for example --bdlm-noise-range 0.3,0.8"
            )
        if self.bdlm_length_multiple < 0:
            found.append(
                f"--bdlm-length-multiple {self.bdlm_length_multiple} must be 0 (off) or positive; "
                "use for example 256"
            )
        if self.bp_peak_tflops < 0:
            found.append(
                f"--bp-peak-tflops {self.bp_peak_tflops} must be 0 (by device) or positive; use "
                "for example 989"
            )
        if self.bp_hierarchical_gather < -1:
            found.append(
                f"--bp-hierarchical-gather {self.bp_hierarchical_gather} must be the ranks of a "
                "node, 0 (off) or -1 (nodes by host name); use for example 8"
            )
        if self.bdlm_lora_rank < 0:
            found.append(f"--bdlm-lora-rank {self.bdlm_lora_rank} must be 0 or more; use 16")
        if self.bdlm_lora_alpha <= 0:
            found.append(f"--bdlm-lora-alpha {self.bdlm_lora_alpha} must be positive; use 32")
        if self.is_diffusion and self.mask_token_id < 0:
            found.append(
                f"--bdlm-objective {self.bdlm_objective} needs --mask-token-id, the id of the "
                "tokenizer's mask token; a checkpoint converted with tools/convert_checkpoint.py "
                "names "
                "it in its flags file"
            )
        return found if self.is_diffusion else found + self._problems_without_objective()

    def _problems_without_objective(self) -> list[str]:
        """What only a block-diffusion objective can use."""
        found = []
        if self.bdlm_data != "stream":
            found.append(
                f"--bdlm-data {self.bdlm_data} needs a block-diffusion objective; use "
                "--bdlm-objective standard, or drop it"
            )
        if self.bdlm_lora_rank:
            found.append(
                f"--bdlm-lora-rank {self.bdlm_lora_rank} needs a block-diffusion objective; use "
                "--bdlm-objective standard, or --bdlm-lora-rank 0"
            )
        if self.block_parallel_size != 1:
            found.append(
                f"--block-parallel-size {self.block_parallel_size} needs a block-diffusion "
                "objective; use --bdlm-objective standard, or --block-parallel-size 1"
            )
        return found

    @classmethod
    def default(cls, name: str) -> Any:
        """Returns the default of one knob."""
        return next(knob.default for knob in fields(cls) if knob.name == name)


def _numbers(text: str) -> list[float]:
    """The numbers of a comma-separated list; none if one of them is no number."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def flag(name: str) -> str:
    """Returns the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def list_problems(problems: list[str]) -> str:
    """Returns the text of one error that reports all problems."""
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    return f"{count} with the arguments:\n" + "\n".join(f"  - {problem}" for problem in problems)
