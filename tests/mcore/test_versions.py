"""A Megatron without one of our seams is refused with the list of what it lacks."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_bp.mcore import versions


def test_the_installed_megatron_has_every_seam() -> None:
    assert versions.missing_seams() == []
    versions.require_seams()


def test_missing_seams_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training.models import gpt

    @dataclasses.dataclass
    class OldConfig:
        transformer_layer_spec: object

    monkeypatch.setattr(GPTModel, "forward", lambda self, packed_seq_params, padding_mask: None)
    monkeypatch.setattr(gpt, "GPTModelConfig", OldConfig)
    with pytest.raises(
        RuntimeError, match=r"megatron-core \S+ lacks what megatron_bp uses"
    ) as error:
        versions.require_seams()
    text = str(error.value)
    assert "has no parameter output_processor\n" in text
    assert "OldConfig has no field pre_wrap_hooks" in text
    assert versions.TESTED in text
    assert "transformer_layer_spec" not in text


def test_a_module_that_moved_is_a_missing_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.models import gpt

    monkeypatch.delattr(gpt, "default_layer_spec")
    (problem,) = versions.missing_seams()
    assert "default_layer_spec" in problem
