"""What tools/fill_blocks.py and block_filling.py guarantee, on a random tiny Llama."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
transformers = pytest.importorskip("transformers", reason="runs the model")
tokenizers = pytest.importorskip("tokenizers", reason="encodes the text")
block_filling = importlib.import_module("block_filling")
fill_blocks = importlib.import_module("fill_blocks")

VOCAB, MASK, LENGTH, BLOCK = 300, 299, 22, 4  # the last block is ragged


def make_model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.3,  # large, so that attention is far from uniform
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def make_rules(clean_rule: str = "token_causal", alignment: str = "same") -> Any:
    return block_filling.Semantics(BLOCK, MASK, clean_rule, alignment)


def sees(row: int, key: int, clean_rule: str) -> bool:
    """The training mask, one pair at a time; rows and keys 0..L-1 are clean, L..2L-1 corrupted."""
    row_block, key_block = row % LENGTH // BLOCK, key % LENGTH // BLOCK
    if key >= LENGTH:
        return row >= LENGTH and row_block == key_block
    if row >= LENGTH:
        return key_block < row_block
    return key <= row if clean_rule == "token_causal" else key_block <= row_block


def train_logits(model: Any, clean: torch.Tensor, corrupted: torch.Tensor, rule: str) -> Any:
    """Logits of the corrupted rows from one dense forward over [clean L ; corrupted L]."""
    size = range(2 * LENGTH)
    mask = torch.tensor([[sees(row, key, rule) for key in size] for row in size])
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    position = torch.arange(LENGTH).repeat(2)
    with torch.no_grad():
        output = model(
            input_ids=torch.cat([clean, corrupted])[None],
            position_ids=position[None],
            attention_mask=bias[None, None],
            use_cache=False,
        )
    return output.logits[0, LENGTH:]


@pytest.mark.parametrize("clean_rule", block_filling.CHOICES["clean_rule"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_block_logits_equal_the_training_forward(
    model: Any, clean_rule: str, attention: str
) -> None:
    """1e-5 of logits of size ten: transformers keeps norms and rotary tables in fp32."""
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, MASK, (LENGTH,), generator=generator)
    noise = torch.rand(LENGTH, generator=generator)
    for start in range(0, LENGTH, BLOCK):
        corrupted = torch.where(noise < 0.6, MASK, clean)
        corrupted[:start] = clean[:start]
        reference = train_logits(model, clean, corrupted, clean_rule)
        block = corrupted[start : start + BLOCK]
        same = block_filling.block_logits(model, clean[:start], block, make_rules(clean_rule))
        stop = start + len(block)
        torch.testing.assert_close(same, reference[start:stop], rtol=0, atol=1e-5)
        shifted = block_filling.block_logits(
            model, clean[:start], block, make_rules(clean_rule, "shifted")
        )
        first = max(start, 1)  # no row predicts position 0
        assert shifted[: first - start].isnan().all()
        torch.testing.assert_close(
            shifted[first - start :], reference[first - 1 : stop - 1], rtol=0, atol=1e-5
        )


def test_the_rules_differ_so_the_comparison_can_fail(model: Any) -> None:
    clean = torch.arange(12)
    block = torch.full((BLOCK,), MASK)
    logits = [
        block_filling.block_logits(model, clean, block, make_rules(rule, alignment))
        for rule in block_filling.CHOICES["clean_rule"]
        for alignment in block_filling.CHOICES["logit_alignment"]
    ]
    for index, one in enumerate(logits):
        for other in logits[index + 1 :]:
            assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("num_steps", [1, 3, 4, 50])
@pytest.mark.parametrize("alignment", block_filling.CHOICES["logit_alignment"])
def test_filling_changes_masks_only_and_never_emits_mask_or_foreign_ids(
    model: Any, num_steps: int, alignment: str
) -> None:
    block = torch.tensor([MASK, 17, MASK, MASK])
    decoder = block_filling.PrefixDecoder(model, make_rules(alignment=alignment))
    decoder.extend(torch.arange(8))
    for limit in (VOCAB, 5):
        how = block_filling.Sampling(num_steps, limit)
        filled = block_filling.fill_block(decoder, block, how, torch.Generator())
        assert filled[1] == 17
        assert (filled != MASK).all()
        assert (filled[block == MASK] < limit).all()


class Certain:
    """A decoder that is surest of position 1, then of 3, 2 and 0, and wants the mask most."""

    rules = make_rules()

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def logits(self, block: torch.Tensor) -> torch.Tensor:
        self.seen.append((block == MASK).tolist())
        logits = torch.zeros(BLOCK, VOCAB)
        logits[torch.arange(BLOCK), torch.arange(BLOCK)] = torch.tensor([1.0, 14.0, 2.0, 13.0])
        logits[:, MASK] = 100.0
        return logits


def fill_certain(num_steps: int, threshold: float) -> list[list[bool]]:
    decoder, how = Certain(), block_filling.Sampling(num_steps, VOCAB, threshold)
    filled = block_filling.fill_block(decoder, torch.full((BLOCK,), MASK), how, torch.Generator())
    assert filled.tolist() == [0, 1, 2, 3]
    return decoder.seen


def test_the_most_confident_positions_are_committed_first() -> None:
    assert fill_certain(3, 2.0) == [[True] * 4, [True, False, True, False], [True] + [False] * 3]


def test_everything_above_the_threshold_is_committed_at_once() -> None:
    rest = [[True, False, True, False], [True] + [False] * 3]
    assert fill_certain(4, 0.9) == [[True] * 4, *rest]
    assert fill_certain(4, 2.0) == [[True] * 4, [True, False, True, True], *rest]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as an exported directory with a byte-level tokenizer of 257 ids."""
    folder = tmp_path_factory.mktemp("model")
    make_model().float().save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<|end|>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    extra = {"block_size": BLOCK, "mask_token_id": MASK, "logit_alignment": "shifted"}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    (folder / "bdlm_conversion.json").write_text(json.dumps({"clean_rule": "block_causal"}))
    return folder


