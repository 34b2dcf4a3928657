"""GPT-2 (124M) shape on OpenWebText with a warm-up-stable-decay schedule: stop whenever you like.

    python data/openwebtext/prepare.py --num_proc=8
    python train.py config/train_openwebtext.py
    python train.py config/train_openwebtext.py --batch_size=4 --gradient_accumulation_steps=120
    python sample.py

As nanoGPT's, it writes to out/, where sample.py looks.
The learning rate stays constant until the last fifth, so a run can be prolonged from a checkpoint
by raising max_iters and lr_decay_iters before the decay begins.
"""

wandb_run_name = "gpt2-124M-wsd"

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

lr_schedule = "wsd"
max_iters = 60000
lr_decay_iters = max_iters
warmup_iters = 500
min_lr = 0.0

eval_interval = 1000
log_interval = 10
