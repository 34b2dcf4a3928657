import gc
import math
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, GPTConfig, RMSNorm, apply_rope, rope_tables
from steady import compiling
from steady import generate as generation
from steady.generate import KVCache, draw, generate, logits_of
from steady.optim import hidden_matrices
from steady.recompute import repeated_blocks, use_activation_checkpointing


def tiny(**changes) -> GPT:
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 40, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(**sizes | changes))


def tokens_for(model, rows=2, length=None):
    torch.manual_seed(1)
    length = length or model.config.block_size
    return torch.randint(model.config.vocab_size, (rows, length))


# ---- the same function as the reference ------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("n_head", "n_kv_head", "n_embd", "n_layer", "theta"),
    [(4, 4, 32, 2, 10000.0), (4, 2, 64, 3, 500000.0), (6, 1, 48, 1, 10000.0)],
)
def test_logits_and_gradients_equal_transformers_llama(
    tied, n_head, n_kv_head, n_embd, n_layer, theta
):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tiny(
        n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, n_layer=n_layer, rope_theta=theta,
        tied_embeddings=tied,
    )  # fmt: skip
    config = model.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.n_hidden,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.block_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=tied,
        )
    )
    renamed = {name: to_llama(name) for name in model.state_dict()}
    with torch.no_grad():
        for p in model.parameters():  # norm weights must not all be 1
            p.add_(0.1 * torch.randn_like(p))
    reference.load_state_dict({renamed[k]: v for k, v in model.state_dict().items()})

    tokens, targets = tokens_for(model), tokens_for(model).flip(0)
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)

    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss.backward()
    ours = model(tokens, targets)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=0, atol=1e-5)
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = gradients[renamed[name]].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-5, msg=name)


def to_llama(name: str) -> str:
    for ours, theirs in (
        ("token_embedding", "model.embed_tokens"),
        ("blocks", "model.layers"),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.", "self_attn."),
        ("final_norm", "model.norm"),
    ):
        name = name.replace(ours, theirs)
    return name


def test_gqa_equals_attention_with_repeated_heads():
    grouped, full = tiny(n_kv_head=2), tiny(n_kv_head=4)
    state = grouped.state_dict()
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(2, 8, 32)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    tokens = tokens_for(full)
    torch.testing.assert_close(grouped(tokens), full(tokens))


