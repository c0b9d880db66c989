"""The only importer of megatron: block parallelism as a Megatron-Core extension.

Everything here may be read as "how Megatron is told"; what is told lives in the layers below.
Importing this package loads no megatron; `cpu.enable_cpu` must be able to run first.
"""
