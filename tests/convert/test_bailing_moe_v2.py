"""Shows that Megatron loads Bailing-MoE v2 (and LLaDA2) and computes what its formulas say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families import read_model
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.plan import Layout, extra_state_keys
from megatron_bp.convert.progress import Silent
from tests.convert import megatron_models as mm
from tests.convert.bailing_models import BAILING, bailing_shapes, reference_logits
from tests.convert.tiny_families import make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits
from tests.distributed import run_distributed

LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 1, 2))  # tensor, pipeline, expert parallel


def _tokens() -> torch.Tensor:
    return torch.randint(0, 101, (2, 33), generator=torch.Generator().manual_seed(5))


def _build(args: argparse.Namespace, config: dict[str, Any], tp: int, ep: int) -> Any:
    """Returns Megatron's model as the converter's own arguments describe it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    routing = {name: value for name, value in vars(args).items() if name.startswith("moe_")}
    settings = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=args.qk_layernorm,
        num_moe_experts=args.num_experts,
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=ep,
        **routing,
    )
    model = GPTModel(
        settings,
        get_gpt_decoder_block_spec(settings, use_transformer_engine=False),
        vocab_size=104,
        max_sequence_length=config["max_position_embeddings"],
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        parallel_output=False,
    )
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    return model.eval()


def _logits(rank: int, world_size: int, root: str) -> dict[str, Any]:
    from megatron_bp.convert.torch_dist_io import TorchDistReader

    found: dict[str, Any] = {}
    tokens = _tokens()
    tokens = torch.nn.functional.pad(tokens, (0, 1))  # sequence parallel: an even length
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    causal = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    release = Path(root) / "m" / "release"
    args = TorchDistReader(release).common_state()["args"]
    for tp, pp, ep in LAYOUTS:
        mm.start(tp, pp, ep)
        model = _build(args, read_config(Path(root) / "hf"), tp, ep)
        asked = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        mm.load(model, release)
        with torch.no_grad():
            logits = model(tokens, positions, causal)
        objects = [getattr(entry, "unique_key", "") for entry in asked.values()]
        found[f"{tp}{pp}{ep}"] = (logits[:, :33, :101], [key for key in objects if key])
        mm.save(model, Path(root) / f"trained{tp}{pp}{ep}", homogeneous=False)
    return found


@pytest.mark.slow
def test_logits_are_those_of_the_formulas_and_training_checkpoints_come_back(tmp_path: Path):
    # The formulas equal Megatron-Bridge 0.6.2's copy of the published model code to 1.2e-6. Without
    # bias, groups, scaling or partial rotation they differ by 0.6 or more.
    generator = torch.Generator().manual_seed(0)
    config = {**BAILING, "torch_dtype": "float32"}
    tensors = {}
    for name, shape in bailing_shapes(config, stacked=False).items():
        centre = 1.0 if "norm" in name else 0.0
        scale = 0.3 if "gate.weight" in name or "expert_bias" in name else 0.1
        tensors[name] = centre + scale * torch.randn(shape, generator=generator)
    hf = write_repository(tmp_path / "hf", config, tensors)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    expected = reference_logits(config, tensors, _tokens())
    assert expected.std() > 0.1
    for changed in (
        {"routed_scaling_factor": 1.0},
        {"topk_group": 3},
        {"partial_rotary_factor": 1.0},
    ):  # the comparison can fail
        other = reference_logits(config | changed, tensors, _tokens())
        assert (other - expected).abs().max() > 0.02, changed
    found = run_distributed(_logits, 2, str(tmp_path), timeout=240)[0]
    family, shape = read_model(config)
    for case, (logits, objects) in found.items():
        difference = float((logits - expected).abs().max())
        assert difference <= 1e-4, (case, difference)
        assert set(objects) <= set(extra_state_keys(family, shape, Layout.PER_LAYER)), case
        assert objects
        sizes = (-1, "keep", 10**9, 0, -1, False)
        target = tmp_path / f"back{case}"
        mcore_to_hf(
            ExportRequest(tmp_path / f"trained{case}", target, tmp_path / "m" / "hf", *sizes),
            Silent(),
        )
        after = read_hf(target)
        assert after.keys() == tensors.keys()
        assert [key for key in tensors if not same_bits(tensors[key], after[key])] == []


def test_a_bailing_model_is_exported_as_llada2(tmp_path: Path):
    from transformers import AutoConfig

    config, tensors = make_case("bailing-untied")
    # The real mask row needs 156896 rows: few columns, one layer.
    config |= {"vocab_size": 156896, "num_hidden_layers": 1}
    shapes = bailing_shapes(config, stacked=False)
    tensors = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    hf = write_repository(tmp_path / "hf", config, tensors)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    request = ExportRequest(
        *(tmp_path / "m", tmp_path / "back", tmp_path / "m" / "hf", -1, "keep", 10**9),
        *(32, 156895, False, "standard", "block_causal"),
        serve_as="llada2",
    )
    mcore_to_hf(request, Silent())
    assert read_hf(tmp_path / "back").keys() == tensors.keys()
    served = AutoConfig.from_pretrained(tmp_path / "back", trust_remote_code=True)
    assert (served.architectures, served.model_type) == (["LLaDA2MoeModelLM"], "llada2_moe")
    assert (served.rope_theta, served.rotary_dim, served.partial_rotary_factor) == (6e5, 8, 0.5)
    assert served.num_shared_experts == 1
    assert json.loads((tmp_path / "back" / "config.json").read_text())["block_size"] == 32
