"""Edits that a student may make to model.py and train.py: each must work, or fail with a traceback
of the student's code. They are applied to copies of both files and run with AdamW and Muon, one and
two processes, one and two micro-batches, eager and compiled (test_gpu.py adds CUDA graphs)."""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
import torch
from conftest import ROOT, TINY, free_port
from torch import nn

from model import GPT, GPTConfig
from steady import checkpoint, compiling
from steady.generate import evaluation_mode
from steady.initial import fingerprint
from steady.optim import build_optimizer, load_state
from steady.runlog import read_metrics

SETTINGS = [*TINY, "--learning_rate=5e-3", "--dtype=float32", "--max_iters=3", "--n_kv_head=1"]


class Edit(NamedTuple):
    """Pairs of (old, new) text for each of the two files, and the expected effects."""

    model: tuple[tuple[str, str], ...] = ()
    train: tuple[tuple[str, str], ...] = ()
    changes_loss: bool = True  # the loss curve differs from the original's
    depends_on_split: bool = False  # losses depend on the number of micro-batches
    samples: bool = True  # sampling with a KV cache still works


MLP_LINE = "        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))"
ATTENTION_LINE = "        x = x + self.dropout(self.attention(self.attention_norm(x), rope, cache))"
MLP_RESIDUAL = "        return x + self.dropout(self.mlp(self.mlp_norm(x)))"
LOOP = """            x = block(x, rope, None if cache is None else cache.layer(i))  # (B, T, C)
"""
BLOCK_END = (
    "        self.dropout = nn.Dropout(config.dropout)\n\n    def forward(self, x: Tensor, rope"
)
LOSS = "            return self.cross_entropy(x, self.lm_head, targets)"
EMBED = "        x = self.token_embedding(tokens)  # (B, T, C)"
GPT_END = '            for name in ("rope_cos", "rope_sin"):'
TRAIN = (ROOT / "train.py").read_text(encoding="utf-8")
SDPA = re.search(
    r"            y = F\.scaled_dot_product_attention\(.*?\)  # fmt: skip\n",
    (ROOT / "model.py").read_text(encoding="utf-8"),
    re.DOTALL,
).group()


def in_block(line):
    return (BLOCK_END, f"        {line}\n{BLOCK_END}")


def in_gpt(line):
    return (GPT_END, f"            {line}\n{GPT_END}")


OPTIMIZER = "opt = optim.build_optimizer(raw_model, config, plan.compiled, process.dtype)"
BACKWARD = """\
        with own_gradients(raw_model, plan.cuda_graphs):  # a CUDA graph's replay overwrites them
            scaler.scale(micro_loss).backward()"""
UNSCALE = "        scaler.unscale_(opt)"

SCHEDULE = "        lr = optim.set_schedule(opt, iter_num, config)"

