"""Reading of DeepSpeed's checkpoints without running any code that they contain."""
