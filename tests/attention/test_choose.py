"""A kernel is chosen by name or by need, and a refusal says why; nothing falls back silently."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_bp.attention import choose
from megatron_bp.attention.choose import choose_kernel, load_kernel
from megatron_bp.attention.contract import IntervalKernel, KernelNeed, NativeKernel, Strategy

NEED = KernelNeed(Strategy.NATIVE, "cpu", torch.float32, 64, window=True)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_auto_finds_a_kernel_for_every_need_on_cpu(strategy: Strategy, dtype: torch.dtype) -> None:
    need = replace(NEED, strategy=strategy, dtype=dtype, deterministic=True)
    kernel = choose_kernel("auto", need)
    assert isinstance(kernel, NativeKernel if strategy is Strategy.NATIVE else IntervalKernel)


def test_a_kernel_is_called_what_it_was_asked_for() -> None:
    assert load_kernel("dense").name == "dense"
    assert choose_kernel("dense", NEED).name == "dense"


def test_every_name_that_auto_tries_is_a_kernel() -> None:
    assert {name for names in choose.AUTO.values() for name in names} <= set(choose.KERNELS)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"kernel='flesh' is not one of auto, .*dense"):
        choose_kernel("flesh", NEED)


def test_an_explicit_kernel_that_cannot_serve_raises_with_every_reason() -> None:
    need = replace(NEED, device="tpu", dtype=torch.int8, head_size=2048)
    with pytest.raises(ValueError, match=r"kernel='dense' cannot run this layer: ") as error:
        choose_kernel("dense", need)
    text = str(error.value)
    for reason in ("not on tpu", "not int8", "not 2048"):
        assert reason in text


def test_auto_says_what_each_kernel_lacks() -> None:
    need = replace(NEED, head_size=2048)
    text = r"no attention kernel can run this layer\. .*dense: it takes head sizes up to .*2048"
    with pytest.raises(ValueError, match=text):
        choose_kernel("auto", need)


def test_auto_on_an_unknown_device_finds_nothing() -> None:
    with pytest.raises(ValueError, match="no attention kernel can run this layer"):
        choose_kernel("auto", replace(NEED, device="tpu"))


@pytest.fixture
def ghost(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel whose module cannot be imported, first in line on the CPU."""
    monkeypatch.setattr(choose, "KERNELS", {**choose.KERNELS, "ghost": "GhostKernel"})
    monkeypatch.setattr(choose, "AUTO", {"cpu": ("ghost", "dense")})
    return "ghost"


def test_a_kernel_whose_package_is_missing_raises_when_named(ghost: str) -> None:
    with pytest.raises(ImportError, match="ghost"):
        choose_kernel(ghost, NEED)


def test_auto_passes_over_a_missing_package_and_reports_it_if_nothing_serves(ghost: str) -> None:
    assert choose_kernel("auto", NEED).name == "dense"
    with pytest.raises(ValueError, match=r"ghost: .*ghost.* \| dense: it takes head sizes"):
        choose_kernel("auto", replace(NEED, head_size=2048))


def test_auto_says_once_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    choose_kernel.cache_clear()
    with caplog.at_level("INFO", logger="megatron_bp"):
        for _ in range(3):
            choose_kernel("auto", NEED)
    assert caplog.text.count("attention kernel for") == 1
    assert "dense, the fastest measured" in caplog.text


def test_auto_has_an_order_of_its_own_for_sliding_windows() -> None:
    assert set(choose.AUTO_SLIDING["cuda"]) == set(choose.AUTO["cuda"])
    assert choose.AUTO_SLIDING["cuda"] != choose.AUTO["cuda"]


def test_a_deterministic_need_gives_a_deterministic_kernel() -> None:
    assert choose_kernel("dense", replace(NEED, deterministic=True)).deterministic


def test_a_library_that_does_not_load_is_an_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another cuDNN is loaded already: `auto` must go on to the next kernel."""
    (tmp_path / "transformer_engine").mkdir()
    broken = 'raise OSError("libcudnn_cnn.so.9: undefined symbol")\n'
    (tmp_path / "transformer_engine/__init__.py").write_text(broken)
    for name in [x for x in sys.modules if x.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "megatron_bp.attention.kernels.te", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"needs Transformer Engine.*undefined symbol"):
        load_kernel("te")
