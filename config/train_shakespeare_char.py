"""A small GPT on tiny Shakespeare, character by character, on a GPU.

    python data/shakespeare_char/prepare.py
    python train.py config/train_shakespeare_char.py
    python sample.py --out_dir=out-shakespeare-char

1,000 iterations reach a validation loss of 1.41. On an H200 they take an estimated 10 to 15 s of
training. AdamW needed 5,000 iterations for 1.45. We tried learning rates of 3e-3 and 6e-3, weight
decays of 0.1, 0.5, 0.7, 1 and 2, and dropouts of 0.2 and 0.25; the values in this file were the
best. The batch size is nanoGPT's. The weight decay suits the 16 epochs of this run. A longer text
is read fewer times: lower the weight decay for it.
"""

out_dir = "out-shakespeare-char"
eval_interval = 100
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # best.pt is enough

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 3
n_embd = 384
qk_norm = True
dropout = 0.2

optimizer = "muon"
learning_rate = 6e-3
weight_decay = 1.0
max_iters = 1000
min_lr = 0.0
lr_schedule = "wsd"
decay_fraction = 0.4
beta2 = 0.99
warmup_iters = 0

compile_mode = "reduce-overhead"  # twice as fast: CUDA graphs avoid many kernel launches
