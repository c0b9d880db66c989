"""Trains a block-diffusion (or, with `--bdlm-objective none`, a next-token) GPT model with
Megatron.

Takes every flag of Megatron's own pretraining script and those of `megatron_bp.config`; see
`--help` and examples/README.md. Runs on the CPU when there is no CUDA device.
"""

from megatron_bp.mcore.adaptor import pretrain_bdlm

if __name__ == "__main__":  # saving starts processes that import this file again
    pretrain_bdlm()
