"""A GPT in one file: RMSNorm, rotary embeddings (RoPE), grouped-query attention (GQA), SwiGLU.

A pre-norm decoder without biases. Its layout is that of Hugging Face's Llama (with qk_norm:
Qwen3), so weights convert without permutation. It is plain torch: change any line. Sampling is in
steady/generate.py. The loss (steady/loss.py) computes about 2**28 logits at a time.

Shapes: B = batch size, T = tokens, C = n_embd, H = n_head, K = n_kv_head, D = head_dim,
V = vocab_size.
"""

import math
import reprlib
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steady import UserError
from steady.initial import InitialWeights
from steady.loss import LinearCrossEntropy, compute_dtype


@dataclass
class GPTConfig:
    """Everything that defines the architecture. Raises UserError for invalid values."""

    block_size: int = 1024  # maximum context length
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # key/value heads; 0: n_head
    n_embd: int = 768
    n_hidden: int = 0  # MLP width; 0: 8/3 n_embd, rounded up to a multiple of 64
    head_dim: int = 0  # head width; 0: n_embd / n_head (some pretrained models differ)
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on queries and keys
    tied_embeddings: bool = True  # lm_head shares token_embedding's weight

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and type(value) is int:
                continue
            if field.type in (int, float, bool) and type(value) is not field.type:
                kind = field.type.__name__
                raise UserError(f"{field.name}={reprlib.repr(value)} is not of type {kind}")
        sizes = {"block_size": (1, 2**31 - 1), "vocab_size": (1, 2**32), "n_layer": (1, 10**4),
                 "n_head": (1, 10**6), "n_kv_head": (0, 10**6), "n_embd": (1, 10**6),
                 "n_hidden": (0, 10**6), "head_dim": (0, 10**6)}  # fmt: skip
        for name, (least, most) in sizes.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise UserError(f"{name}={value} must be at least {least} and at most {most}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or math.ceil(8 * self.n_embd / 3 / 64) * 64
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"rope_theta={self.rope_theta} must be above 0 and finite")
        if not 0 <= self.norm_eps < math.inf:
            raise UserError(f"norm_eps={self.norm_eps} must be at least 0 and finite")
        if self.n_embd % self.n_head and not self.head_dim:
            raise UserError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"use n_embd={math.ceil(self.n_embd / self.n_head / 2) * self.n_head * 2}"
            )
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            divisors = [k for k in range(1, self.n_head + 1) if self.n_head % k == 0]
            raise UserError(
                f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: "
                f"use one of {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:  # RoPE rotates pairs
            head_dim, n_embd = self.head_dim, self.n_head * (self.head_dim + 1)
            raise UserError(f"{head_dim=} (by default n_embd / n_head) is odd: try {n_embd=}")

    @classmethod
    def from_settings(cls, settings: dict[str, Any], vocab_size: int) -> "GPTConfig":
        """Build the config from a script's settings and the vocabulary size of its data."""
        names = {field.name for field in fields(cls)} & settings.keys()
        return cls(**{name: settings[name] for name in names} | {"vocab_size": vocab_size})

    def settings(self) -> dict[str, Any]:
        """All fields as plain values for checkpoints; GPTConfig(**settings) restores them."""
        settings = {f.name: asdict(self)[f.name] for f in fields(self) if f.init}
        again = asdict(type(self)(**settings))
        if changed := [n for n, value in settings.items() if repr(again[n]) != repr(value)]:
            raise UserError(f"GPTConfig.__post_init__ changes its own result: {', '.join(changed)}")
        return settings


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight in float32, returned in x's dtype (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        # the fused kernel computes in float32 but needs x and weight in the same dtype
        values = x if x.dtype == self.weight.dtype else x.float()
        return super().forward(values).type_as(x)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `apply_rope` at `positions` (T,): two float32 tables (T, 1, D).

    A position's rows are (cos t, cos t) and (-sin t, sin t) for the vector t of its D / 2 angles.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, None].float() * theta ** (-pairs / head_dim)  # (T, 1, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, T, heads, D) by the angles of their position.

    RoFormer (Su et al. 2021). Computes in float32 and casts back, because the fast attention
    kernels need x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x * cos + swapped * sin).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; query heads share key/value heads (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.q_proj = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_head * self.head_dim, config.n_embd, bias=False)
        for layer in (self.q_proj, self.k_proj, self.v_proj):
            layer.head_dim = self.head_dim  # Muon orthogonalises each head's update separately
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any = None) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim)  # (B, T, K, D)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim)  # (B, T, K, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        if cache is not None:  # sampling: also attend to the cached tokens
            y = cache(q, k, v)  # (B, H, T, D)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v,
                is_causal=True,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=self.n_kv_head != self.n_head,
            )  # fmt: skip
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_dim))