EDITS = {
    # ---- other names, fewer settings, and what a loop may do in any place
    "renamed_head": Edit(
        (("            self.lm_head = nn", "            self.head = nn"),
         ("                self.lm_head.weight", "                self.head.weight"),
         ("(x, self.lm_head, targets", "(x, self.head, targets"),
         ("return self.lm_head(x", "return self.head(x")), changes_loss=False),
    "no_grouped_query_attention": Edit(
        (("    n_kv_head: int = 0  # key/value heads; 0: n_head\n", ""),
         ('"n_kv_head": (0, 10**6), ', ""),
         ("        self.n_kv_head = self.n_kv_head or self.n_head\n", ""),
         ("        if self.n_head % self.n_kv_head:", "        if False:"),
         ("= config.n_head, config.n_kv_head", "= config.n_head, config.n_head"))),
    "logits_and_loss_as_in_nanogpt": Edit(
        ((LOSS, LOSS.replace("return ", "return None, ")),
         ("        return self.lm_head(x if cache is None else x[:, -1:])",
          "        return self.lm_head(x[:, [-1]]), None")),
        (("micro_loss = model(tokens, targets) * share",
          "micro_loss = model(tokens, targets)[1] * share"),
         ("weight * model(tokens, targets)", "weight * model(tokens, targets)[1]")),
        changes_loss=False),
    "gradient_noise": Edit(train=(  # the same on all processes
        (UNSCALE, UNSCALE + "\n        for p in raw_model.parameters():\n"
                            "            p.grad += 0.01 * torch.randn_like(p.grad)"),)),
    "own_schedule_without_settings_of_the_old_one": Edit(train=(
        (SCHEDULE, "        lr = learning_rate * 0.9**iter_num\n"
                   "        for group in opt.param_groups:\n            group['lr'] = lr"),
        *((re.search(rf"\n{name} = .*", TRAIN).group(), "") for name in (
            "lr_schedule", "decay_lr", "min_lr", "decay_fraction", "weight_decay", "second_target",
            "sampled_softmax", "wandb_project", "wandb_run_name", "backend")))),
    "saves_after_each_step": Edit(train=(
        ("        iter_num += 1\n",
         "        iter_num += 1\n        save(out_path / 'each.pt', training_state())\n"),),
        changes_loss=False),
    # ---- the loop over the blocks, and blocks
    "a_trunk_and_outputs_in_a_dict": Edit(  # and a setting of the model without a default
        (("class GPT(nn.Module):", "class Trunk(nn.ModuleDict):\n"
          "    def forward(self, x, rope, cache):\n"
          "        for i, block in enumerate(self.layers):\n"
          "            x = block(x, rope, None if cache is None else cache.layer(i))\n"
          "        return x\n\n\nclass GPT(nn.Module):"),
         ("            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))",
          "            layers = nn.ModuleList(Block(config) for _ in range(config.depth))\n"
          '            self.trunk = Trunk({"layers": layers})\n'
          "            self.stem = nn.ModuleList([nn.Linear(8, 8)])"),
         ("        for i, block in enumerate(self.blocks):\n" + LOOP,
          "        x = self.trunk(x, rope, cache)\n"),
         ("    block_size: int = 1024", "    depth: int\n    block_size: int = 1024"),
         (LOSS, LOSS.replace("return ", 'return {"loss": ') + "}"),
         ("        return self.lm_head(x if cache is None else x[:, -1:])",
          '        return {"logits": self.lm_head(x if cache is None else x[:, -1:])}')),
        (("dropout = 0.0", "depth = 2\ndropout = 0.0"),
         ("micro_loss = model(tokens, targets) * share",
          'micro_loss = model(tokens, targets)["loss"] * share'),
         ("weight * model(tokens, targets)", 'weight * model(tokens, targets)["loss"]')),
        changes_loss=False),
    "each_block_twice": Edit(((LOOP, LOOP + LOOP),), samples=False),
    "one_block_for_all_layers": Edit(
        (("nn.ModuleList(Block(config) for _ in range(config.n_layer))",
          "nn.ModuleList([Block(config)] * config.n_layer)"),)
    ),
    "parallel_attention_and_mlp": Edit(
        ((ATTENTION_LINE + "\n" + MLP_RESIDUAL,
          "        y = self.attention_norm(x)\n"
          "        return x + self.attention(y, rope, cache) + self.mlp(y)"),)
    ),
    "blocks_know_their_place": Edit(
        (("Block(config) for _ in range", "Block(config, i) for i in range"),
         ("class Block(nn.Module):\n    def __init__(self, config: GPTConfig):",
          "class Block(nn.Module):\n    def __init__(self, config: GPTConfig, place: int):"),
         in_block("self.place = place"),
         (MLP_RESIDUAL, "        return x + self.mlp(self.mlp_norm(x)) / (self.place + 1)"))
    ),
    "a_list_in_a_dictionary": Edit(  # as in nanoGPT
        (("self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))",
          "self.transformer = nn.ModuleDict({'h': nn.ModuleList(\n"
          "            Block(config) for _ in range(config.n_layer))})"),
         ("enumerate(self.blocks)", "enumerate(self.transformer.h)")), changes_loss=False
    ),
    "blocks_return_a_second_value": Edit(
        ((MLP_RESIDUAL, "        x = x + self.mlp(self.mlp_norm(x))\n"
                        "        return x, x.float().square().mean()"),
         (LOOP, LOOP.replace("x = block", "x, size = block")),
         (LOSS, LOSS + " + size"))
    ),
    "value_residual": Edit(
        (in_block("self.mix = nn.Parameter(torch.tensor([0.7, 0.3]))"),
         ("        for i, block", "        first = x\n        for i, block"),
         (LOOP, LOOP.replace("x = block(x,", "x = block(block.mix[0] * x + block.mix[1] * first,")))
    ),
    # ---- parameters of any kind
    "a_learned_scalar": Edit(
        (in_block("self.scale = nn.Parameter(torch.full((), 3.0))"),
         (MLP_RESIDUAL, "        return x + self.scale * self.mlp(self.mlp_norm(x))"))
    ),
    "a_bare_matrix": Edit(
        (in_block("self.mix = nn.Parameter(torch.eye(config.n_embd))"),
         (MLP_RESIDUAL, "        return x + self.mlp(self.mlp_norm(x)) @ self.mix"))
    ),
    "experts_in_one_tensor": Edit(
        (in_block("self.experts = nn.Parameter(torch.randn(3, config.n_embd, config.n_embd) / 9)"),
         (MLP_RESIDUAL, "        y = torch.einsum('btc,ecd->btd', self.mlp_norm(x), self.experts)\n"
                        "        return x + y + self.mlp(self.mlp_norm(x))"))
    ),
    "four_dimensions": Edit(
        (in_gpt("self.gate = nn.Parameter(torch.ones(1, 1, 2, config.n_embd // 2))"),
         (EMBED, EMBED + "\n        x = (x.unflatten(2, (2, -1)) * self.gate).flatten(2) + 0.01"))
    ),
    "conv1d": Edit(
        (in_block("self.conv = nn.Conv1d(config.n_embd, config.n_embd, 3, padding=2)"),
         (MLP_RESIDUAL, "        y = self.conv(x.transpose(1, 2))[:, :, : x.shape[1]]\n"
                        "        return x + y.transpose(1, 2)")), samples=False
    ),
    "an_embedding_in_each_block": Edit(
        (in_block("self.extra = nn.Embedding(config.vocab_size, config.n_embd)"),
         (LOOP, "            x = x + block.extra(tokens)\n" + LOOP))
    ),
    "shared_projections": Edit(
        ((("        self.qk_norm = config.qk_norm\n"),
          "        self.v_proj.weight = self.k_proj.weight\n"
          "        self.qk_norm = config.qk_norm\n"),)
    ),
    "a_frozen_embedding": Edit(
        (in_gpt("self.token_embedding.weight.requires_grad_(False)"),
         ("tied_embeddings: bool = True", "tied_embeddings: bool = False")),
        (("tied_embeddings = True", "tied_embeddings = False"),)
    ),
    "a_frozen_block": Edit((in_gpt("self.blocks[0].requires_grad_(False)"),)),
    "an_unused_layer": Edit((in_block("self.unused = nn.Linear(8, 8)"),)),
    "a_layer_used_in_some_steps": Edit(
        (in_block("self.sometimes = nn.Linear(config.n_embd, config.n_embd)"),
         in_gpt("self.calls = 0"),
         (EMBED, EMBED + "\n        self.calls += self.training"
                         "\n        if self.calls % 3 == 0:"
                         "\n            x = x + self.blocks[0].sometimes(x)")),
        depends_on_split=True
    ),
    # ---- layers of any kind
    "gelu_with_biases": Edit(
        (("self.up_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)",
          "self.up_proj = nn.Linear(config.n_embd, config.n_hidden)"),
         ("self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)",
          "self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=True)"),
         ("        self.gate_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)\n", ""),
         (MLP_LINE, "        return self.down_proj(F.gelu(self.up_proj(x)))"))
    ),
    "a_head_with_a_bias": Edit(
        (("nn.Linear(config.n_embd, config.vocab_size, bias=False)",
          "nn.Linear(config.n_embd, config.vocab_size)"),)
    ),
    "attention_by_hand": Edit(
        ((SDPA, "            k, v = (y.repeat_interleave(self.n_head // self.n_kv_head, 1)"
                " for y in (k, v))\n"
                "            scores = q @ k.mT / self.head_dim**0.5\n"
                "            hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)\n"
                "            y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v\n"),),
        changes_loss=False
    ),
    "a_sliding_window": Edit(
        ((SDPA, "            near = torch.ones(T, T, dtype=torch.bool, device=x.device)"
                ".tril().triu(-3)\n"
                "            y = F.scaled_dot_product_attention(q, k, v, attn_mask=near,"
                " enable_gqa=True)\n"),)
    ),
    "a_mask_of_minus_infinity_in_a_buffer_and_a_parameter": Edit(
        ((("        self.qk_norm = config.qk_norm\n"),
          "        self.qk_norm = config.qk_norm\n"
          "        mask = torch.full((config.block_size, config.block_size), -torch.inf).triu(1)\n"
          "        self.register_buffer('mask', mask)\n"
          "        self.frozen = nn.Parameter(mask.clone(), requires_grad=False)\n"),
         (SDPA, "            mask = torch.minimum(self.mask, self.frozen)[:T, :T].to(q.dtype)\n"
                "            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True,"
                " attn_mask=mask)\n")), changes_loss=False
    ),
    "a_counter_in_a_buffer": Edit(
        (in_gpt("self.register_buffer('steps', torch.zeros((), dtype=torch.int64))"),
         (EMBED, EMBED + "\n        self.steps += self.training")), changes_loss=False
    ),
    "a_complex_buffer": Edit(
        (in_gpt("self.register_buffer('turns', torch.polar(torch.ones(4), torch.arange(4.0)))"),
         (EMBED, EMBED + "\n        x = x + 0.1 * torch.view_as_real(self.turns).sum()"))
    ),
    "an_expanded_buffer": Edit(
        (in_gpt("self.register_buffer('ones', torch.ones(1).expand(4), persistent=False)"),),
        changes_loss=False
    ),
    "a_mask_created_in_forward": Edit(
        ((SDPA, "            if not hasattr(self, 'mask'):\n"
                "                mask = torch.full((16, 16), -torch.inf, device=x.device).triu(1)\n"
                "                self.register_buffer('mask', mask, persistent=False)\n"
                "            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True,"
                " attn_mask=self.mask[:T, :T].to(q.dtype))\n"),), changes_loss=False
    ),
    "a_buffer_with_a_gradient": Edit(
        (in_block("self.register_buffer('mean', torch.zeros(()))"),
         (MLP_RESIDUAL, MLP_RESIDUAL.replace("return x", "x = x") + "\n"
                        "        self.mean = x.float().mean()\n        return x")),
        changes_loss=False
    ),
    "more_state_than_tensors": Edit(
        ((MLP_LINE, MLP_LINE + "\n\n"
          "    def get_extra_state(self):\n        return {'version': 3}\n\n"
          "    def set_extra_state(self, state):\n        assert state == {'version': 3}"),),
        changes_loss=False
    ),
    "rates_from_a_tensor": Edit(  # as in timm; such code cannot run on the meta device
        (in_gpt("self.rates = [rate.item() for rate in torch.linspace(0, 0.3, config.n_layer)]"),
         (LOOP, LOOP + "            x = x * (1 + self.rates[i])\n"))
    ),
    "layers_in_nested_lists": Edit(
        (("nn.ModuleList(Block(config) for _ in range(config.n_layer))",
          "nn.ModuleList(nn.ModuleList([Block(config)]) for _ in range(config.n_layer))"),
         (LOOP, LOOP.replace("block(", "block[0]("))), changes_loss=False
    ),
    "initial_values_of_ones_own": Edit(
        (("        self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)\n",
          "        self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)\n"
          "        nn.init.zeros_(self.down_proj.weight)\n"),)
    ),
    # ---- losses
    "full_logits": Edit(
        ((LOSS, "            return F.cross_entropy(self.lm_head(x), targets.flatten())"),),
        changes_loss=False
    ),
    "a_negative_loss": Edit(((LOSS, LOSS + " - 10.0"),)),
    "a_head_with_its_own_forward": Edit(
        (("class GPT(nn.Module):", "class Head(nn.Linear):\n"
          "    def forward(self, x):\n        return 30 * torch.tanh(super().forward(x) / 3)\n\n\n"
          "class GPT(nn.Module):"),
         ("self.lm_head = nn.Linear(", "self.lm_head = Head("))
    ),
    "label_smoothing_from_a_new_setting": Edit(
        (("    dropout: float = 0.0\n", "    dropout: float = 0.0\n    smoothing: float = 0.0\n"),
         (LOSS, "            return F.cross_entropy(self.lm_head(x), targets.flatten(),"
                " label_smoothing=self.config.smoothing)")),
        (("dropout = 0.0  #", "smoothing = 0.2  # of the labels\ndropout = 0.0  #"),)
    ),
    # ---- train.py
    "sgd": Edit((), ((OPTIMIZER, "opt = torch.optim.SGD(raw_model.parameters(), lr=0.1,"
                                 " momentum=0.8)"),)),
    "rmsprop_for_some": Edit(
        (), ((OPTIMIZER, "opt = torch.optim.RMSprop(raw_model.blocks.parameters())"),)
    ),
    "hooks_see_gradients": Edit(
        (), ((BACKWARD, "        seen = []\n"
                        "        handles = [p.register_hook(lambda g: seen.append(g.norm()))"
                        " for p in raw_model.parameters()]\n" + BACKWARD + "\n"
                        "        assert len(seen) == len(handles) and all(g > 0 for g in seen)\n"
                        "        [handle.remove() for handle in handles]"),), changes_loss=False
    ),
    "autograd_grad": Edit(
        (), ((BACKWARD, "        found = torch.autograd.grad(micro_loss, raw_model.parameters(),"
                        " retain_graph=True)\n"
                        "        assert all(g is not None for g in found)\n" + BACKWARD),),
        changes_loss=False
    ),
    "state_of_the_last_batch": Edit(
        (in_gpt("self.register_buffer('last', None)"),
         (EMBED, EMBED + "\n        if self.training:\n"
                         "            x = x if self.last is None else x + self.last.to(x.dtype)\n"
                         "            self.last = x.detach().float().mean(dim=(0, 1))")),
        depends_on_split=True
    ),
    "no_scaler": Edit(
        (), (('"optimizer": opt, "scaler": scaler, "average"', '"optimizer": opt, "average"'),
             ("start.load_optimizer(opt, scaler)", "start.load_optimizer(opt)")),
        changes_loss=False
    ),
    "only_validation_loss": Edit(
        (), (('(("train_loss", train_file), ("val_loss",', '(("val_loss",'),
             ('val_file)):', 'val_file),):')), changes_loss=False
    ),
    "gradients_set_to_zero": Edit(
        (), (("        opt.zero_grad()", "        opt.zero_grad(set_to_none=False)"),),
        changes_loss=False
    ),
    "gradients_changed_by_hand": Edit(
        (), ((UNSCALE, "        for p in raw_model.parameters():\n"
                       "            p.grad.sign_()\n" + UNSCALE),)
    ),
    "no_clipping": Edit(
        (), (("optim.clip_gradients(opt, grad_clip)", "torch.zeros((), device=process.device)"),
             ("grad_clip = 1.0", "grad_clip = 0.0"))
    ),
    "a_running_average_of_the_weights": Edit(
        (), (("micro_batches = loader.micro_batches(iter_num)\n",
              "micro_batches = loader.micro_batches(iter_num)\n"
              "import copy\naverage = copy.deepcopy(raw_model)\n"),
             ("        iter_num += 1\n",
              "        iter_num += 1\n"
              "        with torch.no_grad():\n"
              "            pairs = zip(average.parameters(), raw_model.parameters(), strict=True)\n"
              "            for a, b in pairs:\n"
              "                a.lerp_(b, 0.5)\n"
              "            assert evaluate(average, [(torch.zeros(1, 8, dtype=torch.int64,"
              " device=process.device),) * 2 + (1.0,)]).isfinite()\n")),
        changes_loss=False
    ),
    "a_rate_of_its_own_for_the_embedding": Edit(
        (), (("        lr = optim.set_schedule(opt, iter_num, config)\n",
              "        lr = optim.set_schedule(opt, iter_num, config)\n"
              "        opt.param_groups[-2]['lr'] = lr / 3\n"),)
    ),
}  # fmt: skip


