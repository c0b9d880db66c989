"""A run with adapters names its base; what does not fit adapters is refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bp.mcore.arguments import config_from_args, prepare
from megatron_bp.mcore.refusals import TRACKER
from tests.mcore.parsing import parsed
from tests.mcore.runs import flags


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / TRACKER).write_text("release")
    return str(tmp_path)


def prepared(text: str) -> tuple[str, str | None, str | None]:
    """The base, and what Megatron still loads."""
    args = parsed(base=tuple(flags(text)))
    prepare(args, config_from_args(args))
    return args.bdlm_lora_base, args.load, args.pretrained_checkpoint


def test_the_base_is_the_pretrained_checkpoint_and_load_holds_adapters(base: str) -> None:
    lora = f"--bdlm-lora-rank 4 --pretrained-checkpoint {base}"
    assert prepared(f"{lora} --load {base}/a --save {base}/a") == (base, f"{base}/a", None)
    assert prepared(lora) == (base, None, None)


def test_load_with_finetune_is_the_base_of_new_adapters(base: str) -> None:
    assert prepared(f"--bdlm-lora-rank 4 --load {base} --finetune") == (base, None, None)


def test_without_adapters_nothing_moves(base: str) -> None:
    assert prepared(f"--load {base} --finetune") == ("", base, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--bdlm-lora-rank 4 needs the model to adapt; give its checkpoint as"),
        ("--load BASE", "--bdlm-lora-rank 4 needs the model to adapt"),
        ("--num-experts 4", "does not fit experts; drop it, or drop --num-experts 4"),
        ("--transformer-impl transformer_engine", "use --transformer-impl local"),
        ("--ckpt-format torch_dcp", "use --ckpt-format torch_dist"),
    ],
)
def test_what_does_not_fit_is_refused(base: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match="with the arguments") as error:
        prepared(f"--bdlm-lora-rank 4 {text.replace('BASE', base)}")
    assert message in str(error.value)
