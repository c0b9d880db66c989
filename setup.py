"""Package metadata of megatron_bp."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_bp/__init__.py").read_text())

assert VERSION is not None, "megatron_bp/__init__.py must define __version__"

setup(
    name="megatron-bp",
    version=VERSION[1],
    description="Block parallelism for block-diffusion language models in Megatron-Core",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_namespace_packages(include=["megatron_bp", "megatron_bp.*"]),
    package_data={"megatron_bp": ["*.md"]},
    install_requires=[
        "megatron-core>=0.19.2,<0.21",
        "torch>=2.6",
        "numpy",
        # megatron-core needs these but does not declare them
        "einops",
        "psutil",
        "pyyaml",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9"],
        # attention/flash4_sums.py calls its kernels one by one, and a beta moves them
        "fa4": ["flash-attn-4==4.0.0b36"],
        "convert": ["gguf", "safetensors", "tokenizers", "tqdm", "transformers>=5.5"],
        "data": ["pyarrow", "tokenizers", "tqdm", "transformers>=5.5"],
        "dev": [
            "gguf",
            "hypothesis",
            "matplotlib",
            "mypy",
            "pyarrow",
            "pytest",
            "pytest-xdist",
            "ruff",
            "safetensors",
            "tensorboard",
            "tokenizers",
            "tqdm",
            "transformers>=5.5",
        ],
    },
)
