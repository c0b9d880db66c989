"""Block parallelism for block-diffusion language models as a Megatron-Core extension.

Importing this package loads no optional dependency and neither torch nor megatron
(tests/test_layering.py). Start at `megatron_bp/DESIGN.md`.
"""

__version__ = "0.1.0"