# edits that change the computation, but neither the parameters nor which of them get gradients
SAME_PARAMETERS = (
    "parallel_attention_and_mlp", "blocks_know_their_place", "attention_by_hand",
    "a_sliding_window", "a_mask_of_minus_infinity_in_a_buffer_and_a_parameter",
    "a_counter_in_a_buffer", "full_logits", "a_negative_loss",
    "label_smoothing_from_a_new_setting", "gradients_set_to_zero", "no_clipping",
    "a_running_average_of_the_weights",
    "blocks_return_a_second_value",
)  # fmt: skip


def edits_of_the_page() -> dict[str, Edit]:
    """The edits from docs/changing.md."""
    text = (ROOT / "docs" / "changing.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## (?=\d)", text, flags=re.MULTILINE)[1:]:
        codes = re.findall(r"^```python\n(.*?)\n```$", section, re.DOTALL | re.MULTILINE)
        pairs = {"model.py": [], "train.py": []}
        for old, new in zip(codes[::2], codes[1::2], strict=True):
            (name,) = [n for n in pairs if (ROOT / n).read_text(encoding="utf-8").count(old) == 1]
            pairs[name].append((old, new))
        title = section.splitlines()[0]
        found[title] = Edit(
            tuple(pairs["model.py"]), tuple(pairs["train.py"]), samples="Every block" not in title,
            changes_loss=not title.startswith(("9.", "10.")),
        )  # fmt: skip
    return found


EDITS |= edits_of_the_page()


def test_the_page_shows_eleven_edits():
    assert len(edits_of_the_page()) == 11


