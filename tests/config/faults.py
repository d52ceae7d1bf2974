"""Helpers of the tests in this folder: a configuration's faults and notes, by path."""

import pytest

from hadal.config import load_config
from hadal.errors import ConfigError

BASE = {"train_batch_size": 8}


def faults_of(source, **brought):
    """Load what must be refused; return the messages by JSON path."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, **brought)
    text = str(caught.value)
    for fault in caught.value.faults:
        assert fault.path in text
        assert fault.message in text
    return {fault.path: fault.message for fault in caught.value.faults}


def only_fault(source, **brought):
    """Return the path and the message of the one fault."""
    ((path, message),) = faults_of(source, **brought).items()
    return path, message


def with_zero(**keys):
    return {**BASE, "zero_optimization": keys}