@pytest.mark.parametrize(("length", "fused"), [(16, False), (520, True)])
def test_short_contexts_on_a_cpu_attend_step_by_step(length, fused):
    """In bfloat16 the fused kernel takes up to five times as long."""
    from torch.profiler import profile

    from steady.hardware import use_onednn

    model = tiny(block_size=length, n_kv_head=2)
    use_onednn(torch.device("cpu"), torch.bfloat16, 32, length)
    tokens = tokens_for(model, rows=1)
    with torch.autocast("cpu", torch.bfloat16), profile() as recorded:
        model(tokens, tokens).backward()
    names = {event.name for event in recorded.events()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) is fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm_rounds_only_its_result(dtype, weight_dtype):
    """Fails if the squares, which overflow float16, or their sum are 16-bit."""
    torch.manual_seed(0)
    norm = RMSNorm(1000, 1e-5)
    torch.nn.init.normal_(norm.weight)
    norm.to(weight_dtype or dtype)
    x = (300 * torch.randn(4, 1000)).to(dtype)
    out, wide = norm(x), x.double()
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt() * norm.weight.double()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_qk_norm_normalises_every_head():
    plain, normed = tiny(norm_eps=1e-9), tiny(norm_eps=1e-9, qk_norm=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    tokens = tokens_for(plain)
    with torch.no_grad():
        before = normed(tokens)
        for block in normed.blocks:  # the scale of queries and keys must not matter
            block.attention.q_proj.weight *= 3
            block.attention.k_proj.weight *= 5
    torch.testing.assert_close(normed(tokens), before, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(plain(tokens), before, atol=1e-4)


def test_attention_is_causal():
    model = tiny()
    tokens = tokens_for(model)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 40
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


# ---- rotary embeddings ------------------------------------------------------------------------


def test_rope_depends_on_relative_position_only():
    q, k = torch.randn(2, 1, 1, 1, 8)

    def score(i, j):
        turned = [
            apply_rope(x, *rope_tables(torch.tensor([p]), 8, 1e4)) for x, p in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(905, 902), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(score(5, 2), score(6, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_f18_rope_keeps_the_dtype_and_computes_in_float32(dtype):
    cos, sin = rope_tables(torch.arange(1000), 8, 1e4)
    assert cos.dtype == sin.dtype == torch.float32
    x = torch.randn(1, 1000, 2, 8).to(dtype)
    turned = apply_rope(x, cos, sin)
    assert turned.dtype == dtype
    exact = apply_rope(x.double().float(), cos, sin)
    assert torch.equal(turned, exact.to(dtype))  # rounded only once, at the end
    naive = x * cos + x.roll(4, dims=-1) * sin
    assert naive.dtype == torch.float32  # the plain formula turns bfloat16 into this


def test_f18_tables_stay_float32_in_a_model_cast_to_bfloat16():
    model = tiny().to(torch.bfloat16)
    assert model(tokens_for(model)).dtype == torch.bfloat16
    cos, sin = rope_tables(torch.arange(16), 8, 1e4)
    assert torch.equal(model.rope_cos, cos) and torch.equal(model.rope_sin, sin)
    assert "rope_cos" not in model.state_dict()


def test_tables_that_an_edit_changes_or_trains_keep_their_values():
    """sample.py moves the model: its tables were computed anew, so it sampled from another one."""
    model = tiny()
    model.rope_cos[..., 2:] = 1.0  # rotates only some of the pairs
    expected = model.rope_cos.clone()
    model.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(model.rope_cos, expected)
    model = tiny()
    cos, sin = model.rope_cos, model.rope_sin
    del model.rope_cos, model.rope_sin
    model.rope_cos, model.rope_sin = nn.Parameter(cos), nn.Parameter(sin)
    model.to(torch.float64).to(torch.float32)
    assert torch.equal(model.rope_cos, cos) and isinstance(model.rope_cos, nn.Parameter)


class HalvedHead(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


def half_by_hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, logits: 0.5 * logits)


def half_by_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: 0.5 * forward(x)


def half_by_class(model):
    head = model.lm_head
    model.lm_head = HalvedHead(head.in_features, head.out_features, bias=False)
    model.lm_head.weight = head.weight


def half_in_parts(model):
    half_by_class(model)
    model.lm_head = nn.Sequential(model.lm_head, nn.Identity())


@pytest.mark.parametrize("edit", [half_by_hook, half_by_forward, half_by_class, half_in_parts])
def test_the_loss_is_that_of_any_head(edit):
    """The loss read the head's weight itself, whatever the head computes."""
    model = tiny()
    edit(model)
    tokens, targets = tokens_for(model), tokens_for(model)
    targets[0, :3] = -1
    weight = model.token_embedding.weight
    logits = model(tokens).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
    gradient = torch.autograd.grad(expected, weight)[0]
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], gradient)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(tokens, targets[:, :4])
    model.cross_entropy.share = torch.full((), 0.1)
    with pytest.raises(ValueError, match="second_target needs a plain nn.Linear as lm_head"):
        model(tokens, targets)


# ---- initial weights --------------------------------------------------------------------------


def test_init_statistics():
    model = tiny(n_layer=8, n_embd=128, vocab_size=512)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        residual = "o_proj" in name or "down_proj" in name
        expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
        assert abs(parameter.mean().item()) < 0.05 * expected, name
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_first_loss_is_that_of_a_uniform_guess():
    model = tiny(vocab_size=512, n_embd=64)
    tokens = torch.randint(512, (64, 16))
    assert model(tokens, tokens.roll(5, 0)).item() == pytest.approx(math.log(512), abs=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once(tied):
    model = tiny(tied_embeddings=tied)
    c, h, v = 32, model.config.n_hidden, 40
    per_block = 4 * c * c + 3 * c * h + 2 * c
    assert model.num_params() == 2 * per_block + c + v * c * (1 if tied else 2)
    matmul = model.num_params() - (0 if tied else v * c)
    assert model.flops_per_token() == 6 * matmul + 12 * 2 * c * 16


def test_124m_is_124m():
    with torch.device("meta"):
        assert GPT(GPTConfig()).num_params() == 123_587_328


# ---- configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 30}, "n_embd=30 is not divisible by n_head=4: use n_embd=32"),
        ({"n_kv_head": 3}, "n_head=4 is not divisible by n_kv_head=3: use one of 1, 2, 4"),
        ({"n_embd": 36}, "head_dim=9 .by default n_embd / n_head. is odd.* try n_embd=40"),
        ({"n_layer": 0}, "n_layer=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be"),
    ],
)
def test_impossible_shapes_say_what_to_change(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


# ---- decoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_f41_cached_decoding_equals_uncached_at_every_position(n_kv_head):
    model = tiny(n_kv_head=n_kv_head).eval()
    tokens = tokens_for(model, rows=3)
    with torch.no_grad():
        expected = model(tokens)
        for prefill in (1, 5, 16):
            cache = KVCache(model.config, 3, 16, "cpu", torch.float32)
            logits = model(tokens[:, :prefill], cache=cache)
            torch.testing.assert_close(logits[:, 0], expected[:, prefill - 1])
            for t in range(prefill, 16):
                logits = model(tokens[:, t : t + 1], cache=cache)
                torch.testing.assert_close(logits[:, 0], expected[:, t])
            assert cache.position == 16


def test_f41_cache_takes_several_tokens_at_a_time():
    model = tiny().eval()
    tokens = tokens_for(model)
    with torch.no_grad():
        cache = KVCache(model.config, 2, 16, "cpu", torch.float32)
        for part in tokens.split((3, 6, 7), dim=1):
            logits = model(part, cache=cache)
        torch.testing.assert_close(logits[:, 0], model(tokens)[:, -1])


def test_f07_a_samples_cache_is_freed_when_it_is_drawn(monkeypatch):
    """Immediately, not by the garbage collector: until then its memory would be unavailable."""
    caches = []

    class Watched(KVCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            caches.append(weakref.ref(self))
            caches.extend(map(weakref.ref, self.keys))

    monkeypatch.setattr(generation, "KVCache", Watched)
    model = tiny()
    gc.disable()
    try:
        generate(model, tokens_for(model, length=3), 5)
        assert len(caches) == 3 * 3 and not any(cache() is not None for cache in caches)
    finally:
        gc.enable()


@torch.no_grad()
def test_f89_a_model_that_a_cache_does_not_serve_samples_without_one(monkeypatch, capsys):
    """Covers edits of the attention in model.py alone, such as ALiBi."""
    model = tiny().eval()
    monkeypatch.setattr(KVCache, "attend", lambda self, keys, values, q, k, v: 0 * q)
    tokens = expected = tokens_for(model, length=3)
    for _ in range(5):
        new = model(expected[:, -model.config.block_size :])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, new), dim=1)
    assert torch.equal(generate(model, tokens, 5, temperature=0.0), expected)
    assert "a KV cache changes this model's output" in capsys.readouterr().err


def test_layers_in_nested_lists_count_as_blocks():
    """They are compiled and recomputed one by one: a list itself has no forward pass."""
    a, b, c, d = (torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(4))
    lists = torch.nn.ModuleList([torch.nn.ModuleList([a, b]), torch.nn.ModuleDict({"c": c}), d])
    model = torch.nn.ModuleDict({"layers": lists, "head": torch.nn.Linear(1, 1)})
    assert repeated_blocks(model) == [a, b, c, d]


def test_blocks_inside_another_module_are_found_and_a_head_of_single_layers_is_none():
    """Muon trained only the second kind if there were both, and compiled neither."""
    model = tiny(n_layer=2)
    model.head = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    model.trunk = torch.nn.ModuleDict({"layers": model.blocks, "norm": torch.nn.LayerNorm(4)})
    blocks = list(model.blocks)
    del model.blocks
    assert repeated_blocks(model) == blocks
    assert compiling.compiled_parts(model) == [*blocks, model.final_norm, model.cross_entropy,
                                     model.trunk["norm"]]  # fmt: skip
    assert set(hidden_matrices(model)) == {p for b in blocks for p in b.parameters() if p.dim() > 1}


def test_each_block_counts_once_and_layers_in_lists_count():
    block, stack = torch.nn.TransformerEncoderLayer(4, 1), torch.nn.Module()
    stack.layers = torch.nn.ModuleList([block, block])
    hidden = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    model = torch.nn.ModuleDict({"a": stack, "b": torch.nn.Sequential(block), "c": hidden})
    assert repeated_blocks(model) == [block]
    model["first"] = block  # before and after it, as an attribute
    assert repeated_blocks(torch.nn.ModuleList([model])) == repeated_blocks(model) == [block]
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    unrolled = torch.nn.ModuleDict({"block": torch.nn.Module()})
    unrolled["block"].mlp = torch.nn.Sequential(*layers)
    assert repeated_blocks(unrolled) == []
    model["flat"] = torch.nn.ModuleList(layers)
    assert repeated_blocks(model) == [block, *layers]
    use_activation_checkpointing(stack, "block")
    assert block(torch.ones(1, 2, 4)).isfinite().all()  # it called itself without end


@torch.no_grad()
def test_f89_a_window_longer_than_the_prompt_samples_without_a_cache(monkeypatch):
    """Its effect shows only after 40 tokens."""
    window = torch.ones(64, 64, dtype=torch.bool).tril().triu(-40)

    def near(q, k, v, attn_mask=None, is_causal=False, **more):
        mask = window[: q.shape[2], : q.shape[2]] if is_causal else attn_mask
        return attention(q, k, v, attn_mask=mask, **more)

    attention = torch.nn.functional.scaled_dot_product_attention
    model = tiny(block_size=64).eval()
    assert generation.cache_is_exact(model, 13, 64)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", near)
    assert generation.cache_is_exact(model, 13, 40)
    assert not generation.cache_is_exact(model, 13, 64)


@torch.no_grad()
def test_f89_a_mask_that_depends_on_separators_samples_without_a_cache(monkeypatch):
    class Documents(GPT):
        def forward(self, tokens, targets=None, cache=None):
            documents = (tokens == self.separator).cumsum(1)
            seen.append(documents[:, :, None] == documents[:, None, :])
            return super().forward(tokens, targets, cache)

    def within(q, k, v, attn_mask=None, is_causal=False, **more):
        if is_causal:
            attn_mask = seen[-1][:, None].tril()
        return attention(q, k, v, attn_mask=attn_mask, **more)

    seen, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", within)
    torch.manual_seed(0)
    model = Documents(tiny(block_size=64, vocab_size=512).config).eval()
    for model.separator in (0, 2, 499):
        assert not generation.cache_is_exact(model, 500, 64)
    model.separator = -1
    assert generation.cache_is_exact(model, 500, 64)


@torch.no_grad()
def test_f89_an_edit_that_changes_some_positions_samples_without_a_cache():
    """Such as mixture of depths, which routes half of a sequence's tokens through a block."""

    class Chosen(GPT):
        def forward(self, tokens, targets=None, cache=None):
            T = tokens.shape[1]
            chosen = tokens.topk(T // 2, dim=1).indices == T - 1  # never with a single token
            return super().forward(tokens, targets, cache) * (1 + chosen.any(1)[:, None, None])

    model = Chosen(tiny().config).eval()
    for length in (4, 5, 6, 7, 8):  # the last token of the longest probe is chosen in some
        assert not generation.cache_is_exact(model, 13, length)


@torch.no_grad()
def test_f89_a_model_with_tuples_as_sizes_samples_without_a_cache():
    model = tiny().eval()
    model.config.n_head, model.config.n_layer = (2, 4), (1, 1)
    assert not generation.cache_is_exact(model, 13, 8)
    generation.require_room(model.config, 1, 4, 4, torch.float32, torch.device("cpu"))


@torch.no_grad()
def test_f89_a_model_that_fails_with_a_cache_samples_without_it():
    class Register(GPT):
        def forward(self, tokens, targets=None, cache=None):
            if cache is not None:
                raise IndexError("one position too many")
            return super().forward(tokens, targets)

    model = Register(tiny().config).eval()
    assert not generation.cache_is_exact(model, 13, 8)


@torch.no_grad()
def test_f89_a_forward_pass_without_a_cache_samples_too():
    class Plain(GPT):
        def forward(self, tokens, targets=None):
            return super().forward(tokens, targets)

    model = Plain(tiny().config).eval()
    tokens = tokens_for(model, length=3)
    assert generate(model, tokens, 5, temperature=0.0).shape == (len(tokens), 8)


@torch.no_grad()
def test_f41_a_decoding_step_is_compiled_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny(n_kv_head=2).eval()
    tokens, graphs = tokens_for(model), CompileCounterWithBackend("aot_eager")
    cache = KVCache(model.config, *tokens.shape, "cpu", torch.float32)
    step = torch.compile(model, backend=graphs, fullgraph=True, dynamic=False)
    expected = model(tokens)
    for t in range(tokens.shape[1]):
        logits = step(tokens[:, t : t + 1], cache=cache)
        torch.testing.assert_close(logits[:, 0], expected[:, t])
    assert graphs.frame_count == 1


@torch.no_grad()
def test_f41_a_decoding_step_is_few_operations():
    """Each operation is a kernel, and for one token the launch takes longer than the work."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += not function.is_view
            return function(*args, **(kwargs or {}))

    counts = []
    for n_layer in (1, 2):
        model = tiny(n_layer=n_layer).bfloat16().eval()
        cache = KVCache(model.config, 1, 16, "cpu", torch.bfloat16)
        with Count() as count:
            model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        counts.append(count.operations)
    assert counts[1] - counts[0] <= 48  # an RMSNorm counts as 8 on a CPU


def test_f41_cached_attention_takes_any_layout_its_kernel_returns(monkeypatch):
    """On GPUs some kernels return (B, H, T, D) as a view of (B, T, H, D)."""
    attend = F.scaled_dot_product_attention

    def other_layout(*args, **kwargs):
        return attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    model = tiny(n_kv_head=2)
    tokens = tokens_for(model)
    expected = generate(model, tokens, 5, temperature=0)
    monkeypatch.setattr(F, "scaled_dot_product_attention", other_layout)
    assert torch.equal(generate(model, tokens, 5, temperature=0), expected)


def greedy(model, tokens, n):
    """Greedy decoding without a cache, with generate's rule for a full context."""
    size = model.config.block_size
    start = max(0, tokens.shape[1] - size)
    for _ in range(n):
        if tokens.shape[1] - start > size:
            start = tokens.shape[1] - size // 2
        new = model(tokens[:, start:])[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens


def test_a_decoding_step_is_recorded_once_and_then_replayed(monkeypatch):
    recorded, replayed = [], []

    def record(step, example):
        recorded.append(example.shape)

        def replay(context):
            replayed.append(context.shape)
            return step(context)

        return replay

    monkeypatch.setattr("steady.generate.as_cuda_graph", record)
    model = tiny()
    tokens = tokens_for(model, 2, 3)
    plain = generate(model, tokens, 40, temperature=0)
    assert torch.equal(plain, generate(model, tokens, 40, temperature=0, cuda_graph=True))
    assert recorded == [(2, 1)]
    assert len(replayed) > 30 and set(replayed) == {(2, 1)}


@pytest.mark.parametrize("length", [1, 10, 16, 40])
def test_f43_generate_equals_uncached_greedy_within_and_beyond_the_context(length):
    model = tiny().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # sharper: no ties
    tokens = tokens_for(model, length=length)
    found = generate(model, tokens, 40, temperature=0)
    assert torch.equal(found, greedy(model, tokens, 40))


def test_f42_rows_draw_their_own_first_token():
    model = tiny().eval()
    tokens = tokens_for(model, rows=1).expand(64, -1)
    generator = torch.Generator().manual_seed(0)
    new = generate(model, tokens, 1, generator=generator)[:, -1]
    assert len(new.unique()) > 10


def test_same_seed_same_samples_and_the_global_random_state_is_not_touched():
    model = tiny().eval()
    state = torch.get_rng_state()
    samples = [
        generate(model, tokens_for(model, 2, 3), 5, generator=torch.Generator().manual_seed(s))
        for s in (7, 7, 8)
    ]
    torch.manual_seed(1)
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    torch.set_rng_state(state)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    generate(model, tokens, 5, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_on_token_sees_every_column_as_it_is_drawn():
    model = tiny().eval()
    seen = []
    out = generate(model, tokens_for(model, 2, 3), 6, on_token=seen.append)
    assert torch.equal(torch.stack(seen, dim=1), out[:, 3:])


def test_padding_ids_are_never_drawn():
    model = tiny().eval()
    out = generate(model, torch.zeros(64, 1, dtype=torch.int64), 10, vocab_size=3)
    assert out.max() < 3


def test_f43_draw_limits():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, -1)
    assert (draw(logits, temperature=0.0) == 0).all()
    assert (draw(logits, temperature=1e-45) == 0).all()
    for value in (math.nan, math.inf, -math.inf, 3e38):
        assert draw(torch.full((1, 4), value), temperature=1e-6).item() in range(4)
    assert set(draw(logits, top_k=0).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, top_k=99).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, top_k=2).tolist()) == {0, 1}
    assert set(draw(logits, top_k=1).tolist()) == {0}
    assert set(draw(logits, top_p=0.5).tolist()) == {0}  # the first token has 0.64
    assert set(draw(logits, top_p=0.7).tolist()) == {0, 1}
    assert set(draw(logits, top_p=1e-9).tolist()) == {0}
    assert set(draw(logits, top_p=1e-300).tolist()) == {0}  # 0 in float32
    shares = torch.bincount(draw(logits, temperature=2.0), minlength=4) / 4000
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(0), rtol=0, atol=0.04)


# ---- training ---------------------------------------------------------------------------------


def test_overfits_one_batch_to_near_zero():
    model = tiny()
    tokens, targets = tokens_for(model, 4), tokens_for(model, 4).flip(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(200):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.01


def test_ignored_targets_do_not_count():
    model = tiny()
    tokens, targets = tokens_for(model), tokens_for(model).flip(0)
    half = targets.clone()
    half[:, 8:] = -1
    expected = F.cross_entropy(model(tokens)[:, :8].flatten(0, 1), targets[:, :8].flatten())
    torch.testing.assert_close(model(tokens, half), expected)


def test_dropout_is_off_in_evaluation():
    model = tiny(dropout=0.5)
    tokens = tokens_for(model)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_settings_rebuild_the_model():
    model = tiny(n_kv_head=2, qk_norm=True)
    again = GPT(GPTConfig(**model.config.settings()))
    again.load_state_dict(model.state_dict())
    tokens = tokens_for(model)
    assert torch.equal(model(tokens), again(tokens))


@pytest.mark.parametrize("kind", ["selective", "block"])
def test_activation_checkpointing_changes_no_number(kind):
    model = tiny(dropout=0.2)
    tokens, targets = tokens_for(model), tokens_for(model).flip(0)

    def loss_and_gradients():
        torch.manual_seed(3)  # the same dropout, also in recomputation
        model.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = loss_and_gradients()
    use_activation_checkpointing(model, kind)
    for found, wanted in zip(loss_and_gradients(), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "way"),
    [("none", "in parts"), ("none", "as one"), ("none", "sharded"), ("selective", "in parts"),
     ("selective", "sharded"), ("block", "in parts")],
)  # fmt: skip
def test_f52_compiled_code_computes_the_same_gradients(kind, way, monkeypatch):
    """For every kind of checkpointing. (Kernels compile slowly, so the GPU tests cover them.)"""
    options = {"backend": "aot_eager_decomp_partition", "fullgraph": True}
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode: compile(f, **options))
    torch._dynamo.reset()
    model = tiny()
    tokens, targets = tokens_for(model), tokens_for(model).flip(0)
    expected = model(tokens, targets)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    use_activation_checkpointing(model, kind)
    plan = compiling.Plan(None, "default", cuda_graphs=way == "as one")
    function = compiling.compile_model(model, plan, way == "sharded", kind)
    loss = function(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_f12_recomputed_blocks_draw_the_same_random_numbers(on_gpu, monkeypatch):
    """Stochastic depth with dropout. A GPU's dropout is one operation, which may be kept."""
    model = tiny(dropout=0.2)
    for block in model.blocks:
        block.attention.dropout = 0.0
        if on_gpu:
            block.dropout.forward = lambda x: torch.native_dropout(x, 0.2, True)[0]
        block.mlp.register_forward_hook(lambda _, x, y: y * (torch.rand(len(y), 1, 1) < 0.7) / 0.7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    tokens, targets = tokens_for(model), tokens_for(model).flip(0)

    def gradients():
        torch.manual_seed(7)
        return torch.autograd.grad(model(tokens, targets), list(model.parameters()))

    expected = gradients()
    use_activation_checkpointing(model, "selective")
    for found, wanted in zip(gradients(), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["selective", "block"])
def test_activation_checkpointing_keeps_a_forward_set_on_a_block(kind):
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=2, n_head=2, n_embd=8))
    for block in model.blocks:
        block.forward = lambda x, rope, cache=None, old=block.forward: old(9.0 * x, rope, cache)
    tokens = torch.arange(8)[None]
    expected = model(tokens, tokens)
    use_activation_checkpointing(model, kind)
    assert torch.equal(model(tokens, tokens), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, tokens), expected.detach())