def edited(edit: Edit, copy: Path) -> Path:
    """A copy of the project with the edit applied."""
    copy.mkdir(exist_ok=True)
    for name in ("steady", "configurator.py", "convert.py", "sample.py"):
        (copy / name).symlink_to(ROOT / name)
    for name, pairs in (("model.py", edit.model), ("train.py", edit.train)):
        text = (ROOT / name).read_text(encoding="utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (copy / name).write_text(text, encoding="utf-8")
    return copy


OURS = ("model", "convert", "configurator")  # steady is not copied


def forget_project():
    """Drop the project's modules, so that they are imported again; returns the dropped ones."""
    names = [name for name in sys.modules if name.partition(".")[0] in OURS]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def student(monkeypatch, capsys):
    """`student(copy, "train.py", "--key=value")` runs a copy's script in this process."""

    def run(copy, script, *arguments):
        mine = forget_project()
        monkeypatch.setattr(sys, "argv", [str(copy / script), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(copy))
        hook = sys.excepthook
        try:
            runpy.run_path(str(copy / script), run_name="__main__")
        finally:
            sys.excepthook = hook
            held = sys.modules["steady.folder"].held
            while held:  # release the locks, as the end of a process would
                for opened in held.popitem()[1]:
                    os.close(opened)
            forget_project()
            sys.modules.update(mine)
            sys.path.remove(str(copy))
        return capsys.readouterr().out

    return run


def losses(out):
    return [entry["loss"] for entry in read_metrics(out / "metrics.jsonl") if "loss" in entry]


@pytest.fixture(scope="module")
def plain_losses(sums, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    process = forked.start(
        ["train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={out}"],
        dict(os.environ), out / "output.txt",
    )  # fmt: skip
    assert process.wait(100) == 0, (out / "output.txt").read_text()
    return losses(out)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_trains_resumes_samples_and_compiles(
    student, sums, tmp_path, plain_losses, traced, name
):
    edit = EDITS[name]
    copy = edited(edit, tmp_path / "copy")
    muon = ["--batch_size=2", "--gradient_accumulation_steps=2", "--optimizer=muon",
            "--average_weights=True"]  # fmt: skip
    quick = ["--eval_interval=0"]
    ways = {"adamw": quick, "compiled": [*muon, *quick, "--compile=True"],
            "muon": [*muon, "--max_iters=2"], "resumed": [*muon, "--init_from=resume"]}  # fmt: skip
    found = {}
    for way, arguments in ways.items():
        out = tmp_path / ("muon" if way == "resumed" else way)
        shown = student(copy, "train.py", *SETTINGS, *arguments, f"--dataset={sums}",
                        f"--out_dir={out}")  # fmt: skip
        assert "compiling fails" not in shown
        found[way] = losses(out)
        assert len(found[way]) == (2 if way == "muon" else 3)
        assert all(abs(loss) < 20 for loss in found[way])
    if not edit.depends_on_split:  # nor on the number of trial steps
        # (the counter of a_layer_used_in_some_steps is not a buffer, so it is not saved)
        way = "muon" if name == "a_layer_used_in_some_steps" else "resumed"
        whole = found["compiled"][: len(found[way])]
        assert whole == pytest.approx(found[way], abs=1e-5)
    differs = found["adamw"] != pytest.approx(plain_losses, abs=1e-4)
    assert differs is edit.changes_loss
    saved = checkpoint.load(tmp_path / "muon" / "ckpt.pt")
    count = re.search(r"model ([\d,]+) parameters", shown).group(1)
    tensors = [value for value in saved["model"].values() if isinstance(value, torch.Tensor)]
    shared = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
    assert int(count.replace(",", "")) <= sum(shared.values())
    if edit.samples:
        shown = student(copy, "sample.py", f"--out_dir={tmp_path / 'muon'}", "--start=1",
                        "--num_samples=1", "--max_new_tokens=5", "--device=cpu")  # fmt: skip
        assert shown.startswith("1")


RECURRENT = """
import torch
from dataclasses import asdict, dataclass, fields
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 64
    n_layer: int = 1
    n_embd: int = 16
    dropout: float = 0.0

    @classmethod
    def from_settings(cls, settings, vocab_size):
        names = {field.name for field in fields(cls)} & settings.keys()
        return cls(**{name: settings[name] for name in names} | {"vocab_size": vocab_size})

    def settings(self):
        return asdict(self)

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.gru = nn.GRU(config.n_embd, config.n_embd, config.n_layer, batch_first=True)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, tokens, targets=None):
        logits = self.head(self.gru(self.embedding(tokens))[0])
        return logits if targets is None else F.cross_entropy(logits.mT, targets)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        return 6 * self.num_params()
"""


def test_a_model_of_ones_own_trains_resumes_and_samples(student, sums, tmp_path):
    copy = edited(Edit(), tmp_path / "copy")
    (copy / "convert.py").unlink()  # it only knows our model
    (copy / "convert.py").write_text("")
    (copy / "model.py").write_text(RECURRENT)
    common = [*SETTINGS, f"--dataset={sums}", "--eval_interval=0"]
    student(copy, "train.py", *common, f"--out_dir={tmp_path / 'whole'}")
    parts = [*common, f"--out_dir={tmp_path / 'parts'}"]
    student(copy, "train.py", *parts, "--max_iters=2", "--lr_decay_iters=3")
    student(copy, "train.py", *parts, "--init_from=resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    shown = student(copy, "sample.py", f"--out_dir={tmp_path / 'parts'}", "--start=1",
                    "--num_samples=1", "--max_new_tokens=5", "--device=cpu")  # fmt: skip
    assert shown.startswith("1")


LOOPED = """
import atexit, gc, os, runpy, sys, traceback
from pathlib import Path
ours = ("model", "convert", "configurator")
import torch.distributed
import forked
atexit._run_exitfuncs = lambda: None  # they remove our operator from torch
gc.unfreeze = lambda: None  # collections would scan all of torch again
for copy, *arguments in {jobs!r}:
    for name in [n for n in sys.modules if n.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.argv, sys.path[:1] = [copy + "/train.py", *arguments], [copy]
    forked.wait_for_first_process()
    real = os._exit
    def not_yet(status):
        raise SystemExit(status)
    os._exit = not_yet
    try:
        runpy.run_path(copy + "/train.py", run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    finally:
        os._exit = real
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
"""


def test_two_processes_train_edits_as_one_does(sums, tmp_path):
    """Covers gradients that only some of the processes, or none, have."""
    left_out = {name for name, edit in EDITS.items() if edit.depends_on_split}
    left_out |= {name for name in edits_of_the_page() if not name.startswith(("1.", "3.", "4."))}
    names = [name for name in EDITS if name not in left_out | {*SAME_PARAMETERS}]
    muon = ["--optimizer=muon", "--eval_interval=0", f"--dataset={sums}"]
    halved = ["--batch_size=2", "--gradient_accumulation_steps=2"]
    copies = [str(edited(EDITS[name], tmp_path / name)) for name in names]
    port, running = free_port(len(names)), []
    for rank in range(3):  # rank 2 trains alone
        out = "alone" if rank == 2 else "both"
        split = halved if rank < 2 else []
        own = [[copy, *SETTINGS, *muon, *split, f"--out_dir={tmp_path / out / name}"]
               for copy, name in zip(copies, names, strict=True)]  # fmt: skip
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                 "MASTER_ADDR": "127.0.0.1"} if rank < 2 else {}  # fmt: skip
        variables = os.environ | {k: str(v) for k, v in place.items()} | {"MASTER_PORT": str(port)}
        running.append(forked.start([], variables, tmp_path / f"{rank}.txt",
                                    LOOPED.format(jobs=own)))  # fmt: skip
    ends = [process.wait(100) for process in running]
    for process in running:  # one that has failed leaves the others waiting
        process.kill()
    assert ends == [0, 0, 0], [(tmp_path / f"{n}.txt").read_text()[-2000:] for n in range(3)]
    for name in names:
        both, alone = (losses(tmp_path / out / name) for out in ("both", "alone"))
        assert len(both) == 3 and both == pytest.approx(alone, abs=2e-4), name


def test_f89_hooks_that_come_after_the_first_step_are_called(traced):
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_embd=32, n_head=2))
    compiled = compiling.compile_model(model, compiling.Plan(None, "default", False))
    tokens, called = torch.randint(64, (2, 8)), []
    compiled(tokens, tokens).backward()
    for layer in (model.blocks[0], model.blocks[1].mlp, model.final_norm):
        layer.register_forward_hook(lambda layer, *_: called.append(layer))
    compiled(tokens, tokens).backward()
    assert called == [model.blocks[0], model.blocks[1].mlp, model.final_norm]


