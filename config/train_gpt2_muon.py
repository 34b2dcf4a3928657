"""Train a model of GPT-2's size (124M) with Muon: our shortest 124M run, half a minute on an H200.

    python data/fineweb_edu/prepare.py --streaming=True --max_tokens=20000000
    python train.py config/train_gpt2_muon.py

We ran it on Debian's English manuals, not on FineWeb: 640 iterations reach a validation loss of
2.18 to 2.19. nanoGPT's model with AdamW takes 131 to 133 s to reach 2.21 to 2.24. On Python code,
this config with --max_iters=740 ends at a lower loss than nanoGPT's model, in a fifth of the time.
The learning rate is the best of 3e-3, 4e-3, 5e-3 and 6e-3, the batch size the best of 8, 12, 16 and
32 sequences. For a width from 384 to 1024, start with a learning rate of 3 / n_embd.
docs/choosing.md has these runs, and the gain from each part of the recipe. All of this was measured
without average_weights and second_target. With them, the longest runs of this config (67M tokens of
Python packages' documentation and sources, --batch_size=32 --max_iters=2048) end at 2.044 and 2.052
instead of 2.071 and 2.073. For billions of tokens use train_openwebtext.py, whose batch is larger.
"""

out_dir = "out-gpt2-muon"
wandb_run_name = "gpt2-124M-muon-short"
dataset = "fineweb_edu"

n_head = 6
qk_norm = True

batch_size = 16
gradient_accumulation_steps = 1

optimizer = "muon"
learning_rate = 4e-3
beta2 = 0.99
average_weights = True
second_target = 0.5
lr_schedule = "wsd"
decay_fraction = 0.4
warmup_iters = 0
min_lr = 4e-4
max_iters = 640

eval_interval = 64
eval_iters = 32
log_interval = 10
