import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, GPTConfig
from steady import UserError
from steady.dataloader import TokenFile
from steady.loss import LinearCrossEntropy
from steady.runlog import read_metrics
from steady.sampled import VocabularySampler, saved_flops, use_sampled_softmax

V, C = 200, 8
TARGETS = torch.tensor([[3, 7, -1, 3], [150, 7, 199, -100]])


def output_layer(bias=False):
    torch.manual_seed(0)
    head = nn.Linear(C, V, bias=bias).double()
    nn.init.normal_(head.weight, std=0.3)
    return head, torch.randn(TARGETS.numel(), C, dtype=torch.float64)


def whole_loss(head, hidden):
    used = TARGETS >= 0
    return F.cross_entropy(head(hidden)[used.flatten()], TARGETS[used])


def zipf():
    return 1.0 / torch.arange(1, V + 1)


def test_all_targets_are_drawn_and_ignored_ones_stay_ignored():
    head, _ = output_layer()
    for seed in range(20):
        torch.manual_seed(seed)
        rows, counts, targets = VocabularySampler(zipf(), 12)(head.weight, None, TARGETS)
        assert rows.shape == (12, C) and counts.shape == (12,)
        used = TARGETS >= 0
        assert torch.equal(rows[targets[used]], head.weight[TARGETS[used]])
        assert not counts[targets[used]].any()  # a target counts as itself
        assert torch.equal(targets[~used], TARGETS[~used])


@pytest.mark.parametrize("frequencies", [zipf(), torch.ones(V), 1.0 / torch.arange(V, 0, -1)])
def test_the_sum_of_exponentials_is_right_on_average(frequencies):
    """If tokens counted as one, it would be too small."""
    head, hidden = output_layer()
    sampler, sums = VocabularySampler(frequencies, 40), []
    exact = F.linear(hidden, head.weight).exp().sum(dim=1)
    with torch.no_grad():
        for _ in range(3000):
            rows, counts, _ = sampler(head.weight, None, TARGETS)
            sums.append((F.linear(hidden, rows) + counts).exp().sum(dim=1) / exact)
    ratios = torch.stack(sums)
    error = ratios.std(dim=0) / math.sqrt(len(ratios))
    assert (error < 0.05).all()  # the test could fail
    assert ((ratios.mean(dim=0) - 1.0).abs() < 4.5 * error).all()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_whole_vocabulary_on_average(bias):
    head, hidden = output_layer(bias)
    parameters = [hidden.requires_grad_(), *head.parameters()]
    layer = LinearCrossEntropy()

    def gradients():
        loss = layer(hidden, head, TARGETS)
        return [g.detach() for g in torch.autograd.grad(loss, parameters)]

    exact = gradients()
    layer.sampler = VocabularySampler(torch.ones(V), 120)
    draws = [gradients() for _ in range(700)]
    for whole, *sampled in zip(exact, *draws, strict=True):
        mean = torch.stack(sampled).mean(dim=0)
        single = ((sampled[0] - whole).norm() / whole.norm()).item()
        assert ((mean - whole).norm() / whole.norm()).item() < 0.05 < single


def test_evaluations_use_the_whole_vocabulary():
    head, hidden = output_layer()
    layer = LinearCrossEntropy()
    layer.sampler = VocabularySampler(torch.ones(V), 12)
    exact = whole_loss(head, hidden)
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden, head, TARGETS), exact)
    torch.testing.assert_close(layer.eval()(hidden, head, TARGETS), exact)


def test_heads_for_another_vocabulary_use_all_of_it():
    head, hidden = output_layer()
    layer = LinearCrossEntropy()
    layer.sampler = VocabularySampler(torch.ones(V + 50), 12)
    exact = whole_loss(head, hidden)
    torch.testing.assert_close(layer(hidden, head, TARGETS), exact)


def test_more_targets_than_fit_are_ignored_without_nan(monkeypatch):
    head, hidden = output_layer()
    layer = LinearCrossEntropy()
    layer.sampler = VocabularySampler(torch.ones(V), 2)
    loss = layer(hidden.requires_grad_(), head, TARGETS)
    loss.backward()
    assert loss > 0 and hidden.grad.isfinite().all() and head.weight.grad.isfinite().all()
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)  # torch.rand returns 0 rarely
    assert not layer.sampler(head.weight, None, TARGETS)[1].any()  # it was 88.7


def test_draws_are_made_in_float32():
    """In bfloat16 the sum of exponentials is 2% too large."""
    sampler = VocabularySampler(zipf(), 12).bfloat16()
    assert sampler(output_layer()[0].weight, None, TARGETS)[1].dtype == torch.float32


def test_another_head_is_refused():
    model = GPT(GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=1, n_embd=8))
    model.cross_entropy.sampler = VocabularySampler(torch.ones(V), 12)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(
        UserError, match="sampled_softmax needs a plain nn.Linear as lm_head: use 0"
    ):
        model(TARGETS.clamp(min=0), TARGETS)


