"""GPT-2 (124M) shape on OpenWebText, with Muon and a constant rate: stop whenever you like.

    python data/openwebtext/prepare.py --num_proc=8
    python train.py config/train_openwebtext.py
    python train.py config/train_openwebtext.py --batch_size=4 --gradient_accumulation_steps=120
    python sample.py

As nanoGPT's, it writes to out/, where sample.py looks.
The learning rate stays constant until the last fifth, so a run can be prolonged from a checkpoint
by raising max_iters before the decay begins.

It has not been run to its end. 100 iterations as a run of their own (another text,
--decay_fraction=0.4, --batch_size=32 --gradient_accumulation_steps=15) came to a validation loss of
2.65 in 97 s on an H200; at 6e-3 to 2.81. The batch is nanoGPT's, in micro-batches that every card
holds; docs/choosing.md says where to start with another one, or another size.
"""

wandb_run_name = "gpt2-124M-muon"

n_head = 6
qk_norm = True

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

optimizer = "muon"
learning_rate = 3e-3
lr_schedule = "wsd"
max_iters = 60000
warmup_iters = 0
min_lr = 0.0

eval_interval = 1000
log_interval = 10
