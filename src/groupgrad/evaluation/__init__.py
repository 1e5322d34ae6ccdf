"""The numbers of an evaluation: pass@k and majority votes of each prompt, intervals over prompts, paired tests."""
