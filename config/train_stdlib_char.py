"""A small GPT on the Python standard library's sources, character by character: `make demo`.

    python data/stdlib_char/prepare.py
    python train.py config/train_stdlib_char.py
    python sample.py --out_dir=out-stdlib-char --start="def "

It takes 3 to 5 minutes on two CPU cores, with up to one minute of compiling. The validation loss is
1.19; character frequencies alone give 3.10, and AdamW without compiling reached 1.30 in the same
time. The learning rate is the best of 4e-3, 6e-3 and 9e-3.
"""

out_dir = "out-stdlib-char"
eval_interval = 250
eval_iters = 20
log_interval = 50

dataset = "stdlib_char"
gradient_accumulation_steps = 1
batch_size = 16
block_size = 128

n_layer = 4
n_head = 2
n_kv_head = 1
n_embd = 128
qk_norm = True

optimizer = "muon"
learning_rate = 6e-3
max_iters = 1700
min_lr = 0.0
lr_schedule = "wsd"
decay_fraction = 0.4
beta2 = 0.99
warmup_iters = 0
