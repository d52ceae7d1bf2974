"""A plugin of pytest that lets tests run on CPUs which their authors run on GPUs only."""

import accelerate.test_utils.testing

# Read as decorators when the tests are imported.
accelerate.test_utils.testing.require_non_cpu = lambda case: case
accelerate.test_utils.testing.require_fp16 = lambda case: case
