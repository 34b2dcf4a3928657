"""A GPT in one file: RMSNorm, rotary embeddings (RoPE), grouped-query attention (GQA), SwiGLU.

A pre-norm decoder without biases, in the layout of Hugging Face's Llama, so that weights convert
without permutation. Sampling is in steady/generate.py, activation checkpointing in
steady/recompute.py, the loss that never holds all logits in steady/loss.py.

Shapes: B batch, T tokens, C n_embd, H n_head, K n_kv_head, D head_dim, V vocab_size.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

from steady.float8 import float8_mlp
from steady.generate import KVCache, LayerCache
from steady.linear import Embedding, Linear, compute_dtype, gradient_sums, side_by_side
from steady.loss import linear_cross_entropy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurator import check_values


@dataclass
class GPTConfig:
    """Everything that defines the architecture. Raises ValueError on values that do not fit."""

    block_size: int = 1024  # the longest context
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # key/value heads; 0: as many as n_head
    n_embd: int = 768
    n_hidden: int = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
    head_dim: int = 0  # width of a head; 0: n_embd / n_head (some pretrained models have others)
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on queries and keys
    tied_embeddings: bool = True  # lm_head shares token_embedding's weight

    def __post_init__(self):
        for field in fields(self):
            kinds = (int, float) if field.type is float else (field.type,)
            if type(value := getattr(self, field.name)) not in kinds:
                raise ValueError(f"{field.name}={value!r} is not of type {field.type.__name__}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or math.ceil(8 * self.n_embd / 3 / 64) * 64
        check_values(self.settings())
        if self.n_embd % self.n_head and not self.head_dim:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"use n_embd={math.ceil(self.n_embd / self.n_head) * self.n_head}"
            )
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            divisors = [k for k in range(1, self.n_head + 1) if self.n_head % k == 0]
            raise ValueError(
                f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: "
                f"use one of {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head dimension {self.head_dim} (n_embd / n_head if not given) is odd, but rotary "
                f"embeddings rotate pairs: use n_embd={self.n_head * (self.head_dim + 1)}"
            )

    @classmethod
    def from_settings(cls, settings: dict[str, Any], vocab_size: int) -> "GPTConfig":
        """The architecture that a script's settings describe, with the vocabulary of its data."""
        names = {field.name for field in fields(cls)} & settings.keys()
        return cls(**{name: settings[name] for name in names} | {"vocab_size": vocab_size})

    def settings(self) -> dict[str, int | float | bool]:
        """All of it as plain values, for checkpoints: `GPTConfig(**settings)`."""
        return asdict(self)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32, returned in x's dtype (Zhang, Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        # the fused kernel computes in float32 by itself, but takes x and weight of one dtype only
        values = x if x.dtype == self.weight.dtype else x.float()
        return F.rms_norm(values, self.weight.shape, self.weight, self.eps).type_as(x)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """What `apply_rope` multiplies by at `positions` (T,): two tables (T, 1, D) in float32.

    For the D / 2 angles a of a position they hold (cos a, cos a) and (-sin a, sin a).
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, None].float() * theta ** (-pairs / head_dim)  # (T, 1, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, T, heads, D) by their position's angles.

    Computed in float32 and cast back, because float32 queries would switch off attention's fast
    kernels (Su et al. 2021, "RoFormer").
    """
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x * cos + swapped * sin).type_as(x)