@pytest.fixture
def text(tmp_path):
    """Tokens of which number n is about n times rarer than the first."""
    ids = np.floor(V ** np.random.default_rng(0).random(5000)) - 1
    ids.astype("uint16").tofile(tmp_path / "train.bin")
    return TokenFile(tmp_path / "train.bin", 16, V)


def test_frequencies_are_counted_and_rare_tokens_keep_an_even_share(text):
    model = GPT(GPTConfig(block_size=16, vocab_size=V, n_layer=1, n_head=1, n_embd=8))
    config = {"sampled_softmax": 100, "vocab_size": V, "batch_size": 4, "n_embd": 8}
    config["eval_only"] = False
    keys = list(model.state_dict())
    for off in ({"sampled_softmax": 0}, {"sampled_softmax": V}, {"eval_only": True}):
        use_sampled_softmax(model, text, config | off)
        assert model.cross_entropy.sampler is None and saved_flops(model, config) == 0
    use_sampled_softmax(model, text, config)
    assert saved_flops(model, config) == 6 * 8 * 100
    found = model.cross_entropy.sampler.frequencies
    counts = np.bincount(np.fromfile(text.path, "uint16"), minlength=V) / 5000
    np.testing.assert_allclose(found, 0.75 * counts + 0.25 / V, atol=0.002)
    assert found.min() >= 0.24 / V and found.sum().item() == pytest.approx(1.0)
    assert list(model.state_dict()) == keys  # checkpoints and exports do not change
    with pytest.raises(UserError, match="use --sampled_softmax=0"):
        use_sampled_softmax(nn.Linear(2, 2), text, config)


def test_more_tokens_than_asked_for_are_used_if_a_text_needs_them(text, capsys):
    """With twice as many as there are different ones a run ended 0.013 higher, with three times as
    many as with all. An error would stop a command that works on another text."""
    starts = np.random.default_rng(1).integers(0, 4983, (500, 4))
    different = max(len(np.unique(text.windows(batch))) for batch in starts)
    used = {}
    for asked, batch_size in ((2 * different, 4), (different, 4), (10, 4), (10, 90)):
        model = GPT(GPTConfig(block_size=16, vocab_size=V, n_layer=1, n_head=1, n_embd=8))
        config = {"sampled_softmax": asked, "vocab_size": V, "batch_size": batch_size, "n_embd": 8}
        use_sampled_softmax(model, text, config)
        sampler = model.cross_entropy.sampler
        used[asked, batch_size] = sampler and sampler.size
        assert saved_flops(model, config) == 6 * 8 * (V - sampler.size if sampler else 0)
    assert used[2 * different, 4] == 2 * different
    assert 3 * different - 20 <= used[different, 4] == used[10, 4] < V
    assert used[10, 90] is None
    first, second, third = capsys.readouterr().out.splitlines()
    words = r"note: micro-batches have up to \d+ different tokens, so sampled_softmax=\d+ is "
    assert re.fullmatch(rf"{words}too small: using {used[10, 4]}", first)
    assert second.endswith(f"=10 is too small: using {used[10, 4]}")
    assert third.endswith("using all tokens")


@pytest.mark.parametrize("place", [0, 2**13, 2**14 - 150])
def test_a_region_with_many_different_tokens_counts(tmp_path, capsys, place):
    """Such as a word list: otherwise targets that do not fit would be ignored."""
    ids = np.arange(2**14, dtype="uint16") % 7
    ids[place : place + 150] = np.arange(150)
    ids.tofile(tmp_path / "train.bin")
    model = GPT(GPTConfig(block_size=16, vocab_size=V, n_layer=1, n_head=1, n_embd=8))
    config = {"sampled_softmax": 33, "vocab_size": V, "batch_size": 1, "n_embd": 8}
    use_sampled_softmax(model, TokenFile(tmp_path / "train.bin", 16, V), config)
    assert "up to 17 different tokens" in capsys.readouterr().out
    config |= {"batch_size": 10_000}  # more than there are windows
    use_sampled_softmax(model, TokenFile(tmp_path / "train.bin", 16, V), config)
    assert re.search("up to (149|150) different tokens", capsys.readouterr().out)


def test_a_run_learns_as_with_the_whole_vocabulary(run, sums, tmp_path):
    found = {}
    for size in (0, 26):
        run("train.py", f"--dataset={sums}", f"--out_dir={tmp_path / str(size)}", "--n_layer=1",
            "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=16", "--max_iters=40",
            "--gradient_accumulation_steps=1", "--eval_interval=40", "--eval_iters=4",
            "--learning_rate=1e-2", "--warmup_iters=5", "--compile=False", "--device=cpu",
            f"--sampled_softmax={size}")  # fmt: skip
        metrics = read_metrics(tmp_path / str(size) / "metrics.jsonl")
        found[size] = metrics[-1]["val_loss"]
        first = metrics[1]["loss"]
        assert first == pytest.approx(math.log(64), abs=0.2)  # not log(26): tokens count for others
    assert found[26] == pytest.approx(found[0], abs=0.1) and found[26] != found[0]
