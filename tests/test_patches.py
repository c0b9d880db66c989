"""The patches open their seams in a tree, go away without a trace, and touch no other version."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SERIES = json.loads((ROOT / "patches/series.json").read_text())["patches"]
INSTALLED = Path(sysconfig.get_paths()["purelib"])
CORE = "megatron/core/transformer/attention.py"
ARGUMENTS = "megatron/training/arguments.py"
TE = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"


def patch(action: str, tree: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/apply_patches.py", f"--{action}", str(tree), *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The installed files that are patched, and a pretraining script."""
    for path in (CORE, ARGUMENTS):
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(INSTALLED / path, tmp_path / path)
    shutil.copy(ROOT / "tests/mcore/stand_in_pretrain.py", tmp_path / "pretrain_gpt.py")
    return tmp_path


def contents(tree: Path) -> dict[str, bytes]:
    return {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()}


def test_applied_and_reversed_a_tree_is_what_it_was(tree: Path) -> None:
    before = contents(tree)
    assert "cp_comm_type.patch: fits, not applied" in patch("check", tree).stdout
    assert contents(tree) == before
    assert "3 file(s) patched" in patch("apply", tree).stdout
    after = contents(tree)
    assert {path for path in after if after[path] != before[path]} == set(before)
    assert "megatron_lm/pretrain_gpt.patch: applied" in patch("check", tree).stdout
    assert "0 file(s) patched" in patch("apply", tree).stdout
    assert contents(tree) == after
    assert "3 file(s) restored" in patch("reverse", tree).stdout
    assert contents(tree) == before
    assert "0 file(s) restored" in patch("reverse", tree).stdout


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"# Checks.\n", b"# Checks.\n\n", "is at line 568 instead of 567: another version"),
        (b'if "a2a+p2p" in', b'if "a2a" in', "lines around line 567 are not the ones"),
    ],
)
def test_another_version_is_refused_and_nothing_changes(
    tree: Path, old: bytes, new: bytes, says: str
) -> None:
    path = tree / ARGUMENTS
    whole = path.read_bytes()
    at = whole.index(b"a2a+p2p") - 400
    assert old in whole[at:]
    path.write_bytes(whole[:at] + whole[at:].replace(old, new, 1))
    before = contents(tree)
    for action in ("check", "apply"):
        done = patch(action, tree)
        assert done.returncode == 1
        assert f"error: {ARGUMENTS}: the " in done.stderr
        assert says in done.stderr
        assert "python -m megatron_bp.launch" in done.stderr
        assert contents(tree) == before
    # The other patch can still be chosen by name.
    assert "1 file(s) patched" in patch("apply", tree, "--only", "pretrain_gpt").stdout


def test_an_old_script_and_an_empty_tree_are_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    assert "the file has no parse_and_validate_args" in patch("apply", tree).stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no patch is for this tree" in patch("check", empty).stderr


def test_patches_are_small_and_hold_no_foreign_line() -> None:
    for entry in SERIES:
        lines = (ROOT / "patches" / entry["name"]).read_text().splitlines()
        assert all(entry[key] for key in ("opens", "upstream", "until", "tried_on"))
        assert len([line for line in lines if line.startswith("+") and "+++" not in line]) <= 10
        assert not [line for line in lines[2:] if line[:1] not in ("+", "@", "-")]
        assert not [line for line in lines if line.startswith("-") and not line.startswith("--- ")]
    listed = {entry["name"] for entry in SERIES}
    found = {str(p.relative_to(ROOT / "patches")) for p in (ROOT / "patches").rglob("*.patch")}
    assert found == listed


def test_the_patched_package_imports_and_puts_our_attention_in_its_seat(tmp_path: Path) -> None:
    shutil.copytree(INSTALLED / "megatron", tmp_path / "megatron")
    patch("apply", tmp_path)
    code = (
        "from megatron_bp.mcore import cpu; cpu.enable_cpu()\n"
        "from tests.test_patches import core_attention\n"
        "for name in ('p2p', 'block_parallel'): print(name, core_attention(name))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "p2p DotProductAttention" in done.stdout
    assert f"block_parallel BlockParallelAttention {tmp_path}/megatron/core" in done.stdout


def core_attention(cp_comm_type: str) -> str:
    """What Megatron builds into the core-attention seat, and where Megatron is."""
    import torch
    from megatron.core import __file__ as core
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
    )
    submodules = get_gpt_layer_local_spec().submodules.self_attention.submodules
    layer = SelfAttention(config, submodules, layer_number=1, cp_comm_type=cp_comm_type)
    return f"{type(layer.core_attention).__name__} {core}"


def test_the_lines_for_transformer_engine_ask_the_context_of_a_named_attention() -> None:
    text = (ROOT / "patches/transformer_engine/cp_comm_type.patch").read_text().splitlines()
    inserted = [line[1:] for line in text if line.startswith("+") and "+++" not in line]
    head = "def forward(self, query_layer, key_layer, value_layer, qkv_format=None):"
    source = "\n".join([head, *inserted, "        return 'stock'"])
    found: dict[str, Any] = {}
    exec(source, found)  # our own lines
    context = SimpleNamespace(attend=lambda *given: given)
    ours = SimpleNamespace(cp_comm_type="block_parallel", cp_group=context, qkv_format="sbhd")
    assert found["forward"](ours, 1, 2, 3) == (1, 2, 3, "sbhd")
    assert found["forward"](ours, 1, 2, 3, qkv_format="bshd") == (1, 2, 3, "bshd")
    assert found["forward"](SimpleNamespace(cp_comm_type="p2p"), 1, 2, 3) == "stock"


@pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="needs the sources of Transformer Engine"
)
def test_transformer_engine_asks_the_context_first(tmp_path: Path) -> None:
    spec = find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / TE).parent.mkdir(parents=True)
    shutil.copy(Path(spec.origin).parents[1] / TE, tmp_path / TE)
    before = contents(tmp_path)
    assert patch("apply", tmp_path).returncode == 0
    tree = ast.parse((tmp_path / TE).read_text())
    (forward,) = [
        method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "forward"
    ]
    assert ast.unparse(forward.body[1].test) == "self.cp_comm_type == 'block_parallel'"  # type: ignore[attr-defined]
    patch("reverse", tmp_path)
    assert contents(tmp_path) == before
