"""A plugin of pytest that lets tests run on CPUs which their authors run on GPUs only."""

import accelerate.test_utils.testing
import transformers.testing_utils
import transformers.training_args

# Read as decorators when the tests are imported.
for module, marks in (
    (accelerate.test_utils.testing, ("require_non_cpu", "require_fp16")),
    (transformers.testing_utils, ("require_torch_accelerator", "require_torch_fp16")),
):
    for mark in marks:
        setattr(module, mark, lambda case: case)

# The Trainer refuses bf16 without a GPU unless it is told `use_cpu`.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
