"""Sampling: a static-shape KV cache, drawing the next token, and decoding in a CUDA graph.

Shapes: B batch, T new tokens, H query heads, K key/value heads, D head dimension, S cache length,
V vocabulary size.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, GPTConfig
from steady import UserError, hardware
from steady.dataloader import DataSet, TokenFile, eval_batches
from steady.distributed import reshard
from steady.loss import compute_dtype
from steady.tokenizer import from_meta


class KVCache:
    """Keys and values of the tokens decoded so far, for all layers.

    Keys, values and the position are updated in place on the device, so a decoding step can be
    recorded as a CUDA graph.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        def size(name: str, default: int = 0) -> int:
            value = getattr(config, name, default)  # an edited model may lack it, or have a tuple
            return value if isinstance(value, int) else 0

        heads, layers = size("n_head"), size("n_layer")  # without heads there is no attention
        key_heads = size("n_kv_head", heads)
        head_dim = size("head_dim") or size("n_embd") // max(1, heads)
        length = math.ceil(length / 16) * 16  # attention copies masks of other widths
        shape = (batch_size, key_heads, length, head_dim)
        self.position = torch.zeros((), device=device, dtype=torch.int64)  # tokens held
        self.slots = torch.arange(length, device=device)
        self.heads_per_key = heads // max(1, key_heads)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def reserve(self, T: int) -> Tensor:
        """Reserve the next T positions and make their mask. Returns the positions (T,)."""
        self.positions = self.position + self.slots[:T]
        visible = self.slots <= self.positions[:, None]  # (T, S)
        mask = torch.where(visible, 0.0, -math.inf).to(self.keys[0].dtype)
        self.mask = mask.repeat(self.heads_per_key, 1)  # a row for each query head of a key head
        self.position += T
        return self.positions

    def layer(self, i: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Layer i's attention, for the positions from `reserve`."""
        return partial(self.attend, self.keys[i], self.values[i])

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values (B, K, T, D) of the new tokens in a layer's `keys` and `values`
        (B, K, S, D), then let their queries (B, H, T, D) attend to everything in them. Returns (B,
        H, T, D)."""
        B, H, T, D = q.shape
        keys.index_copy_(2, self.positions, k)
        values.index_copy_(2, self.positions, v)
        # the query heads that share a key head become rows of one matmul
        rows = q.reshape(B, k.shape[1], self.heads_per_key * T, D)
        y = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self.mask)
        return y.reshape(B, H, T, D)


def require_room(
    config: GPTConfig, n: int, prompt: int, new: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises UserError if `device` cannot hold n samples of prompt + new tokens. Allocates
    nothing."""
    length = min(config.block_size, prompt + new)
    cache = KVCache(config, 1, length, torch.device("meta"), dtype)  # without memory
    cached = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    tokens, logits = 2 * 8 * (prompt + new), 3 * 4 * config.vocab_size  # with copies
    needed = n * (cached + tokens + logits) / 2**30
    machine_gib = hardware.available_memory_gib(device)
    if needed > machine_gib:
        raise UserError(
            f"num_samples={n} with max_new_tokens={new} needs {needed:.1f} GiB, but {device} has "
            f"{machine_gib:.1f} GiB: reduce one of them"
        )


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], bool | None] | None = None,
    cuda_graph: bool = False,
) -> Tensor:
    """Continue every row of `tokens` (B, T) independently.

    Args:
        temperature, top_k, top_p: see `draw`.
        vocab_size: ids from this one on are never drawn (the padding of the vocabulary).
        on_token: called with every new column (B,) as it is drawn; return True to stop.
        cuda_graph: record a decoding step and replay it, for speed on a GPU.

    Returns (B, T + max_new_tokens), or fewer columns if on_token stops it. The model sees the last
    block_size tokens of a longer prompt. When the context is full, it keeps the newer half.
    """
    size = model.config.block_size
    ids = model.config.vocab_size  # a tokenizer may have more
    cache = None
    length = min(size, tokens.shape[1] + max_new_tokens)
    if cache_is_exact(model, min(vocab_size or ids, ids), length):
        dtype = compute_dtype(next(model.parameters()))
        cache = KVCache(model.config, tokens.shape[0], length, tokens.device, dtype)
    else:
        print("note: a KV cache changes this model's output: sampling without one, which is slow",
              file=sys.stderr)  # fmt: skip
    step = partial(logits_of, model) if cache is None else partial(logits_of, model, cache=cache)
    decode = None  # the recorded step for a single token
    held, context = 0, tokens[:, -size:]
    for _ in range(max_new_tokens):
        if cache is None:
            context = tokens[:, -size:]  # recompute all of them
        elif held + context.shape[1] > size:
            cache.position.zero_()
            held, context = 0, tokens[:, -max(1, size // 2) :]
        single = cache is not None and context.shape[1] == 1
        logits = decode(context) if decode and single else step(context)
        if cuda_graph and single and not decode:
            decode = as_cuda_graph(step, context)
        held += context.shape[1]
        logits = logits[:, -1, :vocab_size].float()  # (B, V)
        new = draw(logits, temperature, top_k, top_p, generator)  # (B,)
        context = new[:, None]
        tokens = torch.cat((tokens, context), dim=1)
        if on_token is not None and on_token(new):
            break
    return tokens


def logits_of(model: GPT, tokens: Tensor, **more: Any) -> Tensor:
    """The model's logits (B, T, V). An edited model may return a tuple, such as nanoGPT's
    (logits, loss), or an object with `logits`, as transformers' models do."""
    found = model(tokens, **more)
    found = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    parts = found if isinstance(found, tuple | list) else [found]
    parts = [part for part in parts if isinstance(part, Tensor) and part.dim() == 3]
    if not parts:
        raise UserError("sampling needs logits (B, T, V): alone, in a tuple, or under that name")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return min(parts, key=lambda part: part.shape[-1] != size)  # the first of this size


def cache_is_exact(model: GPT, vocab_size: int, length: int) -> bool:
    """Whether the model's last logits for `length` tokens (at most 2,048, to save memory), and for
    some short sequences, are the same with a KV cache. They differ if attention was edited but
    KVCache was not, or if other layers look at other positions."""
    weight, longest, short = next(model.parameters()), min(length, 2048), min(length, 8)
    if "cache" not in inspect.signature(model.forward).parameters:
        return False
    if length < 2:
        return True
    dtype = compute_dtype(weight)  # with autocast and fsdp it differs from the weights' dtype
    # rounding alone causes up to 0.026 in bfloat16 and 0.0025 in TF32 (124M, H100)
    tolerance = 0.05 if dtype.itemsize < 4 else 0.01 if weight.is_cuda else 1e-3
    # several short ones, because an edit may change some positions only
    for B, T, steps in ((1, longest, 1), (8, short, short // 2)):
        tokens = probe_tokens(B * T, vocab_size).view(B, T).to(weight.device)
        cache = KVCache(model.config, B, T, weight.device, dtype)
        try:
            model(tokens[:, : T - steps], cache=cache)
            for end in range(T - steps + 1, T + 1):
                cached = logits_of(model, tokens[:, end - 1 : end], cache=cache)[:, -1]
                whole = logits_of(model, tokens[:, :end])[:, -1]  # (B, V)
                if not all(map(same_logits, cached, whole, [tolerance] * B)):
                    return False
        except torch.OutOfMemoryError:
            raise
        except Exception:  # an edited model adds positions, for example
            return False
    return True


def probe_tokens(length: int, vocab_size: int) -> Tensor:
    """Token ids (length,) for comparing two models. Most are spread over the vocabulary; every
    eighth is one of the first four or the last, which often separate documents."""
    places = torch.arange(length)
    separators = torch.tensor([0, 1, 2, 3, vocab_size - 1]) % vocab_size
    spread = places * 7919 % vocab_size
    return torch.where(places % 8 == 5, separators[places // 8 % 5], spread)


def same_logits(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the root mean square of the difference is at most `tolerance` standard deviations of
    `expected`. False for NaN."""
    if found.shape != expected.shape:
        return False
    found, expected = found.float(), expected.float()
    return bool((found - expected).square().mean().sqrt() <= tolerance * expected.std() + 1e-6)


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of `logits` (B, V); returns (B,).

    temperature 0 (below 1e-6, where logits might overflow) takes the most likely token. top_k keeps
    the k most likely tokens, then top_p keeps the fewest of them whose probabilities reach top_p
    (Holtzman et al. 2020). top_k 0 and top_p 1 keep every token.
    """
    if temperature < 1e-6:
        return logits.argmax(dim=-1)
    logits = (logits / temperature).nan_to_num()  # multinomial aborts on NaN
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        beyond = probs.cumsum(dim=-1) - probs >= top_p
        beyond[:, 0] = False  # keep the most likely token, however small top_p is
        logits = logits.masked_fill(beyond.gather(1, order.argsort(dim=-1)), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)


def as_cuda_graph(
    function: Callable[[Tensor], Tensor], example: Tensor
) -> Callable[[Tensor], Tensor]:
    """Record `function` for tensors like `example`: hundreds of kernels become one launch.

    Run `function` once before: recording does not run it. Every call returns the same tensor.
    """
    graph, static = torch.cuda.CUDAGraph(), example.clone()
    with torch.cuda.graph(graph):
        out = function(static)

    def replay(tensor: Tensor) -> Tensor:
        static.copy_(tensor)
        graph.replay()
        return out

    return replay


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Turn dropout and the like off in the `with` block. Afterwards each module has its earlier
    mode, so those that you have switched off with `.eval()` stay off."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # parents come first
            if module.training != mode:
                module.train(mode)


def sample_while_training(
    model: GPT,
    data: DataSet,
    file: TokenFile,
    autocast: contextlib.AbstractContextManager,
    seed: int,
) -> str:
    """Sample 100 tokens after (at most) the first 8 of `file`. Returns the text of both.

    This affects neither CUDA graphs nor the random numbers of training: the model runs eagerly, and
    sampling has its own generator.
    """
    device, tokenizer = next(model.parameters()).device, from_meta(data.tokenizer)
    tokens = next(eval_batches(file, 1, 1))[0][:, :8].to(device)  # (1, T)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.compiler.set_stance("force_eager"), autocast, evaluation_mode(model):
        out = generate(
            model, tokens, 100, temperature=0.8, top_k=200, vocab_size=tokenizer.vocab_size,
            generator=generator,
        )  # fmt: skip
    reshard(model)  # as after an evaluation
    # Sampling leaves cached blocks in sizes that training cannot use. (Without CUDA: a no-op.)
    torch.cuda.empty_cache()
    return tokenizer.decode(out[0].tolist())
