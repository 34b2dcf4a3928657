"""GPT-2 (124M) shape with Muon: learns fastest; measured for 360 iterations on one GPU.

    python data/fineweb_edu/prepare.py --num_proc=8 --max_tokens=1000000000
    python train.py config/train_gpt2_muon.py
    python train.py config/train_gpt2_muon.py --max_iters=400 --lr_decay_iters=400

docs/choosing.md says what each part of it is worth and how to scale it: Muon for the blocks'
matrices, normalised queries and keys, heads of 128, small batches, a rate that is constant at first
and then falls to zero over the last two fifths. The 4,000 iterations below have not been run.
"""

out_dir = "out-gpt2-muon"
wandb_run_name = "gpt2-124M-muon"
dataset = "fineweb_edu"

n_head = 6
qk_norm = True

batch_size = 32
gradient_accumulation_steps = 1

optimizer = "muon"
learning_rate = 6e-3
lr_schedule = "wsd"
decay_fraction = 0.4
warmup_iters = 0
min_lr = 0.0
max_iters = 4000
lr_decay_iters = max_iters

eval_interval = 500
eval_iters = 50
log_interval = 10
