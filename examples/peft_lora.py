"""PEFT: fp32 adapters on a frozen bf16 model.

torchrun --nproc-per-node 2 examples/peft_lora.py
"""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM

import z3ext

z3ext.patch_deepspeed()

torch.manual_seed(0)
config = BertConfig(vocab_size=256, hidden_size=48, num_hidden_layers=3, num_attention_heads=4)
lora = LoraConfig(target_modules=["query", "value"], r=4, init_lora_weights=False)
model = get_peft_model(BertForMaskedLM(config).bfloat16(), lora, autocast_adapter_dtype=True)
adapters = [param for param in model.parameters() if param.requires_grad]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(adapters, lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000},
    },
)
generator = torch.Generator().manual_seed(engine.global_rank)
for _ in range(6):
    rows = torch.randint(0, 256, (2, 32), generator=generator).to(engine.device)
    engine.backward(engine(input_ids=rows, labels=rows).loss)
    engine.step()
print(z3ext.status(engine))
