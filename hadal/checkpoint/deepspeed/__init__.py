"""Checkpoints that DeepSpeed has written, read without running a line of theirs."""
