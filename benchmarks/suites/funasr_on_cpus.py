"""Runs FunASR's train_ds.py on CPUs, where PyPI's torchaudio cannot be loaded."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import librosa
import torch


def fbank(waveform: torch.Tensor, num_mel_bins: int, **_: Any) -> torch.Tensor:
    """Return logarithms of energies in bands of pitch, as torchaudio's function of this name."""
    bands = librosa.feature.melspectrogram(
        y=waveform[0].numpy(), sr=16000, n_fft=400, hop_length=160, n_mels=num_mel_bins
    )
    return torch.from_numpy(bands.T).clamp(min=1e-10).log()


kaldi = SimpleNamespace(fbank=fbank)
compliance = SimpleNamespace(kaldi=kaldi)
sys.modules["torchaudio"] = SimpleNamespace(compliance=compliance)  # type: ignore[assignment]
sys.modules["torchaudio.compliance"] = compliance  # type: ignore[assignment]
sys.modules["torchaudio.compliance.kaldi"] = kaldi  # type: ignore[assignment]

trainer = __import__("funasr.train_utils.trainer_ds", fromlist=["Trainer"]).Trainer
# It takes a rank's number for that of its GPU.
trainer.device = property(lambda trainer: "cpu", lambda trainer, number: None)
runpy.run_module("funasr.bin.train_ds", run_name="__main__")
