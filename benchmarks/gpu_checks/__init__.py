"""The checks of `gpu_check.py`: `right`, `fast` and `offload`, one function a check."""