def test_activation_checkpointing_recomputes_what_it_says():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.counts = {"attention": 0, "mm": 0}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = str(function)
            self.counts["attention"] += "attention" in name and "backward" not in name
            self.counts["mm"] += name.startswith("aten.mm")
            return function(*args, **(kwargs or {}))

    seen = {}
    for kind in ("none", "selective", "block"):
        model = tiny(n_layer=3)
        use_activation_checkpointing(model, kind)
        with Count() as count:
            model(tokens_for(model), tokens_for(model)).backward()
        seen[kind] = count.counts
    assert [seen[k]["attention"] for k in ("none", "selective", "block")] == [3, 3, 6]
    assert seen["none"]["mm"] < seen["selective"]["mm"] == seen["block"]["mm"]


@pytest.mark.parametrize("loss", [torch.zeros(()), None])
def test_logits_are_found_beside_a_loss(loss):
    """As nanoGPT's forward returns them, and as other models do."""
    logits = torch.zeros(1, 2, 3)
    beside = {"hidden": torch.zeros(1, 2, 2), "loss": loss, "logits": logits}
    for found in ((logits, loss), [loss, logits], beside, types.SimpleNamespace(**beside)):
        assert logits_of(lambda _, found=found: found, None) is logits
    model = tiny(vocab_size=3)
    model.forward = lambda _: (beside["hidden"], logits)
    assert logits_of(model, None) is logits
    with pytest.raises(ValueError, match="sampling needs logits"):
        logits_of(lambda _: {"hidden": beside["hidden"]}, None)
    with pytest.raises(ValueError, match="sampling needs logits"):
        logits_of(lambda _: logits[0], None)  # a classifier's


@torch.no_grad()
def test_edges_of_sampling(capsys):
    start = torch.zeros(2, 1, dtype=torch.int64)
    model = GPT(GPTConfig(block_size=1, vocab_size=16, n_layer=1, n_head=2, n_embd=16)).eval()
    assert generate(model, start, 3, temperature=0.0).shape == (2, 4)
    # a tokenizer with more tokens than the model
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=16)).eval()
    generate(model, start, 3, vocab_size=20)
    assert not capsys.readouterr().err
    assert generation.probe_tokens(64, 2).max() < 2
    assert not generation.same_logits(torch.zeros(1), torch.zeros(4), 1e-3)
    assert generation.same_logits(torch.full((8,), 1.0), torch.full((8,), 1.0000001), 1e-3)