# ---- mistakes of the student -------------------------------------------------------------------

WRONG = ("        B, T, _ = x.shape\n", "        B, T = x.shape\n")


SHAPES = ("* self.up_proj(x))", "* self.up_proj(x)[..., :3])")  # torch.compile has its own error


@pytest.mark.parametrize(
    ("compiled", "edit", "line", "error"),
    [(False, WRONG, WRONG[1].strip(), "ValueError: too many values to unpack (expected 2)"),
     (True, SHAPES, "return self.down_proj(F.silu(self.gate_proj(x)) " + SHAPES[1],
      "RuntimeError: The size of tensor a (")],
    ids=["eager", "compiled"],
)  # fmt: skip
def test_f57_a_students_error_keeps_its_traceback(
    fork, sums, tmp_path, compiled, edit, line, error
):
    copy = edited(Edit((edit,)), tmp_path / "copy")
    code = f"""
import sys
for name in [n for n in sys.modules if n.partition(".")[0] in {OURS!r}]:
    del sys.modules[name]
sys.path.insert(0, {str(copy)!r})
"""
    process = fork(copy / "train.py", *SETTINGS, f"--compile={compiled}", f"--dataset={sums}",
                   f"--out_dir={tmp_path / 'out'}", code=code)  # fmt: skip
    shown = process.stdout.read()
    number = [*map(str.strip, (copy / "model.py").read_text().splitlines())].index(line) + 1
    assert process.wait() == 1
    assert f'model.py", line {number}, in forward\n    {line}\n' in shown
    # torch also logs the error, with "E" and the time before each line
    assert shown.count("\nTraceback") == 1 and f"\n{error}" in shown
    assert "compiling fails" not in shown and "error: " not in shown


def test_f57_every_error_but_a_user_error_or_the_systems_keeps_its_traceback(capsys):
    from configurator import one_line_errors
    from steady import UserError

    for error, one_line in (
        (ValueError("x"), False), (UserError("x"), True), (OSError("x"), False),
        (FileNotFoundError(2, "No such file", "x"), True), (KeyError("x"), False),
    ):  # fmt: skip
        one_line_errors(type(error), error, None)
        assert capsys.readouterr().err.startswith("error: ") is one_line


@pytest.mark.parametrize("script", ["model.py", "train.py", "convert.py"])
@pytest.mark.parametrize("call", ["open('missing')", "checkpoint.require_file(folder)"])
def test_f57_a_missing_file_in_a_students_line_has_a_traceback(capsys, script, call):
    from configurator import one_line_errors

    def resolve():
        raise PermissionError(13, "Permission denied")

    folder = type("Folder", (), {"exists": lambda self: resolve()})()
    try:
        exec(
            compile(call, str(ROOT / script), "exec"), {"checkpoint": checkpoint, "folder": folder}
        )
    except OSError as error:
        trace = error.__traceback__.tb_next  # without this file
        one_line_errors(type(error), error, trace)
    own = script != "convert.py" and "open" in call
    assert (f'{script}", line 1' in capsys.readouterr().err) is own


def test_f89_compiled_code_is_the_students_loop_over_the_blocks(
    student, sums, tmp_path, traced, plain_losses
):
    """An edit of the loop has the same effect on compiled and on eager training."""
    copy = edited(EDITS["each_block_twice"], tmp_path / "copy")
    for way in ("False", "True"):
        student(copy, "train.py", *SETTINGS, f"--compile={way}", "--max_iters=2",
                f"--dataset={sums}", f"--out_dir={tmp_path / way}")  # fmt: skip
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), abs=1e-4)
    assert losses(tmp_path / "True") != pytest.approx(plain_losses[:2], abs=1e-3)


def test_f60_hooks_and_autograd_see_all_gradients():
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=16))
    tokens, seen = torch.zeros(2, 8, dtype=torch.int64), {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, gradient))
    model(tokens, tokens).backward()
    found = torch.autograd.grad(model(tokens, tokens), list(model.parameters()))
    for (name, parameter), gradient in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(seen[name], parameter.grad)
        torch.testing.assert_close(gradient, parameter.grad)


