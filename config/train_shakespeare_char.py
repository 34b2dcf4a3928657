"""A small GPT on tiny Shakespeare, character by character, on a GPU.

    python data/shakespeare_char/prepare.py
    python train.py config/train_shakespeare_char.py
    python sample.py --out_dir=out-shakespeare-char

An H200 takes 85 s, with compilation; the best validation loss is 1.4455. From there on it overfits,
so only a better checkpoint is kept.
"""

out_dir = "out-shakespeare-char"
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # it overfits: keep the best

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
