"""Describes a model by the numbers that decide its work: layers, heads, widths, experts.

Owns parameter counts, because they follow from the shape alone. Knows no ranks and no batch.
Letters: E hidden size, N query heads, M key/value heads, H head size, F feed-forward size, V
vocabulary. Specified by tests/layout/test_model_shape.py, which compares the counts with models
that Megatron-Core builds.
"""

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True)
class AttentionShape:
    """Softmax attention of one layer.

    Units: `window` tokens, 0 for none. `shared_kv`: one projection is both K and V (Gemma 4 full
    layers). `output_gate`: a sigmoid gate as wide as the query (Qwen3.5). `qk_norm`: a norm of one
    head's size for queries and one for keys.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 0
    shared_kv: bool = False
    output_gate: bool = False
    qk_norm: bool = False
    bias: bool = False

    @property
    def query_width(self) -> int:
        """N * H numbers a row."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """M * H numbers a row: K alone, or V alone."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Numbers a row that the input projection makes."""
        kv = self.kv_width * (1 if self.shared_kv else 2)
        return self.query_width * (2 if self.output_gate else 1) + kv

    def parameters(self, hidden: int) -> int:
        """Weights of the projections and head norms."""
        weights = hidden * (self.qkv_width + self.query_width)
        norms = 2 * self.head_size if self.qk_norm else 0
        return weights + norms + (self.qkv_width if self.bias else 0)


@dataclass(frozen=True)
class DeltaNetShape:
    """A gated delta-rule layer (linear attention with a recurrent state per value head).

    Source: Qwen3.5 configuration in transformers 5.24 (`linear_*`): projections of q, k, v, z and
    of two gates a value head, a depthwise convolution over q, k, v, a norm of one value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int = 4

    @property
    def key_width(self) -> int:
        """Numbers a row of q, and of k."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Numbers a row of v, and of the output gate z."""
        return self.num_value_heads * self.value_size

    def parameters(self, hidden: int) -> int:
        """Weights of projections, convolution, decay, gates and norm."""
        mixed = 2 * self.key_width + self.value_width
        projections = hidden * (mixed + self.value_width + 2 * self.num_value_heads)
        small = mixed * self.kernel + 2 * self.num_value_heads + self.value_size
        return projections + small + self.value_width * hidden


@dataclass(frozen=True)
class ExpertsShape:
    """Mixture of experts: `num_experts` 0 means none. `ffn` is one expert's inner size.

    `router_scales`: the router scales its input and each expert (Gemma 4).
    """

    num_experts: int = 0
    top_k: int = 0
    ffn: int = 0
    router_scales: bool = False


Mixer = AttentionShape | DeltaNetShape


@dataclass(frozen=True)
class LayerKind:
    """One kind of decoder layer: a token mixer and a feed-forward part, both after a norm.

    `ffn` is the dense (or shared-expert) inner size, 0 for none; `gated` feed-forward parts have
    two input matrices (SwiGLU). `num_norms` counts norms of the hidden size.
    """

    mixer: Mixer
    ffn: int
    experts: ExpertsShape = ExpertsShape()
    gated: bool = True
    num_norms: int = 2

    @property
    def is_attention(self) -> bool:
        """Whether keys and values are exchanged for this layer."""
        return isinstance(self.mixer, AttentionShape)

    @property
    def input_widths(self) -> int:
        """Inner-size numbers that the first feed-forward matrix makes for each inner number."""
        return 2 if self.gated else 1

    def expert_parameters(self, hidden: int) -> int:
        """Weights of all experts."""
        experts = self.experts
        return experts.num_experts * (self.input_widths + 1) * hidden * experts.ffn

    def dense_parameters(self, hidden: int) -> int:
        """Weights of everything but the experts."""
        ffn = (self.input_widths + 1) * hidden * self.ffn
        router = hidden * self.experts.num_experts
        if self.experts.router_scales:
            router += hidden + self.experts.num_experts
        return self.mixer.parameters(hidden) + ffn + router + self.num_norms * hidden


@dataclass(frozen=True)
class ModelShape:
    """A decoder: `layers` gives each kind of layer and how many there are, in no order.

    `source` says where the numbers are from, `assumed` lists those that are guesses.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[tuple[LayerKind, int], ...]
    tied: bool = False
    source: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{what}={value} must be at least 1."
            for what, value in (("hidden", self.hidden), ("vocab", self.vocab))
            if value < 1
        ]
        if not self.layers or any(count < 1 for _, count in self.layers):
            problems.append("layers must hold at least one kind, each at least once.")
        if problems:
            raise ValueError(f"model {self.name!r}: " + " ".join(problems))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(count for _, count in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether some layer routes rows to experts."""
        return any(kind.experts.num_experts for kind, _ in self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding table (and of the head, if it has its own)."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts of all layers."""
        return sum(count * kind.expert_parameters(self.hidden) for kind, count in self.layers)

    @property
    def dense_layer_parameters(self) -> int:
        """Weights of all layers without experts' weights."""
        return sum(count * kind.dense_parameters(self.hidden) for kind, count in self.layers)

    @property
    def num_parameters(self) -> int:
        """All weights: layers, experts, embedding, head and the last norm."""
        layers = self.dense_layer_parameters + self.expert_parameters
        return layers + self.embedding_parameters + self.hidden


def dense_model(
    name: str, num_layers: int, hidden: int, ffn: int, attention: AttentionShape, vocab: int
) -> ModelShape:
    """A model of equal dense layers."""
    return ModelShape(name, hidden, vocab, ((LayerKind(attention, ffn), num_layers),))
