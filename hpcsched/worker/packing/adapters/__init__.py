"""Adapters (LoRA and its like, of PEFT) on one frozen model: its forward pass is computed once for all."""