class Attention(nn.Module):
    """Causal self-attention whose query heads share n_kv_head key/value heads (Ainslie 2023)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.cudnn = False
        self.q_proj = Linear(config.n_embd, self.n_head * self.head_dim)
        self.k_proj = Linear(config.n_embd, self.n_kv_head * self.head_dim)
        self.v_proj = Linear(config.n_embd, self.n_kv_head * self.head_dim)
        self.o_proj = Linear(self.n_head * self.head_dim, config.n_embd)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        B, T, _ = x.shape
        q, k, v = side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.view(B, T, -1, self.head_dim) for y in (q, k, v))  # (B, T, H or K, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        y = self.attend(q, k, v) if cache is None else cache.attend(q, k, v)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.cudnn:
            # The operator itself, since code from torch.compile's cache ignores the context manager
            # sdpa_kernel. It groups heads by itself. After v: attn_bias, compute_log_sumexp,
            # dropout_p, is_causal.
            attention = torch.ops.aten._scaled_dot_product_cudnn_attention
            return attention(q, k, v, None, True, dropout, True)[0]
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= 512:
            # in bfloat16 the CPU's kernel takes up to five times as long for contexts so short
            with torch.autocast("cpu", enabled=False):
                return self.attend(q.float(), k.float(), v.float()).type_as(v)
        gqa = self.n_kv_head != self.n_head
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa
        )


class MLP(nn.Module):
    """SwiGLU: a SiLU-gated linear unit (Shazeer 2020, "GLU variants improve transformer")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.n_hidden)
        self.up_proj = Linear(config.n_embd, config.n_hidden)
        self.down_proj = Linear(config.n_hidden, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        if self.down_proj.in_float8:  # the same function in FP8: change both together
            return float8_mlp(x, self.gate_proj, self.up_proj, self.down_proj)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # from_pretrained, since Embedding(...) would draw values here that init_weights draws again
        embedding = torch.empty(config.vocab_size, config.n_embd)
        self.token_embedding = Embedding.from_pretrained(embedding, freeze=False)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tied_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        if not embedding.is_meta:  # the meta device holds no values
            self.init_weights()
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.compute_rope_tables()

    def compute_rope_tables(self) -> None:
        """The tables for every position; computed in the forward pass, they would be recomputed in
        every layer's fused kernels, which makes those four times slower."""
        config = self.config
        positions = torch.arange(config.block_size, device=self.token_embedding.weight.device)
        self.rope_cos, self.rope_sin = rope_tables(positions, config.head_dim, config.rope_theta)

    def _apply(self, function, recurse=True):
        """What `.to()` and `.cuda()` call; computes the tables anew: bfloat16 would round them."""
        super()._apply(function, recurse)
        self.compute_rope_tables()
        return self

    def init_weights(self) -> None:
        """Normal with standard deviation 0.02, as GPT-2; what adds to the residual stream starts
        smaller. Each matrix has a generator of its own, so that several are drawn at a time."""

        def draw(name: str, weight: Tensor, seed: int) -> None:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if into_residual else 0.02
            generator = torch.Generator(weight.device).manual_seed(seed)
            nn.init.normal_(weight, std=std, generator=generator)

        matrices = {name: p for name, p in self.named_parameters() if p.dim() == 2}
        seeds = torch.randint(2**63 - 1, (len(matrices),), device="cpu").tolist()
        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, matrices.keys(), matrices.values(), seeds))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Loss if `targets` are given, else logits.

        Args:
            tokens: (B, T) int64, T at most block_size.
            targets: (B, T) int64; positions of -1 do not count.
            cache: keys and values of the tokens before these, to which these are added.

        Returns the mean loss (scalar, float32), or logits (B, T, V); with a cache only the last
        position's, (B, 1, V).
        """
        T = tokens.shape[1]
        positions = slice(T) if cache is None else cache.advance(T)
        rope = self.rope_cos[positions], self.rope_sin[positions]  # (T, 1, D) each
        x = self.run_blocks(self.embed(tokens), rope, cache)
        return self.head(x if cache is None else x[:, -1:], targets)

    # Three parts, because compile_model in steady/compiling.py may compile each on its own.

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to the residual stream (B, T, C)."""
        x = self.token_embedding(tokens)
        if compute_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too: half the memory traffic between matmuls
        return self.dropout(x)

    def run_blocks(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None = None
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, rope, None if cache is None else cache.layer(i))
        return x

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        x = self.final_norm(x)
        if targets is None:
            return self.lm_head(x)
        weight, sums = self.lm_head.weight, gradient_sums([self.lm_head])
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), sums=sums)

    def use_cudnn_attention(self, use: bool) -> None:
        """Whether training and evaluation call cuDNN's attention; decide before compiling."""
        for block in self.blocks:
            block.attention.cudnn = use

    def num_params(self) -> int:
        """Number of parameters, a tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """FLOPs of a training step per token: 6 N + 12 L H D T (PaLM's appendix B).

        As usual it leaves out embedding look-ups and takes attention as if it were not causal.
        """
        config = self.config
        n = self.num_params() - (
            0 if config.tied_embeddings else self.token_embedding.weight.numel()
        )
        attention = config.n_layer * config.n_head * config.head_dim * config.block_size
        return 6 * n + 12 * attention

    def summary(self, data_vocab: int) -> str:
        """For the beginning of a run's log."""
        size = self.config.vocab_size
        padded = f", padded to {size}" if size > data_vocab else ""
        return f"model {self.num_params():,} parameters, vocabulary {data_vocab}{padded}"
