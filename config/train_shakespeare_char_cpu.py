"""A very small GPT on tiny Shakespeare, character by character, on a laptop's CPU.

    python data/shakespeare_char/prepare.py
    python train.py config/train_shakespeare_char_cpu.py
    python sample.py --out_dir=out-shakespeare-char-cpu

It takes 1 to 3 minutes on two CPU cores. The validation loss is 1.59; character frequencies alone
give 3.34, and AdamW reaches 1.66 in the same time. The learning rate is the better of 6e-3 and
1e-2, and the batch size is nanoGPT's. With --compile=True the first run is no faster; later ones
are 20% shorter.
"""

out_dir = "out-shakespeare-char-cpu"
eval_interval = 250
eval_iters = 20
log_interval = 50
always_save_checkpoint = False  # best.pt is enough

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 4
n_head = 2
n_embd = 128
qk_norm = True

optimizer = "muon"
learning_rate = 6e-3
max_iters = 1250
min_lr = 0.0
lr_schedule = "wsd"
decay_fraction = 0.4
beta2 = 0.99
warmup_iters = 0

compile = False  # compiling pays off only from the second run
