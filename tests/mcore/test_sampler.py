"""The sampler's logits in transformers are those of the training forward in Megatron."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert import megatron_models as mm
from tests.convert.tiny_models import QWEN3, make_hf
from tests.distributed import run_distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
block_filling = importlib.import_module("block_filling")
transformers = pytest.importorskip("transformers", reason="runs the exported model")

LENGTH, BLOCK, MASK = 22, 4, 100
RULES = ("token_causal", "block_causal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sampler")
    hf = make_hf(root / "hf", QWEN3)
    request = ImportRequest(hf, root / "megatron", Layout.PER_LAYER, "float32", overwrite=False)
    hf_to_mcore(request, Silent())
    return root


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, torch.Tensor]:
    return run_distributed(_train_logits, 1, str(folder))[0]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """A sample and its corrupted copy: some masks in every block."""
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(0, MASK, (LENGTH,), generator=generator)
    masked = torch.rand(LENGTH, generator=generator) < 0.5
    masked[::BLOCK] = True
    return clean, clean.masked_fill(masked, MASK)


@pytest.mark.parametrize("clean_rule", RULES)
@pytest.mark.parametrize("alignment", ["same", "shifted"])
def test_a_block_s_logits_are_those_of_the_training_forward(
    folder: Path, trained: dict[str, torch.Tensor], clean_rule: str, alignment: str
) -> None:
    """fp64 on both sides; both keep rotary tables (transformers norms, too) in fp32: 1e-5.

    With shifted alignment a block's first token is predicted by the row before it, which training
    computes in the block before: the sampler's is compared with a forward where that has no masks.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
    decoder = block_filling.PrefixDecoder(
        model.eval(), block_filling.Semantics(BLOCK, MASK, clean_rule, alignment)
    )
    clean, corrupted = text()
    scale = trained[clean_rule].abs().max()
    for start in range(0, LENGTH, BLOCK):
        decoder.extend(clean[decoder.length : start])
        block = corrupted[start : start + BLOCK]
        logits, stop = decoder.logits(block), start + len(block)
        if alignment == "same":
            wanted = trained[clean_rule][start:stop]
        elif start:
            before = trained[f"{clean_rule} without masks"][start - 1 : start]
            wanted = torch.cat([before, trained[clean_rule][start : stop - 1]])
        else:
            logits, wanted = logits[1:], trained[clean_rule][: stop - 1]
        assert (logits - wanted).abs().max() <= 1e-5 * scale


def test_the_rules_differ_so_the_comparison_can_fail(trained: dict[str, torch.Tensor]) -> None:
    difference = (trained["token_causal"] - trained["block_causal"]).abs().max()
    assert difference > 1e-2 * trained["token_causal"].abs().max()


def _train_logits(rank: int, num_ranks: int, root: str) -> dict[str, torch.Tensor]:
    mm.start(1, 1)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_bp.mcore.model import diffusion_spec, use_plan_positions

    stock = mm.build(QWEN3, 1, 1, torch.float32, QWEN3["vocab_size"])
    mm.load(stock, Path(root) / "megatron" / "release")
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        stock.config,
        diffusion_spec(spec, stock.config),
        vocab_size=QWEN3["vocab_size"],
        max_sequence_length=QWEN3["max_position_embeddings"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(QWEN3["rope_theta"]),
    )
    model.load_state_dict(stock.state_dict())
    (model,) = use_plan_positions([model.double().eval()])
    clean, corrupted = text()
    found = {}
    for rule in RULES:
        found[rule] = _forward(model, clean, corrupted, rule)
        found[f"{rule} without masks"] = _forward(model, clean, clean, rule)
    return found


def _forward(
    model: Any, clean: torch.Tensor, corrupted: torch.Tensor, clean_rule: str
) -> torch.Tensor:
    from megatron_bp.attention.block_parallel import AttentionOptions
    from megatron_bp.comm.groups import BlockGroups
    from megatron_bp.layout.plan import PlanRequest
    from megatron_bp.layout.visibility import CleanRule
    from megatron_bp.mcore.carrier import make_layout, make_params

    request = PlanRequest(LENGTH, BLOCK, clean_rule=CleanRule(clean_rule))
    options = AttentionOptions(softmax_scale=1.0)
    layout = make_layout(request, BlockGroups.single(), options, True, torch.device("cpu"))

    def logits_of_corrupted_rows(*, hidden_states: Any, output_layer: Any, **_: Any) -> Any:
        return hidden_states[-layout.num_corrupted :, 0] @ output_layer.weight.T

    with torch.no_grad():
        logits = model(
            torch.cat([clean, corrupted])[layout.token_index][None],
            layout.position[None],
            None,
            packed_seq_params=make_params(layout),
            output_processor=logits_of_corrupted_rows,
        )
    ordered = torch.empty_like(logits[:LENGTH])
    real = ~layout.is_padding[-layout.num_corrupted :]
    ordered[layout.target_index[real]] = logits[real]
    return ordered
