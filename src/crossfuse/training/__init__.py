"""Fine-tuning of fused models: a thin layer over transformers' Trainer and PEFT."""
