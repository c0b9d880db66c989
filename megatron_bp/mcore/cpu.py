"""Runs Megatron-Core and megatron.training on a machine without CUDA, by `enable_cpu()`.

Megatron spells "the device I run on" as CUDA: `torch.cuda.current_device()`, `device="cuda"`,
`.cuda()`. This file maps those spellings to the CPU. It owns nothing numeric: no kernel, formula,
dtype or collective is replaced, so what runs is Megatron's own code on another device. Each patch
carries its reason. It must not know block parallelism. Specified by tests/mcore/test_cpu.py.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_bp.mcore.cpu_saving import use_cpu_writer

CPU = torch.device("cpu")

# Flags of Megatron whose default needs a CUDA kernel or NCCL. Used as parser defaults only, so an
# explicit flag still wins (and then Megatron says itself what is missing).
CPU_FLAG_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        "distributed_backend": "gloo",
        "transformer_impl": "local",  # no Transformer Engine
        "gradient_accumulation_fusion": False,  # an apex CUDA kernel
        "masked_softmax_fusion": False,  # a CUDA kernel
        "no_persist_layer_norm": True,  # an apex CUDA kernel
        "apply_rope_fusion": False,  # a Transformer Engine kernel
    }
)


class CudaMeansCpu(TorchFunctionMode):
    """Rewrites every torch call that names a CUDA device so that it names the CPU.

    One mode instead of a patch for each factory function; torch's own `set_default_device` works
    so too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:  # page-locked memory exists for CUDA copies only
            return args[0]
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to:
            args = tuple(CPU if _names_cuda(arg) else arg for arg in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # The optimizers accept a parameter only if its type reads "torch.cuda.FloatTensor".
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def enable_cpu() -> None:
    """Makes this process able to run Megatron on the CPU; a second call changes nothing.

    Call it before megatron is used (importing megatron first is fine).
    Raises: RuntimeError when CUDA is present: there Megatron runs as it is.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            f"enable_cpu() was called on a machine with {torch.cuda.device_count()} CUDA "
            "device(s). It "
            "must run where there is none, since it would silently move the work off them. Do not "
            "call "
            'it, or hide the devices with CUDA_VISIBLE_DEVICES="".'
        )
    if getattr(torch.cuda.current_device, "_megatron_bp_cpu", False):
        return
    # Fused element-wise functions are torch.compile'd at import; on a CPU that costs minutes of C++
    # compilation in every process. The stance runs the very same Python functions eagerly.
    torch.compiler.set_stance("force_eager")
    CudaMeansCpu().__enter__()
    patch_torch_cuda()
    _patch_random()
    _patch_startup()
    mark_torch_norms()
    _patch_expert_splits()
    _patch_distributed_optimizer()
    use_cpu_writer()


def use_shipped_dataset_helpers() -> None:
    """Lets Megatron use the compiled dataset index builder that its wheel ships.

    At start Megatron runs `make` in its dataset folder and exits if that fails. The PyPI wheel has
    the compiled module and no Makefile, on every device. Where the module is absent nothing is
    changed.
    """
    from megatron.core.datasets import utils

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return
    utils.compile_helpers = lambda: None


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


class _InOrderStream:
    """A CPU works in order, so every wait of a stream or an event is already over."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = wait = synchronize = record = _done

    def record_event(self, *args: Any) -> _InOrderStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def patch_torch_cuda() -> None:
    """Makes torch.cuda speak of one device, the CPU, which works in order and holds no memory."""
    cuda: Any = torch.cuda

    def current_device() -> torch.device:
        return CPU

    current_device._megatron_bp_cpu = True  # type: ignore[attr-defined]
    cuda.current_device = current_device
    # Process groups are built only where a device exists; one "device" a process.
    cuda.device_count = lambda: 1
    # Read for the compute capability: from 10 on Megatron stops asking for
    # CUDA_DEVICE_MAX_CONNECTIONS=1, a rule about hardware queues that a CPU does not have.
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        major=10, minor=0, name="cpu", total_memory=0, multi_processor_count=1
    )
    cuda.get_device_capability = lambda device=None: (0, 0)  # no CUDA kernel can be chosen
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
    ):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.Stream = cuda.Event = _InOrderStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _InOrderStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    # "The device's generator" is the CPU's.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: (
        torch.set_rng_state(state)
    )
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.manual_seed(seed)


def _patch_random() -> None:
    # The tensor-parallel generator states are swapped through torch's C bindings of CUDA.
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )


def _patch_startup() -> None:
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    use_shipped_dataset_helpers()
    # Megatron's own switch against its assertion that CUDA is available.
    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    # The warm-up of the fused functions draws random tensors whose size depends on the parallel
    # layout. On CUDA they come from the device's default generator; here that would be the
    # generator which initialises the weights, so every layout would start from other weights.
    training.set_jit_fusion_options = lambda **kwargs: None


def mark_torch_norms() -> None:
    """Lets torch's norms run under sequence parallelism, on any device; twice changes nothing."""
    # torch's norms have no sequence-parallel mark, so the local layer spec refuses sequence
    # parallelism. The norm itself works on any slice of tokens; all that is missing is the mark by
    # which finalize_model_grads sums the weight's gradient over the tensor-parallel ranks.
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = types.SimpleNamespace(**{**vars(config), "sequence_parallel": False})
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = build_marked


def _patch_expert_splits() -> None:
    # all_to_all_single takes its split sizes as Python numbers; Megatron converts them only while
    # it copies them from a CUDA device.
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


def _patch_distributed_optimizer() -> None:
    # Without apex and Transformer Engine the inner optimizer is torch's Adam, which keeps a step
    # count for each parameter. The distributed optimizer saves one count and stumbles three times
    # over it.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict_with_state(self: Any) -> Any:
        # A checkpoint is loaded before the first step, when Adam has no state to read a count from.
        # Give the state its shape; loading overwrites it.
        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam) and not inner.state:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    @torch.no_grad()  # fp32 parameters are their own main parameters: loading writes into leaves
    def load_with_own_steps(self: Any, saved: Any) -> None:
        load_state_dict(self, saved)
        for state in self.optimizer.state.values():
            if "step" in state:  # one tensor in all states would count every parameter's step
                state["step"] = state["step"].clone()

    def set_states_without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        # No format stores a count for each parameter: one lacks the entry, one brings back the
        # count from before loading. An entry that is no tensor is skipped.
        set_states(self, parameter, {**tensors, "step": "as loaded"})

    DistributedOptimizer.state_dict = state_dict_with_state
    DistributedOptimizer.load_state_dict = load_with_own_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
