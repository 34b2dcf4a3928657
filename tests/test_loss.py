import pytest
import torch
from torch.nn import functional as F

from steady.loss import LinearCrossEntropy, linear_cross_entropy


def inputs(n, c, v, dtype, ignored=()):
    torch.manual_seed(n * v)
    hidden = torch.randn(n, c, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, c, dtype=dtype, requires_grad=True)
    targets = torch.randint(v, (n,))
    targets[list(ignored)] = -1
    return hidden, weight, targets


def full(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=-1)


def loss_and_gradients(function, hidden, weight, targets):
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    loss = function(hidden, weight, targets)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_elements", [1, 7 * 3, 7 * 5, 10**6])  # uneven chunks, one chunk
@pytest.mark.parametrize("ignored", [(), (0, 4, 12), range(5)])
def test_f14_equals_full_logits_in_float64(chunk_elements, ignored):
    case = inputs(13, 4, 7, torch.float64, ignored)
    expected = loss_and_gradients(full, *case)
    found = loss_and_gradients(lambda *a: linear_cross_entropy(*a, chunk_elements), *case)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ignored", [-1, -100])  # -100: F.cross_entropy and Hugging Face
def test_f89_negative_targets_do_not_count(ignored):
    hidden, weight, targets = inputs(13, 4, 7, torch.float64, (0, 4, 12))
    expected = loss_and_gradients(full, hidden, weight, targets)
    targets = targets.masked_fill(targets < 0, ignored)
    found = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_gradcheck():
    hidden, weight, targets = inputs(5, 3, 7, torch.float64, (2,))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, 14), (hidden, weight)
    )


def mixed(hidden, weight, targets, share):
    """The loss with a second target, the plain way. targets: (B, T)."""
    losses = F.cross_entropy(
        hidden @ weight.T, targets.flatten(), ignore_index=-1, reduction="none"
    )
    losses, mean = losses.view_as(targets), 0.0
    for row, ids in enumerate(targets):
        for i, target in enumerate(ids):
            second = ids[i + 1] if i + 1 < len(ids) else -1
            if target >= 0 and second >= 0:
                scores = (hidden[row * len(ids) + i] @ weight.T).log_softmax(-1)
                mean += (1 - share) * losses[row, i] - share * scores[second]
            else:
                mean += losses[row, i]
    return mean / (targets >= 0).sum()


@pytest.mark.parametrize("chunk_elements", [7 * 3, 10**6])
def test_a_second_target_is_the_next_one_of_the_same_sequence(chunk_elements):
    hidden, weight, targets = inputs(12, 4, 7, torch.float64, (2, 3, 9))
    targets, share = targets.view(3, 4), torch.tensor(0.3)
    targets[1, 2] = targets[1, 1]  # both targets are the same token
    expected = loss_and_gradients(lambda *a: mixed(*a, share.double()), hidden, weight, targets)
    found = loss_and_gradients(
        lambda h, w, t: linear_cross_entropy(h, w, t, chunk_elements, share=share),
        hidden, weight, targets,
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    with pytest.raises(ValueError, match="needs targets of shape"):  # no sequences
        linear_cross_entropy(hidden, weight, targets.flatten(), share=share)
    with torch.no_grad():  # an evaluation has one target
        loss = linear_cross_entropy(hidden, weight, targets, chunk_elements, share=share)
    torch.testing.assert_close(loss, full(hidden, weight, targets.flatten()).detach())


@pytest.mark.parametrize("enabled", [True, False])
def test_as_many_targets_as_rows_are_needed(enabled):
    """With fewer targets an evaluation ignored rows, without a message."""
    hidden, weight, targets = inputs(12, 4, 7, torch.float32)
    with torch.set_grad_enabled(enabled), pytest.raises(RuntimeError, match="input of size 8"):
        linear_cross_entropy(hidden, weight, targets[:8])


def test_second_derivatives_are_refused():
    """Without the fix their contributions are missing, silently."""
    hidden, weight, targets = inputs(5, 3, 7, torch.float64, (2,))
    (gradient,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets), weight, retain_graph=True
    )
    assert not gradient.requires_grad
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, targets), weight, create_graph=True
        )


def test_all_targets_ignored_is_zero_without_nan():
    case = inputs(6, 3, 7, torch.float32, range(6))
    loss, grad_hidden, grad_weight = loss_and_gradients(linear_cross_entropy, *case)
    assert loss == 0 and not grad_hidden.any() and not grad_weight.any()
    with torch.no_grad():
        assert linear_cross_entropy(*case) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_close_to_float64_as_full_logits_are(dtype):
    hidden, weight, targets = inputs(300, 64, 500, torch.float32, (3,))
    weight = (weight.detach() * 0.1).requires_grad_()
    exact = loss_and_gradients(full, hidden.double(), weight.double(), targets)

    def errors(function):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found = loss_and_gradients(function, hidden, weight, targets)
        assert [t.dtype for t in found] == [torch.float32] * 3
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    ours = errors(lambda *a: linear_cross_entropy(*a, 500 * 64))
    plain = errors(full)
    floor = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine <= max(1.1 * theirs, floor)


def test_loss_is_the_same_without_gradients():
    hidden, weight, targets = inputs(30, 8, 11, torch.float32, (1,))
    with torch.no_grad():
        quiet = linear_cross_entropy(hidden, weight, targets, 50)
    torch.testing.assert_close(quiet, linear_cross_entropy(hidden, weight, targets, 50).detach())


def test_float16_with_scaling_keeps_small_gradients():
    """Dividing by the number of targets before GradScaler scales the loss would underflow."""
    hidden, weight, targets = inputs(4096, 8, 16, torch.float32)
    exact = loss_and_gradients(full, hidden.double(), weight.double(), targets)[2]
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets, 16 * 64)
    (grad,) = torch.autograd.grad(loss * 2**16, weight)
    assert ((grad / 2**16 - exact).norm() / exact.norm()) < 2e-3


def test_float16_gradients_of_a_frequent_token_do_not_overflow():
    """A chunk's gradient is a sum in float16, before it is divided by the number of targets."""
    hidden, weight, targets = torch.ones(2**17, 4), torch.zeros(4, 4), torch.zeros(1, 2**17).long()
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight.requires_grad_(), targets)
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad[0].tolist() == [-0.75] * 4


def test_f14_largest_tensor_is_one_chunk():
    """Checks peak memory by the largest tensor that any operation returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.numel())
            return out

    n, v = 1000, 200
    sizes = {}
    for name, function in (
        ("ours", lambda *a: linear_cross_entropy(*a, 50 * v)),
        ("plain", full),
    ):
        with Largest() as largest:
            loss_and_gradients(function, *inputs(n, 8, v, torch.float32))
        sizes[name] = largest.size
    assert sizes["plain"] == n * v
    assert sizes["ours"] == 50 * v


def test_a_head_with_a_forward_of_its_own_is_used():
    head = torch.nn.Linear(8, 16, bias=False)
    plain = head.forward
    head.forward = lambda x: 2 * plain(x)
    x, targets = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    found = LinearCrossEntropy()(x, head, targets)
    torch.testing.assert_close(found, F.cross_entropy(head(x), targets))


def test_a_second_target_needs_rows():
    layer, targets = LinearCrossEntropy(), torch.zeros(4, dtype=torch.int64)
    layer.share = torch.tensor(0.5)
    with pytest.raises(ValueError, match="second_target needs targets"):
        layer(torch.randn(4, 8), torch.nn.Linear(8, 16, bias=False), targets)
