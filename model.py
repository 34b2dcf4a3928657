"""A GPT in one file: RMSNorm, rotary embeddings (RoPE), grouped-query attention (GQA), SwiGLU.

Pre-norm decoder without biases, in the layout of Hugging Face's Llama, so weights convert without
permutation. `GPT.forward` gives the loss without ever holding all logits (see loss.py);
`GPT.generate` decodes with a KV cache of static shape.

Shapes: B batch, T tokens, C n_embd, H n_head, K n_kv_head, D head_dim, V vocab_size,
S length of the KV cache.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

from linear import Linear, compute_dtype, linear
from loss import linear_cross_entropy


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
    head_dim: int = 0  # width of a head; 0: n_embd / n_head
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on queries and keys
    tied_embeddings: bool = True  # lm_head shares token_embedding's weight

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or math.ceil(8 * self.n_embd / 3 / 64) * 64
        for name in (
            "block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0 and finite")
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
                f"head dimension n_embd / n_head = {self.head_dim} is odd, but rotary embeddings "
                f"turn pairs: use n_embd={self.n_head * (self.head_dim + 1)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")

    @classmethod
    def from_settings(cls, settings: dict[str, Any], vocab_size: int) -> "GPTConfig":
        """The architecture that a script's settings describe, with the vocabulary of its data."""
        names = {field.name for field in fields(cls)} & settings.keys()
        return cls(**{name: settings[name] for name in names} | {"vocab_size": vocab_size})


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
    """Cosines and sines of the angles at `positions` (T,), each (T, 1, D / 2), in float32."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, None].float() * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D / 2) of x (B, T, heads, D) by their positions' angles.

    The result has x's dtype: promoted to float32 it would slow attention down or disable its fast
    kernels (Su et al. 2021, "RoFormer").
    """
    first, second = x.float().chunk(2, dim=-1)  # (B, T, heads, D / 2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


class KVCache:
    """Keys and values of the tokens decoded so far, in static shapes, the position on the device.

    From one decoding step to the next only the contents of tensors change, so a step can be
    compiled and captured in a CUDA graph.
    """

    def __init__(self, config: GPTConfig, batch_size: int, length: int, device, dtype: torch.dtype):
        length = -(-length // 16) * 16  # attention would copy a mask of any other width
        shape = (config.n_layer, batch_size, config.n_kv_head, length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.position = torch.zeros((), device=device, dtype=torch.int64)  # tokens held
        self.group = config.n_head // config.n_kv_head

    def advance(self, T: int) -> None:
        """Take T more tokens: `positions` (T,) is where they go, `mask` (group * T, S) is 0 where
        they attend to and -inf elsewhere, repeated for every query head of a key/value head."""
        device, length = self.keys.device, self.keys.shape[3]
        self.positions = self.position + torch.arange(T, device=device)
        visible = torch.arange(length, device=device) <= self.positions[:, None]  # (T, S)
        mask = torch.where(visible, 0.0, -math.inf).to(self.keys.dtype)
        self.mask = mask.repeat(self.group, 1)
        self.position += T


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
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        B, T, C = x.shape
        if cache is None:
            # One product for queries and keys is faster than two. Values apart: as a view of a
            # common product they would keep all of it for backward.
            qk_weight = torch.cat((self.q_proj.weight, self.k_proj.weight))
            qk = linear(x, qk_weight).view(B, T, self.n_head + self.n_kv_head, self.head_dim)
            q, k = qk.split((self.n_head, self.n_kv_head), dim=2)  # (B, T, H or K, D)
        else:  # for a single token, to copy the weights takes longer than to multiply them
            q = self.q_proj(x).view(B, T, self.n_head, self.head_dim)
            k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        else:  # for a single token, what counts is the number of kernels
            qk = apply_rope(torch.cat((q, k), dim=2), *rope)
            q, k = qk.split((self.n_head, self.n_kv_head), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            y = self.attend_cache(q, k, v, cache, layer)
        elif self.cudnn:
            # Called by name: choosing it by a context manager has no effect on code compiled
            # before, and inside compiled code keeps that out of torch's cache.
            y = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, dropout, True
            )[0]  # (B, H, T, D)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout,
                enable_gqa=self.n_kv_head != self.n_head,
            )  # (B, H, T, D)  # fmt: skip
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_dim))

    def attend_cache(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Store k and v in the cache, attend to all that it holds; returns (B, H, T, D)."""
        B, H, T, D = q.shape
        keys = cache.keys[layer].index_copy_(2, cache.positions, k)  # (B, K, S, D)
        values = cache.values[layer].index_copy_(2, cache.positions, v)
        # the query heads of a key/value head become rows of one product
        rows = q.reshape(B, self.n_kv_head, cache.group * T, D)
        y = F.scaled_dot_product_attention(rows, keys, values, attn_mask=cache.mask)
        return y.reshape(B, H, T, D)


class MLP(nn.Module):
    """SwiGLU: a SiLU-gated linear unit (Shazeer 2020, "GLU variants improve transformer")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.n_hidden)
        self.up_proj = Linear(config.n_embd, config.n_hidden)
        self.down_proj = Linear(config.n_hidden, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    checkpointing = "none"  # one of CHECKPOINTING: what backward recomputes, to save memory

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], *cached) -> Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(x, rope, *cached)
        if self.checkpointing == "block" and not self.dropout.p:
            return checkpoint.checkpoint(self.compute, x, rope, use_reentrant=False)
        # With dropout, block does the same: compiled, attention that is recomputed would draw from
        # a generator that torch.manual_seed does not reach.
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, keep_attention)
        return checkpoint.checkpoint(
            self.compute, x, rope, use_reentrant=False, context_fn=contexts
        )

    def compute(self, x: Tensor, rope: tuple[Tensor, Tensor], *cached) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, *cached))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


