r"""Finetune SmolLM2 (135M) on tiny Shakespeare: a few minutes on one GPU.

    python data/shakespeare/prepare.py --tokenizer=hf:HuggingFaceTB/SmolLM2-135M \
        --out=data/shakespeare_smollm2
    python train.py config/finetune_shakespeare.py
    python sample.py --out_dir=out-finetune-shakespeare --start="ROMEO:"

Other models of the Llama family work too (docs/pretrained.md): pass --init_from=FOLDER_OR_HUB_ID
and a data set made with the model's tokenizer. Finetuning overfits quickly; best.pt has the weights
with the lowest validation loss.
"""

out_dir = "out-finetune-shakespeare"
init_from = "HuggingFaceTB/SmolLM2-135M"
dataset = "shakespeare_smollm2"
wandb_run_name = "finetune-shakespeare"

eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # best.pt is enough

batch_size = 4  # 4 x 8 x 1024 tokens per iteration, 9 iterations per epoch
gradient_accumulation_steps = 8
block_size = 1024
max_iters = 40
dropout = 0.0

learning_rate = 3e-5
decay_lr = False
warmup_iters = 5
