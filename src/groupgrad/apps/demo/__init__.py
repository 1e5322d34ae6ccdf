"""The demo: a small model is made, trained with GRPO and measured, offline on a CPU."""