class MLP(nn.Module):
    """SwiGLU: a SiLU-gated linear unit (Shazeer 2020, "GLU variants improve transformer")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The whole model. Build it inside `with torch.device(...)` to initialise it on that device."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.initial = InitialWeights()
        with self.initial.new_layers():  # init_weights leaves layers made elsewhere as they are
            self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.final_norm = RMSNorm(config.n_embd, config.norm_eps)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            self.cross_entropy = LinearCrossEntropy()  # F.cross_entropy of lm_head(x), in chunks
            if config.tied_embeddings:
                self.lm_head.weight = self.token_embedding.weight
            for name in ("rope_cos", "rope_sin"):
                self.register_buffer(name, torch.empty(0), persistent=False)
            self.compute_rope_tables()
        self.init_weights()

    def init_weights(self) -> None:
        """Draw linear layers and embeddings from a normal distribution. Its std is 0.02, as in
        GPT-2, but smaller for layers named o_proj and down_proj, which add to the residual stream.
        Biases, other parameters, and weights that you set yourself keep their values."""
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith(("o_proj", "down_proj")) else 0.02
                self.initial.draw(name, layer, std)

    def compute_rope_tables(self) -> None:
        """Precompute the tables for every position. If forward computed them, the compiler
        would fuse them into every layer's kernels, which would then be four times slower."""
        config = self.config
        positions = torch.arange(config.block_size, device=self.token_embedding.weight.device)
        self.rope_cos, self.rope_sin = rope_tables(positions, config.head_dim, config.rope_theta)

    def _apply(self, function, recurse=True):
        """Called by `.to()`, `.cuda()`, `.bfloat16()` and so on; keeps the tables in float32."""
        tables = self.rope_cos, self.rope_sin
        super()._apply(function, recurse)
        if tables[0].is_meta:
            self.compute_rope_tables()
        elif not isinstance(self.rope_cos, nn.Parameter):  # you may train them
            self.rope_cos, self.rope_sin = (table.to(self.rope_cos.device) for table in tables)
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Any = None) -> Tensor:
        """Return the loss if `targets` are given, else the logits.

        Args:
            tokens: (B, T) int64, T at most block_size.
            targets: (B, T) int64; negative ones (-1, -100) are ignored.
            cache: a KVCache (steady/generate.py) of the earlier tokens; `tokens` are appended.

        Returns the mean loss (scalar, float32) or the logits (B, T, V). With a cache it returns
        only the last position's logits (B, 1, V).
        """
        T = tokens.shape[1]
        assert T <= self.config.block_size, f"{T} tokens, but {self.config.block_size=}"
        positions = slice(T) if cache is None else cache.reserve(T)
        rope = self.rope_cos[positions], self.rope_sin[positions]  # (T, 1, D) each
        x = self.token_embedding(tokens)  # (B, T, C)
        if compute_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # bfloat16 residual stream: halves memory traffic between matmuls
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, None if cache is None else cache.layer(i))  # (B, T, C)
        x = self.final_norm(x)
        if targets is not None:
            x = x.flatten(0, 1)  # (B * T, C); targets stay (B, T), for second_target
            return self.cross_entropy(x, self.lm_head, targets)
        return self.lm_head(x if cache is None else x[:, -1:])

    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """FLOPs of a training step per token: 6 N + 12 n_layer H D block_size with N parameters
        (PaLM's appendix B). By convention, embedding lookups count as zero, and the causal mask is
        ignored."""
        config = self.config
        n = self.num_params()
        if not config.tied_embeddings:
            n -= self.token_embedding.weight.numel()
        attention = config.n_layer * config.n_head * config.head_dim * config.block_size
        return 6 * n + 12 * attention