CHECKPOINTING = ("none", "selective", "block")
KEPT = (  # attention's kernels; and since those draw once only, all else that draws
    torch.ops.aten.native_dropout.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def keep_attention(context, op, *args, **kwargs) -> checkpoint.CheckpointPolicy:
    """Selective activation checkpointing: recompute all of a block but its attention kernel
    and, on GPUs, dropout."""
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op in KEPT else policy.PREFER_RECOMPUTE


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tied_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.apply(self.init_weights)
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
        """What `.to()` and `.cuda()` call: the tables go along, but stay in float32."""
        super()._apply(function, recurse)
        self.compute_rope_tables()
        return self

    def init_weights(self, module: nn.Module) -> None:
        """Normal with standard deviation 0.02, as GPT-2."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):  # the two that write to the residual stream start smaller
            for projection in (module.attention.o_proj, module.mlp.down_proj):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Loss if `targets` are given, else logits.

        Args:
            tokens: (B, T) int64, T at most block_size.
            targets: (B, T) int64; positions of -1 do not count.
            cache: holds the tokens before these, and takes these up.

        Returns the mean loss (scalar, float32), or logits (B, T, V); with a cache only the last
        position's, (B, 1, V).
        """
        T = tokens.shape[1]
        if cache is None:
            rope = self.rope_cos[:T], self.rope_sin[:T]
        else:
            cache.advance(T)
            rope = self.rope_cos[cache.positions], self.rope_sin[cache.positions]
        x = self.token_embedding(tokens)  # (B, T, C)
        if compute_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too: half the memory traffic between matmuls
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope) if cache is None else block(x, rope, cache, layer)
        x = self.final_norm(x)
        if targets is not None:
            return linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        if cache is not None:
            x = x[:, -1:]
        return self.lm_head(x)

    def use_activation_checkpointing(self, kind: str) -> None:
        """Which of CHECKPOINTING to do; decide before compiling."""
        for block in self.blocks:
            block.checkpointing = kind

    def use_cudnn_attention(self, use: bool) -> None:
        """Whether training and evaluation call cuDNN's attention; decide before compiling."""
        for block in self.blocks:
            block.attention.cudnn = use

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        vocab_size: int | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[Tensor], None] | None = None,
        cuda_graph: bool = False,
    ) -> Tensor:
        """Continue every row of `tokens` (B, T), each row drawing on its own.

        Args:
            temperature: 0 takes the likeliest token. top_k, top_p: see `draw`.
            vocab_size: ids from here on are never drawn (the padding of a vocabulary).
            on_token: called with every new column (B,) as it is drawn.
            cuda_graph: record a decoding step and replay it, for speed on a GPU.

        Returns (B, T + max_new_tokens). Of a prompt longer than block_size the model sees the end;
        when the context is full, it goes on with the newer half of it.
        """
        size = self.config.block_size
        length = min(size, tokens.shape[1] + max_new_tokens)
        dtype = compute_dtype(self.lm_head.weight)
        cache = KVCache(self.config, tokens.shape[0], length, tokens.device, dtype)
        step, replay = partial(self, cache=cache), None
        held, context = 0, tokens[:, -size:]
        for _ in range(max_new_tokens):
            if held + context.shape[1] > size:
                cache.position.zero_()
                held, context = 0, tokens[:, -(size // 2 or 1) :]
            single = context.shape[1] == 1
            logits = replay(context) if single and replay else step(context)
            if single and cuda_graph and not replay:
                replay = as_cuda_graph(step, context)
            held += context.shape[1]
            logits = logits[:, -1, :vocab_size].float()  # (B, V)
            new = draw(logits, temperature, top_k, top_p, generator)  # (B,)
            context = new[:, None]
            tokens = torch.cat((tokens, context), dim=1)
            if on_token is not None:
                on_token(new)
        return tokens

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

    def settings(self) -> dict[str, int | float | bool]:
        """The configuration as plain values, for checkpoints: `GPT(GPTConfig(**settings))`."""
        return asdict(self.config)


def as_cuda_graph(
    function: Callable[[Tensor], Tensor], example: Tensor
) -> Callable[[Tensor], Tensor]:
    """`function` for tensors like `example`, recorded once: hundreds of kernels in one launch.

    It must have run before, since recording runs nothing. Every call returns the same tensor.
    """
    graph, static = torch.cuda.CUDAGraph(), example.clone()
    with torch.cuda.graph(graph):
        out = function(static)

    def replay(tensor: Tensor) -> Tensor:
        static.copy_(tensor)
        graph.replay()
        return out

    return replay


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of `logits` (B, V); returns (B,).

    temperature 0 (below 1e-6, where logits might overflow) is greedy; top_k 0 and top_p 1 keep
    every token; otherwise only the k likeliest, then the fewest whose probabilities reach top_p
    (Holtzman et al. 2020).
    """
    if temperature < 1e-6:
        return logits.argmax(dim=-1)
    logits = (logits / temperature).nan_to_num()  # drawing from NaN or infinity ends a process
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        beyond = probs.cumsum(dim=-1) - probs >= top_p  # never the first
        logits = logits.masked_fill(beyond.gather(1, order.argsort(dim=-1)), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
