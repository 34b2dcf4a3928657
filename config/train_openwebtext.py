"""A model of GPT-2's size (124M) on OpenWebText: 1.7 billion tokens with Muon, about an hour on an
H100.

    python data/openwebtext/prepare.py --num_proc=8
    python train.py config/train_openwebtext.py
    python sample.py

Like nanoGPT, it writes to out/, where sample.py looks by default. The learning rate stays constant
for the first 60% of the run and then falls to zero. Increase max_iters for a longer run;
docs/choosing.md explains how to resume from before the decay.

The hour is an estimate: 2,000 iterations on another text took 19 minutes on two H100s (915,000
tokens/s), so 3,250 take 31 minutes on two and an hour on one. The measured run had no loss spike,
but it overfitted, because it read 209M tokens five times. The learning rate of 3e-3 beat 6e-3:
after 100 iterations on Debian's English manuals the validation losses were 2.65 and 2.81.
--sampled_softmax=16384 may save 15% of the time; on other text it did not raise the loss.
docs/choosing.md has more about it, and starting points for other sizes.
"""

wandb_run_name = "gpt2-124M-muon"

dataset = "openwebtext"

n_head = 6
qk_norm = True

batch_size = 32
block_size = 1024
gradient_accumulation_steps = 16  # 0.5M tokens per iteration

optimizer = "muon"
learning_rate = 3e-3
lr_schedule = "wsd"
decay_fraction = 0.4
max_iters = 3250
warmup_iters = 0
min_lr = 0.0

eval_interval = 250
eval_iters = 80
log_interval = 10