def test_semantics_come_from_the_directory_unless_given(directory: Path) -> None:
    rules = block_filling.read_semantics(directory, {})
    assert rules == block_filling.Semantics(BLOCK, MASK, "block_causal", "shifted")
    given = {"clean_rule": "token_causal", "block_size": 8}
    rules = block_filling.read_semantics(directory, given)
    assert rules == block_filling.Semantics(8, MASK, "token_causal", "shifted")


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({}, ("token_causal", "same")),
        ({"objective": "standard", "alignment": "same_position"}, ("token_causal", "same")),
        ({"objective": "fast_dllm_v2", "clean_rule": "preset"}, ("block_causal", "shifted")),
        ({"objective": "sdar", "clean_rule": "preset"}, ("block_causal", "same")),
        ({"objective": "nemotron_labs", "clean_rule": "preset"}, ("token_causal", "same")),
        ({"objective": "standard", "clean_rule": "block_causal"}, ("block_causal", "same")),
    ],
)
def test_a_preset_means_the_objective_of_the_conversion(
    tmp_path: Path, recorded: dict[str, str], expected: tuple[str, str]
) -> None:
    sizes = {"block_size": BLOCK, "mask_token_id": MASK}
    (tmp_path / "bdlm_conversion.json").write_text(json.dumps(recorded | sizes))
    rules = block_filling.read_semantics(tmp_path, {})
    assert (rules.clean_rule, rules.logit_alignment) == expected


def test_every_problem_of_the_semantics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"block_size.*mask_token_id.*clean_rule='causal'"):
        block_filling.read_semantics(tmp_path, {"clean_rule": "causal"})


def test_a_masked_block_of_a_file_is_filled_and_compared(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text("abcdefghijklm")
    arguments = [str(directory), "--file", str(tmp_path / "code.py"), "--mask-rate", "0.5"]
    assert fill_blocks.main([*arguments, "--block", "2", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "=== prompt (8 tokens, its end)\nabcdefgh\n" in printed
    masked = printed.split("=== masked\n")[1].split("\n")[0]
    assert masked.count("<?>") == 2
    assert "=== original\nijkl\n" in printed
    assert " of 2 masked tokens equal the original" in printed
    for block in ("0", "3"):  # the first, where position 0 stays, and the ragged last
        assert fill_blocks.main([*arguments, "--block", block]) == 0


def test_a_prompt_is_continued_to_the_end_of_its_blocks(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fill_blocks.main([str(directory), "--prompt", "abcdef", "--num-blocks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "=== prompt (4 tokens, its end)\nabcd\n" in printed
    assert f"=== masked\nef{'<?>' * 6}\n" in printed
    assert "=== filled (6 tokens" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block", "9"), "block=9 must be in [0, 4)"),
        (("--mask-rate", "0"), "mask_rate=0.0 must be in (0, 1]"),
        (("--steps", "0"), "steps=0 must be at least 1"),
        (("--mask-token-id", "300"), "mask_token_id=300 must be in [0, vocab_size=300)"),
        (("--block-size", "200", "--block", "0"), ""),
    ],
)
def test_mistakes_are_named(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "code.py").write_text("abcdefghijklm")
    status = fill_blocks.main([str(directory), "--file", str(tmp_path / "code.py"), *arguments])
    assert (status, message in capsys.readouterr().err) == (1 if message else 0, True)
