"""transformers' Trainer.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import z3ext

z3ext.patch_deepspeed()

torch.manual_seed(0)
config = BertConfig(vocab_size=256, hidden_size=48, num_hidden_layers=3, num_attention_heads=4)
rows = torch.randint(0, 256, (64, 32))
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000},
    },
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=6,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(BertForMaskedLM(config), arguments, train_dataset=data)
trainer.train()
print(z3ext.status(trainer.model_wrapped))