def test_values_that_a_student_gives_survive(monkeypatch, tmp_path):
    """Initial values of parameters, buffers and layers survive, also under torch.device()."""
    edit = Edit((
        in_block("self.scale = nn.Parameter(torch.full((), 3.0))"),
        in_block("self.norm = nn.LayerNorm(config.n_embd)"),
        in_block("self.table = nn.Parameter(torch.eye(4))"),
        in_block("self.register_buffer('own', torch.arange(3))"),
        in_block("self.zero = nn.Linear(4, 4); nn.init.zeros_(self.zero.weight)"),
        in_block("self.data = nn.Linear(4, 4); self.data.weight.data.zero_()"),
        in_block("self.again = nn.Embedding(100, 64); nn.init.normal_(self.again.weight)"),
        in_block("self.own_weight = nn.Linear(64, 64)\n"
                 "        weight = torch.empty(64, 64).uniform_(-1, 1)\n"
                 "        self.own_weight.weight = nn.Parameter(weight)"),
        in_block("self.padded = nn.Embedding(100, 64, padding_idx=3)"),
        ("nn.ModuleList(Block(config) for _ in range(config.n_layer))",
         "nn.ModuleList(copy.deepcopy(block) for block in [Block(config)] * config.n_layer)"),
        ("import math\n", "import copy\nimport math\n"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    spec = importlib.util.spec_from_file_location("edited", copy / "model.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", module)  # dataclass looks it up there
    spec.loader.exec_module(module)
    config = module.GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
    with torch.device("cpu"):
        block, other = module.GPT(config).blocks
    assert block.scale == 3.0 and torch.equal(block.table, torch.eye(4))
    assert (block.norm.weight == 1).all() and torch.equal(block.own, torch.arange(3))
    assert not block.zero.weight.any() and not block.data.weight.any()
    assert block.own_weight.weight.max() > 0.9 and block.again.weight.std() > 0.9
    with torch.device("meta"):  # fsdp
        draws = module.GPT(config).initial.draws
    assert not any("again" in name for name in draws) and "blocks.0.mlp.up_proj" not in draws
    assert block.padded.weight.std() < 0.03 and not block.padded.weight[3].any()
    assert block.mlp.up_proj.weight.std() < 0.03  # a copied block is drawn like any other
    assert not torch.equal(block.mlp.up_proj.weight, other.mlp.up_proj.weight)
    assert torch.nn.Linear.reset_parameters.__module__ == "torch.nn.modules.linear"


def test_initial_weights_do_not_depend_on_the_number_of_threads():
    """It decides how a sum of floats is rounded, and an edit may change it at any time."""
    weight, before = torch.randn(2048, 512), torch.get_num_threads()
    seen = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        seen.append(fingerprint(weight))
    torch.set_num_threads(before)
    assert len(set(seen)) == 1
    rows = weight.flip(0), weight[torch.randperm(2048)], weight.flip(1), -weight
    weight = weight.clone()
    weight[5, 7] += 1e-3
    assert not {*map(fingerprint, (weight, *rows))} & {*seen}
    for shape in ((), (3,), (2, 3, 4)):  # a layer may have any weight
        assert fingerprint(torch.ones(shape)) != fingerprint(torch.zeros(shape))


@pytest.mark.parametrize("counted", ["", "        self.calls += 1\n"])
def test_a_number_that_changes_in_every_step_is_compiled_twice(
    student, sums, tmp_path, traced, counted
):
    """Without the fix: once in every step, which takes seconds."""
    edit = Edit(
        (in_block("self.heat, self.calls = 1.0, 0"),
         (MLP_RESIDUAL, counted
          + MLP_RESIDUAL.replace(")))", "))) * (self.heat + 1 / (9 + self.calls))"))),
        (("        loss = forward_backward(model, step_batches",
          "        for block in raw_model.blocks:\n"
          "            block.heat = 1.0 + 1.0 / (2 + iter_num)\n"
          "        loss = forward_backward(model, step_batches"),),
    )  # fmt: skip
    copy, versions = edited(edit, tmp_path / "copy"), {}
    for steps in (3, 8):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        student(copy, "train.py", *SETTINGS, "--compile=True", f"--max_iters={steps}",
                "--eval_interval=0", f"--dataset={sums}",
                f"--out_dir={tmp_path / 'out'}")  # fmt: skip
        versions[steps] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert versions[3] == versions[8] == 3  # the block twice, the last norm once


LLAMAS = ("", "logits_and_loss_as_in_nanogpt")


@pytest.mark.parametrize("name", ["gelu_with_biases", "1. Another MLP: ReLU squared", *LLAMAS])
def test_only_what_transformers_computes_is_exported(student, sums, tmp_path, name):
    """Without the fix an edited model is exported as a Llama without a word."""
    copy = edited(EDITS[name] if name else Edit(), tmp_path / "copy")
    out = f"--out_dir={tmp_path / 'out'}"
    student(copy, "train.py", *SETTINGS, f"--dataset={sums}", out)
    export = [copy, "convert.py", out, f"--to={tmp_path / 'exported'}"]
    if name in LLAMAS:
        assert "wrote" in student(*export)
        return
    with pytest.raises(ValueError, match="computes something other than a Llama"):
        student(*export)
    assert not (tmp_path / "exported").exists()


SCALE = (
    in_block("self.scale = nn.Parameter(torch.full((1,), 0.5))"),
    (MLP_RESIDUAL, MLP_RESIDUAL.replace("self.dropout", "self.scale * self.dropout")),
)
LORA = (
    ("class Attention(nn.Module):", '''class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)
        self.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.A = nn.Parameter(torch.randn(4, n_in))
        self.B = nn.Parameter(torch.zeros(n_out, 4))

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


class Attention(nn.Module):'''),
    ("q_proj = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)",
     "q_proj = LoRALinear(config.n_embd, self.n_head * self.head_dim)"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "prefix"),
    [(SCALE, "blocks.0."), (LORA, "blocks.0.attention.q_proj.")],
    ids=["scale", "lora"],
)
def test_a_run_is_finetuned_with_parameters_that_it_lacks(student, sums, tmp_path, edit, prefix):
    base = [*SETTINGS, f"--dataset={sums}"]
    student(edited(Edit(), tmp_path / "plain"), "train.py", *base, f"--out_dir={tmp_path / 'a'}")
    load = "start.load_weights(raw_model)"
    loose = Edit(edit, ((load, "start.load_weights(raw_model, strict=False)"),))
    tune = [*base, f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'b'}"]
    complaint = rf"does not fit model.py and its model_config in .*{prefix}scale \(missing\)"
    with pytest.raises(ValueError, match=complaint):
        student(edited(Edit(edit), tmp_path / "strict"), "train.py", *tune)
    copy = edited(loose, tmp_path / "loose")
    student(copy, "train.py", *tune, "--learning_rate=0", "--min_lr=0", "--max_iters=1")
    saved = [checkpoint.load(tmp_path / name / "ckpt.pt")["model"] for name in "ab"]
    assert saved[1][f"{prefix}scale"].item() == 0.5
    assert all(torch.equal(saved[1][name], tensor) for name, tensor in saved[0].items())
    assert "finished" in student(copy, "train.py", *tune[:-2], tune[-1], "--init_from=resume")


def test_a_new_setting_counts_for_a_run_that_is_finetuned(student, sums, tmp_path):
    """It had GPTConfig's default, without a message: LoRA of rank 0, for example."""
    base = [*SETTINGS, f"--dataset={sums}"]
    student(edited(Edit(), tmp_path / "plain"), "train.py", *base, f"--out_dir={tmp_path / 'a'}")
    field = "    dropout: float = 0.0\n"
    derived = "        self.n_kv_head = self.n_kv_head or self.n_head\n"
    edit = Edit(((field, field + "    rank: int = 0\n    window: int = 0\n"),
                 (derived, derived + "        self.window = self.window or 2 * self.n_embd\n")),
                (("qk_norm = False", "rank = 4\nqk_norm = False"),))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    for start, out, more in ("a", "b", ("--n_embd=64",)), ("b", "c", ("--rank=2",)):
        shown = student(copy, "train.py", *base, f"--init_from={tmp_path / start}", *more,
                        f"--out_dir={tmp_path / out}")  # fmt: skip
        saved = checkpoint.load(tmp_path / out / "ckpt.pt", checkpoint.EVERYTHING)
        assert saved["model_config"]["rank"] == saved["config"]["rank"] == 4
        assert saved["model_config"]["window"] == 2 * saved["model_config"]["n_embd"] < 128
        assert ("without effect on this model: --rank=2 (it is 4)" in shown) is (start == "b")


def test_a_post_init_that_changes_its_own_results_is_refused(student, sums, tmp_path):
    line = "        self.n_kv_head = self.n_kv_head or self.n_head\n"
    copy = edited(Edit(((line, line + "        self.n_hidden += 64\n"),)), tmp_path / "copy")
    with pytest.raises(ValueError, match="__post_init__ changes its own result: n_hidden"):
        student(copy, "train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")


def test_a_step_may_use_its_batches_twice(student, sums, tmp_path):
    """As SAM does, or to look at one. The second use had no data and trained on nothing."""
    again = "        loss = forward_backward(model, step_batches, halve)\n"
    changes = (
        again + "        opt.zero_grad()\n" + again,
        "        example = next(iter(step_batches))\n" + again,
        again,
    )
    for n, new in enumerate(changes):
        copy = edited(Edit((), ((again, new),)), tmp_path / f"copy{n}")
        student(copy, "train.py", *SETTINGS, "--gradient_accumulation_steps=2",
                f"--dataset={sums}", f"--out_dir={tmp_path / f'out{n}'}")  # fmt: skip
    assert losses(tmp_path / "out0") == losses(tmp_path / "out1") == losses(tmp_path / "out2")


def test_a_state_without_an_iteration_is_saved_too(student, sums, tmp_path):
    edit = Edit(train=(('"iter_num": iter_num,', '"step": iter_num,'),))
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, "--eval_interval=0", f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert "cannot be resumed: it lacks a valid iter_num" in shown
    assert checkpoint.read(tmp_path / "out" / "ckpt.pt")["step"] == 3


def test_a_state_that_does_not_count_is_announced(student, sums, tmp_path):
    """A loop in a function, whose iter_num is its own: a resume repeated all steps."""
    edit = Edit(train=(('"iter_num": iter_num,', '"iter_num": 0,'),))
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, "--eval_interval=0", f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert "warning: the state has iteration 0 after 3 steps: if your loop is in a fun" in shown


def test_what_becomes_impossible_to_save_is_left_out(student, sums, tmp_path):
    """The check before training cannot see it, and the whole run was lost."""
    edit = Edit(train=(
        ("def training_state", "history = []\n\n\ndef training_state"),
        ('"optimizer": opt,', '"optimizer": opt, "history": history, "other": [1],'),
        ("        iter_num += 1\n", "        history.append(loss.numpy()); iter_num += 1\n"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, "--eval_interval=0", f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert "cannot hold 'history', because it has a NumPy array: save only dense" in shown
    saved = checkpoint.load(tmp_path / "out" / "ckpt.pt", checkpoint.EVERYTHING)
    assert saved["other"] == [1] and saved["iter_num"] == 3


def test_a_state_saved_after_an_error_counts_the_step_that_was_taken(student, sums, tmp_path):
    """It was trained on twice: the error came after opt.step, but before iter_num += 1."""
    fault = (
        "        averages.update(iter_num)\n        if init_from == 'scratch': 1 / (iter_num - 2)\n"
    )
    arguments = [*SETTINGS, f"--dataset={sums}", "--eval_interval=0"]
    copy = edited(Edit(train=(("        averages.update(iter_num)\n", fault),)), tmp_path / "copy")
    with pytest.raises(ZeroDivisionError):
        student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}")
    student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}", "--init_from=resume")
    student(ROOT, "train.py", *arguments, f"--out_dir={tmp_path / 'b'}")
    first, _, last = losses(tmp_path / "b")
    assert losses(tmp_path / "a") == [first, last]  # the second was not logged


def test_your_own_exit_saves_the_state(student, sums, tmp_path):
    edit = Edit(
        train=(("        opt.zero_grad()\n", "        opt.zero_grad()\n        exit(3)\n"),)
    )
    copy, out = edited(edit, tmp_path / "copy"), tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        student(copy, "train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={out}")
    assert ended.value.code == 3 and checkpoint.load(out / "ckpt.pt")["iter_num"] == 1


def test_a_resume_draws_the_same_random_numbers_at_the_top_of_the_loop(student, sums, tmp_path):
    edit = Edit(train=((SCHEDULE, SCHEDULE + "; print('drew', iter_num, torch.rand(()).item())"),))
    copy = edited(edit, tmp_path / "copy")
    arguments = [*SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}"]
    whole = student(copy, "train.py", *arguments)
    student(copy, "train.py", *arguments, "--max_iters=2")
    rest = student(copy, "train.py", *arguments, "--init_from=resume")
    drawn = {line for line in rest.splitlines() if line.startswith("drew")}
    assert len(drawn) == 2 and drawn <= {*whole.splitlines()}


def test_a_criterion_that_is_an_integer_is_resumed(student, sums, tmp_path):
    line = "                losses = estimate_losses()\n"
    edit = Edit(train=((line, line + "                losses['val_loss'] = iter_num + 7\n"),))
    copy = edited(edit, tmp_path / "copy")
    arguments = [*SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}"]
    student(copy, "train.py", *arguments, "--eval_interval=1", "--max_iters=2")
    student(copy, "train.py", *arguments, "--init_from=resume")
    assert checkpoint.load(tmp_path / "out" / "ckpt.pt")["best_val_loss"] == 8


def test_a_derived_field_of_the_config_is_computed_again(student, sums, tmp_path):
    edit = Edit(model=(
        ("import asdict, dataclass, fields", "import asdict, dataclass, field, fields"),
        ("    tied_embeddings: bool", "    n_rep: int = field(init=False, default=0)\n"
         "    tied_embeddings: bool"),
        ("    def __post_init__(self):", "    def __post_init__(self):\n        self.n_rep = 2"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    arguments = [*SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}"]
    student(copy, "train.py", *arguments, "--max_iters=2")
    student(copy, "train.py", *arguments, "--init_from=resume")
    assert len(losses(tmp_path / "out")) == 3


def test_a_signal_during_an_evaluation_leaves_no_line_out(student, sums, tmp_path):
    """`break` skipped the rest of the `with` block, so weights stayed exchanged and were saved."""
    scale = "                for p in raw_model.parameters(): p.data *= {}\n"
    edit = Edit(train=(
        ("                losses = estimate_losses()\n", scale.format(2.0) +
         "                if (init_from, iter_num) == ('scratch', 2): os.kill(os.getpid(), 15)\n"
         "                losses = estimate_losses()\n"),
        ('                        best_val_loss = losses["val_loss"]\n',
         '                        best_val_loss = losses["val_loss"]\n' + scale.format(0.5)),
        ("from pathlib", "import os\nfrom pathlib"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    arguments = [*SETTINGS, f"--dataset={sums}", "--eval_interval=2"]
    shown = student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}")
    assert "stopped at iteration 2" in shown
    student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}", "--init_from=resume")
    student(ROOT, "train.py", *arguments, f"--out_dir={tmp_path / 'b'}")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize("kind", ["adamw", "SGD"])
def test_a_parameter_that_is_a_slice_of_another_is_resumed(student, sums, tmp_path, kind):
    """Loaded in the shared memory of the new model, the second overwrote a part of the first."""
    edit = Edit((
        in_gpt("self.small = nn.Linear(8, config.vocab_size, bias=False)"),
        in_gpt("self.small.weight = nn.Parameter(self.lm_head.weight[:, :8])"),
        (LOSS, "            small = self.small(x[:, :8]).flatten(0, -2)\n"
               "            extra = F.cross_entropy(small, targets.flatten())\n"
               f"{LOSS} + extra"),
    ), () if kind == "adamw" else (
        (OPTIMIZER, "opt = torch.optim.SGD(raw_model.parameters(), lr=0.1, momentum=0.9)"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    arguments = [*SETTINGS, f"--dataset={sums}", "--eval_interval=0"]
    student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}", "--max_iters=2",
            "--lr_decay_iters=3")  # fmt: skip
    student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'a'}", "--init_from=resume")
    student(copy, "train.py", *arguments, f"--out_dir={tmp_path / 'b'}")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_module_that_is_switched_off_stays_off(student, sums, tmp_path):
    """Such as a teacher's dropout. Evaluations, the trial step's too, switched it on again."""
    check = "        assert raw_model.dropout.training and not raw_model.teacher.training\n"
    edit = Edit((in_gpt("self.teacher = nn.Dropout(0.5).eval()"),),
                (("        iter_num += 1\n", check + "        iter_num += 1\n"),))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    student(copy, "train.py", *SETTINGS, "--eval_interval=1", "--sample_interval=1",
            f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert len(losses(tmp_path / "out")) == 3


def test_modules_with_a_train_method_of_their_own_are_switched_back():
    """As in loralib, where train(False) merges LoRA's weights and train(True) takes them out."""

    class Merging(nn.Module):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(), nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    with evaluation_mode(model):
        assert model[0].merged and not any(module.training for module in model.modules())
    assert not model[0].merged
    assert [module.training for module in model.modules()] == [True, True, True, False, False]


def test_the_trial_step_leaves_no_gradients(student, sums, tmp_path):
    """Also if the optimizer has only some of the parameters, as with two optimizers."""
    check = "assert all(p.grad is None for p in raw_model.parameters())\n"
    steps = "micro_steps = sequences_per_iter // fit"
    edit = Edit((), (
        (OPTIMIZER, "opt = torch.optim.AdamW(p for p in raw_model.parameters() if p.dim() < 2)"),
        (steps, check + steps),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    student(copy, "train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")
    assert len(losses(tmp_path / "out")) == 3


@pytest.mark.parametrize(("line", "new", "key"), [
    ('"config": config,', "", "config"),
    ('"optimizer": opt,', '"optimizer": [opt.state_dict()],', "optimizer"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_resumed_is_announced(student, sums, tmp_path, line, new, key):
    copy = edited(Edit(train=((line, new),)), tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert f"ckpt.pt cannot be resumed: it lacks a valid {key}\n" in shown
    assert len(losses(tmp_path / "out")) == 3


def test_the_trial_step_trains_nothing(student, sums, tmp_path):
    """Its batch is all zeros. A step in forward_backward trained on it, at every start."""
    steps = "micro_steps = sequences_per_iter // fit"
    edit = Edit((), (
        (BACKWARD, BACKWARD + "\n        optim.clip_gradients(opt, grad_clip)\n"
                              "        opt.step()\n        opt.zero_grad()"),
        ("fit = memory.fit(", "before = [p.detach().clone() for p in raw_model.parameters()]\n"
                              "fit = memory.fit("),
        (steps, f"assert all(map(torch.equal, before, raw_model.parameters()))\n{steps}"),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    first, _, last = losses(tmp_path / "out")
    assert "the trial step" not in shown and last < first


def test_an_optimizer_with_a_closure_trains(student, sums, tmp_path):
    edit = Edit((), (
        (OPTIMIZER, "opt = torch.optim.LBFGS(raw_model.parameters(), lr=0.1, max_iter=2)"),
        (BACKWARD, "        def closure():\n            opt.zero_grad()\n"
                   "            with autocast:\n"
                   "                found = model(tokens, targets) * share\n"
                   "            found.backward()\n            return found\n"
                   "        micro_loss = opt.step(closure)"),
        ("        scaler.step(opt)\n        scaler.update()\n", ""),
    ))  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert "the trial step" not in shown and len({*losses(tmp_path / "out")}) == 3


def test_a_parameter_that_forward_creates_is_refused(student, sums, tmp_path):
    """It would not be trained, and the checkpoint could be neither sampled nor resumed."""
    line = "        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))"
    new = "        if not hasattr(self, 'late'):\n            self.late = nn.Linear(1, 1)\n"
    copy = edited(Edit(((line, new + line),)), tmp_path / "copy")
    with pytest.raises(ValueError, match="mlp.late.bias was created in a forward pass.*__init__"):
        student(copy, "train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")


def test_what_the_trial_step_changes_in_parameters_is_named(student, sums, tmp_path):
    edit = Edit(
        (in_gpt("self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)"),
         (EMBED, EMBED + "\n        self.bias += 0.1"))
    )  # fmt: skip
    copy = edited(edit, tmp_path / "copy")
    shown = student(copy, "train.py", *SETTINGS, f"--dataset={sums}",
                    f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    assert "note: the trial step, on a batch of zeros, has changed bias: only" in shown


def test_data_that_ends_is_an_error(student, sums, tmp_path):
    """A finite DataLoader: the run went on with losses of 0."""
    line = "micro_batches = loader.micro_batches(iter_num)\n"
    edit = Edit((), ((line, line + "micro_batches = iter([next(micro_batches)])\n"),))
    copy = edited(edit, tmp_path / "copy")
    with pytest.raises(RuntimeError, match="StopIteration"):
        student(copy, "train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")


def test_settings_are_computed_below_configure(student, sums, tmp_path):
    line = "config = configure(globals())\n"
    edit = Edit((), ((line, line + "learning_rate = learning_rate * batch_size\n"),))
    copy = edited(edit, tmp_path / "copy")
    student(copy, "train.py", *SETTINGS, "--warmup_iters=0", "--lr_schedule=wsd",
            f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")  # fmt: skip
    entries = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert next(e["lr"] for e in entries if "lr" in e) == pytest.approx(4 * 5e-3)


def test_the_width_may_have_another_name(student, sums, tmp_path):
    copy = edited(Edit(), tmp_path / "copy")
    for script in ("model.py", "train.py"):
        text = (copy / script).read_text().replace("n_embd", "d_model")
        (copy / script).write_text(text)
    settings = [flag.replace("n_embd", "d_model") for flag in SETTINGS]
    student(copy, "train.py", *settings, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")
    shown = student(copy, "sample.py", f"--out_dir={tmp_path / 'out'}", "--start=1",
                    "--num_samples=1", "--max_new_tokens=5", "--device=cpu")  # fmt: skip
    assert shown.startswith("1")


def test_another_optimizers_own_state_is_saved_and_loaded():
    """Of a subclass with more keys, and of a class that only wraps an optimizer (Lookahead)."""

    class Slow(torch.optim.SGD):
        slow = 0

        def state_dict(self):
            return super().state_dict() | {"slow": self.slow}

        def load_state_dict(self, state):
            super().load_state_dict({k: v for k, v in state.items() if k != "slow"})
            self.slow = state["slow"]

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    for wrap in (lambda optimizer: optimizer, Wrapper):
        first, second = Slow([nn.Parameter(torch.ones(2))]), Slow([nn.Parameter(torch.ones(2))])
        first.slow = 7
        saved = checkpoint.as_saved({"optimizer": wrap(first)})["optimizer"]
        load_state(wrap(second), saved)
        assert second.slow == 7


def test_complex_parameters_are_refused():
    model = nn.ModuleDict({"layer": nn.ParameterList([nn.Parameter(torch.ones(2) * 1j)])})
    rates = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0}
    with pytest.raises(ValueError, match="complex parameters: use torch.view_as_real"):
        build_optimizer(model, rates | {"optimizer": "adamw"})


def test_a_new_setting_is_one_line(student, sums, tmp_path):
    copy = edited(EDITS["label_smoothing_from_a_new_setting"], tmp_path / "copy")
    run = [*SETTINGS, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}", "--max_iters=1"]
    shown = student(copy, "train.py", *run, "--smoothing=0.3")
    assert "smoothing=0.3" in shown
    saved = checkpoint.load(tmp_path / "out" / "ckpt.pt")
    assert saved["config"]["smoothing"] == saved["model_config"]["smoothing"] == 0.3
    with pytest.raises(SystemExit):
        student(copy, "train.py", "--help")
    with pytest.raises(ValueError, match="smoothing takes a value of type float"):
        student(copy, "train.py", "--smoothing=a")


def test_fsdp_names_the_parameters_that_it_cannot_divide():
    from steady import distributed

    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.full((), 3.0))
    with pytest.raises(ValueError, match="cannot use .*scale: .* shape \\(1,\\)"):
        distributed.shard(model, distributed.Process(0, 2, "fsdp"))
