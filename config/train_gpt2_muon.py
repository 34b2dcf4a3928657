"""GPT-2 (124M) shape with Muon, the fastest way here to a low loss: 23 s of steps on an H200.

    python data/fineweb_edu/prepare.py --streaming=True --max_tokens=100000000
    python train.py config/train_gpt2_muon.py
    python train.py config/train_gpt2_muon.py --max_iters=2000

On 53M tokens of English manuals its 640 iterations come to a validation loss of 2.18 to 2.19; a
plain GPT-2 with AdamW takes 131 to 133 s to 2.21 and 2.24. On Python it takes --max_iters=740 to
pass the plain one, in a fifth of its time. The rate is the best of 3e-3, 4e-3, 5e-3 and 6e-3, the
batch of 8, 12, 16 and 32 sequences. For another width begin with a rate of 3 / n_embd, at 30M and
350M about the best tried; docs/choosing.md has that and what each part is worth. Longer runs were
not measured; for billions of tokens train_openwebtext.py has a larger batch.
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
lr_schedule = "wsd"
decay_fraction = 0.4
warmup_iters = 0
min_lr = 4e-4
max_iters = 640

eval_interval = 64
eval_iters = 32
log_interval = 10
