"""Specifies that conversions stream: memory stays at a few chunks whatever the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.plan import hf_shapes, make_links
from megatron_bp.convert.safetensors_io import Shard, ShardWriter
from tests.convert.tiny_models import LLAMA, make_hf, write_json

MEASURE = """
import sys
from pathlib import Path
from megatron_bp.convert import ar_to_bdlm, import_work
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.test_memory import peak_mib
import_work.CHUNK_BYTES = 8 * 2**20
def there(root):
    request = ar_to_bdlm.ImportRequest(root / "hf", root / "m", Layout.PER_LAYER, "keep", False)
    ar_to_bdlm.hf_to_mcore(request, Silent())
def back(root):
    mcore_to_hf(ExportRequest(root / "m", root / "b", root / "hf", -1, "keep", 10**9, 0, -1, False),
                Silent())
tiny, large = Path(sys.argv[1]), Path(sys.argv[2])
there(tiny)
back(tiny)
base = peak_mib()
there(large)
after_import = peak_mib()
back(large)
print(base, after_import, peak_mib())
"""
MIB = 2**20


def peak_mib() -> float:
    """Returns the peak resident memory of this process; getrusage would include the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM line")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_is_a_few_chunks_and_not_the_model(tmp_path: Path):
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 64 * 1024}
    shapes = hf_shapes(make_links(*read_model(config)))
    infos = {name: TensorInfo(size, torch.bfloat16) for name, size in shapes.items()}
    total = sum(info.num_bytes for info in infos.values()) / MIB
    largest = max(info.num_bytes for info in infos.values()) / MIB
    assert (round(total), largest) == (164, 128)
    (tmp_path / "large" / "hf").mkdir(parents=True)
    write_json(tmp_path / "large" / "hf" / "config.json", config)
    # Zeros in a sparse file: creating the shards is all that is needed.
    writer = ShardWriter(tmp_path / "large" / "hf", Shard("model.safetensors", infos))
    writer.__exit__(ValueError, None, None)
    next((tmp_path / "large" / "hf").glob("*.unfinished")).rename(
        tmp_path / "large" / "hf" / "model.safetensors"
    )
    make_hf(tmp_path / "tiny" / "hf", LLAMA)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "tiny"), str(tmp_path / "large")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    base, after_import, after_export = map(float, output.split())
    # Chunks are 8 MiB here (128 MiB by default): the chunk, the previous one not yet freed, and
    # torch's buffers. Holding the largest tensor alone would be 128 MiB.
    assert after_import - base < 70, output
    assert after_export - base < 70, output
    print(output)
